"""The commands ``grow --vocab`` and ``prune --vocab``: more or fewer tokens."""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxgrow import operators
from jaxgrow.checkpoints import CheckpointError, Source, open_checkpoint
from jaxgrow.checkpoints.io.files import inside, listed, read_json, write_json
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.checkpoints.writing import Output
from jaxgrow.cli.errors import UsageError, errors_with_options, refuse_options
from jaxgrow.cli.grow_commands import GROWING, refuse_lost_state
from jaxgrow.cli.new_sizes import LARGEST
from jaxgrow.cli.options import AXES, axis_option
from jaxgrow.cli.writing import transform_model
from jaxgrow.extras.commands.tokenizer_files import tokens_of
from jaxgrow.extras.vocabulary import VOCAB, new_tokens, renumbered_ids
from jaxgrow.typed import Json
from jaxgrow.untrusted import one_line

_GENERATION = "generation_config.json"
_UNCHANGED = "the tokenizer files are copied, not changed"


def grow_vocabulary(a: argparse.Namespace) -> None:
    """Run ``jaxgrow grow --vocab`` and ``--like-tokens``."""
    others = (*AXES, "experts", "active", "loop", "noise", "blend", "format", "names", "head_dim")
    refuse_options(a, "--vocab and --like-tokens change only the vocabulary", *others)
    if a.vocab is not None and a.vocab > LARGEST:
        raise UsageError(f"{axis_option(VOCAB)} {a.vocab}: the maximum is {LARGEST:,}")
    refuse_lost_state(a)
    if a.vocab is None:
        refuse_options(a, "the rows of --like-tokens are not sampled", "seed")
    source, old = _source_with_vocabulary(a)
    names, like = ([], []) if a.like_tokens is None else _similar_tokens(a.like_tokens)
    new = old + len(like) if a.vocab is None else a.vocab
    with errors_with_options():
        growth = new_tokens(source.sizes(), {VOCAB: new}, like, a.seed or 0)
    arguments = {"target": {VOCAB: new}, "tokenizer": _UNCHANGED}
    tokens = tokens_of(source.folder)
    if known := [f"{name!r} has the id {i}" for i, name in tokens.items() if name in names]:
        raise CheckpointError(
            f"{a.like_tokens} has tokens that the tokenizer of {a.src} has already: "
            f"{listed(known, most=5)}. Remove them from the file"
        )
    used = max(tokens, default=old - 1) + 1
    free = max(used, old)
    if like and used > old:
        raise CheckpointError(
            f"the tokenizer of {a.src} has ids up to {used - 1}, but the model has rows only up to {old - 1}, so the next "
            f"token would get the id {used} there, and here the row {old}. First run "
            f"{shlex.join(['jaxgrow', 'grow', str(a.src)])} DST --vocab {used}"
        )
    if like:
        arguments["like_tokens"] = dict(zip(names, like, strict=True))
    else:
        arguments["seed"] = a.seed or 0
    change = "their logits are bitwise equal"
    if source.config.predicts == "tokens":
        change += (
            ", and only the softmax over the new rows changes their probabilities: "
            f"{shlex.join(['jaxgrow', 'report', str(a.src), str(a.dst)])} measures it"
        )
    notes = [f"the rows of the {old} old tokens are unchanged: {change}", _UNCHANGED]
    if new > free:
        notes[1] += f": add the {new - free} new tokens to them, with the ids {free} to {new - 1}"
    if used < old:
        notes.append(
            f"the tokenizer has the ids 0 to {used - 1}, so it would give the id {used} to the next token. To "
            f"remove the unused rows before, run {shlex.join(['jaxgrow', 'prune', str(a.src)])} DST --vocab {used}"
        )
    # They are about the model and its files.
    transform_model(a, source, growth, arguments, notes * (not a.lora_only))


def _source_with_vocabulary(a: argparse.Namespace) -> tuple[Checkpoint, int]:
    """Return the model, and the size of its vocabulary."""
    source = open_checkpoint(a.src)
    old = source.sizes().get(VOCAB)
    if old is None:
        raise CheckpointError(
            f"{a.src} is a {type(source.config).__name__}, which has no tokens. Give a text model"
        )
    return source, old


def _similar_tokens(file: Path) -> tuple[list[str], list[list[int]]]:
    """Read the new tokens, and the old ids of each of them."""
    content = _read_chosen(file)
    for name, ids in content.items():
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise CheckpointError(
                f"{file}: {name[:60]!r} must be a list of old ids, such as [12, 881]"
            )
    if not content:
        raise CheckpointError(f'{file} has no new tokens: give such as {{"<think>": [12, 881]}}')
    return [*content], [*content.values()]


def _read_chosen(file: Path) -> Json:
    """Read a JSON object that the user named."""
    with one_line(CheckpointError, f"{file} cannot be read"):  # such as a circle of links
        return read_json(file)


class _Renumbered:
    """The ``generation_config.json`` of a model, with the new ids of special tokens."""

    folders: Sequence[Path] = ()
    notes: Sequence[str] = ()

    def __init__(self, content: Json | None):
        self._content = content

    def write(self, part: Path, model: Source | None, output: Output) -> list[str]:
        """Replace the copy of the file by the changed content."""
        if self._content is not None:
            write_json(part / _GENERATION, self._content)
        return []


def prune_vocabulary(a: argparse.Namespace) -> None:
    """Run ``jaxgrow prune --vocab``."""
    refuse_options(
        a,
        "--vocab keeps given tokens, so nothing is measured; prune again for other sizes",
        *(*AXES, "experts", "params", "scores", "data", "by", "keep"),
    )
    source, old = _source_with_vocabulary(a)
    kept = _kept_tokens(a.vocab, old)
    new = {int(token): i for i, token in enumerate(kept)}
    # Such as lists that are nested too deeply.
    with one_line(CheckpointError, f"the special tokens of {a.src} cannot be read"):
        generation = _renumber_special(source, new, old)
    with errors_with_options():
        growth = operators.keep_units(source.sizes(), {VOCAB: kept})
    arguments = {"target": {VOCAB: len(kept)}, "vocab": a.vocab, "tokenizer": _UNCHANGED}
    # The note is about the files of the model.
    notes = (not a.lora_only) * [
        f"{_UNCHANGED}: token i has the row of the old token with the i-th smallest kept id, of "
        f"{len(kept)}; ids of special tokens in config.json and {_GENERATION} follow"
    ]
    transform_model(a, source, growth, arguments, notes, beside=[_Renumbered(generation)])


def _kept_tokens(given: str, old: int) -> np.ndarray:
    """Read the ids of ``--vocab``: a number N for the first N, or a file."""
    if given.isascii() and given.isdecimal() and len(given) < 10:
        found: object = list(range(min(int(given), old + 1)))
    else:
        found = _read_chosen(Path(given)).get("keep")
    ids = found if isinstance(found, list) else []
    valid = all(type(i) is int and 0 <= i < old for i in ids)
    if not ids or not valid or len(ids) > len(set(ids)):
        raise CheckpointError(
            f"--vocab {given} is not a choice of tokens: give a number from 1 to {old}, or a JSON file "
            f'{{"keep": [ids from 0 to {old - 1}, each of them once]}}'
        )
    return np.sort(ids)


def _renumber_special(source: Checkpoint, new: Mapping[int, int], old: int) -> Json | None:
    """Renumber the special tokens of a model, and return its new ``generation_config.json``."""
    where = str(source.folder / "config.json")
    if source.hf_config is not None:
        source.hf_config = renumbered_ids(source.hf_config, where, new, old)
    else:
        settings = {**source.own_settings, **source.head}
        if renumbered_ids(settings, where, new, old) != settings:
            raise CheckpointError(
                f"{source.folder} is a run whose special tokens get other ids. First write it for "
                f"transformers: jaxgrow convert {shlex.quote(str(source.folder))} DST --to hf"
            )
    beside = source.files_beside
    if beside is None or not os.path.lexists(beside / _GENERATION):
        return None
    file = inside(beside, _GENERATION)
    return renumbered_ids(read_json(file), str(file), new, old)


GROWING.add(VOCAB, grow_vocabulary)
