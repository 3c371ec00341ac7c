"""Which parameters are frozen during training, and how are they kept unchanged?"""

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
    axis_of,
    by_path,
    has_mark,
    is_names,
    layers_of,
    path,
    sibling_axis,
    stages,
    state_owners,
)


@dataclass(frozen=True)
class Freeze:
    """A selection of frozen parameters; all other parameters are trainable.

    If the lowest layers and the embeddings below them are frozen, the backward pass does not run
    through them.

    Attributes:
      layers: the indices of the frozen layers.
      paths: glob patterns for the paths of other frozen parameters.
      below: whether the parameters that compute the input of the layers are also frozen. They are
        the parameters marked ``.below`` (`jaxgrow.axes`). Between stages, such a parameter is
        frozen if the layer that follows it is frozen.
    """

    layers: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    below: bool = True

    def bottom(self, axes: Axes, sizes: Mapping[str, int] | None = None) -> int:
        """Count the layers, from the lowest one, that need no backward pass.

        These layers are frozen, together with all parameters below them. The count is 0 if a
        parameter below the layers is trainable. If a parameter between two stages is trainable, the
        count ends before it.

        Args:
          axes: the axis names of the model.
          sizes: the size of every axis; needed for models with stages only.

        Returns:
          The number of layers.

        Raises:
          ValueError: no parameter is marked as below the layers.
        """
        matched = _matched_paths(axes, self.paths)
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
        """The frozen layers as a mask.

        Args:
          layers: the number of layers of the model.

        Returns:
          An array, bool [layers]; True where the layer is frozen.

        Raises:
          ValueError: a layer index is outside the model.
        """
        outside = [i for i in self.layers if not 0 <= i < layers]
        if outside:
            raise ValueError(
                f"freeze selects the layers {outside}, but the model has the layers 0 to "
                f"{layers - 1}"
            )
        return np.isin(np.arange(layers), self.layers)


def _below(axes: Axes) -> dict[str, str]:
    """The parameters that compute the input of layers, with the axis of those layers."""
    found: dict[str, str] = {}
    for leaf, names in by_path(axes, is_leaf=is_names).items():
        below = [axis_of(n) for n in names if has_mark((n,), BELOW)]
        if below:
            found[leaf] = sibling_axis(below[0], LAYERS)
    if not found:
        raise ValueError(
            f"no parameter of this model is marked {BELOW!r}. Mark the parameters that compute the "
            f"input of the layers, such as 'embed{BELOW}'"
        )
    return found


def _start(parts: Mapping[str, slice], layers: str) -> int:
    """The index of the first layer of a stage."""
    return parts[layers].start if layers in parts else 0


def _matched_paths(axes: Axes, paths: Sequence[str]) -> dict[str, bool]:
    """Whether each parameter, by path, matches one of the patterns ``paths``."""
    leaves = by_path(axes, is_leaf=is_names)
    matched = dict.fromkeys(leaves, False)
    lost: list[str] = []
    for pattern in paths:
        found = [leaf for leaf in leaves if fnmatchcase(leaf, pattern)]
        matched |= dict.fromkeys(found, True)
        if not found:
            lost.append(pattern)
    if lost:
        raise ValueError(
            f"freeze selects the paths {lost}, but no parameter of this model matches. Its "
            f"parameters are {', '.join(leaves)}"
        )
    return matched


def hold_frozen(
    before: Tree,
    after: Tree,
    layers: ArrayLike,
    params: Params,
    axes: Axes,
    paths: Sequence[str] = (),
    below: bool = False,
) -> Tree:
    """Undo a step for frozen parameters: take them from ``before``, and all others from ``after``.

    The trees may contain parameters and optimizer state. A leaf of the optimizer state belongs to
    the parameter with its path and shape, as in `jaxgrow.growth.moments`. Neither weight decay nor
    momentum changes frozen parameters. The step count of Adam advances as usual.

    Args:
      before: parameters, optimizer state, or a tree of both, before a step.
      after: the same tree after the step.
      layers: which layers are frozen, bool [layers].
      params: the parameters; their paths and shapes assign the leaves of the optimizer state.
      axes: the axis names of the parameters.
      paths: glob patterns for the paths of other frozen parameters.
      below: whether the parameters that compute the input of the layers are also frozen. For a
        later stage, they are frozen if the first layer of that stage is.

    Returns:
      A tree with the structure of ``after``.

    Raises:
      ValueError: a pattern matches no parameter; or ``below`` is True and no parameter is marked as
        below the layers.

    Example:
      >>> before, after, axes = {"w": np.zeros((2, 1))}, {"w": np.ones((2, 1))}, {"w": ("layers", "embed.scale")}
      >>> hold_frozen(before, after, [True, False], before, axes)["w"].tolist()
      [[0.0], [1.0]]
    """
    matched = _matched_paths(axes, paths)
    first = _below(axes) if below else {}
    names = by_path(axes, is_leaf=is_names)
    shapes = {leaf: jnp.shape(x) for leaf, x in by_path(params).items()}
    # The layer axis of each stacked parameter, and its dimension. It is not the first one in all models.
    stacked: dict[str, tuple[str, int]] = {}
    for p, of in names.items():
        if name := layers_of(of):
            stacked[p] = name, [axis_of(n) for n in of].index(name)
    parts = stages({name: shapes[p][dim] for p, (name, dim) in stacked.items()})

    owned = state_owners(after, shapes)

    def leaf(key_path, old, new):
        mine = owned.get(path(key_path))
        if mine is None or jnp.shape(new) != shapes[mine]:
            return new
        begin = _start(parts, first.get(mine, ""))
        if matched[mine] or (mine in first and not begin):
            return old
        if mine in stacked:
            name, along = stacked[mine]
            held = jnp.asarray(layers)[parts[name]]
            others = tuple(dim for dim in range(new.ndim) if dim != along)
            return jnp.where(jnp.expand_dims(held, others), old, new)
        return jnp.where(jnp.asarray(layers)[begin], old, new) if mine in first else new

    return jax.tree_util.tree_map_with_path(leaf, before, after)
