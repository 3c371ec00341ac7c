"""From a dense model to experts: the structure, and what no growth can say, since it is drawn."""

import math
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Axes, Names, Params, axis, is_names, path, reads
from jaxgrow.models.llama import LlamaConfig

_EXPERTS = "experts"


def as_mixture(config: LlamaConfig, params: Params) -> tuple[LlamaConfig, Params]:
    """The same model as a mixture of a single expert, whose gate is one: the same function, to rounding.

    Its kernels get an axis ``experts`` of size one; its router, which has nothing to choose, is
    zero.

    Args:
      config: of a model without experts.
      params: its parameters.

    Returns:
      ``(config, parameters)``, which `jaxgrow.operators.upcycle` grows.

    Raises:
      ValueError: a model that has experts, or an MLP that no expert is.

    Example:
      >>> config = LlamaConfig(layers=1, embed=4, heads=1, kv_heads=1, head_dim=4, mlp=8, vocab=5)
      >>> as_mixture(config, config.init(jax.random.key(0)))[1]["blocks"]["mlp"]["up"]["kernel"].shape
      (1, 1, 4, 8)
    """
    if config.experts:
        raise ValueError(f"this model has {config.experts} experts already")
    one = replace(config, experts=1, active=1)
    mlp = {
        name: {"kernel": leaf["kernel"][:, None]} for name, leaf in params["blocks"]["mlp"].items()
    }
    dtype = mlp["up"]["kernel"].dtype
    router = {"kernel": np.zeros((config.layers, config.embed, 1), dtype)}
    return one, {**params, "blocks": {**params["blocks"], "mlp": {**mlp, "router": router}}}


def routed(
    params: Params, axes: Axes, seed: int = 0, scale: float = 0.02, group: int = 1
) -> Params:
    """Adds noise to what writes ``experts``, so that copies of an expert are chosen apart and learn apart.

    ``R + scale N(0, 1)``, a column for each expert; the same for every ``group`` neighbours, the
    parts of one (`jaxgrow.operators.virtual_groups`). Keeps the function where the experts that a
    token may go through are alike.

    Args:
      params: the grown parameters.
      axes: their axis names.
      seed: of the noise.
      scale: its standard deviation; that of a router as it is born.
      group: how many neighbouring experts stay alike.

    Returns:
      The parameters, with other routers.

    Raises:
      ValueError: experts that are no whole groups.

    Example:
      >>> router = {"router": jnp.zeros((3, 4))}
      >>> noisy = routed(router, {"router": ("embed.in", "experts")}, group=2)["router"]
      >>> bool(noisy[0, 0] == noisy[0, 1]), bool(noisy[0, 1] == noisy[0, 2])
      (True, False)

    References:
      Komatsuzaki et al., `Sparse Upcycling <https://arxiv.org/abs/2212.05055>`_, ICLR 2023
    """
    key = jax.random.key(seed)

    def leaf(key_path: tuple, names: Names, x: jax.Array) -> jax.Array:
        if axis(names[-1]) != _EXPERTS or not any(map(reads, names)):
            return x
        if x.shape[-1] % group:
            raise ValueError(
                f"{path(key_path)}: {x.shape[-1]} experts are no whole groups of {group}"
            )
        noise = jax.random.normal(_own(key, key_path), (*x.shape[:-1], x.shape[-1] // group))
        return (x + scale * jnp.repeat(noise, group, -1)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def redrawn(params: Params, axes: Axes, part: float = 0.5, seed: int = 0) -> Params:
    """Draws a part of each expert's units anew: drop-upcycling (Nakamura et al., ICLR 2025).

    Of each expert of each layer, ``part`` of the units of ``mlp``, others in each expert, the same
    in all its kernels: normal, with the mean and the deviation that the kernel has over all of the
    expert. Breaks the function, and the copies' symmetry.

    Args:
      params: the grown parameters.
      axes: their axis names.
      part: of the units.
      seed: of units and numbers.

    Returns:
      The parameters.

    Raises:
      ValueError: a part that is not from 0 to 1.

    Example:
      >>> kernel = {"up": jnp.ones((4, 3, 6))}
      >>> redrawn(kernel, {"up": ("experts", "embed.in", "mlp")}, part=0.0)["up"].sum().item()
      72.0

    References:
      Nakamura et al., `Drop-Upcycling <https://arxiv.org/abs/2502.19261>`_, ICLR 2025
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part is {part}, not from 0 to 1")
    key = jax.random.key(seed)

    def leaf(key_path: tuple, names: Names, x: jax.Array) -> jax.Array:
        plain = [axis(n) for n in names]
        if not {_EXPERTS, "mlp"} <= set(plain):
            return x
        mlp, lead = plain.index("mlp"), plain.index(_EXPERTS) + 1
        units = x.shape[mlp]
        # By the module's parent, which the kernels of an expert share.
        order = (
            jax.random.uniform(_own(key, key_path[:-2]), (*x.shape[:lead], units))
            .argsort(-1)
            .argsort(-1)
        )
        where = order < math.floor(part * units + 0.5)
        where = jnp.expand_dims(where, [i for i in range(lead, x.ndim) if i != mlp])
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        over = tuple(range(lead, x.ndim))
        noise = jax.random.normal(jax.random.fold_in(_own(key, key_path), 1), x.shape, wide.dtype)
        new = wide.mean(over, keepdims=True) + wide.std(over, keepdims=True) * noise
        return jnp.where(where, new, wide).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=is_names)


def _own(key: jax.Array, key_path: tuple) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(path(key_path).encode()))
