"""The texts of a run: one corpus, or a mixture of sources, and perhaps several validation sets."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.data.text import TEXTS, Corpora, Data
from train.data.windows import Vocabulary
from train.extras.splitting import exact_fraction, more_held_out
from train.extras.text.corpora import training_files
from train.extras.text.formats import TEXT
from train.extras.text.mixed_paths import checked_paths, source_names
from train.extras.text.mixture import Mixture, as_shares
from train.extras.text.reading import Tokens, open_corpus, read_tokens
from train.extras.text.token_files import token_formats
from train.extras.text.tokenise import corpus_pieces
from train.extras.tokenizers.loading import copy_tokenizer, named_tokenizer, write_tokenizer


def read_corpora(data: Data) -> Corpora:
    """The tokens of all sources and validation sets.

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
    report = _mixture_report(data, own, shares) + _sets_report(sets)
    begins = {name: found.begins[0] for name, found in own.items()}
    if data.attend == "document":
        report = [*report, _document_report(begins, _token_counts(own))]
    valid = sets or own
    return Corpora(
        train={name: found.train for name, found in own.items()},
        shares=shares,
        valid={name: found.valid for name, found in valid.items()},
        begins=begins,
        valid_begins={name: found.begins[1] for name, found in valid.items()},
        vocab=max(found.vocab for found in (*own.values(), *sets.values())),
        identity=_joint_identity(own, sets, shares),
        report=report,
    )


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
    formats = token_formats(data.ids) if data.source == "tokens" else TEXT
    known: dict[Path, str] = {}
    for part in mixed_data(data).values():
        for file in training_files(str(part.path), formats):
            if (other := known.setdefault(file, str(part.path))) != part.path:
                raise UserError(
                    f"data.path reads {file} twice, in {other} and in {part.path}: give paths that have no file in common, "
                    "or leave out one of them"
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
        for piece in corpus_pieces(open_corpus(part), exact_fraction(data.valid_fraction)):
            if not piece.held:
                yield piece.text


def more_validation(data: Data, name: str) -> str:
    """The part of a message that says how to get more data of the validation set ``name``."""
    if isinstance(data.valid_path, dict):
        return f"give more of them in data.valid_path={data.valid_path[name]}, the set {name}"
    if data.valid_path is not None:
        return f"give more of them in data.valid_path={data.valid_path}"
    if name:
        part = mixed_data(data)[name]
        return f"{more_validation(part, '')} for {name}, or set data.valid_path"
    return more_held_out(open_corpus(data).valid is None, data.valid_fraction)


def text_masking(data: Data) -> Vocabulary:
    """What masked models need to know of the tokenizer of ``data``.

    Raises:
      UserError: the tokenizer lacks a mask, or the marks of words for ``data.whole_words``.
    """
    if data.tokenizer == "none":
        raise UserError(
            "a masked model needs the mask of a tokenizer, but data.tokenizer is none: name the tokenizer of the tokens"
        )
    known = named_tokenizer(data.tokenizer, data.bos).masking()
    if data.whole_words and known.whole_word is None:
        raise UserError(
            f"data.whole_words: the tokenizer {data.tokenizer} does not mark tokens that continue a word; set it to false"
        )
    return known if data.whole_words else known._replace(whole_word=None)


def write_text_inputs(data: Data, run: Path, config: Config, folder: Path) -> Json:
    """Write the tokenizer of ``data`` to a run and, for `transformers`, to ``folder``."""
    if data.tokenizer == "none":
        return {}
    copy_tokenizer(data.tokenizer, run)
    return write_tokenizer(run, config, folder)


class _Files:
    checked_paths = staticmethod(checked_paths)
    read = staticmethod(read_corpora)
    more_validation = staticmethod(more_validation)
    masking = staticmethod(text_masking)
    write_inputs = staticmethod(write_text_inputs)
    mixture = staticmethod(Mixture)


TEXTS.add("files", _Files())
