"""The input of a model for one or two texts: their tokens, and tokens that mark start and end."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.data.windows import BYTES
from train.data.workers import core_count
from train.extras.bounded import BoundedTokenizer
from train.extras.text.tokenise import token_dtype
from train.extras.tokenizers.loading import (
    folder_of,
    load_tokenizer,
    save_tokenizer,
    tokenizer_files,
    tokenizer_of,
)
from train.extras.tokenizers.special import (
    ENDS,
    added_tokens,
    frame_of_pairs,
    largest_vocab,
    special_tokens,
    text_encoder,
)

_PIECE = 4  # bytes per word piece in English text
_CHUNK = 4096  # texts that are tokenised in one call
PADS = ("<pad>", "<|pad|>", "[PAD]", "<unk>", "[UNK]")


class Frame(NamedTuple):
    """The tokens around texts: ``begin a end``, or ``begin a between b end``.

    Padding follows them.
    """

    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    pad: int

    def room(self, texts: int, length: int) -> int:
        """The number of tokens of a sample that remain for its texts."""
        return length - len(self.begin) - len(self.end) - (len(self.between) if texts == 2 else 0)


# These bytes do not occur in UTF-8 text. The first one ends texts here, because it also ended
# documents in pre-training (`train.data.windows.BYTES`). The mask is a different byte.
_BYTE_END, _BYTE_BEGIN, _BYTE_PAD = sorted(BYTES.special - {BYTES.mask_id})[:3]


class Encoder:
    """A tokenizer, with the frame of a model.

    =================== ========================== =========================================================
    encoder             ``[CLS] a [SEP] b [SEP]``  the tokens that its tokenizer adds; if it adds none, the
                                                   names of BERT's or RoBERTa's tokenizer
    encoder, bytes      ``C0 a 00 b 00``           bytes that do not occur in text; ``C1`` is padding
    decoder             ``<s> a </s> b </s>``      its end of text, and the tokens that it adds before texts
    decoder, bytes      ``a 00 b 00``              byte 0 ended documents in pre-training
    =================== ========================== =========================================================

    ``piece`` is the number of tokens that correspond to about one word piece: 1, or more if the
    tokens are bytes. A decoder predicts at the last token, which is always the end of text; padding
    is a different token.

    Args:
      name: the tokenizer, as in `train.data.text.Data`.
      model: the config of the model.

    Raises:
      UserError: there is no such tokenizer, it lacks the tokens of the frame, or it has more tokens
        than the model.
    """

    def __init__(self, name: str, model: Config):
        self.vocab = 256
        self.identity = "bytes"
        self.piece = _PIECE if name == "bytes" else 1
        self._loaded: Any = None
        self._texts: Any = None
        self._folder = folder_of(name)
        if name != "bytes":
            self._loaded = load_tokenizer(name)
            self.vocab = largest_vocab(self._loaded)
            self._texts = BoundedTokenizer(text_encoder(self._loaded), name, core_count())
            self.identity = _tokenizer_hash(Path(name).expanduser())
        vocab = model.integers()["vocab"]
        if self.vocab > vocab:
            raise UserError(
                f"the largest id of the tokenizer is {self.vocab - 1}, but model.vocab is {vocab}; "
                f"raise model.vocab to {self.vocab}; for a checkpoint, run jaxgrow grow MODEL NEW --vocab {self.vocab}"
            )
        self.dtype = token_dtype(self.vocab)
        # A RoBERTa derives positions from its own padding token, independent of the tokenizer.
        self.own_pad = not model.causal and model.first_position > 0
        frame = self._of_a_decoder() if model.causal else self._of_an_encoder()
        if frame is None:
            wanted = (
                ", ".join(ENDS)
                if model.causal
                else "[CLS], [SEP] and [PAD], or <s>, </s> and <pad>"
            )
            raise UserError(
                f"a {type(model).__name__} reads texts that are marked by {wanted}, but the tokenizer {name} has none of "
                "them: take the tokenizer of pre-training, or 'bytes'"
            )
        self.frame = frame

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, [n]."""
        if self._loaded is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        parts = map(self._texts.encode_batch_fast, _chunks(texts))
        return [encoded.ids.astype(self.dtype) for part in parts for encoded in part]

    def spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The tokens [n] of each text, and their character ranges, int32 [n, 2].

        A range [begin, end) counts characters of the text.
        """
        if self._loaded is None:
            return [
                (tokens, _byte_spans(text))
                for text, tokens in zip(texts, self.tokens(texts), strict=True)
            ]
        parts = map(self._texts.encode_batch, _chunks(texts))
        return [(each.ids.astype(self.dtype), each.offsets) for part in parts for each in part]

    def _of_an_encoder(self) -> Frame | None:
        if self._loaded is None:
            return Frame((_BYTE_BEGIN,), (_BYTE_END,), (_BYTE_END,), _BYTE_PAD)
        named = special_tokens(self._loaded, self._folder).names.get("pad_token")
        begin, between, end = map(tuple, frame_of_pairs(self._loaded))
        for names, ends in ((("[CLS]", "[SEP]", "[PAD]"), 1), (("<s>", "</s>", "<pad>"), 2)):
            first, last, pad = map(self._loaded.token_to_id, (*names[:2], named or names[2]))
            if between and end and pad is not None:
                return Frame(begin, between, end, pad)
            if first is not None and last is not None and pad is not None:
                return Frame((first,), (last,) * ends, (last,), pad)
        return None

    def _of_a_decoder(self) -> Frame | None:
        if self._loaded is None:
            return Frame((), (_BYTE_END,), (_BYTE_END,), _BYTE_PAD)
        special = special_tokens(self._loaded, self._folder)
        if special.end is None:
            return None
        names = [special.names.get("pad_token", ""), *PADS]
        pads = (self._loaded.token_to_id(name) for name in names)
        # Padding may be any token except the end of text (`jaxgrow.checkpoints.hf.labels`).
        pad = next((i for i in pads if i not in (None, special.end)), int(special.end == 0))
        begin = tuple(added_tokens(self._loaded)[0])
        return Frame(begin, (special.end,), (special.end,), pad)


def _chunks(texts: Sequence[str]) -> list[Sequence[str]]:
    return [texts[i : i + _CHUNK] for i in range(0, len(texts), _CHUNK)]


def _tokenizer_hash(path: Path) -> str:
    """The hash of the files, as in `train.extras.text.reading.Tokens.identity`."""
    return hashlib.sha256("".join(map(sha256, tokenizer_files(path))).encode()).hexdigest()


def _byte_spans(text: str) -> np.ndarray:
    letters = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + sum((letters >= least).astype(int) for least in (0x80, 0x800, 0x10000))
    begin = np.repeat(np.arange(len(letters), dtype=np.int32), sizes)
    return np.stack([begin, begin + 1], 1)


def pair_lengths(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of tokens to keep of each text of each pair, int [N] for first and second texts.

    First, the longer text is shortened to at most the length of the shorter text; if this is not
    enough, both are shortened. If ``room`` is odd, the longer text keeps one more token, or the
    second text if both have the same length.

    Args:
      first: tokens of each first text, int [N].
      second: tokens of each second text, int [N].
      room: tokens that a pair may have.
    """
    least = np.minimum(np.minimum(first, second), room // 2)
    swapped = first > second
    most = np.minimum(np.where(swapped, first, second), room - least)
    return np.where(swapped, most, least), np.where(swapped, least, most)


@dataclass(frozen=True)
class Texts:
    """Framed texts, concatenated."""

    tokens: np.ndarray
    edges: np.ndarray  # int64 [N + 1]: the start of each text, and the end of the last one
    second: np.ndarray  # int32 [N]: the number of tokens before the second text

    def __len__(self) -> int:
        return len(self.second)


def frame_texts(
    frame: Frame, first: Sequence[np.ndarray], second: Sequence[np.ndarray] | None, kind: type
) -> Texts:
    """Put texts or pairs of texts, which must fit, into their frame; ``kind`` is the dtype."""
    begin, between, end = (np.array(part, kind) for part in frame[:3])
    samples = [[begin, a, end] for a in first]
    if second is not None:
        samples = [[begin, a, between, b, end] for a, b in zip(first, second, strict=True)]
    sizes = [sum(map(len, sample)) for sample in samples]
    before = sizes
    if second is not None:
        before = [len(begin) + len(a) + len(between) for a in first]
    return Texts(
        np.concatenate([np.zeros(0, kind), *itertools.chain.from_iterable(samples)]),
        np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        np.array(before, np.int32),
    )


@dataclass(frozen=True)
class Examples:
    """Framed texts as inputs of a model, with their targets.

    The inputs of an encoder are ``tokens`` int32, ``types`` int32 if the model has token types, and
    ``mask`` bool, [T] each. The inputs of a decoder are ``tokens`` int32 [T] and ``lengths`` int32.
    T is the same for all samples. A target is a class, int32; a number, float32; or the start and
    end of a span, int32 [2].
    """

    texts: Texts
    targets: np.ndarray  # [N] or [N, 2]
    length: int
    pad: int
    types: int | None  # the number of token types of the model; None: a decoder
    what: str = "examples"
    workers: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def sample(self, i: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The inputs and the target of example ``i``, without randomness."""
        begin, end = self.texts.edges[i : i + 2]
        size = int(end - begin)
        tokens = np.full(self.length, self.pad, np.int32)
        tokens[:size] = self.texts.tokens[begin:end]
        if self.types is None:
            return {"tokens": tokens, "lengths": np.asarray(size, np.int32)}, np.asarray(
                self.targets[i]
            )
        place = np.arange(self.length)
        inputs = {"tokens": tokens, "mask": place < size}
        if self.types:
            types = (place >= self.texts.second[i]) & (place < size) & (self.types > 1)
            inputs["types"] = types.astype(np.int32)
        return inputs, np.asarray(self.targets[i])

    def digest(self) -> str:
        """A hash of the tokens and the targets."""
        shape = f"{self.length} {self.pad} {self.types} {self.targets.dtype} {self.targets.shape}"
        out = hashlib.sha256(shape.encode())
        for part in (self.texts.tokens, self.texts.edges, self.texts.second, self.targets):
            out.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
        return out.hexdigest()


# --- the tokenizer of a fine-tuned model for `transformers`, which frames texts as in the fine-tuning ---


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
    types = ["token_type_ids"] if config.types > 1 else []
    about |= {
        "eos_token": loaded.id_to_token(encoder.frame.end[-1]),
        "pad_token": loaded.id_to_token(pad),
        "model_max_length": min(length, config.length),
        "padding_side": "right",
        "truncation_side": "right",
        "model_input_names": ["input_ids", *types, "attention_mask"],
    }
    write_record(folder / "tokenizer_config.json", about)
    return {"eos_token_id": encoder.frame.end[-1]} | (
        {} if encoder.own_pad else {"pad_token_id": pad}
    )


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
