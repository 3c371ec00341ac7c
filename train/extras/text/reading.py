"""Text corpora, tokenised once into files of tokens that are identified by their content.

Every corpus is processed in the same way: its documents are split into pieces, and the pieces are
tokenised to files. Without validation text, evenly spaced pieces are held out.
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from jaxgrow.untrusted import narrow_permissions, one_line
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.data.text import Data
from train.extras.cache import PROGRESS, cache_folder, cached_folder, make_again
from train.extras.splitting import exact_fraction
from train.extras.text.corpus import Corpus, stdlib_corpus
from train.extras.text.tokenise import begins_of, token_dtype, tokenise_corpus
from train.extras.tokenizers.loading import named_tokenizer
from train.extras.tokenizers.tokenizer import ENDS, Tokenizer

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
