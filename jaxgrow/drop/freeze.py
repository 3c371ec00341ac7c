"""Layers that did not run, left as they were."""

import jax
import jax.numpy as jnp

from jaxgrow.axes import LAYERS, Tree, is_names, path
from jaxgrow.drop.execution import Kept
from jaxgrow.moments import owner


def freeze(before: Tree, after: Tree, kept: Kept, params: Tree, axes: Tree) -> Tree:
    """``after``, with the slices of ``before`` for every layer that no pass of ``kept`` ran (its ``layers`` has any shape).

    Both are trees of parameters and of optimizer state, whose leaves belong to those of ``params`` by path and shape, as in
    `jaxgrow.moments`. PLD's "no update" of a dropped layer. Adam's step count goes on, as for all.
    """
    layers = kept.layers
    if layers is None:
        return after
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    shapes = {path(p): jnp.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def leaf(key_path, old, new):
        mine = owner(path(key_path), shapes)
        if mine is None or names[mine][0] != LAYERS or jnp.shape(new) != shapes[mine]:
            return new
        if layers.dtype == bool:
            ran = layers.reshape(-1, layers.shape[-1]).any(0)
        else:
            ran = jnp.zeros(len(new), bool).at[layers.reshape(-1)].set(True)
        return jnp.where(ran.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree_util.tree_map_with_path(leaf, before, after)
