"""From a dense model to a mixture of experts.

The functions here convert the structure and add random values, which a growth cannot represent.
"""

import math
import zlib
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Axes, Names, Params, axis_of, is_names, path, reads_axis
from jaxgrow.models.config import Config
from jaxgrow.models.llama import MIXTURES

C = TypeVar("C", bound=Config)
_EXPERTS = "experts"


def as_mixture(config: C, params: Params) -> tuple[C, Params]:
    """Convert a dense model to a mixture of one expert, with the same function up to rounding.

    The kernels of the MLP get an axis ``experts`` of size one. The gate of the only expert is always
    one. The router therefore has no effect, and is set to zeros.

    Args:
      config: config of a model without experts.
      params: parameters of the model.

    Returns:
      ``(config, parameters)`` of the mixture, which `jaxgrow.operators.upcycle` grows.

    Raises:
      ValueError: the model already has experts, or its MLP cannot be an expert.

    Example:
      >>> from jaxgrow.models import LlamaConfig
      >>> config = LlamaConfig(layers=1, embed=4, heads=1, kv_heads=1, head_dim=4, mlp=8, vocab=5)
      >>> as_mixture(config, config.init(jax.random.key(0)))[1]["blocks"]["mlp"]["up"]["kernel"].shape
      (1, 1, 4, 8)
    """
    one = config.as_mixture()
    mlp = {
        name: {of: x[:, None] for of, x in leaf.items()}  # the kernel, and a LoRA beside it
        for name, leaf in params["blocks"]["mlp"].items()
    }
    dtype = mlp["up"]["kernel"].dtype
    router = {"kernel": np.zeros((config.layers, config.embed, 1), dtype)}
    return one, {**params, "blocks": {**params["blocks"], "mlp": {**mlp, "router": router}}}


def add_router_noise(
    params: Params, axes: Axes, seed: int = 0, scale: float = 0.02, group: int = 1
) -> Params:
    """Add noise to the routers, so that copies of an expert get different tokens and diverge.

    ``R + scale N(0, 1)``, with a column for each expert. Each ``group`` of neighbouring experts gets
    the same noise, because its members are the parts of one expert
    (`jaxgrow.operators.virtual_groups`). The function is preserved if all experts among which the
    noise changes the choice are copies of each other.

    Args:
      params: the grown parameters.
      axes: axis names of the parameters.
      seed: random seed of the noise.
      scale: standard deviation of the noise. The default is the value of a freshly initialised
        router.
      group: number of neighbouring experts that get the same noise.

    Returns:
      The parameters with changed routers.

    Raises:
      ValueError: the number of experts is not divisible by ``group``.

    Example:
      >>> router = {"router": jnp.zeros((3, 4))}
      >>> noisy = add_router_noise(router, {"router": ("embed.in", "experts")}, group=2)["router"]
      >>> bool(noisy[0, 0] == noisy[0, 1]), bool(noisy[0, 1] == noisy[0, 2])
      (True, False)

    References:
      Komatsuzaki et al., `Sparse Upcycling <https://arxiv.org/abs/2212.05055>`_, ICLR 2023
    """
    key = jax.random.key(seed)

    def leaf(key_path: tuple, names: Names, x: jax.Array) -> jax.Array:
        if axis_of(names[-1]) != _EXPERTS or not any(map(reads_axis, names)):
            return x
        if x.shape[-1] % group:
            raise ValueError(
                f"{path(key_path)}: {x.shape[-1]} experts are not divisible into groups of {group}"
            )
        noise = jax.random.normal(_leaf_key(key, key_path), (*x.shape[:-1], x.shape[-1] // group))
        return (x + scale * jnp.repeat(noise, group, -1)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def redraw_units(params: Params, axes: Axes, part: float = 0.5, seed: int = 0) -> Params:
    """Reinitialise a part of each expert's units: drop-upcycling (Nakamura et al., ICLR 2025).

    In each expert of each layer, ``part`` of the units of ``mlp`` are sampled again. The choice of
    units differs between experts and is the same in all kernels of an expert. The new values are
    normal, with the mean and the standard deviation of the expert's kernel. This changes the
    function and breaks the symmetry of the copies.

    Args:
      params: the grown parameters.
      axes: axis names of the parameters.
      part: fraction of the units, from 0 to 1.
      seed: random seed for the choice of units and for the new values.

    Returns:
      The parameters with reinitialised units.

    Raises:
      ValueError: ``part`` is not between 0 and 1.

    Example:
      >>> kernel = {"up": jnp.ones((4, 3, 6))}
      >>> redraw_units(kernel, {"up": ("experts", "embed.in", "mlp")}, part=0.0)["up"].sum().item()
      72.0

    References:
      Nakamura et al., `Drop-Upcycling <https://arxiv.org/abs/2502.19261>`_, ICLR 2025
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part is {part}, but must be between 0 and 1")
    key = jax.random.key(seed)

    def leaf(key_path: tuple, names: Names, x: jax.Array) -> jax.Array:
        plain = [axis_of(n) for n in names]
        if not {_EXPERTS, "mlp"} <= set(plain):
            return x
        mlp = plain.index("mlp")
        lead = plain.index(_EXPERTS) + 1
        units = x.shape[mlp]
        # The key depends on the path of the parent module, which all kernels of an expert share.
        order = (
            jax.random.uniform(_leaf_key(key, key_path[:-2]), (*x.shape[:lead], units))
            .argsort(-1)
            .argsort(-1)
        )
        where = order < math.floor(part * units + 0.5)
        where = jnp.expand_dims(where, [i for i in range(lead, x.ndim) if i != mlp])
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        over = tuple(range(lead, x.ndim))
        noise = jax.random.normal(
            jax.random.fold_in(_leaf_key(key, key_path), 1), x.shape, wide.dtype
        )
        new = wide.mean(over, keepdims=True) + wide.std(over, keepdims=True) * noise
        return jnp.where(where, new, wide).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def _leaf_key(key: jax.Array, key_path: tuple) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(path(key_path).encode()))


MIXTURES.add("add_router_noise", add_router_noise)
MIXTURES.add("redraw_units", redraw_units)
