"""Parts of a model that do not train."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgrow.axes import LAYERS, Tree, is_names, path
from jaxgrow.moments import owner


@dataclass(frozen=True)
class Freeze:
    """Layers by number, and other leaves by patterns of their paths. The rest trains.

    Of layers that are frozen from the bottom up, under frozen embeddings, no backward pass is run.
    """

    layers: tuple[int, ...] = ()
    paths: tuple[str, ...] = ("*embedding*",)  # their norm, too

    def bottom(self, axes: Tree) -> int:
        """How many layers from the bottom are frozen together with what is below them: every leaf of ``axes`` (the model's
        axis names) whose path has ``embedding`` in it. Where one of these trains, none: 0."""
        below = [
            name
            for p, _ in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)
            if "embedding" in (name := path(p))
        ]
        if not all(any(fnmatchcase(name, p) for p in self.paths) for name in below):
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


def hold(before: Tree, after: Tree, layers: ArrayLike, params: Tree, axes: Tree, paths: Sequence[str] = ()) -> Tree:
    """``after``, but as ``before`` what is held: the ``layers`` (bool [layers]), and leaves that match ``paths``.

    Both are trees of parameters and of optimizer state, whose leaves belong to those of ``params`` by path and shape, as in
    `jaxgrow.moments`. Adam's step count goes on, as for all. Weight decay and momentum do not move what is held.
    """
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    shapes = {path(p): jnp.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def leaf(key_path, old, new):
        name = path(key_path)
        mine = name if name in shapes else owner(name, shapes)
        if mine is None or jnp.shape(new) != shapes[mine]:
            return new
        if any(fnmatchcase(mine, p) for p in paths):
            return old
        if names[mine][:1] != (LAYERS,):
            return new
        return jnp.where(jnp.asarray(layers).reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return jax.tree_util.tree_map_with_path(leaf, before, after)
