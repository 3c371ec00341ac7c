"""The files that a run writes for `transformers`, from which ``jaxgrow convert RUN DST`` copies.

The folder ``transformers/`` of a run contains the tokenizer or the image processor, the entries of
``config.json`` about them and, when the run has finished, a model card with its data, plan, cost and
losses.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrow import __version__
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.io.files import CARD, TRANSFORMERS
from jaxgrow.checkpoints.io.folders import atomic_file
from jaxgrow.models import Config
from train.common.files import read_json, write_json, write_text
from train.data.special import special_tokens
from train.data.text import tokenizer_of
from train.extras.images.images import Images
from train.extras.images.processor import FILE, described
from train.extras.labelled.encoding import PADS, Encoder, Frame
from train.extras.labelled.task import Labelled

# For each role of a special token, the spellings that identify it.
_ROLES = {
    "pad_token": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_LINE = "\n"
_OF_MASKED = ("cls_token", "sep_token", "mask_token")


def write_inputs(run: Path, data: Any, config: Config) -> None:
    """Write the tokenizer or the image processor of a run, and the entries of ``config.json``.

    Args:
      run: folder of the run, which has the tokenizer of its data, if they are text.
      data: data of the experiment.
      config: config of the model that the run trains.
    """
    folder = run / TRANSFORMERS
    folder.mkdir(exist_ok=True)
    entries: dict[str, Any] = {}
    if isinstance(data, Images):
        sizes = config.integers()
        write_json(folder / FILE, described(data, sizes["image"], sizes["channels"]))
    elif data.tokenizer != "none":
        entries = _tokenizer(run, config, folder)
        if isinstance(data, Labelled):
            entries |= _of_task(data, config, folder)
    write_json(folder / "config.json", entries)


def _tokenizer(run: Path, config: Config, folder: Path) -> dict[str, Any]:
    """Write the tokenizer for `transformers`.

    Returns:
      The entries of ``config.json`` about the special tokens.
    """
    tokenizer = tokenizer_of(run)
    _save(tokenizer, folder)
    special = special_tokens(tokenizer, run)
    roles = {role for role in _ROLES if config.masked or role not in _OF_MASKED}
    named = {}
    for role, names in _ROLES.items():
        existing = (name for name in names if tokenizer.token_to_id(name) is not None)
        if role in roles and (name := next(existing, None)):
            named[role] = name
    # texts of decoders do not have these roles
    of_bert = {named.get("cls_token"), named.get("sep_token")} & {"[CLS]", "[SEP]"}
    ends = {} if of_bert else {"bos_token_id": special.begin, "eos_token_id": special.end}
    named |= {
        role.removesuffix("_id"): tokenizer.id_to_token(i)
        for role, i in ends.items()
        if i is not None
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.length,
        **named,
        **special.names,
    }
    about |= {} if special.template is None else {"chat_template": special.template}
    write_json(folder / "tokenizer_config.json", about | {"clean_up_tokenization_spaces": False})
    if "pad_token" in named and (config.causal or config.first_position == 0):
        ends["pad_token_id"] = tokenizer.token_to_id(named["pad_token"])
    found: dict[str, Any] = {role: i for role, i in ends.items() if i is not None}
    if "eos_token_id" in found and len(special.ends) > 1:  # several tokens end generated texts
        found["eos_token_id"] = list(special.ends)
    return found


def _of_task(data: Labelled, config: Config, folder: Path) -> dict[str, Any]:
    """Make the written tokenizer frame texts as in the fine-tuning of the model.

    Returns:
      The entry of ``config.json`` for the padding token.
    """
    encoder = Encoder(
        data.tokenizer if data.tokenizer == "bytes" else str(folder / "tokenizer.json"), config
    )
    loaded = tokenizer_of(folder)
    loaded.post_processor = _framing(loaded, encoder.frame)
    _save(loaded, folder)
    about = read_json(folder / "tokenizer_config.json", "")
    pad = _padding(loaded, encoder.frame)
    ends = {"eos_token": encoder.frame.end[-1], "pad_token": pad}
    about |= {role: loaded.id_to_token(number) for role, number in ends.items()}
    about |= {
        "model_max_length": min(data.length, config.length),
        "padding_side": "right",
        "truncation_side": "right",
    }
    about |= {"model_input_names": _input_names(config)}
    write_json(folder / "tokenizer_config.json", about)
    return {"eos_token_id": encoder.frame.end[-1]} | (
        {} if encoder.own_pad else {"pad_token_id": pad}
    )


def _save(tokenizer: Any, folder: Path) -> None:
    with atomic_file(folder / "tokenizer.json") as part:
        tokenizer.save(str(part))


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


def write_card(
    run: Path,
    was: Mapping[str, Any],
    result: Mapping[str, Any],
    config: Config,
    scores: Mapping[str, Mapping[str, float]] | None,
) -> None:
    """Write the model card of a run.

    Args:
      run: folder of the run.
      was: content of its ``config.json``.
      result: its result.
      config: config of its model.
      scores: its scores on its task, by split and metric, if they are known.
    """
    text = _card(was, result, config, _architecture(config), scores)
    (run / TRANSFORMERS).mkdir(exist_ok=True)
    write_text(run / TRANSFORMERS / CARD, text)


def _architecture(config: Config) -> str:
    try:
        return storage.family_for(config, None)[0].architecture
    except CheckpointError:  # only an Orbax folder stores such a model
        return type(config).__name__


def _card(
    was: Mapping[str, Any],
    result: Mapping[str, Any],
    config: Config,
    architecture: str,
    scores: Mapping[str, Mapping[str, float]] | None,
) -> str:
    of = {name.replace("_", " "): x for name, x in _scores(result, scores).items()}
    lines = [f"* {name}: {value:.4f}" for name, value in of.items()]
    return f"""---
library_name: transformers
tags: [jaxgrow]
{_base(was)}---

# {result["name"]}

{architecture}, {result["phases"][-1]["parameters"]:,} parameters, trained by jaxgrow {__version__}
({next(iter(was["method"]))}).

## Data

{_data(was, result["corpus"])}

## Plan and cost

{_plan(result["phases"])}

In all {result["flops"]:.3g} FLOPs and {result["seconds"]:.0f} s. Batch {was["batch"]}, seed {was["seed"]}, optimizer:
`{json.dumps(was["optim"])}`.

## Evaluation on validation data

{_LINE.join(lines)}

## Model

```json
{json.dumps(config.as_json(), indent=1)}
```
"""


def _plan(phases: list[dict[str, Any]]) -> str:
    """Return the table of the card with the size and the cost of each phase."""
    rows = [
        f"| {p['phase']} | {p['parameters']:,} | {p['steps']:,} | {p['tokens']:,} | {p['flops']:.3g} |"
        for p in phases
    ]
    head = ["| phase | parameters | steps | tokens | FLOPs |", "| --- | --- | --- | --- | --- |"]
    return _LINE.join([*head, *rows])


def _data(config: Mapping[str, Any], corpus: Mapping[str, str]) -> str:
    """Return the line of the card about the data: the name, hashes, and how they were read."""
    kind, data = next(iter(config["data"].items()))
    parts = [name for name in ("train", "valid", "tokenizer") if name in corpus]
    hashes = ", ".join(f"{name} `{corpus[name][:12]}`" for name in parts)
    shown = ("source", "name", "task", "tokenizer")
    about = {name: value for name, value in data.items() if name in shown}
    if "tokenizer" in about:
        # without the folder, which is specific to this machine
        about["tokenizer"] = Path(about["tokenizer"]).name
    return f"{kind}: {corpus['name']} ({hashes}); `{json.dumps(about)}`"


def _scores(
    result: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]] | None
) -> dict[str, float]:
    """Return the loss and the metrics on validation data."""
    found: dict[str, float] = {}
    for split, of in (scores or {}).items():
        found |= {f"{metric}, {split}": x for metric, x in of.items()}
    return {"loss": result["val_loss"]} | (found or {"accuracy": result["val_accuracy"]})


def _base(config: Mapping[str, Any]) -> str:
    """Return the line of the card that names the source model: its name, without its folder."""
    source = next(iter(config["method"].values())).get("source")
    if not isinstance(source, str):
        return ""
    name = Path(source.replace("{seed}", str(config["seed"]))).name
    return f"base_model: {json.dumps(name)}\n"
