"""A mixture of experts in place of an MLP: each token goes through a few of them, which a router chooses.

Shapes in names: N tokens, E experts, X of a token, A = N X assignments of a token to an expert, D embed, F mlp.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes import READ, named

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
        wide = jnp.promote_types(self.dtype, jnp.float32)
        x_ND = x_BTD.reshape(-1, self.embed)
        router = _Kernel(("embed" + READ, EXPERTS), (self.embed, self.experts), self.kernel_init, wide, name="router")
        probs_NE = jax.nn.softmax(router(x_ND.astype(wide), jnp.matmul))
        gates_NX, chosen_NX = jax.lax.top_k(probs_NE, self.active)
        if self.normed:
            gates_NX = gates_NX / gates_NX.sum(-1, keepdims=True)
        # Assignments in the order of their experts, and where each one is then.
        order_A = jnp.argsort(chosen_NX.reshape(-1), stable=True)
        place_A = jnp.argsort(order_A)
        counts_E = (chosen_NX.reshape(-1, 1) == jnp.arange(self.experts)[None]).sum(0, dtype=jnp.int32)

        def product(x_AI, name, out, into, init):
            shape = (self.experts, getattr(self, out), getattr(self, into))
            kernel = _Kernel((EXPERTS, out + READ, into), shape, init, self.dtype, name=name)
            return kernel(x_AI, lambda x_AI, w_EIO: jax.lax.ragged_dot(x_AI, w_EIO, counts_E))

        x_AD = x_ND[order_A // self.active]
        gate_AF = product(x_AD, "gate", "embed", "mlp", self.kernel_init)
        h_AF = self.activation(gate_AF) * product(x_AD, "up", "embed", "mlp", self.kernel_init)
        y_AD = product(h_AF, "down", "mlp", "embed", self.out_init)
        y_NXD = y_AD[place_A].reshape(-1, self.active, self.embed)
        y_ND = (gates_NX.astype(wide)[..., None] * y_NXD.astype(wide)).sum(1).astype(self.dtype)
        if self.balance:
            share_E = counts_E.astype(wide) / chosen_NX.size
            y_ND = _adding(y_ND, self.balance * self.experts * (share_E * probs_NE.mean(0)).sum())
        return y_ND.reshape(x_BTD.shape)


class _Kernel(nn.Module):
    """``x W``, or ``x W + (x a) b``, by whatever ``product``."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kernel_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, product):
        kernel = self.param("kernel", named(self.kernel_init, *self.axes), self.shape)
        y = product(x, kernel.astype(self.dtype))
        if self.has_variable("params", "a"):
            a, b = (self.get_variable("params", name).astype(self.dtype) for name in ("a", "b"))
            y = y + product(product(x, a), b)
        return y


@jax.custom_vjp
def _adding(x: Any, loss: jax.Array) -> Any:
    """``x``; whatever the gradient of ``x``, that of ``loss`` is one: as if it were added to what is differentiated."""
    return x


def _adding_forward(x, loss):
    return x, None


def _adding_backward(_, dx):
    return dx, jnp.ones((), jnp.promote_types(dx.dtype, jnp.float32))


_adding.defvjp(_adding_forward, _adding_backward)
