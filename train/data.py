"""Corpora: read, and tokenised once into a file of tokens.

Every source takes the same path: documents, pieces, tokens on disk. Where no validation text is named, every
k-th piece is held out.
"""

import gzip
import hashlib
import itertools
import json
import lzma
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from tqdm import tqdm

from train.cache import appearing
from train.errors import UserError

_PIECE = 1 << 16  # characters; long documents are tokenised and held out in pieces of this size


@dataclass(frozen=True)
class Data:
    """A corpus and its tokens.

    ``source="stdlib"`` is the source text of Python's standard library: a corpus that is always there. ``"text"`` is a
    file or folder of ``.txt``, ``.xz`` and ``.gz`` files at ``path``. ``"tfds"`` is the tensorflow-datasets corpus ``name``,
    prepared or to be prepared under ``path``; it is read without TensorFlow.
    """

    source: Literal["stdlib", "text", "tfds"] = "stdlib"
    path: str | None = None
    valid_path: str | None = None  # validation text of its own, for "text"
    name: str | None = None  # for "tfds", e.g. "wiki40b/en"
    field: str = "text"  # the feature that holds a document, for "tfds"
    tokenizer: str = "bytes"  # or a tokenizer.json, or a folder with vocab.json and merges.txt
    whole_words: bool = False  # of masked language models: all pieces of a word are hidden, or none
    valid_fraction: float = 0.02  # held out, where there is no validation text or split
    cache: str = "~/.cache/jaxgrow"

    def __post_init__(self):
        if not 0 < self.valid_fraction <= 0.5:
            raise ValueError(f"valid_fraction lies between 0 and 0.5, but is {self.valid_fraction}")
        if self.source == "text" and self.path is None:
            raise ValueError("data.source=text needs data.path, a file or folder of .txt, .xz or .gz")
        if self.source == "tfds" and self.name is None:
            raise ValueError("data.source=tfds needs data.name, such as wiki40b/en")


@dataclass(frozen=True)
class Tokens:
    train: np.ndarray  # memory-mapped, one axis
    valid: np.ndarray
    vocab: int


def tokens(data: Data) -> Tokens:
    """The corpus as tokens, from the cache if it was tokenised before.

    Raises:
      UserError: the corpus or the tokenizer is missing, empty or unreadable.
    """
    encode, vocab, identity = _encoder(data.tokenizer)
    corpus = {"stdlib": _stdlib, "text": _text, "tfds": _tfds}[data.source](data)
    how = asdict(data) | {"whole_words": None}  # changes no token
    key = json.dumps([how, identity, corpus.identity], sort_keys=True)
    folder = Path(data.cache).expanduser() / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not folder.exists():
        _tokenise(corpus, encode, vocab, data, folder)
    dtype = _dtype(vocab)
    train, valid = (np.memmap(folder / part, dtype, "r") for part in ("train", "valid"))
    return Tokens(train, valid, vocab)


# --- corpora: documents with a name for what they were read from ---


@dataclass(frozen=True)
class _Corpus:
    identity: Any  # JSON; changes when the text does
    train: Iterator[str]  # documents
    valid: Iterator[str] | None  # None: hold some of ``train`` out


def _stdlib(data: Data) -> _Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    return _files(files, f"the standard library under {root}")


def _text(data: Data) -> _Corpus:
    def found(name: str) -> list[Path]:
        path = Path(name).expanduser()
        if not path.exists():
            raise UserError(f"there is no corpus at {path}")
        if path.is_file():
            return [path]
        return sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".xz", ".gz") and p.is_file())

    assert data.path is not None
    corpus = _files(found(data.path), data.path)
    if data.valid_path is None:
        return corpus
    valid = _files(found(data.valid_path), data.valid_path)
    return _Corpus([corpus.identity, valid.identity], corpus.train, valid.train)


def _files(files: list[Path], where: str) -> _Corpus:
    if not files:
        raise UserError(f"no text in {where}: there is no .txt, .xz or .gz file")
    return _Corpus([(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files], map(_read, files), None)


def _read(path: Path) -> str:
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opened(path, "rb") as f:
            return f.read().decode("utf-8", errors="replace")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def prepared(name: str, path: str | None) -> Any:
    """The builder of the tensorflow-datasets set ``name``, prepared under ``path``.

    Raises:
      UserError: it cannot be.
    """
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text  # registers the text corpora, which the line above does only with TensorFlow

    folder = None if path is None else Path(path).expanduser()
    try:
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:
        raise UserError(
            f"tensorflow-datasets cannot prepare {name!r} ({type(error).__name__}: {error}); some sets need TensorFlow "
            f"for this: run tfds.builder({name!r}, file_format='array_record').download_and_prepare() once where it is "
            "installed, and name the folder in data.path"
        ) from error
    return builder


def _tfds(data: Data) -> _Corpus:
    assert data.name is not None
    builder = prepared(data.name, data.path)

    def documents(split: str) -> Iterator[str]:
        for example in builder.as_data_source(split):
            if data.field not in example:
                raise UserError(f"{data.name} has no feature {data.field!r}, only {', '.join(example)}; set data.field")
            yield example[data.field].decode("utf-8", errors="replace")

    split = next((s for s in ("validation", "test") if s in builder.info.splits), None)
    identity = [builder.info.full_name, {k: s.num_examples for k, s in builder.info.splits.items()}]
    return _Corpus(identity, documents("train"), documents(split) if split else None)


# --- tokens ---

Encode: TypeAlias = Callable[
    [list[str]], tuple[list[Any], list[int]]
]  # pieces -> (ids of each, ids that end the document)


def tokenizer(name: str) -> Any:
    """The `tokenizers.Tokenizer` of a file ``tokenizer.json``, or of a folder with ``vocab.json`` and ``merges.txt``.

    Raises:
      UserError: there is none.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = Path(name).expanduser()
    try:
        if path.is_dir():
            found = Tokenizer(models.BPE.from_file(*map(str, _tokenizer_files(path))))
            found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        else:
            found = Tokenizer.from_file(str(path))
            found.no_truncation()  # of whole documents, to the context of the model that it was saved with
            found.no_padding()
    except Exception as error:
        raise UserError(
            f"no tokenizer at {path} ({error}): a tokenizer.json, or a folder of vocab.json and merges.txt"
        ) from error
    return found


def _tokenizer_files(path: Path) -> list[Path]:
    return [path / "vocab.json", path / "merges.txt"] if path.is_dir() else [path]


def _encoder(name: str) -> tuple[Encode, int, Any]:
    """``(encode, vocabulary size, identity)``."""
    if name == "bytes":
        return _bytes, 256, "bytes"
    found = tokenizer(name)
    end = next((i for t in ("<|endoftext|>", "</s>", "[SEP]") if (i := found.token_to_id(t)) is not None), None)

    def encode(pieces: list[str]) -> tuple[list[Any], list[int]]:
        ids = [e.ids for e in found.encode_batch(pieces, add_special_tokens=False)]
        return ids, [] if end is None else [end]

    files = _tokenizer_files(Path(name).expanduser())
    return encode, found.get_vocab_size(), [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]


def _bytes(pieces: list[str]) -> tuple[list[Any], list[int]]:
    return [np.frombuffer(p.encode(), np.uint8) for p in pieces], [0]  # no text holds a zero byte, so it ends documents


def _dtype(vocab: int) -> type:
    return np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32


def _tokenise(corpus: _Corpus, encode: Encode, vocab: int, data: Data, folder: Path) -> None:
    """Writes ``folder/train`` and ``folder/valid``; the folder appears whole or not at all."""
    every = round(1 / data.valid_fraction)
    with appearing(folder) as work:
        with open(work / "train", "wb") as train, open(work / "valid", "wb") as valid:
            count = itertools.count(1)

            def part() -> Any:
                return valid if corpus.valid is None and next(count) % every == 0 else train

            _write(corpus.train, encode, vocab, part)
            if corpus.valid is not None:
                _write(corpus.valid, encode, vocab, lambda: valid)
        for name in ("train", "valid"):
            if (work / name).stat().st_size == 0:
                raise UserError(
                    f"the {name} text of the corpus is empty: {data}; name more text, or raise data.valid_fraction"
                )


def _write(documents: Iterator[str], encode: Encode, vocab: int, part: Callable[[], Any]) -> None:
    bar = tqdm(documents, desc="tokenise", unit=" documents", disable=None, leave=False)
    for document in bar:
        pieces = [document[i : i + _PIECE] for i in range(0, len(document), _PIECE)]
        if not pieces:
            continue
        ids, end = encode(pieces)
        ids[-1] = np.concatenate([ids[-1], end])
        for piece in ids:
            part().write(np.asarray(piece, _dtype(vocab)).tobytes())
