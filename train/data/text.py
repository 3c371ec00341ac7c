"""Text corpora, tokenised once into files of tokens that are identified by their content.

Every corpus is processed in the same way: its documents are split into pieces, and the pieces are
tokenised to files. Without validation text, evenly spaced pieces are held out. A run reads one
corpus or a mixture of several, and divides the tokens into samples for its model.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, Protocol

import jax
import numpy as np

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from jaxgrow.untrusted import narrow_permissions, one_line
from train.common.errors import UserError
from train.common.fields import GIVEN
from train.common.files import read_record, write_record
from train.data.cache import PROGRESS, cache_folder, cached_folder, make_again
from train.data.corpus import Corpus, stdlib_corpus
from train.data.dataset import DATASETS, Batch, Dataset, MixedSource, Source, more_held_out
from train.data.splitting import exact_fraction
from train.data.tokenise import begins_of, token_dtype, tokenise_corpus
from train.data.tokenizers import ENDS, TOKENIZERS, Tokenizer, named_tokenizer
from train.data.windows import MaskedWindows, Windows


@dataclass(frozen=True)
class Data(Dataset):
    """A corpus and its tokenizer.

    ``source="stdlib"`` is the source text of Python's standard library, which needs no files.
    ``"text"`` is a file or folder at ``path``: text (``.txt``, one document per file) and JSON
    Lines (``.jsonl``), both also compressed (``.gz``, ``.xz``, ``.zst``), Parquet, or a folder that
    Hugging Face `datasets` wrote with ``save_to_disk``. Markdown, Python and CSV files (``.md``,
    ``.py``, ``.csv``) are read if ``path`` is the file itself. ``"tfds"`` is the
    tensorflow-datasets corpus ``name``, which is prepared under ``path`` if necessary; it is read
    without TensorFlow. A document that is empty or null is left out; a document without ``field``
    is an error.

    ``"tokens"`` is a file or folder of token ids (`train.extras.text.token_files`), which are used as they
    are. All of them must be in the vocabulary of ``tokenizer``, which the run keeps.

    Documents are plain text: the name of a special token in them, such as ``<|endoftext|>``, is
    encoded as any other characters. Around each document are the tokens that the files of the
    tokenizer ask for, and at least its end of text.
    """

    modality = "text"
    source: Literal["stdlib", "text", "tokens", "tfds"] = "stdlib"
    # A file, a folder or a pattern; or a mixture of several: {wiki: 0.7, "code/*.jsonl.gz": 0.3}, whose
    # weights are divided by their sum, or [wiki, code], whose weights are their sizes.
    path: str | tuple[str, ...] | dict[str, float] | None = None
    # For "text" and "tokens": the validation text, or several: {wiki: wiki.txt, code: code.txt}. None: the
    # files or the split that have the name of a validation split, if there are any.
    valid_path: str | dict[str, str] | None = None
    # For "text" and "tokens": "auto" leaves out test files and validates on validation files, by their names;
    # "ignore" reads all files as training text.
    splits: Literal["auto", "ignore"] = "auto"
    name: str | None = None  # for "tfds", e.g. "wiki40b/en"
    # The feature, column or key of the documents, such as "text" or the nested "meta.text". For
    # "tokens", the default is "input_ids".
    field: str = "text"
    # For "tokens": the type of the numbers in raw .bin files.
    ids: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    # "bytes", a tokenizer.json, or a folder with vocab.json and merges.txt. For "tokens", also "none".
    tokenizer: str = "bytes"
    # Whether a token begins each document; "auto": as the files of the tokenizer say.
    bos: bool | Literal["auto"] = "auto"
    # Whether a token sees only its document, whose positions then count from 0, or its entire row.
    attend: Literal["row", "document"] = "row"
    whole_words: bool = False  # masked language models: mask all pieces of a word together
    # The part that is held out if there is no validation text or split.
    valid_fraction: float = 0.02
    cache: str = "~/.cache/jaxgrow"

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "path": {"source": ("text", "tokens", "tfds")},
        "valid_path": {"source": ("text", "tokens")},
        "splits": {"source": ("text", "tokens")},
        "name": {"source": ("tfds",)},
        "field": {"source": ("text", "tokens", "tfds")},
        "whole_words": {"/model.masked": GIVEN},
        "valid_fraction": {"valid_path": (None,)},
    }

    def __post_init__(self):
        if lists_paths(self.path):
            object.__setattr__(self, "path", SEVERAL_TEXTS["files"].weighted_paths(self.path))
        if lists_paths(self.valid_path):
            named = SEVERAL_TEXTS["files"].named_paths(self.valid_path)
            object.__setattr__(self, "valid_path", named)
        several = [n for n in ("path", "valid_path") if isinstance(getattr(self, n), tuple | dict)]
        if several and self.source not in ("text", "tokens"):
            raise ValueError(
                f"data.{several[0]} can name several paths only for data.source=text and data.source=tokens, but "
                f"data.source is {self.source}: set data.source=text"
            )
        if not 0 < self.valid_fraction <= 0.5:
            raise ValueError(
                f"valid_fraction must be between 0 and 0.5, but is {self.valid_fraction}"
            )
        if self.source in ("text", "tokens") and self.path is None:
            raise ValueError(
                f"data.source={self.source} needs data.path, a file or folder of {self.source}"
            )
        if self.tokenizer == "none" and self.source != "tokens":
            raise ValueError(
                "data.tokenizer=none is for data.source=tokens; for text, name a tokenizer, or set data.tokenizer=bytes"
            )
        if self.source == "tokens" and self.bos != "auto":
            raise ValueError(
                "data.bos has no effect on data.source=tokens, whose ids are used as they are: set data.bos=auto"
            )
        if self.bos is True and self.tokenizer == "bytes":
            raise ValueError(
                "data.bos=true needs a tokenizer with a token that begins texts, but data.tokenizer is bytes: "
                "set data.bos=auto, or give a tokenizer"
            )
        if self.source != "tokens" and self.ids != "uint16":
            raise ValueError(
                f"data.ids is for data.source=tokens, and has no effect on {self.source}: leave it out"
            )
        if self.source == "tfds" and self.name is None:
            raise ValueError("data.source=tfds needs data.name, such as wiki40b/en")

    def sources(self, model: Config) -> tuple[Source | MixedSource, dict[str, Source]]:
        self.check_modality(model)
        return text_sources(self, model)

    def identity(self, model: Config) -> Json:
        """Describe the text by content; the standard library also by the version of Python."""
        return self._corpora().identity

    def report(self) -> list[str]:
        return self._corpora().report

    def _corpora(self) -> "Corpora":
        return read_corpora(self)

    def shapes(self, model: Config, samples: int) -> Batch:
        inputs, targets = model.batch_shapes(samples)
        if self.attend == "document":
            if not isinstance(inputs, dict):
                weights = jax.ShapeDtypeStruct(inputs.shape, np.float32)
                inputs = {"tokens": inputs, "weights": weights}
            inputs = inputs | {"segments": inputs["tokens"]}
        return inputs, targets

    def more_validation(self, name: str = "") -> str:
        if isinstance(self.valid_path, dict):
            return f"give more of them in data.valid_path={self.valid_path[name]}, the set {name}"
        if self.valid_path is not None:
            return f"give more of them in data.valid_path={self.valid_path}"
        if name:
            part = SEVERAL_TEXTS["files"].parts(self)[name]
            return f"{part.more_validation()} for {name}, or set data.valid_path"
        return more_held_out(open_corpus(self).valid is None, self.valid_fraction)

    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        if self.tokenizer == "none":
            return {}
        return TOKENIZERS["files"].write_inputs(run, config, folder)


# The value of ``data.source`` -> a function that opens the corpus.
CORPORA: Registry[Callable[[Data], Corpus]] = Registry("corpus", "train.extras")
CORPORA.add("stdlib", lambda data: stdlib_corpus())


@dataclass(frozen=True)
class Tokens:
    train: np.ndarray  # memory-mapped, one axis
    valid: np.ndarray
    begins: tuple[np.ndarray, np.ndarray]  # the positions at which documents begin, in each part
    vocab: int
    identity: Json  # JSON; identifies the tokens by content, not by path
    report: list[str]  # a summary line, and warnings


def read_tokens(data: Data) -> Tokens:
    """The tokens of a corpus, from the cache if it was tokenised before.

    Raises:
      UserError: the corpus or the tokenizer is missing, empty or unreadable.
    """
    corpus = open_corpus(data)
    held = exact_fraction(data.valid_fraction)
    # The same tokens serve both kinds of attention.
    settings = {name: value for name, value in asdict(data).items() if name != "attend"}
    if isinstance(data.valid_path, dict):
        settings["valid_path"] = ()  # so that another validation set changes no cache of this text
    tokenizer = corpus.tokenizer or named_tokenizer(data.tokenizer, data.bos)
    vocab = tokenizer.vocab
    key = json.dumps([*tokenizer.rule, tokenizer.files, corpus.key, _every(held)], sort_keys=True)

    def make(work: Path) -> None:
        _make(corpus, data, tokenizer, held, work)
        if open_corpus(data).key != corpus.key:
            (work / PROGRESS).unlink(missing_ok=True)  # the next call must not continue from it
            raise UserError(f"{data.path} changed while it was read; repeat the command")

    folder = cached_folder(cache_folder(data.cache, settings, key), make)
    name = folder / "about.json"
    about = read_record(name, make_again(folder), ("train", "valid", "tokens", "begins", "read"))
    with one_line(UserError, f"{name} is damaged; {make_again(folder)}"):
        train, valid = (
            _mapped_tokens(folder, *part, token_dtype(vocab))
            for part in zip(("train", "valid"), about["tokens"], strict=True)
        )
        counts = zip(("train", "valid"), about.pop("begins"), strict=True)
        begins, valid_begins = (
            _mapped_tokens(folder, begins_of(part), n, np.int64) for part, n in counts
        )
        read = about.pop("read")
        identity = {"name": _name(data), "tokenizer": tokenizer.identity} | about
        identity |= {"frame": tokenizer.written} if tokenizer.written else {}
        identity |= {"python": _PYTHON} if data.source == "stdlib" else {}
        report = [_summary(read, about["tokens"], corpus.skipped, tokenizer.written)]
    ended = bool(tokenizer.frame.end) or corpus.tokenizer is not None
    report += [*corpus.report, *_warnings(read, data.tokenizer, ended)]
    if data.tokenizer == "none":
        vocab = 1 + max(int(part.max()) for part in (train, valid) if len(part))
    return Tokens(train, valid, (begins, valid_begins), vocab, identity, report)


def _summary(
    read: Json,
    tokens: Sequence[int],
    skipped: Mapping[str, int],
    each: str,
) -> str:
    framed = f", each: {each}" if each else ""
    kinds = zip(tokens, ("training", "validation"), strict=True)
    counted = " and ".join(f"{number:,} {kind}" for number, kind in kinds if number)
    count = sum(skipped.values())
    whys = ", ".join(f"{files:,} {why}" for why, files in sorted(skipped.items()))
    return (
        f"data: {read['files']:,} files, {read['documents']:,} documents{framed}, {read['bytes']:,} bytes, "
        f"{counted} tokens"
        + (f", {read['replaced']:,} replaced characters" if read["replaced"] else "")
        + (f", {count:,} skipped files ({whys})" if count else "")
    )


def _warnings(read: Json, tokenizer: str, ended: bool) -> list[str]:
    warnings = []
    if read["replaced"]:
        warnings.append(
            f"WARNING: {read['replaced']:,} characters are U+FFFD, because they were not UTF-8 or were NUL; the first is in "
            f"{read['first_replaced']}: convert the file to UTF-8, for example with iconv -f LATIN1 -t UTF-8"
        )
    if not ended:
        warnings.append(
            f"WARNING: the tokenizer {tokenizer} has no token that ends a document ({', '.join(ENDS)}): documents follow each "
            "other without a separator; add one of these tokens"
        )
    return warnings


def _mapped_tokens(folder: Path, name: str, count: int, kind: type) -> np.ndarray:
    file = folder / name
    size = count * np.dtype(kind).itemsize
    there = file.stat().st_size if file.exists() else 0
    if there != size:
        raise UserError(
            f"the token file {file} is damaged: it has {there} bytes, not {size}; {make_again(folder)}"
        )
    return np.memmap(file, kind, "r") if size else np.zeros(0, kind)


# The standard library as a corpus differs from one Python version to the next.
_PYTHON = platform.python_version()


def open_corpus(data: Data) -> Corpus:
    """Open the corpus of a setting with a single path."""
    return CORPORA[data.source](data)


def lists_paths(value: object) -> bool:
    """Whether a setting lists paths, and is not the name of a file with such characters."""
    if not isinstance(value, str):
        return isinstance(value, Mapping | list | tuple)
    text = value.strip()
    is_list = text.startswith("[") and text.endswith("]")
    return (text.startswith("{") or is_list) and not os.path.lexists(os.path.expanduser(value))


def _name(data: Data) -> str:
    if data.source in ("text", "tokens"):
        return Path(str(data.path)).name
    return data.name if data.source == "tfds" and data.name else data.source


def _every(held: Fraction) -> int | str:
    """The number k for a fraction of 1/k, and the fraction itself otherwise."""
    return held.denominator if held.numerator == 1 else str(held)


def _make(corpus: Corpus, data: Data, tokenizer: Tokenizer, held: Fraction, work: Path) -> None:
    """Write the tokens of both parts, and their description."""
    kind = token_dtype(tokenizer.vocab)
    tokenise_corpus(corpus, tokenizer, kind, held, work)
    parts = [work / name for name in ("train", "valid")]
    for part in parts:
        apart = part.name == "valid" and isinstance(data.valid_path, dict)
        if part.stat().st_size == 0 and not apart:
            (work / PROGRESS).unlink(missing_ok=True)
            out = "give more text"
            if part.name == "valid":
                some = "one document" if held.numerator == 1 else f"{held.numerator} documents"
                out = (
                    f"data.valid_fraction selects {some} in {held.denominator} for validation; "
                    "give more text"
                ) + (", or set data.valid_path" if data.source == "text" else "")
            raise UserError(f"the {part.name} text of the corpus is empty: {data}; {out}")
    about: Json = {part.name: sha256(part) for part in parts}
    read = {
        name: count for name, count in asdict(corpus.counts).items() if name not in ("file", "mode")
    }
    # If the text is private, its tokens must be private.
    mode = corpus.counts.mode
    narrow_permissions(work, mode | (mode & 0o444) >> 2)  # who may read a file may enter the folder
    sizes = [part.stat().st_size // np.dtype(kind).itemsize for part in parts]
    begins = [(work / begins_of(part.name)).stat().st_size // 8 for part in parts]
    write_record(work / "about.json", about | {"tokens": sizes, "begins": begins, "read": read})


@dataclass(frozen=True)
class Corpora:
    """Tokens by the name of their source or validation set; the name is empty if there is only one.

    Attributes:
      train: training tokens of each source.
      shares: share of each source in the samples.
      valid: tokens of each validation set.
      begins: positions at which the documents of each source begin.
      valid_begins: positions at which the documents of each validation set begin.
      vocab: one more than the largest id.
      identity: JSON value that identifies the tokens by content, and the shares.
      report: summary lines, and warnings.
    """

    train: dict[str, np.ndarray]
    shares: list[Fraction]
    valid: dict[str, np.ndarray]
    begins: dict[str, np.ndarray]
    valid_begins: dict[str, np.ndarray]
    vocab: int
    identity: Json
    report: list[str]


class SeveralTexts(Protocol):
    """What extras do with several texts or validation sets in one setting."""

    def weighted_paths(self, value: object) -> str | tuple[str, ...] | dict[str, float] | None:
        """``data.path`` in its plain form; raises `ValueError` for a wrong one."""
        ...

    def named_paths(self, value: object) -> str | dict[str, str] | None:
        """``data.valid_path`` in its plain form; raises `ValueError` for a wrong one."""
        ...

    def parts(self, data: Data) -> dict[str, Data]:
        """The settings of each source, by name."""
        ...

    def read(self, data: Data) -> Corpora:
        """As `read_corpora`."""
        ...

    def mixture(self, parts: Mapping[str, Source], shares: Sequence[Fraction]) -> MixedSource:
        """Mix the samples of sources, by their shares, which sum to 1."""
        ...


SEVERAL_TEXTS: Registry[SeveralTexts] = Registry("several texts", "train.extras")


def read_corpora(data: Data) -> Corpora:
    """The tokens of all sources and validation sets.

    Without ``data.valid_path``, each source holds out a part of its text.

    Raises:
      UserError: a corpus or the tokenizer is missing, empty or unreadable, or two sources have the
        same text.
    """
    if isinstance(data.path, tuple | dict) or isinstance(data.valid_path, dict):
        return SEVERAL_TEXTS["files"].read(data)
    found = read_tokens(data)
    return corpora_of(data, {"": found}, {}, [Fraction(1)], found.identity, found.report)


def corpora_of(
    data: Data,
    own: Mapping[str, Tokens],
    sets: Mapping[str, Tokens],
    shares: list[Fraction],
    identity: Json,
    report: list[str],
) -> Corpora:
    """Collect the tokens of each source, and of each validation set if there are any."""
    valid = sets or own
    begins = {name: found.begins[0] for name, found in own.items()}
    if data.attend == "document":
        counts = {name: len(found.train) for name, found in own.items()}
        report = [*report, _document_report(begins, counts)]
    return Corpora(
        {name: found.train for name, found in own.items()},
        shares,
        {name: found.valid for name, found in valid.items()},
        begins,
        {name: found.begins[1] for name, found in valid.items()},
        max(found.vocab for found in (*own.values(), *sets.values())),
        identity,
        report,
    )


def _document_report(begins: Mapping[str, np.ndarray], tokens: Mapping[str, int]) -> str:
    """A line about the documents of the training text.

    Args:
      begins: the positions at which the documents of each source begin, ascending.
      tokens: the number of tokens of each source.

    Raises:
      UserError: each source is only one document, whose ends attention never reaches.
    """
    inner = [np.searchsorted(begins[name], [1, count]) for name, count in tokens.items()]
    ends = sum(int(high - low) for low, high in inner)
    if not ends:
        raise UserError(
            "data.attend=document has no effect, because the training text is one document: set data.attend=row, or give "
            "one document in each file, line or row; token ids are also divided by the end of text of data.tokenizer"
        )
    return (
        f"data: attention stops at the ends of {ends + len(inner):,} training documents; their last tokens predict nothing, "
        "but count as tokens and FLOPs"
    )


def text_sources(data: Data, model: Config) -> tuple[Source | MixedSource, dict[str, Source]]:
    """The training samples of ``model``, and the samples of each validation set by its name.

    Raises:
      UserError: the text cannot be read, or the model cannot take it.
    """
    text = read_corpora(data)
    vocab = model.sizes()["vocab"]
    if text.vocab > vocab:
        what = "tokens" if data.tokenizer == "none" else "tokenizer"
        raise UserError(
            f"the largest id of the {what} is {text.vocab - 1}, but model.vocab is {vocab}; "
            f"raise model.vocab to {text.vocab}"
        )
    windows = _windows(data, model)
    train = {name: windows(part, text.begins[name]) for name, part in text.train.items()}
    valid = {name: windows(part, text.valid_begins[name]) for name, part in text.valid.items()}
    if len(train) == 1:
        return next(iter(train.values())), valid
    if empty := [name for name, part in train.items() if not len(part)]:
        what = f"less than one sample of {model.length} tokens"
        raise UserError(
            f"the training text of {empty[0]} in data.path is {what}: give more text, or leave it out"
        )
    return SEVERAL_TEXTS["files"].mixture(train, text.shares), valid


def _windows(data: Data, model: Config) -> Callable[[np.ndarray, np.ndarray], Source]:
    """The function that divides tokens, with the begins of documents, into samples of ``model``."""
    used = data.attend == "document"
    if used and not getattr(model, "segments", False):
        raise UserError(
            f"attention of a {type(model).__name__} cannot stop at the ends of documents: set data.attend=row"
        )
    if not model.masked:
        return lambda part, begins: Windows(part, model.length, begins if used else None)
    if data.tokenizer == "none":
        raise UserError(
            "a masked model needs the mask of a tokenizer, but data.tokenizer is none: name the tokenizer of the tokens"
        )
    known = named_tokenizer(data.tokenizer, data.bos).masking()
    if data.whole_words and known.whole_word is None:
        raise UserError(
            f"data.whole_words: the tokenizer {data.tokenizer} does not mark tokens that continue a word; set it to false"
        )
    known = known if data.whole_words else known._replace(whole_word=None)
    return lambda part, begins: MaskedWindows(
        part, model.length, *known, masked=model.masked, begins=begins if used else None
    )


DATASETS.add("Data", Data)
