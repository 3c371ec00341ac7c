"""How many FLOPs does a training step of an adapter take?"""

import math
from collections.abc import Mapping
from typing import Protocol

import jax

from jaxgrow.axes.names import LAYERS, Axes, Names, axis_of, is_names, path, reads_axis, role_of
from jaxgrow.flops import TokenSkips, layer_cost, train_flops
from jaxgrow.models.config import Config, Cost


class Tuning(Protocol):
    """An adapter that is trained instead of all parameters below the head.

    Examples are `jaxgrow.models.Adapter` and `jaxgrow.extras.peft.lora.LoRA`.
    """

    def adapted(self, config: Config) -> Config:
        """Return the config of the model with the adapter."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the adapter's own axes."""
        ...

    def kernels(self, axes: Axes) -> tuple[Axes, Axes]:
        """Divide the kernels of the layers by what their training costs.

        Args:
          axes: the axis names of the model with the adapter.

        Returns:
          ``(axis names of the frozen kernels, axis names of the adapter's kernels that are not in
          the config's cost)``.
        """
        ...


def adapter_train_flops(
    adapter: Tuning,
    config: Config,
    tokens: int,
    length: int | None = None,
    layers: float | None = None,
    *,
    frozen: int = 0,
    drop: TokenSkips | None = None,
    at_once: int | None = None,
) -> float:
    """Return the FLOPs of a training step of an adapter, as `jaxgrow.flops.train_flops`.

    The kernels of the layers and a tied embedding have no gradient, so their products cost two
    thirds. Products of attention and of a new head cost the same as without an adapter. The
    adapter's own products cost three forward passes.

    Args:
      adapter: the adapter that is trained instead of all parameters below the head.
      config: config of the model without the adapter.
      tokens: number of positions, over all samples.
      length: positions of a sample; None: the config's length.
      layers: number of layers that ran; None: all layers.
      frozen: number of frozen layers at the bottom, which has to be 0.
      drop: which tokens bypass which layers, which has to be None.
      at_once: number of positions that a device computes at once.

    Returns:
      Floating-point operations.

    Raises:
      ValueError: an adapter is combined with frozen layers or token dropping, or the model has
        stages.
    """
    if frozen or drop is not None:
        raise ValueError(
            "an adapter cannot be combined with frozen layers or token dropping: leave out "
            "frozen and drop"
        )
    config = adapter.adapted(config)
    length = length or config.length
    added = _added_flops(config, layer_cost(config, length, at_once), adapter, layers, at_once)
    return train_flops(config, tokens, length, layers, at_once=at_once) + tokens * added


def _added_flops(
    config: Config,
    cost: Cost,
    adapter: Tuning,
    layers: float | None,
    at_once: int | None,
) -> float:
    """Return the FLOPs per position that training an adapter adds to a step of full training.

    The result is negative if the adapter costs less than the gradients of the frozen kernels, which
    are not computed.
    """
    if len(config.depths) > 1:
        raise ValueError(
            f"a {type(config).__name__} has stages with different numbers of positions, for "
            "which the cost of adapters is not implemented: leave out adapter"
        )
    depth = {LAYERS: config.depth if layers is None else layers}
    sizes = {**config.sizes(), **adapter.sizes(), **depth}
    active = {**config.active_sizes(at_once), **depth}
    frozen, added = (_kernels(axes, sizes, active) for axes in adapter.kernels(config.axes()))
    return 3 * added - frozen - cost.first - cost.embedding


def _kernels(axes: Axes, sizes: Mapping[str, float], each: Mapping[str, float]) -> float:
    """Return the FLOPs per position of the products with all kernels.

    ``each`` has the number of active kernels for the axes along which kernels are stacked.
    """
    every = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)

    def cost(names: Names) -> float:
        first = next((i for i, n in enumerate(names) if reads_axis(n)), 0)
        return 2 * math.prod(
            (each if i < first else sizes)[axis_of(n)] for i, n in enumerate(names)
        )

    return float(sum(cost(names) for p, names in every if role_of(path(p), names) == "kernel"))
