"""The tokenizer of a fine-tuned model for `transformers`: it frames texts as in the fine-tuning."""

from pathlib import Path
from typing import Any

from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.common.files import read_record, write_record
from train.extras.labelled.encoding import PADS, Encoder, Frame
from train.extras.tokenizers.loading import save_tokenizer, tokenizer_of


def write_framing(name: str, length: int, config: Config, folder: Path) -> Json:
    """Make the written tokenizer frame texts as in the fine-tuning of the model.

    Args:
      name: the tokenizer, as in `train.data.text.Data`.
      length: the length of the samples.
      config: config of the model.
      folder: folder of the written tokenizer.

    Returns:
      The entry of ``config.json`` for the padding token.
    """
    encoder = Encoder(name if name == "bytes" else str(folder / "tokenizer.json"), config)
    loaded = tokenizer_of(folder)
    loaded.post_processor = _framing(loaded, encoder.frame)
    save_tokenizer(loaded, folder)
    about = read_record(folder / "tokenizer_config.json", "")
    pad = _padding(loaded, encoder.frame)
    ends = {"eos_token": encoder.frame.end[-1], "pad_token": pad}
    about |= {role: loaded.id_to_token(number) for role, number in ends.items()}
    about |= {
        "model_max_length": min(length, config.length),
        "padding_side": "right",
        "truncation_side": "right",
    }
    about |= {"model_input_names": _input_names(config)}
    write_record(folder / "tokenizer_config.json", about)
    return {"eos_token_id": encoder.frame.end[-1]} | (
        {} if encoder.own_pad else {"pad_token_id": pad}
    )


def _input_names(config: Config) -> list[str]:
    return ["input_ids", *(["token_type_ids"] if config.types > 1 else []), "attention_mask"]


def _framing(tokenizer: Any, frame: Frame) -> Any:
    """Return the post-processor of `tokenizers` that adds the tokens of a frame."""
    from tokenizers.processors import TemplateProcessing

    begin, between, end = (list(map(tokenizer.id_to_token, part)) for part in frame[:3])
    tokens = {name: tokenizer.token_to_id(name) for name in (*begin, *between, *end)}
    return TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *between, "$B:1", *(f"{name}:1" for name in end)],
        special_tokens=list(tokens.items()),
    )


def _padding(tokenizer: Any, frame: Frame) -> int:
    """Return a token for padding that is not at the end of any text.

    `transformers` also finds special tokens in raw text, by their spelling. For a tokenizer without
    a padding token, this function therefore chooses a token that begins with a mark of the
    tokenizer, such as the mark for a blank. Text rarely contains such a mark.
    """
    added = tokenizer.get_added_tokens_decoder().get(frame.pad)
    if tokenizer.id_to_token(frame.pad) in PADS or (added is not None and added.special):
        return frame.pad
    marked = [name for name in tokenizer.get_vocab() if name.startswith(("\u0120", "\u2581", "##"))]
    if marked:
        return tokenizer.token_to_id(max(marked, key=lambda name: (len(name), name)))
    return frame.pad
