"""How do documents become tokens?

Bytes are the tokens of the core. `train.extras.tokenizers` reads the tokenizers of others from files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
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


class TokenizerFiles(Protocol):
    """What extras do with the files of tokenizers. Every method raises `UserError` for damaged files."""

    def load(self, name: str, bos: bool | Literal["auto"]) -> Tokenizer:
        """The tokenizer of a file or folder; ``bos``: whether a token begins each document."""
        ...

    def copy(self, name: str, folder: Path) -> None:
        """Write a tokenizer, perhaps "bytes", and the files of its special tokens to a folder."""
        ...

    def written_frame(self, folder: Path) -> str:
        """`Tokenizer.written` of the tokenizer in the folder of a model."""
        ...

    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        """As `train.data.dataset.Dataset.write_inputs`."""
        ...


TOKENIZERS: Registry[TokenizerFiles] = Registry("tokenizers", "train.extras")
_END = DocumentFrame((), (0,))  # text has no zero byte, so this byte ends documents


def named_tokenizer(name: str, bos: bool | Literal["auto"] = "auto") -> Tokenizer:
    """The tokenizer of ``data.tokenizer``.

    Raises:
      UserError: it does not exist or cannot be read.
    """
    return BYTE_TOKENIZER if name == "bytes" else TOKENIZERS["files"].load(name, bos)


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
