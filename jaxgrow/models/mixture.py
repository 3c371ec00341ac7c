"""A mixture of experts in place of an MLP: each token goes through a few of them, which a router chooses.

Shapes in names: N tokens, E experts, X of a token, A = N X assignments of a token to an expert, D
embed, F mlp; S blocks, which have R rows in all; C rows of an expert that has a capacity.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, Names, axis, named
from jaxgrow.models.layers import MLP, Linear, quick_gelu
from jaxgrow.sharding import (
    RULES,
    batch_axes,
    divided,
    mean_of_devices,
    parts,
    platform,
    undivided_by_samples,
)

EXPERTS, SHARED = "experts", "shared"
FEW = 128  # assignments of an expert, on average: with fewer, a block is larger in relation to them


class Experts(nn.Module):
    """``sum_x g_x down_x(act(gate_x(h)) * up_x(h))`` over the X experts with the greatest
    ``softmax(h R)`` of each token. Leaves ``a`` and ``b`` beside a kernel are as in
    `jaxgrow.models.layers.Linear`; each expert has its own.

    The gates ``g`` are the router's probabilities, normalised to sum to one if ``normed``
    (Mixtral). The router is in float32.

    Without a capacity, no token is dropped: each expert takes all tokens that are sent to it, in
    `blocks` of rows of one expert each. XLA for CPUs and GPUs compiles `jax.lax.ragged_dot` to the
    products of all assignments with all experts (JAX 0.10 and 0.12), so the products are those of
    these blocks, in several rounds. TPUs use `jax.lax.ragged_dot`.

    With a ``capacity`` c, each expert takes ``ceil(c A / E)`` assignments on each device, in the
    order of the tokens; further ones add nothing (Lepikhin et al., 2021). No kernel is copied.
    Experts are then sharded over the mesh axis ``RULES["experts"]``, if the mesh has it: devices
    exchange tokens by two all-to-all operations, there and back.

    In training, two losses are added. ``balance * E sum_e f_e p_e`` (Fedus et al., 2022, section
    2.2), where f is the share of the assignments that an expert gets and p its mean probability,
    over the tokens of a micro-batch on all devices: it is least where all experts get as many.
    ``z_loss * mean(logsumexp(h R)^2)`` (Zoph et al., 2022) keeps the router's logits small. Their
    gradients are added where the gradient of the output arrives (`_adding`); the reported loss does
    not contain them.

    With ``shared`` units, ``sigmoid(h w) * mlp(h)`` is added, an expert that every token goes
    through (Qwen2-MoE).

    With ``clamp``, the router and all kernels have biases, and a unit is
    ``(u + 1) g sigmoid(1.702 g)``, with the gate ``g`` at most ``clamp``, and ``u`` between
    ``-clamp`` and ``clamp`` (gpt-oss).

    Each device routes its own samples. Units are sharded by ``mlp`` (`jaxgrow.sharding.spec`).

    References:
      Lepikhin et al., `GShard <https://arxiv.org/abs/2006.16668>`_, ICLR 2021;
      Fedus et al., `Switch Transformers <https://arxiv.org/abs/2101.03961>`_, JMLR 2022;
      Zoph et al., `ST-MoE <https://arxiv.org/abs/2202.08906>`_, 2022
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
    capacity: float = 0.0
    z_loss: float = 0.0
    shared: int = 0
    clamp: float = 0.0

    @nn.compact
    def __call__(self, x_BTD):
        y_BTD = self._chosen(x_BTD)
        if not self.shared:
            return y_BTD
        inits, axes = (self.kernel_init, self.out_init), ("embed", SHARED)
        expert = MLP(
            self.embed,
            self.shared,
            *inits,
            self.dtype,
            self.activation,
            axes,
            True,
            False,
            name=SHARED,
        )
        axes, shape = ("embed" + READ, "gates"), (self.embed, 1)
        gate = Linear(axes, shape, 1, self.kernel_init, self.dtype, bias=False, name="shared_gate")
        return y_BTD + jax.nn.sigmoid(gate(x_BTD)) * expert(x_BTD)

    def _chosen(self, x_BTD):
        """The sum over the experts that the router chooses."""
        wide, x_ND = jnp.promote_types(self.dtype, jnp.float32), x_BTD.reshape(-1, self.embed)
        sizes = {EXPERTS: self.experts, "embed": self.embed, "mlp": self.mlp}

        def kernel(name, axes, init, dtype):
            return _Kernel(
                axes, tuple(sizes[axis(a)] for a in axes), init, dtype, self.clamp > 0, name=name
            )()

        router = kernel("router", ("embed" + READ, EXPERTS), self.kernel_init, wide)
        scores_NE = _product(x_ND.astype(wide), router, jnp.matmul)
        scores_NE = scores_NE + router["bias"][None] if "bias" in router else scores_NE
        probs_NE = jax.nn.softmax(scores_NE)
        axes = {name: (EXPERTS, "embed" + READ, "mlp") for name in ("gate", "up")} | {
            "down": (EXPERTS, "mlp" + READ, "embed")
        }
        inits = {"gate": self.kernel_init, "up": self.kernel_init, "down": self.out_init}
        kernels = {name: kernel(name, axes[name], inits[name], self.dtype) for name in axes}
        counts_E, y_ND = self._mixed(x_ND, probs_NE, kernels, axes, len(x_BTD))
        if self.balance:
            share_E = mean_of_devices(counts_E.astype(wide) / (self.active * len(x_ND)))
            y_ND = _adding(y_ND, self.balance * self.experts * (share_E * probs_NE.mean(0)).sum())
        if self.z_loss:
            y_ND = _adding(y_ND, self.z_loss * jnp.square(jax.nn.logsumexp(scores_NE, -1)).mean())
        return y_ND.reshape(x_BTD.shape)

    def _mixed(self, x_ND, probs_NE, kernels, axes: dict[str, Names], samples: int):
        """``(how many assignments each expert gets [E], the output [N, D])``, of the samples that each device has."""
        over = RULES[EXPERTS] if parts(EXPERTS) > 1 else None
        if over and not self.capacity:
            raise ValueError(
                f"the mesh shards experts over {over!r}, which needs a capacity (each device sends equally many rows to every "
                "other one), but capacity is 0: set it, as to 1.25, or set that mesh axis to 1"
            )
        if over and self.experts % parts(EXPERTS):
            raise ValueError(
                f"{self.experts} experts do not divide among the {parts(EXPERTS)} devices of {over!r}"
            )
        # Each device its own samples: XLA would sort all of them on each, and sum activations in
        # place of gathering kernels.
        tokens, (units,) = (
            P(batch_axes(samples) or None),
            undivided_by_samples(("mlp",), (self.mlp,)),
        )
        if (
            "bias" in kernels["down"] and units
        ):  # each device adds it to the sum over the units of all
            down = kernels["down"]
            kernels = {**kernels, "down": {**down, "bias": down["bias"] / parts("mlp")}}
        lie = tokens, tokens, {name: _specs(axes[name], w, over) for name, w in kernels.items()}
        routing = _Routing(self.active, self.normed, self.capacity, over)
        units_of = partial(_clamped, self.clamp) if self.clamp else partial(_gated, self.activation)
        mixed = divided(partial(_mixed, routing, units_of), lie, (P(units, *tokens), tokens))
        y_1ND, counts_1E = mixed(x_ND, probs_NE, kernels)
        return counts_1E.sum(0), jax.lax.reduce_sum(
            y_1ND, (0,)
        )  # not jnp.sum: devices would exchange float32


class _Kernel(nn.Module):
    """``{"kernel": W}``, its bias if it has one, and ``a`` and ``b`` where they lie beside it."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kernel_init: Initializer
    dtype: DTypeLike
    biased: bool = False

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        w = {"kernel": self.param("kernel", named(self.kernel_init, *self.axes), self.shape)}
        if self.biased:
            axes, shape = (*self.axes[:-2], self.axes[-1]), (*self.shape[:-2], self.shape[-1])
            w["bias"] = self.param("bias", named(nn.initializers.zeros, *axes, role="bias"), shape)
        w |= {
            name: self.get_variable("params", name)
            for name in ("a", "b")
            if self.has_variable("params", name)
        }
        return {name: x.astype(self.dtype) for name, x in w.items()}


def _specs(axes: Names, w: dict[str, jax.Array], over: str | None) -> dict[str, P]:
    """How a kernel and its LoRA are sharded where a device computes for its samples; experts over the mesh axis ``over``."""
    *lead, reads, writes = axes
    names = {
        "kernel": axes,
        "bias": (*lead, writes),
        "a": (*lead, reads, "rank"),
        "b": (*lead, "rank" + READ, writes),
    }
    return {name: P(over, *undivided_by_samples(names[name], x.shape)[1:]) for name, x in w.items()}


def _product(x: jax.Array, w: dict[str, jax.Array], product: Callable) -> jax.Array:
    """``x W``, or ``x W + (x a) b``, by whatever ``product``."""
    y = product(x, w["kernel"])
    return y + product(product(x, w["a"]), w["b"]) if "a" in w else y


class Blocks(NamedTuple):
    """Blocks of rows, each of one expert, and in how many rounds they are computed.

    Attributes:
      number: of blocks, a multiple of ``rounds``.
      size: the rows of each block.
      rounds: how many rounds compute the blocks. Each round copies a kernel for each of its
        ``number / rounds`` blocks.
    """

    number: int
    size: int
    rounds: int

    @property
    def rows(self) -> int:
        return self.number * self.size


def blocks(assignments: int, experts: int) -> Blocks:
    """Blocks that are enough for any distribution of assignments over experts, the last block of each being partly empty.

    An average expert fills 32 blocks, so that one row in 33 is empty. The blocks are computed in 33
    rounds of E blocks. If the expert gets fewer than 128 assignments, it fills two, and up to a
    third of the rows are empty: reading kernels for more blocks would take longer than computing
    empty rows. TPUs have a product of ragged groups, which leaves no row empty.

    Example:
      >>> blocks(16384, 8)  # 8192 tokens of a Mixtral
      Blocks(number=264, size=64, rounds=33)
      >>> 1 - 16384 / blocks(16384, 8).rows < 0.05
      True
    """
    if platform() == "tpu":
        return Blocks(assignments, 1, 1)
    many = assignments >= FEW * experts
    size = -(-assignments // ((32 if many else 2) * experts))
    number = (assignments + min(assignments, experts) * (size - 1)) // size
    rounds = -(-number // experts) if many else 1
    return Blocks(-(-number // rounds) * rounds, size, rounds)


def rows(assignments: int, experts: int, capacity: float = 0.0) -> int:
    """The rows that a device computes of each product of all experts.

    Args:
      assignments: of a token to an expert, of the tokens that the device computes at once.
      experts: how many there are.
      capacity: of `Experts`; 0: no token is dropped.

    Returns:
      The number of rows, empty ones included.

    Example:
      >>> rows(16384, 8), rows(16384, 8, capacity=1.25)
      (16896, 20480)
    """
    return (
        experts * room(assignments, experts, capacity)
        if capacity
        else blocks(assignments, experts).rows
    )


def room(assignments: int, experts: int, capacity: float) -> int:
    """How many assignments an expert takes at most, on one device."""
    return math.ceil(capacity * assignments / experts)


class _Routing(NamedTuple):
    """How tokens are sent to experts, as in `Experts`; ``over``: the mesh axis that experts are sharded over."""

    active: int
    normed: bool
    capacity: float
    over: str | None


def _gated(activation: Callable, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(gate) * up


def _clamped(limit: float, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jnp.clip(up, -limit, limit) + 1) * quick_gelu(jnp.minimum(gate, limit))


def _mixed(
    routing: _Routing, units_of: Callable, x_ND, probs_NE, kernels: dict[str, dict[str, jax.Array]]
):
    """``(the output of the active experts for each token [1, N, D], how many assignments each expert gets [1, E])``.

    With a part of the units of ``mlp``, the output is a summand of the full one. The counts are
    over one device's tokens.
    """
    gates_NX, chosen_NX = jax.lax.top_k(probs_NE, routing.active)
    if routing.normed:
        gates_NX = gates_NX / gates_NX.sum(-1, keepdims=True)
    experts, chosen_A = probs_NE.shape[1], chosen_NX.reshape(-1)
    counts_E = (chosen_A[:, None] == jnp.arange(experts)[None]).sum(0, dtype=jnp.int32)
    order_A = jnp.argsort(chosen_A, stable=True)
    if routing.capacity:
        total, row_A, grouped = _by_capacity(routing, chosen_A[order_A], counts_E)
    else:
        total, row_A, grouped = _by_blocks(chosen_A[order_A], counts_E, gates_NX.dtype)
    place_A = jnp.zeros_like(row_A).at[order_A].set(row_A, unique_indices=True)
    # Rows from ``total`` on belong to assignments that are dropped.
    token_R = (
        jnp.full(total, len(x_ND))
        .at[row_A]
        .set(order_A // routing.active, unique_indices=True, mode="drop")
    )

    def product(x, name):
        y_RO, bias_EO = _product(x, kernels[name], grouped), kernels[name].get("bias")
        if bias_EO is None:
            return y_RO
        return y_RO + grouped(
            jnp.ones_like(x[:, :1]), bias_EO[:, None]
        )  # each row the bias of its expert

    x_RD = _sent(routing, x_ND.at[token_R].get(mode="fill", fill_value=0), experts)
    y_RD = _returned(
        routing, product(units_of(product(x_RD, "gate"), product(x_RD, "up")), "down"), experts
    )
    y_AD = y_RD.at[place_A].get(unique_indices=True, mode="fill", fill_value=0)
    y_NXD = y_AD.reshape(-1, routing.active, x_ND.shape[1])
    y_ND = (gates_NX[..., None] * y_NXD.astype(gates_NX.dtype)).sum(1)
    return y_ND.astype(x_ND.dtype)[None], counts_E[None]


def _by_capacity(
    routing: _Routing, chosen_A: jax.Array, counts_E: jax.Array
) -> tuple[int, jax.Array, Callable]:
    """``(rows, the row of each assignment, the product of rows with kernels)``; assignments in the order of their experts."""
    taken = room(len(chosen_A), len(counts_E), routing.capacity)
    total = taken * len(counts_E)
    number_A = (
        jnp.arange(len(chosen_A)) - (jnp.cumsum(counts_E) - counts_E)[chosen_A]
    )  # within its expert
    row_A = jnp.where(
        number_A < taken, taken * chosen_A + number_A, total + jnp.arange(len(chosen_A))
    )

    def grouped(x_RI, w_EIO):
        y_ECO = jnp.einsum("eci,eio->eco", x_RI.reshape(len(w_EIO), -1, x_RI.shape[1]), w_EIO)
        return y_ECO.reshape(len(x_RI), -1)

    return total, row_A, grouped


def _sent(routing: _Routing, x_RD: jax.Array, experts: int) -> jax.Array:
    """Exchange rows: each device gives the rows of all experts and gets all rows of its own experts."""
    if routing.over is None:
        return x_RD
    x_ECD = x_RD.reshape(experts, -1, x_RD.shape[1])
    return jax.lax.all_to_all(x_ECD, routing.over, 0, 1, tiled=True).reshape(x_RD.shape)


def _returned(routing: _Routing, y_RD: jax.Array, experts: int) -> jax.Array:
    """The inverse of `_sent`."""
    if routing.over is None:
        return y_RD
    own = experts // jax.lax.axis_size(routing.over)
    y_ECD = y_RD.reshape(own, -1, y_RD.shape[1])
    return jax.lax.all_to_all(y_ECD, routing.over, 1, 0, tiled=True).reshape(y_RD.shape)


def _by_blocks(
    chosen_A: jax.Array, counts_E: jax.Array, wide: DTypeLike
) -> tuple[int, jax.Array, Callable]:
    """As `_by_capacity`, but each expert's rows begin with a new block, and no assignment is dropped."""
    shape = blocks(len(chosen_A), len(counts_E))
    end_E = jnp.cumsum(-(-counts_E // shape.size))  # blocks
    begin_E = jnp.concatenate([jnp.zeros_like(end_E[:1]), end_E[:-1]])
    # How many rows before an expert's are empty.
    empty_E = shape.size * begin_E - (jnp.cumsum(counts_E) - counts_E)
    row_A = jnp.arange(len(chosen_A)) + empty_E[chosen_A]
    expert_S = (jnp.arange(shape.number)[:, None] >= end_E[None, :-1]).sum(1)

    def grouped(x_RI, w_EIO):
        if platform() == "tpu":
            return jax.lax.ragged_dot(x_RI, w_EIO, counts_E)
        return _of_blocks(shape, expert_S, x_RI, w_EIO, wide)

    return shape.rows, row_A, grouped


def _of_blocks(
    shape: Blocks, expert_S: jax.Array, x_RI: jax.Array, w_EIO: jax.Array, wide: DTypeLike
) -> jax.Array:
    """The product of each block with the kernel of its expert. Gradients of kernels are added in the dtype ``wide``."""
    w_EIO, dtype = w_EIO.astype(wide), w_EIO.dtype
    x_SRI = x_RI.reshape(shape.number, shape.size, -1)

    def some(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_SRI, expert_S = of
        w_SIO = (
            w_EIO.at[expert_S].get(indices_are_sorted=True, mode="promise_in_bounds").astype(dtype)
        )
        return jnp.einsum("sri,sio->sro", x_SRI, w_SIO)

    if shape.rounds == 1:
        return some((x_SRI, expert_S)).reshape(len(x_RI), -1)
    # The backward pass copies kernels again, so that only the kernels of one round are in memory.
    again = jax.checkpoint(some, prevent_cse=False)
    by_round = jax.tree.map(lambda a: a.reshape(shape.rounds, -1, *a.shape[1:]), (x_SRI, expert_S))
    return jax.lax.map(again, by_round).reshape(len(x_RI), -1)


@jax.custom_vjp
def _adding(x: Any, loss: jax.Array) -> Any:
    """``x``; whatever the gradient of ``x``, that of ``loss`` is one: as if it were added to what is differentiated."""
    return x


def _adding_forward(x, loss):
    return x, None


def _adding_backward(_, dx):
    return dx, jnp.ones((), jnp.promote_types(dx.dtype, jnp.float32))


_adding.defvjp(_adding_forward, _adding_backward)
