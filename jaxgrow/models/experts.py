"""A mixture of experts in place of an MLP: each token goes through a few of them, which a router chooses.

Shapes in names: N tokens, E experts, X of a token, A = N X assignments of a token to an expert, D embed, F mlp.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxgrow.axes import READ, Names, named
from jaxgrow.sharding import batch_axes, divided, mean_of_devices, undivided_by_samples

EXPERTS = "experts"


class Experts(nn.Module):
    """``sum_x g_x down_x(act(gate_x(h)) * up_x(h))`` over the X experts with the greatest ``softmax(h R)``, each token's own.
    Leaves ``a`` and ``b`` beside a kernel are as of `jaxgrow.models.layers.Linear`, those of each expert its own.

    ``g`` are their probabilities, which add up to one (``normed``; Mixtral) or are as they are. Dropless: each expert takes
    all tokens that are sent to it, however many, by one product of ragged groups (`jax.lax.ragged_dot`); no capacity, and no
    token is lost. The router is in float32.

    While it trains, ``balance * E sum_e f_e p_e`` is added to the loss (Fedus et al., 2022, section 2.2), f the share of
    assignments that an expert gets and p its mean probability, over the tokens that are seen at once, so of a micro-batch:
    least, at ``balance``, where all get as many. Its gradient comes in where the output's does (`_adding`); the loss that is
    told is without it.
    """

    experts: int
    active: int
    normed: bool
    balance: float
    embed: int
    mlp: int
    kernel_init: Initializer
    out_init: Initializer
    dtype: DTypeLike
    activation: Callable

    @nn.compact
    def __call__(self, x_BTD):
        wide, inwards, outwards = jnp.promote_types(self.dtype, jnp.float32), "embed" + READ, "mlp" + READ
        x_ND = x_BTD.reshape(-1, self.embed)
        router = _Kernel((inwards, EXPERTS), (self.embed, self.experts), self.kernel_init, wide, name="router")()
        probs_NE = jax.nn.softmax(_product(x_ND.astype(wide), router, jnp.matmul))
        axes = {
            "gate": (EXPERTS, inwards, "mlp"),
            "up": (EXPERTS, inwards, "mlp"),
            "down": (EXPERTS, outwards, "embed"),
        }
        shape, init = (self.experts, self.embed, self.mlp), self.kernel_init
        kernels = {name: _Kernel(axes[name], shape, init, self.dtype, name=name)() for name in ("gate", "up")}
        shape, init = (self.experts, self.mlp, self.embed), self.out_init
        kernels["down"] = _Kernel(axes["down"], shape, init, self.dtype, name="down")()
        # Each device its own samples: XLA would sort all of them on each, and sum activations in place of gathering kernels.
        tokens, (units,) = P(batch_axes(len(x_BTD)) or None), undivided_by_samples(("mlp",), (self.mlp,))
        lie = tokens, tokens, {name: _specs(axes[name], w) for name, w in kernels.items()}
        mixed = divided(partial(_mixed, self.active, self.normed, self.activation), lie, (P(units, *tokens), tokens))
        y_1ND, counts_1E = mixed(x_ND, probs_NE, kernels)
        y_ND = y_1ND.sum(0)
        if self.balance:
            share_E = mean_of_devices(counts_1E.sum(0).astype(wide) / (self.active * len(x_ND)))
            y_ND = _adding(y_ND, self.balance * self.experts * (share_E * probs_NE.mean(0)).sum())
        return y_ND.reshape(x_BTD.shape)


class _Kernel(nn.Module):
    """``{"kernel": W}``, and ``a`` and ``b`` where they lie beside it."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kernel_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        w = {"kernel": self.param("kernel", named(self.kernel_init, *self.axes), self.shape)}
        w |= {name: self.get_variable("params", name) for name in ("a", "b") if self.has_variable("params", name)}
        return {name: x.astype(self.dtype) for name, x in w.items()}


def _specs(axes: Names, w: dict[str, jax.Array]) -> dict[str, P]:
    """How a kernel, and what lies beside it, is divided where a device computes for its samples."""
    *lead, reads, writes = axes
    names = {"kernel": axes, "a": (*lead, reads, "rank"), "b": (*lead, "rank" + READ, writes)}
    return {name: undivided_by_samples(names[name], x.shape) for name, x in w.items()}


def _product(x: jax.Array, w: dict[str, jax.Array], product: Callable) -> jax.Array:
    """``x W``, or ``x W + (x a) b``, by whatever ``product``."""
    y = product(x, w["kernel"])
    return y + product(product(x, w["a"]), w["b"]) if "a" in w else y


def _mixed(active: int, normed: bool, activation: Callable, x_ND, probs_NE, kernels: dict[str, dict[str, jax.Array]]):
    """``(what the active experts make of each token [1, N, D], how many tokens each expert gets [1, E])``.

    Of some of the units of ``mlp``, it is a summand of that; so is one device's number of its own tokens."""
    gates_NX, chosen_NX = jax.lax.top_k(probs_NE, active)
    if normed:
        gates_NX = gates_NX / gates_NX.sum(-1, keepdims=True)
    # Assignments in the order of their experts, and where each one is then.
    order_A = jnp.argsort(chosen_NX.reshape(-1), stable=True)
    place_A = jnp.argsort(order_A)
    counts_E = (chosen_NX.reshape(-1, 1) == jnp.arange(probs_NE.shape[1])[None]).sum(0, dtype=jnp.int32)

    def product(x_AI, name):
        return _product(x_AI, kernels[name], lambda x_AI, w_EIO: jax.lax.ragged_dot(x_AI, w_EIO, counts_E))

    x_AD = x_ND[order_A // active]
    y_AD = product(activation(product(x_AD, "gate")) * product(x_AD, "up"), "down")
    y_NXD = y_AD[place_A].reshape(-1, active, x_ND.shape[1])
    y_ND = (gates_NX[..., None] * y_NXD.astype(gates_NX.dtype)).sum(1)
    return y_ND.astype(x_ND.dtype)[None], counts_E[None]


@jax.custom_vjp
def _adding(x: Any, loss: jax.Array) -> Any:
    """``x``; whatever the gradient of ``x``, that of ``loss`` is one: as if it were added to what is differentiated."""
    return x


def _adding_forward(x, loss):
    return x, None


def _adding_backward(_, dx):
    return dx, jnp.ones((), jnp.promote_types(dx.dtype, jnp.float32))


_adding.defvjp(_adding_forward, _adding_backward)
