"""Bottleneck adapters in a layer, and attention over several of them.

`jaxgrow.peft.adapters` trains and grows them. Shape suffixes: B batch, T positions, D embed, N
adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ
from jaxgrow.models.modules import Linear
from jaxgrow.models.stack import stacked

ADAPTERS = "adapters"  # the axis of fused adapters
BOTTLENECK = "bottleneck"
# Suffixes of module names, after the sublayer's name.
ADAPTER = "_adapter"
FUSION = "_fusion"
ACTIVATIONS: Mapping[str, Callable] = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class AdapterCost(NamedTuple):
    """FLOPs of products in the forward pass.

    Attributes:
      bottlenecks: products with the kernels D and U of the bottlenecks.
      fusion: products with the kernels Q, K and V of the fusion.
      scores: products of activations only.
    """

    bottlenecks: float
    fusion: float = 0.0
    scores: float = 0.0


@dataclass(frozen=True)
class Adapter:
    """Bottleneck adapters in every layer.

    The defaults are the adapters of Houlsby et al. (2019). ``at=("mlp",)`` with
    ``activation="relu"`` gives those of Pfeiffer et al. (2021).

    Attributes:
      size: units of the bottleneck.
      at: the sublayers that have an adapter.
      activation: activation function of the bottleneck.
      fused: the number of adapters that attention combines; None: one adapter without attention.

    Deviation(AdapterFusion): in a post-LN model, the adapters of Pfeiffer et al. read the output of
    the norm that follows a sublayer. Here, adapters read the output of the sublayer itself.
    """

    size: int = 64
    at: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    fused: int | None = None

    def __post_init__(self):
        counts = (self.size, 1 if self.fused is None else self.fused)
        known = (
            isinstance(self.at, tuple)
            and set(self.at) <= {"attention", "mlp"}
            and len(set(self.at)) == len(self.at)
        )
        if not all(type(n) is int and n > 0 for n in counts) or not known or not self.at:
            raise ValueError(
                "an adapter needs a size of at least 1, a place (at) of attention, mlp or both, "
                f"and at least one fused adapter, but is {self}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"an adapter's activation must be one of {', '.join(ACTIVATIONS)}, not "
                f"{self.activation!r}"
            )

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the adapter's own axes."""
        return {BOTTLENECK: self.size} | ({} if self.fused is None else {ADAPTERS: self.fused})

    def cost(self, embed: int) -> "AdapterCost":
        """Return the FLOPs per position in a layer.

        Each sublayer with adapters takes ``4 n D S`` for n adapters with S units. With fusion, it
        also takes ``2 (1 + 2 n) D D`` and ``4 n D``.

        Args:
          embed: hidden size, D.
        """
        count = self.fused or 1
        places = len(self.at)
        bottlenecks = float(places * count * 4 * embed * self.size)
        if self.fused is None:
            return AdapterCost(bottlenecks)
        return AdapterCost(
            bottlenecks,
            places * 2.0 * (1 + 2 * count) * embed * embed,
            places * 4.0 * count * embed,
        )


class Bottleneck(nn.Module):
    """``f(y D + d) U + u``, where U is initialised to zeros.

    D is initialised as in He et al. (ICLR 2022): uniform in ``+- 1 / sqrt(embed)``.
    """

    adapter: Adapter
    dtype: DTypeLike

    @nn.compact
    def __call__(self, y_BTD):
        embed = y_BTD.shape[-1]
        size = self.adapter.size
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        down = Linear(("embed" + READ, BOTTLENECK), (embed, size), 1, init, self.dtype, name="down")
        up = Linear(
            (BOTTLENECK + READ, "embed"),
            (size, embed),
            1,
            nn.initializers.zeros,
            self.dtype,
            name="up",
        )
        return up(ACTIVATIONS[self.adapter.activation](down(y_BTD)))


class Fusion(nn.Module):
    """Attention over the outputs z of n adapters: ``sum_n s_n z_n V``.

    ``s = softmax_n (y Q) . (z_n K)``. V is initialised near the identity. The key has the output
    axis of the query as an input axis, so the scores do not change when ``embed`` grows.
    """

    dtype: DTypeLike

    @nn.compact
    def __call__(self, y_BTD, z_NBTD):
        def project(name, x, init, written):
            axes = ("embed" + READ, written)
            shape = (y_BTD.shape[-1],) * 2
            return Linear(axes, shape, 1, init, self.dtype, bias=False, name=name)(x)

        init = nn.initializers.normal(0.02)
        wide = jnp.promote_types(self.dtype, jnp.float32)
        q_BTD = project("query", y_BTD, init, "embed")
        k_NBTD = project("key", z_NBTD, init, "embed" + READ)
        scores_NBT = jnp.einsum("btd,nbtd->nbt", q_BTD, k_NBTD, preferred_element_type=wide)
        weights_NBT = jax.nn.softmax(scores_NBT, axis=0).astype(self.dtype)
        return jnp.einsum(
            "nbt,nbtd->btd", weights_NBT, project("value", z_NBTD, _near_identity, "embed")
        )


def _near_identity(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.eye(*shape, dtype=dtype) + 1e-6 * jax.random.normal(key, shape, dtype)


def adapted(block: nn.Module, sublayer: Literal["attention", "mlp"], y_BTD: jax.Array) -> jax.Array:
    """Return a sublayer's output plus the output of its adapter, if it has one.

    Call it inside a compact block that has a config.
    """
    config = block.config  # type: ignore[attr-defined]
    dtype = block.dtype  # type: ignore[attr-defined]
    adapter: Adapter | None = config.adapter
    if adapter is None or sublayer not in adapter.at:
        return y_BTD
    if adapter.fused is None:
        return y_BTD + Bottleneck(adapter, dtype, name=sublayer + ADAPTER)(y_BTD)
    # The module is detached: only its init and apply are used.
    one = Bottleneck(adapter, dtype, parent=None)
    each = stacked(block, sublayer + ADAPTER, one, adapter.fused, y_BTD[:1, :1], axis=ADAPTERS)
    z_NBTD = jax.vmap(partial(_applied, one), (0, None))(each, y_BTD)
    return y_BTD + Fusion(dtype, name=sublayer + FUSION)(y_BTD, z_NBTD)


def _applied(module: nn.Module, params: Any, x: jax.Array) -> jax.Array:
    return module.apply({"params": params}, x)  # type: ignore[return-value]
