"""Parts of a model that do not train."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgrow.axes.names import (
    BELOW,
    LAYERS,
    Axes,
    Params,
    Tree,
    axis,
    beside,
    is_names,
    layers_of,
    marked,
    owner,
    path,
    stages,
)


@dataclass(frozen=True)
class Freeze:
    """Layers by number, what is below them, and other leaves by patterns of their paths. The rest trains.

    Of layers that are frozen from the bottom up, above frozen embeddings, no backward pass is run.
    """

    layers: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    # What makes the input of the layers: the leaves that are marked so (`jaxgrow.axes`). Of those
    # that lie between stages, the ones whose next layer is frozen.
    below: bool = True

    def bottom(self, axes: Axes, sizes: Mapping[str, int] | None = None) -> int:
        """How many layers from the bottom are frozen together with all that is below them, of a
        model with the axis names ``axes`` and, if it has stages, these ``sizes``. Where a leaf
        below them trains, none: 0; where one between them does, those below that one.

        Raises:
          ValueError: no leaf is marked as below the layers.
        """
        matched = _matched(axes, self.paths)
        if not self.layers:
            return 0
        parts = stages(sizes or {})
        trains = {
            _start(parts, of)
            for leaf, of in _below(axes).items()
            if not (self.below or matched[leaf])
        }
        return next(i for i in itertools.count() if i not in self.layers or i in trains)

    def mask(self, layers: int) -> np.ndarray:
        """The frozen layers, bool [layers].

        Raises:
          ValueError: a layer that the model does not have.
        """
        outside = [i for i in self.layers if not 0 <= i < layers]
        if outside:
            raise ValueError(
                f"freeze names the layers {outside}, but the model has 0 .. {layers - 1}"
            )
        return np.isin(np.arange(layers), self.layers)


def _below(axes: Axes) -> dict[str, str]:
    """The leaves that make the input of layers, and the axis of those layers."""
    found = {
        path(p): beside(next(axis(n) for n in names if marked((n,), BELOW)), LAYERS)
        for p, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)
        if marked(names, BELOW)
    }
    if not found:
        raise ValueError(
            f"no leaf of this model is marked {BELOW!r}: name what makes the input of the layers so, as in 'embed{BELOW}'"
        )
    return found


def _start(parts: Mapping[str, slice], layers: str) -> int:
    """The first layer of a stage."""
    return parts[layers].start if layers in parts else 0


def _matched(axes: Axes, paths: Sequence[str]) -> dict[str, bool]:
    """Of each leaf, by path, whether it matches one of ``paths``."""
    leaves = [path(p) for p, _ in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)]
    lost = [p for p in paths if not any(fnmatchcase(leaf, p) for leaf in leaves)]
    if lost:
        raise ValueError(
            f"freeze names the paths {lost}, but no leaf of this model matches; it has {', '.join(leaves)}"
        )
    return {leaf: any(fnmatchcase(leaf, p) for p in paths) for leaf in leaves}


def hold(
    before: Tree,
    after: Tree,
    layers: ArrayLike,
    params: Params,
    axes: Axes,
    paths: Sequence[str] = (),
    below: bool = False,
) -> Tree:
    """``after``, but as ``before`` what is held: the ``layers`` (bool [layers]), leaves that match
    ``paths``, and, with ``below``, those that make the layers' input, and a later stage's if its
    first layer is held.

    Both are trees of parameters and of optimizer state, whose leaves belong to those of ``params``
    by path and shape, as in `jaxgrow.growth.moments`. Adam's step count goes on, as for all. Weight
    decay and momentum do not move what is held.

    Args:
      before: parameters, optimizer state, or a tree of both, before a step.
      after: the same after it.
      layers: those that are held, bool [layers].
      params: the parameters, whose paths and shapes say what a leaf of state belongs to.
      axes: their axis names.
      paths: patterns of paths, as of a shell.
      below: whether what makes the layers' input is held, too.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: a path that no leaf matches, or, with ``below``, no leaf is marked so.

    Example:
      >>> before, after, axes = {"w": np.zeros((2, 1))}, {"w": np.ones((2, 1))}, {"w": ("layers", "embed.scale")}
      >>> hold(before, after, [True, False], before, axes)["w"].tolist()
      [[0.0], [1.0]]
    """
    matched, first = _matched(axes, paths), _below(axes) if below else {}
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    shapes = {path(p): jnp.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}
    parts = stages({name: shapes[p][0] for p in shapes if (name := layers_of(names[p]))})

    def leaf(key_path, old, new):
        name = path(key_path)
        mine = name if name in shapes else owner(name, shapes)
        if mine is None or jnp.shape(new) != shapes[mine]:
            return new
        stacked, begin = layers_of(names[mine]), _start(parts, first.get(mine, ""))
        if matched[mine] or (mine in first and not begin):
            return old
        if stacked:
            held = jnp.asarray(layers)[parts[stacked]]
        elif mine in first:
            held = jnp.asarray(layers)[begin]
        else:
            return new
        return jnp.where(held.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return jax.tree_util.tree_map_with_path(leaf, before, after)
