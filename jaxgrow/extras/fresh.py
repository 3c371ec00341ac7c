"""How can the new units of a grown model be initialised freshly instead of copied?

`fresh` replaces the copies by freshly initialized values, which `spectral` can scale.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Axes, KeyPath, Names, Params, is_names, layer_kernels, path
from jaxgrow.growth import maps
from jaxgrow.growth.apply import check, grow_leaf
from jaxgrow.growth.matrices import Array
from jaxgrow.growth.symmetry import INITIALISING

# JAX does not annotate this function.
_finfo: Callable[[np.dtype], np.finfo] = jnp.finfo  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def fresh(params: Params, growth: maps.Growth, axes: Axes, initial: Params) -> Params:
    """Grow the model, but initialize all new units and layers freshly instead of copying them.

    ``W' = [[W, N], [N, N]]``, and new layers are ``N``, where ``N`` is taken from ``initial``.

    Each old unit and layer keeps its weights, at the position of its first copy in the growth. For
    widths, this is the baseline "direct copy" of bert2BERT. For depth, these are the random layers
    of zero-layer and one-layer growth (Bu). The function is not preserved exactly, but it changes
    little if the new weights are small.

    Args:
      params: the parameters before the growth.
      growth: a growth that copies units and layers. It determines the positions of the old units
        and layers in the grown model.
      axes: their axis names.
      initial: freshly initialized parameters of the grown model.

    Returns:
      The grown parameters, in the dtypes of ``params``.

    Raises:
      ValueError: the growth does not copy, it does not fit the parameters (`jaxgrow.grow`), or
        ``initial`` has other shapes than the grown parameters.

    Example:
      >>> params, axes = {"w": jnp.array([[2.0]])}, {"w": ("embed.in", "mlp")}
      >>> fresh(params, {"mlp": maps.tile(1, 2)}, axes, {"w": jnp.array([[5.0, 6.0]])})["w"].tolist()
      [[2.0, 6.0]]

    References:
      Chen et al., `bert2BERT <https://arxiv.org/abs/2110.07143>`_, ACL 2022

      Bu, `Deep Progressive Training <https://arxiv.org/abs/2511.04981>`_, ICML 2026
    """

    check(growth, params, axes)

    def leaf(key_path: KeyPath, names: Names, x: Array, new: Array) -> Array:
        name = path(key_path)
        terms = maps.terms(growth, name, names)
        copies = maps.first_copies(terms, "fresh") if any(terms) else []
        shape = maps.new_shape(growth, names, x.shape)
        if new.shape != shape:
            raise ValueError(
                f"{name}: initial has shape {new.shape}, but the grown parameter has shape "
                f"{shape}. Initialize the model with its sizes after the growth."
            )
        if not copies:
            return x
        # A compiled program would store a NumPy array of ones as a constant.
        ones = np.ones_like if isinstance(x, np.ndarray) else jnp.ones_like
        kept = grow_leaf(copies, names, ones(x))  # one or zero, so the sums are exact
        return (grow_leaf(copies, names, x) + (1 - kept) * new).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, initial, is_leaf=is_names)


def spectral(params: Params, axes: Axes) -> Params:
    """Scale random kernels of layers to a spectral norm of about ``sqrt(n_out / n_in)``.

    Each matrix of `jaxgrow.axes.names.layer_kernels` is scaled to the Frobenius norm of a
    Gaussian matrix with standard deviation ``sqrt(n_out / n_in) / (sqrt(n_in) + sqrt(n_out))``. All
    other parameters are unchanged.

    Args:
      params: freshly initialized parameters.
      axes: their axis names.

    Returns:
      The scaled parameters, for example as ``initial`` of `fresh`.

    Example:
      >>> kernel = jax.random.normal(jax.random.key(0), (1, 100, 400))
      >>> scaled = spectral({"up": kernel}, {"up": ("layers", "embed.in", "mlp")})
      >>> round(float(jnp.linalg.norm(scaled["up"][0], ord=2)), 1)  # sqrt(400 / 100)
      2.0

    References:
      Yang et al., `A Spectral Condition for Feature Learning <https://arxiv.org/abs/2310.17813>`_,
      2023
    """
    kernels = layer_kernels(axes)

    def leaf(key_path: KeyPath, x: jax.Array) -> jax.Array:
        if (kernel := kernels.get(path(key_path))) is None:
            return x
        n_in = math.prod(np.take(x.shape, kernel.read_dims))
        n_out = math.prod(np.take(x.shape, kernel.written_dims))
        dims = kernel.read_dims + kernel.written_dims
        norm = jnp.sqrt(jnp.square(x).sum(dims, keepdims=True))
        return x * (
            n_out / (math.sqrt(n_in) + math.sqrt(n_out)) / jnp.maximum(norm, _finfo(x.dtype).tiny)
        )

    return jax.tree_util.tree_map_with_path(leaf, params)


def _fresh_spectral(params: Params, growth: maps.Growth, axes: Axes, initial: Params) -> Params:
    return fresh(params, growth, axes, spectral(initial, axes))


INITIALISING.add("fresh", fresh)
INITIALISING.add("spectral", _fresh_spectral)
