"""Text corpora, tokenised once into files of tokens that are identified by their content.

Every corpus is processed in the same way: its documents are split into pieces, and the pieces are
tokenised to files. Without validation text, evenly spaced pieces are held out.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.checkpoints.io.folders import atomic_file
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from jaxgrow.untrusted import narrow_permissions, one_line
from train.common.errors import UserError
from train.common.fields import GIVEN
from train.common.files import read_record, write_record
from train.data import corpus as reading
from train.data.bounded import BoundedTokenizer, check_tokenizer
from train.data.cache import cache_folder, cached_folder, make_again
from train.data.corpus import Corpus
from train.data.cutting import TextEncoder, cut_document
from train.data.dataset import Batch, Dataset, Source, more_held_out
from train.data.decoding import readable_file
from train.data.formats import TEXT, Formats
from train.data.mixed_paths import named_paths, source_names, weighted_paths
from train.data.named_splits import VALIDATION, described_splits
from train.data.special import (
    END,
    ENDS,
    DocumentFrame,
    document_frame,
    document_marks,
    frame_as_files_say,
    largest_vocab,
    read_as_text,
    set_up,
    special_tokens,
    text_encoder,
)
from train.data.splitting import exact_fraction
from train.data.tokenise import (
    UNMARKED,
    Cut,
    Encode,
    begins_of,
    corpus_pieces,
    token_dtype,
    tokenise_corpus,
)
from train.data.workers import core_count

if TYPE_CHECKING:
    from train.data.corpora import Corpora
    from train.data.mixture import Mixture


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
    # files or the split whose name says so, if any.
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

    def sources(self, model: Config) -> "tuple[Source | Mixture, dict[str, Source]]":
        self.check_modality(model)
        from train.data.corpora import text_sources

        return text_sources(self, model)

    def identity(self, model: Config) -> Json:
        """Describe the text by content; the standard library also by the version of Python."""
        return self._corpora().identity

    def report(self) -> list[str]:
        return self._corpora().report

    def _corpora(self) -> "Corpora":
        from train.data.corpora import read_corpora  # its import takes seconds

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
    rule: list[Any]  # JSON that differs if the same tokenizer gives other tokens or documents
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
        known = [sha256(file) for file in _tokenizer_files(Path(data.tokenizer).expanduser())]
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
    read: Mapping[str, Any],
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


def _held_out_by_name(counts: Mapping[str, int], valid_path: Any) -> str:
    validated = counts.get(VALIDATION) and valid_path is None
    return (
        f"data: by their names, there are {described_splits(counts)}; training files are trained on, "
        + ("validation files are the validation set, " if validated else "")
        + "and the others are left out; data.splits=ignore reads all of them as training text"
    )


def _warnings(
    read: Mapping[str, Any], skipped: Mapping[str, Sequence[Path]], tokenizer: str, ended: bool
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
        encoder, cut = _encoder(data.tokenizer, data.bos)
        tokenise_corpus(corpus, encoder, kind, held, workers, work, cut)
    parts = [work / name for name in ("train", "valid")]
    for part in parts:
        apart = part.name == "valid" and isinstance(data.valid_path, dict)
        if part.stat().st_size == 0 and not apart:
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
    # The tokens of a private text are private, too.
    mode = corpus.counts.mode
    narrow_permissions(work, mode | (mode & 0o444) >> 2)  # who may read a file may enter the folder
    sizes = [part.stat().st_size // np.dtype(kind).itemsize for part in parts]
    begins = [(work / begins_of(part.name)).stat().st_size // 8 for part in parts]
    write_record(work / "about.json", about | {"tokens": sizes, "begins": begins, "read": read})


# --- tokenizers ---


def load_tokenizer(name: str) -> Any:
    """The `tokenizers.Tokenizer` of a name.

    Args:
      name: a file ``tokenizer.json``, a folder with ``vocab.json`` and ``merges.txt``, or
        ``"bytes"`` for a tokenizer that gives the same tokens as `Data.tokenizer` ``"bytes"``.

    Raises:
      UserError: the tokenizer does not exist or cannot be read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if name == "bytes":
        return _byte_tokenizer()
    path = Path(name).expanduser()
    try:
        with readable_file(path):
            check_tokenizer(path, _tokenizer_files(path))
            if path.is_dir():
                loaded = Tokenizer(models.BPE.from_file(*map(str, _tokenizer_files(path))))
                loaded.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
                loaded.decoder = decoders.ByteLevel()  # type: ignore[assignment]
            else:
                loaded = Tokenizer.from_file(str(path))
                # The saved settings would cut documents to the context of another model.
                loaded.no_truncation()
                loaded.no_padding()
    except UserError as error:
        raise UserError(
            f"no tokenizer at {path} ({error}): give a tokenizer.json, or a folder of vocab.json and merges.txt"
        ) from error
    with readable_file(path, "download or copy the tokenizer again"):
        if path.is_dir():
            set_up(loaded, path)
        else:
            frame_as_files_say(loaded, path.parent)
        read_as_text(loaded, folder_of(name))
    return loaded


def _byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes of UTF-8.

    Byte 0, which does not occur in text, ends documents.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A byte-level BPE writes bytes as printable characters: a printable byte as itself, the others
    # as the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    spelt = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    vocab = {_NAMED_BYTES.get(b, character): b for character, b in spelt.items()}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bpe.add_special_tokens([AddedToken(END, special=True)])
    return bpe


# The roles of bytes that do not occur in text (`train.data.windows.BYTES`,
# `train.extras.labelled.encoding`).
_NAMED_BYTES = {0x00: END, 0xC0: "[CLS]", 0xC1: "[PAD]", 0xFF: "[MASK]"}


def end_of_text(tokenizer: Any, folder: Path | None = None) -> int | None:
    """The token that ends a document; None if the tokenizer has none.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      folder: the folder of its files, as `train.data.special.special_tokens` reads them.
    """
    return special_tokens(tokenizer, folder).end


def folder_of(name: str) -> Path | None:
    """The folder of a tokenizer's files; None for "bytes"."""
    path = Path(name).expanduser()
    return None if name == "bytes" else path if path.is_dir() else path.parent


def tokenizer_of(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` in the folder of a model.

    Raises:
      UserError: the folder has no tokenizer.
    """
    if (file := folder / "tokenizer.json").is_file():
        return load_tokenizer(str(file))
    if (folder / "vocab.json").is_file():
        return load_tokenizer(str(folder))
    raise UserError(
        f"there is no tokenizer.json in {folder}, nor vocab.json and merges.txt; name a tokenizer with --tokenizer, or bytes"
    )


def name_of(folder: Path) -> str:
    """The value of `Data.tokenizer` for the tokenizer in the folder of a model.

    Raises:
      UserError: the folder has no tokenizer.
    """
    if tokenizer_of(folder).get_vocab() == _byte_tokenizer().get_vocab():
        return "bytes"
    file = folder / "tokenizer.json"
    return str(file if file.is_file() else folder)


def _tokenizer_files(path: Path) -> list[Path]:
    return [path / "vocab.json", path / "merges.txt"] if path.is_dir() else [path]


def _encoder(name: str, bos: bool | Literal["auto"]) -> tuple[Callable[[int], Encode], Cut]:
    """A function that starts an encoder with a number of threads, and how documents are cut.

    Bytes may be cut anywhere.
    """
    if name == "bytes":
        return lambda threads: _bytes, iter
    loaded = load_tokenizer(name)
    around = document_frame(loaded, folder_of(name), bos)
    plain = text_encoder(loaded)

    def started(threads: int = 1) -> TextEncoder:
        return TextEncoder(BoundedTokenizer(plain, name, threads))

    def encoder(threads: int) -> Encode:
        texts = started(threads)
        return lambda pieces, begins: (texts(pieces, begins), around)

    return encoder, partial(cut_document, encoder=cache(started))


def checked_ids(ids: np.ndarray, vocab: int, name: str) -> np.ndarray:
    """The ids, if a vocabulary has all of them.

    Args:
      ids: token ids.
      vocab: one more than the largest id of the tokenizer.
      name: the tokenizer, for the message.

    Raises:
      UserError: an id is negative, or above the largest one.
    """
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise UserError(
            f"the corpus has the token id {wrong}, but the ids of data.tokenizer={name} are from 0 to {vocab - 1}: name "
            "the tokenizer that made the tokens, or set data.tokenizer=none; for a raw file, data.ids is the type of "
            "its numbers"
        )
    return ids


def _checked_ids(
    vocab: int, name: str, pieces: list[np.ndarray], begins: list[bool]
) -> tuple[list[Any], DocumentFrame]:
    return [checked_ids(ids, vocab, name) for ids in pieces], UNMARKED


def _bytes(pieces: list[str], begins: list[bool]) -> tuple[list[Any], DocumentFrame]:
    # Text has no zero byte, so this byte ends documents.
    return [np.frombuffer(p.encode(), np.uint8) for p in pieces], DocumentFrame((), (0,))


# --- files for `transformers` ---

# For each role of a special token, the spellings that identify it.
_ROLES = {
    "pad_token": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_OF_MASKED = ("cls_token", "sep_token", "mask_token")


def write_tokenizer(run: Path, config: Config, folder: Path) -> Json:
    """Write the tokenizer for `transformers`.

    Returns:
      The entries of ``config.json`` about the special tokens.
    """
    tokenizer = tokenizer_of(run)
    save_tokenizer(tokenizer, folder)
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
    write_record(folder / "tokenizer_config.json", about | {"clean_up_tokenization_spaces": False})
    if "pad_token" in named and (config.causal or config.first_position == 0):
        ends["pad_token_id"] = tokenizer.token_to_id(named["pad_token"])
    found: Json = {role: i for role, i in ends.items() if i is not None}
    if "eos_token_id" in found and len(special.ends) > 1:  # several tokens end generated texts
        found["eos_token_id"] = list(special.ends)
    return found


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    with atomic_file(folder / "tokenizer.json") as part:
        tokenizer.save(str(part))
