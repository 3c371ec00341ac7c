"""How can copied units and layers become different from each other?

Equal copies get equal gradients, so deterministic training keeps them equal. `break_symmetry` adds
noise that preserves the function.
"""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgrow.axes.names import (
    Axes,
    KeyPath,
    Names,
    Params,
    axis_of,
    is_names,
    path,
    reads_axis,
)
from jaxgrow.growth import maps
from jaxgrow.growth.apply import grow_leaf
from jaxgrow.growth.matrices import Array
from jaxgrow.registry import Registry

# The output axes of the head of a model. No axis of these names grows.
HEADS = frozenset({"vocab", "classes"})
# Functions that take new units from initial parameters of the grown model instead of copying them
# (`jaxgrow.extras.fresh`).
INITIALISING: Registry[Callable[[Params, maps.Growth, Axes, Params], Params]] = Registry(
    "new units"
)


def break_symmetry(
    params: Params, growth: maps.Maps, axes: Axes, seed: int = 0, snr: float = 10.0
) -> Params:
    """Add noise to kernels that contract copied units; the noise cancels over the copies.

    ``W' = W + (I - read @ write.T) @ N``

    where the first axis of ``W`` is the input axis and ``N`` is noise. For two copies of each unit,
    these are the pairs ``+N, -N`` of HyperCloning (Samragh et al., 2024). Units may have any number
    of copies, and not all need the same number. As in the published code, an untied head, which
    writes tokens or classes, gets no noise.

    Deviation(HyperCloning): the scale of a norm before a tied head (``.in``) also gets noise. With
    an odd number of copies, all of them get noise; the published code leaves the last one unchanged.

    Args:
      params: the *grown* parameters, ``grow(growth, ..., axes)``.
      growth: growth that copies units, with one map per axis.
      axes: the axis names of the parameters.
      seed: random seed of the noise. The noise of each leaf also depends on its path.
      snr: signal-to-noise ratio in decibels, the ratio of the root mean squares of a leaf and its
        noise.

    Returns:
      The parameters with noise. The function is preserved if all copies of a unit have equal
      activations. Heads, and leaves that contract no grown axis, are unchanged.

    Raises:
      TypeError: the growth is `Rules`.

    Example:
      Two copies have equal weights at first, and then different weights with the same sum.

      >>> noisy = break_symmetry({"w": jnp.array([[2.0], [2.0]])}, {"mlp": maps.tile(1, 2)}, {"w": ("mlp.in", "embed")})
      >>> bool(noisy["w"][0, 0] == noisy["w"][1, 0]), round(float(noisy["w"].sum()), 3)
      (False, 4.0)

    References:
      Samragh et al.,
      `Scaling Smart: Accelerating Large Language Model Pre-training with Small Model Initialization <https://arxiv.org/abs/2409.12903>`_,
      2024
    """
    if isinstance(growth, maps.Rules):
        raise TypeError(
            "break_symmetry supports only growths with one map per axis, but this growth consists "
            "of Rules. Use a growth such as operators.hypercloning(sizes, target), or add no noise."
        )
    key = jax.random.key(seed)
    copies = maps.by_axes(growth)

    def leaf(key_path: KeyPath, names: Names, x: jax.Array) -> jax.Array:
        mine = [
            n
            for n in names
            if reads_axis(n) and (m := copies.get((axis_of(n),))) is not None and m.new > m.old
        ]
        if not mine or HEADS & {axis_of(n) for n in names}:
            return x
        wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        noise: Array = jax.random.normal(
            jax.random.fold_in(key, zlib.crc32(path(key_path).encode())), wide.shape, wide.dtype
        )
        for name in mine:
            one = {(axis_of(name),): copies[axis_of(name),]}
            # The part of the noise that does not cancel over the copies is removed.
            noise = noise - _shared(one, name, names, noise)
        level = 10 ** (-snr / 20) * jnp.sqrt(jnp.square(wide).mean() / jnp.square(noise).mean())
        return (wide + level * noise).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def _shared(one: maps.Term, name: str, names: Names, noise: Array) -> Array:
    """Apply ``read @ write.T`` along the axis ``name``."""
    alone = tuple(n if n == name else "_" for n in names)
    return grow_leaf([one], alone, grow_leaf([maps.swap(one)], alone, noise))
