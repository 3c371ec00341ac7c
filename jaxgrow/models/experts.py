"""A mixture of experts in place of an MLP: each token goes through a few of them, which a router chooses.

Shapes in names: N tokens, E experts, X of a token, A = N X assignments of a token to an expert, D embed, F mlp; S blocks, which
have R rows in all.
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

from jaxgrow.axes import READ, Names, axis, named
from jaxgrow.sharding import batch_axes, divided, mean_of_devices, platform, undivided_by_samples

EXPERTS = "experts"


class Experts(nn.Module):
    """``sum_x g_x down_x(act(gate_x(h)) * up_x(h))`` over the X experts with the greatest ``softmax(h R)``, each token's own.
    Leaves ``a`` and ``b`` beside a kernel are as of `jaxgrow.models.layers.Linear`, those of each expert its own.

    ``g`` are their probabilities, which add up to one (``normed``; Mixtral) or are as they are. Dropless: each expert takes
    all tokens that are sent to it, however many; no capacity, and no token is lost. XLA for CPUs and GPUs makes of
    `jax.lax.ragged_dot` the products of all assignments with all experts (JAX 0.10 and 0.12), so theirs is a batched product of
    `blocks`, each of one expert's rows. The router is in float32.

    While it trains, ``balance * E sum_e f_e p_e`` is added to the loss (Fedus et al., 2022, section 2.2), f the share of
    assignments that an expert gets and p its mean probability, over the tokens that are seen at once, so of a micro-batch on
    all devices: least, at ``balance``, where all get as many. Its gradient comes in where the output's does (`_adding`); the
    loss that is told is without it.

    Each device routes its own samples. Units are divided by ``mlp`` (`jaxgrow.sharding.spec`); experts are not, by any axis of
    a mesh.
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
        wide, x_ND = jnp.promote_types(self.dtype, jnp.float32), x_BTD.reshape(-1, self.embed)
        sizes = {EXPERTS: self.experts, "embed": self.embed, "mlp": self.mlp}

        def kernel(name, axes, init, dtype):
            return _Kernel(axes, tuple(sizes[axis(a)] for a in axes), init, dtype, name=name)()

        router = kernel("router", ("embed" + READ, EXPERTS), self.kernel_init, wide)
        probs_NE = jax.nn.softmax(_product(x_ND.astype(wide), router, jnp.matmul))
        axes = {name: (EXPERTS, "embed" + READ, "mlp") for name in ("gate", "up")} | {
            "down": (EXPERTS, "mlp" + READ, "embed")
        }
        inits = {"gate": self.kernel_init, "up": self.kernel_init, "down": self.out_init}
        kernels = {name: kernel(name, axes[name], inits[name], self.dtype) for name in axes}
        # Each device its own samples: XLA would sort all of them on each, and sum activations in place of gathering kernels.
        tokens, (units,) = P(batch_axes(len(x_BTD)) or None), undivided_by_samples(("mlp",), (self.mlp,))
        lie = tokens, tokens, {name: _specs(axes[name], w) for name, w in kernels.items()}
        mixed = divided(partial(_mixed, self.active, self.normed, self.activation), lie, (P(units, *tokens), tokens))
        y_1ND, counts_1E = mixed(x_ND, probs_NE, kernels)
        y_ND = jax.lax.reduce_sum(y_1ND, (0,))  # not jnp.sum: devices would exchange float32
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


def blocks(assignments: int, experts: int) -> tuple[int, int]:
    """``(how many, of how many rows)``: enough for any number of assignments to each expert, whose last block is not full.

    An expert that gets its share fills two. So up to half as many rows as there are assignments are empty, and each expert's
    kernels are there up to three times on average. TPUs have a product of ragged groups: blocks of one row.
    """
    size = 1 if platform() == "tpu" else -(-assignments // (2 * experts))
    return (assignments + min(assignments, experts) * (size - 1)) // size, size


def _mixed(active: int, normed: bool, activation: Callable, x_ND, probs_NE, kernels: dict[str, dict[str, jax.Array]]):
    """``(what the active experts make of each token [1, N, D], how many tokens each expert gets [1, E])``.

    Of some of the units of ``mlp``, it is a summand of that; so is one device's number of its own tokens."""
    gates_NX, chosen_NX = jax.lax.top_k(probs_NE, active)
    if normed:
        gates_NX = gates_NX / gates_NX.sum(-1, keepdims=True)
    # Assignments in the order of their experts, each expert's from a new block of rows on.
    experts, chosen_A = probs_NE.shape[1], chosen_NX.reshape(-1)
    count, size = blocks(len(chosen_A), experts)
    order_A = jnp.argsort(chosen_A, stable=True)
    counts_E = (chosen_A[:, None] == jnp.arange(experts)[None]).sum(0, dtype=jnp.int32)
    taken_E = -(-counts_E // size)  # blocks
    end_E = jnp.cumsum(taken_E)
    empty_E = size * (end_E - taken_E) - (jnp.cumsum(counts_E) - counts_E)  # rows before an expert's that nothing is in
    row_A = jnp.arange(len(chosen_A)) + empty_E[chosen_A[order_A]]
    place_A = jnp.zeros_like(row_A).at[order_A].set(row_A, unique_indices=True)
    token_R = jnp.full(count * size, len(x_ND)).at[row_A].set(order_A // active, unique_indices=True)
    expert_S = (jnp.arange(count)[:, None] >= end_E[None, :-1]).sum(1)

    def grouped(x_RI, w_EIO):
        if platform() == "tpu":
            return jax.lax.ragged_dot(x_RI, w_EIO, counts_E)
        wide = w_EIO.astype(gates_NX.dtype)  # in which the gradients of an expert's blocks are added
        w_SIO = wide.at[expert_S].get(indices_are_sorted=True, mode="promise_in_bounds").astype(w_EIO.dtype)
        return jnp.einsum("sri,sio->sro", x_RI.reshape(count, size, -1), w_SIO).reshape(len(x_RI), -1)

    def product(x_RI, name):
        return _product(x_RI, kernels[name], grouped)

    x_RD = x_ND.at[token_R].get(mode="fill", fill_value=0)
    y_RD = product(activation(product(x_RD, "gate")) * product(x_RD, "up"), "down")
    y_AD = y_RD.at[place_A].get(unique_indices=True, mode="promise_in_bounds")
    y_NXD = y_AD.reshape(-1, active, x_ND.shape[1])
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
