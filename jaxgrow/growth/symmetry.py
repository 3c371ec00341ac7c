"""Copies that are alike stay alike under deterministic training: `break_symmetry` tells them apart
and keeps the function, `fresh` puts what a model is born with in their place, or what `spectral`
makes of that.
"""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Axes, Names, Params, axis, is_names, path, reads
from jaxgrow.growth import maps
from jaxgrow.growth.apply import grow_leaf
from jaxgrow.growth.matrices import Array
from jaxgrow.optim.muon import dimension_numbers


def break_symmetry(
    params: Params, growth: maps.Maps, axes: Axes, seed: int = 0, snr: float = 10.0
) -> Params:
    """Adds noise that cancels over copies to every leaf that reads them: what a reader receives stays the same.

    ``W + (I - read write.T) N``, in the convention of rows that are read: with two copies the pairs
    ``+N, -N`` of HyperCloning (Samragh et al., 2024); any number of copies, equal or not. Scales of
    norms that are followed by a tied head count as readers.

    Args:
      params: the *grown* parameters, ``grow(growth, .., axes)``.
      growth: copies of units, one map an axis.
      axes: the axis names of the parameters.
      seed: of the noise; each leaf draws its own, by its path.
      snr: signal to noise, in decibels, of a leaf's root mean square.

    Returns:
      The parameters with noise; the function is kept wherever every copy is alike. Leaves that read
      nothing new stay as they are.

    Example:
      Two copies are read with equal weights, and then with others of the same sum.

      >>> noisy = break_symmetry({"w": jnp.array([[2.0], [2.0]])}, {"mlp": maps.tile(1, 2)}, {"w": ("mlp.in", "embed")})
      >>> bool(noisy["w"][0, 0] == noisy["w"][1, 0]), round(float(noisy["w"].sum()), 3)
      (False, 4.0)

    References:
      Samragh et al.,
      `Scaling Smart: Accelerating Large Language Model Pre-training with Small Model Initialization <https://arxiv.org/abs/2409.12903>`_,
      2024
    """
    key, copies = jax.random.key(seed), maps.by_axes(growth)

    def leaf(key_path: tuple, names: Names, x: jax.Array) -> jax.Array:
        mine = [
            n
            for n in names
            if reads(n) and (m := copies.get((axis(n),))) is not None and m.new > m.old
        ]
        if not mine:
            return x
        wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        noise: Array = jax.random.normal(
            jax.random.fold_in(key, zlib.crc32(path(key_path).encode())), wide.shape, wide.dtype
        )
        for name in mine:
            one = {(axis(name),): copies[axis(name),]}
            # What the readers of all copies get in sum, shared out again, is what must go.
            noise = noise - _shared(one, name, names, noise)
        level = 10 ** (-snr / 20) * jnp.sqrt(jnp.square(wide).mean() / jnp.square(noise).mean())
        return (wide + level * noise).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def fresh(params: Params, growth: maps.Growth, axes: Axes, initial: Params) -> Params:
    """The old model in its place, and all that is new as at birth: ``[[W, N], [N, N]]``, and new layers of N.

    Each old unit, and layer, lies where the growth puts its first copy, with its own weights; what
    the growth would copy beside it is drawn anew. The direct copy that bert2BERT compares with, and
    the random layers of zero- and one-layer growth. Keeps no function exactly, but moves it little
    where new weights are small.

    Args:
      params: the parameters before the growth.
      growth: one that copies units and layers; it says where the old ones lie.
      axes: their axis names.
      initial: parameters of the grown model, as it would be born.

    Returns:
      The grown parameters.

    Raises:
      ValueError: a growth that does not copy.

    Example:
      >>> params, axes = {"w": jnp.array([[2.0]])}, {"w": ("embed.in", "mlp")}
      >>> fresh(params, {"mlp": maps.tile(1, 2)}, axes, {"w": jnp.array([[5.0, 6.0]])})["w"].tolist()
      [[2.0, 6.0]]

    References:
      Chen et al., `bert2BERT <https://arxiv.org/abs/2110.07143>`_, ACL 2022

      Bu, `Deep Progressive Training <https://arxiv.org/abs/2511.04981>`_, ICML 2026
    """

    def leaf(key_path: tuple, names: Names, x: Array, new: Array) -> Array:
        terms = maps.terms(growth, path(key_path), names)
        if not any(m for term in terms for m in term):
            return x
        terms = maps.first_copies(terms, "fresh")
        # A program would hold every one of NumPy's.
        ones = np.ones_like if isinstance(x, np.ndarray) else jnp.ones_like
        kept = grow_leaf(terms, names, ones(x))  # one or zero, so that sums are exact
        return grow_leaf(terms, names, x) + (1 - kept) * new

    return jax.tree_util.tree_map_with_path(leaf, axes, params, initial, is_leaf=is_names)


def spectral(params: Params, axes: Axes) -> Params:
    """Random kernels of layers at the spectral scale: their greatest singular values are about ``sqrt(n_out / n_in)``.

    Each matrix of `jaxgrow.optim.muon.dimension_numbers` is multiplied to the norm that a Gaussian
    one has where its entries deviate by ``sqrt(n_out / n_in) / (sqrt(n_in) + sqrt(n_out))``. All
    else stays.

    Args:
      params: as a model is born with them.
      axes: their axis names.

    Returns:
      The parameters: what `fresh` takes new layers from.

    Example:
      >>> kernel = jax.random.normal(jax.random.key(0), (1, 100, 400))
      >>> scaled = spectral({"up": kernel}, {"up": ("layers", "embed.in", "mlp")})
      >>> round(float(jnp.linalg.norm(scaled["up"][0], ord=2)), 1)  # sqrt(400 / 100)
      2.0

    References:
      Yang et al., `A Spectral Condition for Feature Learning <https://arxiv.org/abs/2310.17813>`_,
      2023
    """
    matrices = dimension_numbers(axes)

    def leaf(key_path: tuple, x: jax.Array) -> jax.Array:
        if (at := matrices.get(path(key_path))) is None:
            return x
        n_in, n_out = (
            math.prod(np.take(x.shape, side)) for side in (at.reduction_axis, at.output_axis)
        )
        over = tuple(int(i) for side in (at.reduction_axis, at.output_axis) for i in np.ravel(side))
        norm = jnp.sqrt(jnp.square(x).sum(over, keepdims=True))
        return x * (
            n_out
            / (math.sqrt(n_in) + math.sqrt(n_out))
            / jnp.maximum(norm, jnp.finfo(x.dtype).tiny)
        )

    return jax.tree_util.tree_map_with_path(leaf, params)


def _shared(one: maps.Term, name: str, names: Names, noise: Array) -> Array:
    """``read write.T`` along the axis ``name``."""
    alone = tuple(n if n == name else "_" for n in names)
    return grow_leaf([one], alone, grow_leaf([maps.swap(one)], alone, noise))
