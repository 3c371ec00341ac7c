"""How do documents become tokens? By bytes, or by a tokenizer that `train.extras.tokenizers.loading` reads."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from train.data.windows import BYTES, Vocabulary


class DocumentFrame(NamedTuple):
    """The tokens before and after each document of a corpus."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


UNMARKED = DocumentFrame((), ())
# Names of tokens that end documents; the first one is that of bytes.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
# Pieces, and whether each begins its document -> (token ids of each piece, tokens around a document).
Encode: TypeAlias = Callable[[list[Any], list[bool]], tuple[list[np.ndarray], DocumentFrame]]
# The parts of a document, whose edges are arbitrary -> pieces that are encoded one by one.
Cut: TypeAlias = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Tokenizer:
    """How the documents of a corpus become tokens.

    Attributes:
      vocab: one more than the largest id.
      files: the hashes of its files.
      identity: a text that identifies it by content.
      rule: JSON value that differs if the same files give other tokens or documents.
      encoder: creates a function that encodes pieces, with a number of threads.
      masking: what masked models need to know of it.
      cut: cuts documents into pieces; the default keeps those of the reader.
      frame: the tokens around each document.
      written: the frame in words; empty if its tokens have no names.
      marks: tokens that begin or end a document within a piece.
      parallel: whether several encoders at the same time are faster than one.
    """

    vocab: int
    files: list[str]
    identity: str
    rule: Sequence[object]
    encoder: Callable[[int], Encode]
    masking: Callable[[], Vocabulary]
    cut: Cut = iter
    frame: DocumentFrame = UNMARKED
    written: str = ""
    marks: DocumentFrame = UNMARKED
    parallel: bool = False


_END = DocumentFrame((), (0,))  # text has no zero byte, so this byte ends documents


def _bytes(pieces: list[str], begins: list[bool]) -> tuple[list[Any], DocumentFrame]:
    return [np.frombuffer(p.encode(), np.uint8) for p in pieces], _END


BYTE_TOKENIZER = Tokenizer(
    256,
    ["bytes"],
    "bytes",
    ["tokens and begins", 0],
    lambda threads: _bytes,
    lambda: BYTES,
    frame=_END,
)
