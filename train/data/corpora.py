"""The text of a run: the tokens of one or several sources, and of one or several validation sets."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.data.dataset import Source
from train.data.mixture import Mixture, as_shares
from train.data.text import (
    Data,
    Tokens,
    load_tokenizer,
    mixed_data,
    read_tokens,
    refuse_overlaps,
    valid_data,
)
from train.data.windows import BYTES, MaskedWindows, Windows, masking_vocabulary


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
