"""Text corpora, tokenised once into files of tokens that are identified by their content.

Every corpus is processed in the same way: its documents are split into pieces, and the pieces are
tokenised to files. Without validation text, evenly spaced pieces are held out. A run reads one
corpus or a mixture of several, and divides the tokens into samples for its model.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from train.data import corpus as reading
from train.data.cache import PROGRESS, cache_folder, cached_folder, make_again
from train.data.corpus import Corpus
from train.data.dataset import DATASETS, Batch, Dataset, Source, more_held_out
from train.data.formats import TEXT, Formats
from train.data.mixed_paths import named_paths, source_names, weighted_paths
from train.data.mixture import Mixture, as_shares
from train.data.named_splits import VALIDATION, described_splits
from train.data.special import (
    ENDS,
    DocumentFrame,
    document_frame,
    document_marks,
    largest_vocab,
)
from train.data.splitting import exact_fraction
from train.data.tokenise import (
    UNMARKED,
    begins_of,
    corpus_pieces,
    token_dtype,
    tokenise_corpus,
)
from train.data.tokenizers import (
    checked_ids,
    document_encoder,
    folder_of,
    load_tokenizer,
    tokenizer_files,
    write_tokenizer,
)
from train.data.windows import BYTES, MaskedWindows, Windows, masking_vocabulary
from train.data.workers import core_count


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

    ``"tokens"`` is a file or folder of token ids (`train.extras.token_files`), which are used as they
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

    # The choices that use a field (`train.config.effect`).
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
        object.__setattr__(self, "path", weighted_paths(self.path))
        object.__setattr__(self, "valid_path", named_paths(self.valid_path))
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

    def sources(self, model: Config) -> tuple[Source | Mixture, dict[str, Source]]:
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
            return f"{mixed_data(self)[name].more_validation()} for {name}, or set data.valid_path"
        return more_held_out(_corpus(self).valid is None, self.valid_fraction)

    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        return {} if self.tokenizer == "none" else write_tokenizer(run, config, folder)


# Sources of extras: the value of ``data.source`` -> a function that opens the corpus.
CORPORA: Registry[Callable[[Data], Corpus]] = Registry("corpus", "train.extras")
# The same for files of token ids: a function that returns the formats of their files.
FORMATS: Registry[Callable[[Data], Formats]] = Registry("corpus formats", "train.extras")
FIELD = "input_ids"  # the usual name of a column of token ids


@dataclass(frozen=True)
class Tokens:
    train: np.ndarray  # memory-mapped, one axis
    valid: np.ndarray
    begins: tuple[np.ndarray, np.ndarray]  # the positions at which documents begin, in each part
    vocab: int
    identity: Json  # JSON; identifies the tokens by content, not by path
    report: list[str]  # a summary line, and warnings


class _Encoding(NamedTuple):
    """How the documents of a corpus become tokens."""

    vocab: int  # one more than the largest id
    files: list[str]  # the hashes of the files of the tokenizer
    identity: str
    frame: DocumentFrame
    written: str  # the frame in words; empty if it has no names
    rule: list[object]  # JSON that differs if the same tokenizer gives other tokens or documents
    marks: DocumentFrame = UNMARKED  # tokens of the corpus that begin or end documents


def _encoding(data: Data) -> _Encoding:
    if data.tokenizer == "none":
        return _Encoding(1 << 32, ["none"], "none", UNMARKED, "", ["begins of token ids", data.ids])
    if data.tokenizer == "bytes":
        known, how, vocab = ["bytes"], "bytes", 256
        marks = around = DocumentFrame((), (0,))
        each, rule = "", ["tokens and begins", 0]
    else:
        loaded = load_tokenizer(data.tokenizer)
        known = [sha256(file) for file in tokenizer_files(Path(data.tokenizer).expanduser())]
        how = hashlib.sha256("".join(known).encode()).hexdigest()
        vocab = largest_vocab(loaded)
        around = document_frame(loaded, folder_of(data.tokenizer), data.bos)
        each = around.written(loaded)
        marks = document_marks(loaded, folder_of(data.tokenizer))
        rule = ["plain text, cut at boundaries, with begins", around]
    if data.source == "tokens":
        rule = ["begins of token ids", data.ids, marks]
        return _Encoding(vocab, known, how, UNMARKED, "", rule, marks)
    return _Encoding(vocab, known, how, around, each, rule)


def read_tokens(data: Data) -> Tokens:
    """The tokens of a corpus, from the cache if it was tokenised before.

    Raises:
      UserError: the corpus or the tokenizer is missing, empty or unreadable.
    """
    corpus = _corpus(data)
    held = exact_fraction(data.valid_fraction)
    # The same tokens serve both kinds of attention.
    settings = {name: value for name, value in asdict(data).items() if name != "attend"}
    if isinstance(data.valid_path, dict):
        settings["valid_path"] = ()  # so that another validation set changes no cache of this text
    encoding = _encoding(data)
    vocab = encoding.vocab
    key = json.dumps([*encoding.rule, encoding.files, corpus.key, _every(held)], sort_keys=True)

    def make(work: Path) -> None:
        _make(corpus, data, encoding, held, work)
        if _corpus(data).key != corpus.key:
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
        identity = {"name": _name(data), "tokenizer": encoding.identity} | about
        identity |= {"frame": encoding.written} if encoding.written else {}
        identity |= {"python": _PYTHON} if data.source == "stdlib" else {}
        report = [_summary(read, about["tokens"], corpus.skipped, encoding.written)]
    if corpus.splits:
        report.append(_held_out_by_name(corpus.splits, data.valid_path))
    ended = bool(encoding.frame.end) or data.source == "tokens"
    report += _warnings(read, corpus.skipped, data.tokenizer, ended)
    if data.tokenizer == "none":
        vocab = 1 + max(int(part.max()) for part in (train, valid) if len(part))
    return Tokens(train, valid, (begins, valid_begins), vocab, identity, report)


def _summary(
    read: Json,
    tokens: Sequence[int],
    skipped: Mapping[str, Sequence[Path]],
    each: str,
) -> str:
    framed = f", each: {each}" if each else ""
    kinds = zip(tokens, ("training", "validation"), strict=True)
    counted = " and ".join(f"{number:,} {kind}" for number, kind in kinds if number)
    count = sum(map(len, skipped.values()))
    whys = ", ".join(f"{len(files):,} {why}" for why, files in sorted(skipped.items()))
    return (
        f"data: {read['files']:,} files, {read['documents']:,} documents{framed}, {read['bytes']:,} bytes, "
        f"{counted} tokens"
        + (f", {read['replaced']:,} replaced characters" if read["replaced"] else "")
        + (f", {count:,} skipped files ({whys})" if count else "")
    )


def _held_out_by_name(counts: Mapping[str, int], valid_path: object) -> str:
    validated = counts.get(VALIDATION) and valid_path is None
    return (
        f"data: by their names, there are {described_splits(counts)}; training files are trained on, "
        + ("validation files are the validation set, " if validated else "")
        + "and the others are left out; data.splits=ignore reads all of them as training text"
    )


def _warnings(
    read: Json, skipped: Mapping[str, Sequence[Path]], tokenizer: str, ended: bool
) -> list[str]:
    warnings = []
    if read["replaced"]:
        warnings.append(
            f"WARNING: {read['replaced']:,} characters are U+FFFD, because they were not UTF-8 or were NUL; the first is in "
            f"{read['first_replaced']}: convert the file to UTF-8, for example with iconv -f LATIN1 -t UTF-8"
        )
    if links := skipped.get("symlinked folder"):
        warnings.append(
            f"WARNING: symlinked folders are not read, such as {links[0]}; copy or bind-mount their targets"
        )
    if links := skipped.get(reading.LEADS_OUT):
        warnings.append(
            f"WARNING: links out of the folder are not read, such as {links[0]}; replace them by their files"
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


def training_text(data: Data) -> Iterator[str]:
    """The training text of ``data``, in pieces, without the held-out pieces.

    Raises:
      UserError: the corpus is missing or unreadable, or has token ids instead of text.
    """
    if data.source == "tokens":
        more = " and data.tokenizer=bytes" if data.tokenizer == "none" else ""
        raise UserError(
            f"data.source=tokens has no text; set data.source=text{more}, and data.path to a corpus of text"
        )
    for part in mixed_data(data).values():
        for piece in corpus_pieces(_corpus(part), exact_fraction(data.valid_fraction)):
            if not piece.held:
                yield piece.text


# The standard library as a corpus differs from one Python version to the next.
_PYTHON = platform.python_version()


def _corpus(data: Data) -> Corpus:
    if data.source == "stdlib":
        return reading.stdlib_corpus()
    if data.source == "text":
        return reading.text_corpus(_single_path(data), data.valid_path, data.field, data.splits)
    if data.source == "tokens":
        field = FIELD if data.field == "text" else data.field
        formats = FORMATS[data.source](data)
        return reading.text_corpus(_single_path(data), data.valid_path, field, data.splits, formats)
    return CORPORA[data.source](data)


def _single_path(data: Data) -> str:
    assert isinstance(data.path, str)
    return data.path


def mixed_data(data: Data) -> dict[str, Data]:
    """The settings of each source of a mixture, by name, in its order.

    A source does not depend on the weights and on the other sources. If there is only one, its name
    is empty.
    """
    if not isinstance(data.path, tuple | dict):
        return {"": data}
    valid = {"": data.valid_path} if isinstance(data.valid_path, str) else data.valid_path
    names = source_names([*data.path])
    return {
        name: replace(data, path=path, valid_path=valid)
        for name, path in zip(names, data.path, strict=True)
    }


def valid_data(data: Data) -> dict[str, Data]:
    """The settings of each validation set, by name, if their text does not belong to one source.

    Their training text is the same text. The name of a set without a name is empty.
    """
    given = data.valid_path
    if isinstance(given, str) and isinstance(data.path, tuple | dict):
        given = {"": given}
    if not isinstance(given, dict):
        return {}
    return {
        name: replace(data, path=path, valid_path=path, splits="ignore")
        for name, path in given.items()
    }


def refuse_overlaps(data: Data) -> None:
    """Check that no two sources of a mixture read the same file.

    The file would be held out in one source, and trained on in the other one.

    Raises:
      UserError: two sources do.
    """
    formats = FORMATS[data.source](data) if data.source == "tokens" else TEXT
    known: dict[Path, str] = {}
    for part in mixed_data(data).values():
        for file in reading.training_files(_single_path(part), formats):
            if (other := known.setdefault(file, _single_path(part))) != part.path:
                raise UserError(
                    f"data.path reads {file} twice, in {other} and in {part.path}: give paths that have no file in common, "
                    "or leave out one of them"
                )


def _name(data: Data) -> str:
    if data.source in ("text", "tokens"):
        return Path(_single_path(data)).name
    return data.name if data.source == "tfds" and data.name else data.source


def _every(held: Fraction) -> int | str:
    """The number k for a fraction of 1/k, and the fraction itself otherwise."""
    return held.denominator if held.numerator == 1 else str(held)


def _make(corpus: Corpus, data: Data, encoding: _Encoding, held: Fraction, work: Path) -> None:
    """Write the tokens of both parts, and their description."""
    vocab = encoding.vocab
    kind = token_dtype(vocab)
    if data.source == "tokens":
        encoder = partial(_checked_ids, vocab, data.tokenizer)
        tokenise_corpus(corpus, lambda threads: encoder, kind, held, 1, work, marks=encoding.marks)
    else:
        # Bytes need no encoding, so more processes would not help.
        workers = 1 if data.tokenizer == "bytes" else core_count()
        encoder, cut = document_encoder(data.tokenizer, data.bos)
        tokenise_corpus(corpus, encoder, kind, held, workers, work, cut)
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


def _checked_ids(
    vocab: int, name: str, pieces: list[np.ndarray], begins: list[bool]
) -> tuple[list[Any], DocumentFrame]:
    return [checked_ids(ids, vocab, name) for ids in pieces], UNMARKED


# --- mixtures and several validation sets ---


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


def read_corpora(data: Data) -> Corpora:
    """The tokens of all sources and validation sets.

    Without ``data.valid_path``, each source holds out a part of its text.

    Raises:
      UserError: a corpus or the tokenizer is missing, empty or unreadable, or two sources have the
        same text.
    """
    if isinstance(data.path, tuple | dict):
        refuse_overlaps(data)
    own = {name: read_tokens(part) for name, part in mixed_data(data).items()}
    sets = {name: read_tokens(part) for name, part in valid_data(data).items()}
    weights = data.path.values() if isinstance(data.path, dict) else _token_counts(own).values()
    shares = as_shares([*weights])
    train = {name: found.train for name, found in own.items()}
    valid = {name: found.valid for name, found in (sets or own).items()}
    vocab = max(found.vocab for found in (own | sets).values())
    report = _mixture_report(data, own, shares) + _sets_report(sets)
    begins = {name: found.begins[0] for name, found in own.items()}
    if data.attend == "document":
        report.append(_document_report(begins, _token_counts(own)))
    valid_begins = {name: found.begins[1] for name, found in (sets or own).items()}
    return Corpora(
        train,
        shares,
        valid,
        begins,
        valid_begins,
        vocab,
        _joint_identity(own, sets, shares),
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


def _token_counts(own: Mapping[str, Tokens]) -> dict[str, int]:
    return {name: len(found.train) for name, found in own.items()}


def _joint_identity(
    own: Mapping[str, Tokens], sets: Mapping[str, Tokens], shares: Sequence[Fraction]
) -> Json:
    (_, first), *others = own.items()
    if not others and not sets:
        return first.identity
    hashes = [found.identity["train"] for found in own.values()]
    if twice := [name for name, h in zip(own, hashes, strict=True) if hashes.count(h) > 1]:
        raise UserError(
            f"data.path names the same text twice, in {twice[0]} and in {twice[1]}: leave out one of them, and give the other "
            "one the sum of the weights"
        )
    valid = [found.identity["valid"] for found in (sets or own).values()]
    sizes = [sum(_token_counts(own).values()), sum(len(x.valid) for x in (sets or own).values())]
    found = first.identity | {"valid": _joint_hash(valid), "tokens": sizes}
    if others:
        parts = {
            name: {"train": h, "share": str(share)}
            for name, h, share in zip(own, hashes, shares, strict=True)
        }
        named = " + ".join(f"{float(s):.3%} {name}" for name, s in zip(own, shares, strict=True))
        train = _joint_hash([[part["train"], part["share"]] for part in parts.values()])
        found |= {"name": named, "train": train, "mixture": parts}
    return found


def _joint_hash(parts: Sequence[Any]) -> str:
    return parts[0] if len(parts) == 1 else hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _mixture_report(data: Data, own: Mapping[str, Tokens], shares: Sequence[Fraction]) -> list[str]:
    if len(own) == 1:
        return next(iter(own.values())).report
    given = isinstance(data.path, dict)
    weights = data.path.values() if isinstance(data.path, dict) else _token_counts(own).values()
    parts = [
        f"{float(share):.1%} {name} ({f'weight {weight:g}' if given else f'{weight:,} tokens'})"
        for name, weight, share in zip(own, weights, shares, strict=True)
    ]
    lines = [f"data: a mixture of samples: {', '.join(parts)}"]
    for name, found in own.items():
        for line in found.report:
            head, colon, rest = line.partition(": ")
            lines.append(f"{head}{colon}{name}: {rest}")
    return lines


def _sets_report(sets: Mapping[str, Tokens]) -> list[str]:
    parts = [f"{name or 'all'} {len(found.valid):,} tokens" for name, found in sets.items()]
    warnings = [line for found in sets.values() for line in found.report if "WARNING" in line]
    return ([f"data: validation sets: {', '.join(parts)}"] if sets else []) + warnings


def text_sources(data: Data, model: Config) -> tuple[Source | Mixture, dict[str, Source]]:
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
    return Mixture(train, text.shares), valid


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
    known = (
        BYTES if data.tokenizer == "bytes" else masking_vocabulary(load_tokenizer(data.tokenizer))
    )
    if data.whole_words and known.whole_word is None:
        raise UserError(
            f"data.whole_words: the tokenizer {data.tokenizer} does not mark tokens that continue a word; set it to false"
        )
    known = known if data.whole_words else known._replace(whole_word=None)
    return lambda part, begins: MaskedWindows(
        part, model.length, *known, masked=model.masked, begins=begins if used else None
    )


DATASETS.add("Data", Data)
