"""The command merge: give two fine-tuned models one config and one vocabulary, and interpolate them."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from jaxgrow.axes.names import axis_of
from jaxgrow.checkpoints import Cast, CheckpointError, Interpolated, Source, open_checkpoint
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import listed, spelt
from jaxgrow.checkpoints.source import Checkpoint, Leaf, initial_layout
from jaxgrow.cli.errors import UsageError, errors_with_options
from jaxgrow.cli.tokenizer_files import tokens_of
from jaxgrow.cli.writing import write_model

_VOCABULARY = "vocab"


@dataclass(frozen=True)
class Pair:
    """Two models of one config.

    Attributes:
      before: the first model.
      up: the second model.
      roots: the two checkpoints. The first has the tokenizer of the result.
      notes: remarks for the user.
    """

    before: Source
    up: Source
    roots: tuple[Checkpoint, Checkpoint]
    notes: tuple[str, ...]


class _Reconfigured(Source):
    """A model with another config, in which some leaves are computed from others.

    Args:
      source: the model.
      config: the config.
      computed: functions that return leaves, by path.
    """

    def __init__(
        self, source: Source, config: Any, computed: Mapping[str, Callable[[], np.ndarray]]
    ):
        self._source = source
        self._computed = computed
        self.config = config
        like = {"head_kernel": source.leaves.get("token_embedding")}
        self.leaves = {}
        for path, (names, shape) in initial_layout(config).items():
            leaf = source.leaves.get(path) or like[path]
            assert leaf is not None
            self.leaves[path] = Leaf(names, shape, leaf.dtype)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        return self._computed[path]() if path in self._computed else self._source.read(path, layer)

    def origin(self, path: str, layer: int | None) -> None:
        return None


class _Merged(Interpolated):
    """The interpolation of two models of one config, with the files of the chosen one."""

    def __init__(self, pair: Pair, alpha: float):
        super().__init__(pair.before, pair.up, alpha)
        self._roots = pair.roots

    @property
    def roots(self) -> tuple[Checkpoint, ...]:
        """The two checkpoints, that with the tokenizer of the result first."""
        return self._roots


def run_merge(a: argparse.Namespace) -> None:
    """Run ``jaxgrow merge``."""
    if not 0 <= a.alpha <= 1:
        raise UsageError(
            f"--alpha {a.alpha:g} is not from 0 to 1: give the weight of UP, such as --alpha 0.5"
        )
    before, up = open_checkpoint(a.before), open_checkpoint(a.up)
    pair = with_one_config(before, up, a.take_config, a.dtype)
    with errors_with_options():
        mixed = _Merged(pair, a.alpha)
    taken = {} if a.take_config is None else {"take_config": a.take_config}
    write_model(a, mixed, {"alpha": a.alpha} | taken, pair.notes)


def with_one_config(
    before: Checkpoint,
    up: Checkpoint,
    take: Literal["A", "B"] | None,
    dtype: str | None = None,
) -> Pair:
    """Give two models of equal layers one config and one vocabulary.

    Models whose layers differ are returned unchanged.

    Args:
      before: the first model, A.
      up: the second model, B.
      take: whose config decides settings that differ; None: such settings are an error.
      dtype: the dtype of the result, to which no value is rounded yet.

    Raises:
      CheckpointError: a setting differs that decides the function, or the vocabularies differ and a
        tokenizer is missing.
    """
    wide = [s if dtype is None else Cast(s, dtype, at_least=True) for s in (before, up)]
    pair = Pair(wide[0], wide[1], (before, up), ())
    if type(before.config) is not type(up.config):
        return pair
    untied = _with_heads(pair)
    pair = _one_vocabulary(untied, take)
    a: Any = pair.before.config
    b: Any = pair.up.config
    names = [f.name for f in fields(a) if f.name not in a.run_by]
    differ = [name for name in names if getattr(a, name) != getattr(b, name)]
    if not differ or _leaf_shapes(pair.before, "blocks/") != _leaf_shapes(pair.up, "blocks/"):
        return pair
    if _leaf_shapes(pair.before) != _leaf_shapes(pair.up):
        raise CheckpointError(
            _unequal_settings(before, up, differ, a, b, "merge models in which they are equal")
        )
    if differ[0] == "context" and getattr(a, "rope_by", None) != "dynamic":
        longest = max(a.context, b.context)
        note = f"the context is {longest} tokens, the longer one of the two"
        pair = replace(pair, notes=(*pair.notes, note))
        a, b = replace(a, context=longest), replace(b, context=longest)
        differ = differ[1:]
    if differ and take is None:
        way_out = "choose the config of one model with --take-config A or --take-config B"
        raise CheckpointError(_unequal_settings(before, up, differ, a, b, way_out))
    chosen = b if take == "B" else a
    # Rows that were matched by token belong to the tokenizer of the first checkpoint.
    of_b = take == "B" and pair is untied
    return replace(
        pair,
        before=_Reconfigured(pair.before, chosen, {}),
        up=_Reconfigured(pair.up, chosen, {}),
        roots=(up, before) if of_b else pair.roots,
    )


def _leaf_shapes(source: Source, start: str = "") -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves of a model whose paths begin with ``start``."""
    return {path: leaf.shape for path, leaf in source.leaves.items() if path.startswith(start)}


def _unequal_settings(
    before: Checkpoint, up: Checkpoint, differ: list[str], a: Any, b: Any, way_out: str
) -> str:
    """The message about settings that differ, by their keys in ``config.json``."""
    keys = (
        {ours: key for key, ours in before.family.fields.items()}
        if isinstance(before, HuggingFace)
        else {}
    )
    about = [
        f"{keys.get(name, name)} is {spelt(getattr(a, name))} in A and {spelt(getattr(b, name))} in B"
        for name in differ
    ]
    return (
        f"A, {before.folder}, and B, {up.folder}, have layers of equal shapes, but cannot be merged: {listed(about, most=5)}; "
        f"{way_out}"
    )


def _with_heads(pair: Pair) -> Pair:
    """Give both models a separate head if one of them has one."""
    tied = [source.config.tied for source in (pair.before, pair.up)]
    which = pair.before if tied[0] else pair.up
    settings: Any = {"tied": False}
    if tied[0] == tied[1] or which.config.predicts != "tokens":
        return pair
    head = {"head_kernel": lambda: which.read("token_embedding").T}
    untied = _Reconfigured(which, replace(which.config, **settings), head)
    note = f"the head of {pair.roots[not tied[0]].folder} is tied, and the other one is not: the result has an untied head"
    sources = {"before" if tied[0] else "up": untied}
    return replace(pair, notes=(*pair.notes, note), **sources)


def _one_vocabulary(pair: Pair, take: Literal["A", "B"] | None) -> Pair:
    """Give both models one vocabulary: the larger one. Rows are matched by their tokens.

    Of vocabularies of one size, it is the one with more tokens, or that of the model to ``take``.
    """
    sizes = [source.sizes().get(_VOCABULARY, 0) for source in (pair.before, pair.up)]
    tokens = [tokens_of(root.folder) for root in pair.roots]
    same = sizes[0] == sizes[1]
    if same and (tokens[0] == tokens[1] or not all(tokens)):
        return pair
    more = len(tokens[1]) > len(tokens[0]) if take is None else take == "B"
    swapped = more if same else sizes[1] > sizes[0]
    large, small = (pair.up, pair.before) if swapped else (pair.before, pair.up)
    roots = pair.roots[::-1] if swapped else pair.roots
    settings: Any = {_VOCABULARY: max(sizes)}
    if _leaf_shapes(large, "blocks/") != _leaf_shapes(small, "blocks/"):
        return pair
    files = tokens[::-1] if swapped else tokens
    if not all(files):
        missing = [str(root.folder) for root, f in zip(roots, files, strict=True) if not f]
        raise CheckpointError(
            f"the two models have layers of equal shapes, but vocabularies of {sizes[0]} and {sizes[1]} tokens, whose rows are "
            f"matched by token. Put the tokenizer.json or the vocab.json of each model into its folder; both are missing in "
            f"{' and '.join(missing)}"
        )
    at = {token: i for i, token in files[1].items() if i < min(sizes)}
    rows = [(i, at[token]) for i, token in files[0].items() if i < max(sizes) and token in at]
    if not rows:
        raise CheckpointError(
            f"the tokenizers in {roots[0].folder} and {roots[1].folder} have no token in common, so no row of the embeddings "
            "can be merged. Give two models that were trained from the same one"
        )
    lost = sorted(at.keys() - set(files[0].values()))
    notes = _row_notes(sizes, roots, len(rows), lost)
    grown = _Reconfigured(
        small, replace(small.config, **settings), _matched_rows(large, small, rows)
    )
    sources = {"before" if swapped else "up": grown}
    return replace(pair, roots=roots, notes=(*pair.notes, *notes), **sources)


def _row_notes(
    sizes: list[int], roots: tuple[Checkpoint, ...], count: int, lost: list[str]
) -> list[str]:
    """The notes about rows that were matched by token, and about tokens that are lost."""
    about = (
        "the two tokenizers give other ids to some tokens: the result has the tokenizer"
        if sizes[0] == sizes[1]
        else f"the vocabularies have {sizes[0]} and {sizes[1]} tokens: the result has the {max(sizes)}"
    )
    notes = [f"{about} of {roots[0].folder}, and {count} rows of both models were matched by token"]
    if lost:
        gone = listed([spelt(token) for token in lost], most=5)
        notes.append(f"these tokens of {roots[1].folder} are not in the result: {gone}")
    return notes


def _matched_rows(
    large: Source, small: Source, rows: list[tuple[int, int]]
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that return the leaves of the small model with the rows of the large vocabulary.

    Args:
      large: the model whose rows other tokens have.
      small: the small model.
      rows: the indices of each token in both models.
    """
    into, of = np.array(rows, int).reshape(-1, 2).T

    def matched(path: str) -> np.ndarray:
        out = np.array(large.read(path))
        along = _vocabulary_axes(small.leaves[path])[0]
        np.moveaxis(out, along, 0)[into] = np.moveaxis(small.read(path), along, 0)[of]
        return out

    paths = [path for path, leaf in small.leaves.items() if _vocabulary_axes(leaf)]
    return {path: lambda path=path: matched(path) for path in paths}


def _vocabulary_axes(leaf: Leaf) -> list[int]:
    """The indices of the axes of a leaf that are its vocabulary."""
    return [i for i, name in enumerate(leaf.names) if axis_of(name) == _VOCABULARY]
