"""Parts of a model that do not train."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgrow.axes import BELOW, LAYERS, Axes, Params, Tree, is_names, marked, owner, path


@dataclass(frozen=True)
class Freeze:
    """Layers by number, what is below them, and other leaves by patterns of their paths. The rest trains.

    Of layers that are frozen from the bottom up, above frozen embeddings, no backward pass is run.
    """

    layers: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    below: bool = True  # what makes the input of the layers: the leaves that are marked so (`jaxgrow.axes`)

    def bottom(self, axes: Axes) -> int:
        """How many layers from the bottom are frozen together with all that is below them, of a model with the axis names
        ``axes``. Where a leaf below them trains, none: 0.

        Raises:
          ValueError: no leaf is marked as below the layers.
        """
        held = _held(axes, self.paths, self.below)
        if self.layers and not all(held[p] for p in _below(axes)):
            return 0
        return next(i for i in range(len(self.layers) + 1) if i not in self.layers)

    def mask(self, layers: int) -> np.ndarray:
        """The frozen layers, bool [layers].

        Raises:
          ValueError: a layer that the model does not have.
        """
        outside = [i for i in self.layers if not 0 <= i < layers]
        if outside:
            raise ValueError(f"freeze names the layers {outside}, but the model has 0 .. {layers - 1}")
        return np.isin(np.arange(layers), self.layers)


def _below(axes: Axes) -> list[str]:
    """The leaves that make the input of the layers."""
    found = [path(p) for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names) if marked(n, BELOW)]
    if not found:
        raise ValueError(
            f"no leaf of this model is marked {BELOW!r}: name what makes the input of the layers so, as in 'embed{BELOW}'"
        )
    return found


def _held(axes: Axes, paths: Sequence[str], below: bool) -> dict[str, bool]:
    """Of each leaf, by path, whether it is below the layers and these are meant, or matches one of ``paths``."""
    leaves = [path(p) for p, _ in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)]
    lost = [p for p in paths if not any(fnmatchcase(leaf, p) for leaf in leaves)]
    if lost:
        raise ValueError(
            f"freeze names the paths {lost}, but no leaf of this model matches; it has {', '.join(leaves)}"
        )
    marked_so = _below(axes) if below else []
    return {leaf: leaf in marked_so or any(fnmatchcase(leaf, p) for p in paths) for leaf in leaves}


def hold(
    before: Tree,
    after: Tree,
    layers: ArrayLike,
    params: Params,
    axes: Axes,
    paths: Sequence[str] = (),
    below: bool = False,
) -> Tree:
    """``after``, but as ``before`` what is held: the ``layers`` (bool [layers]), leaves that match ``paths``, and, with
    ``below``, those that make the layers' input.

    Both are trees of parameters and of optimizer state, whose leaves belong to those of ``params`` by path and shape, as in
    `jaxgrow.moments`. Adam's step count goes on, as for all. Weight decay and momentum do not move what is held.

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
    held = _held(axes, paths, below)
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    shapes = {path(p): jnp.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def leaf(key_path, old, new):
        name = path(key_path)
        mine = name if name in shapes else owner(name, shapes)
        if mine is None or jnp.shape(new) != shapes[mine]:
            return new
        if held[mine]:
            return old
        if names[mine][:1] != (LAYERS,):
            return new
        return jnp.where(jnp.asarray(layers).reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return jax.tree_util.tree_map_with_path(leaf, before, after)
