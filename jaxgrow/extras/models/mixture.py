"""A mixture of experts that replaces an MLP: a router sends each token to a few experts.

Shape suffixes: N tokens, E experts, X experts of a token, A = N X assignments of a token to an
expert, D embed, F mlp; S blocks with R rows in all, I inputs and O outputs of a kernel; C rows of
an expert that has a capacity.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, Names, axis_of, named_init
from jaxgrow.extras.models.mapped import map_devices, mean_of_devices
from jaxgrow.models.config import EXPERTS, SHARED
from jaxgrow.models.llama import MIXTURES
from jaxgrow.models.modules import MLP, Linear, quick_gelu
from jaxgrow.sharding import (
    CONTEXT,
    RULES,
    axis_parts,
    batch_axes,
    current_platform,
    group_samples,
    sequence_parts,
    undivided_by_samples,
    ungroup_samples,
)

# If the average expert gets fewer assignments than this, its rows form 2 blocks instead of 32.
FEW = 128


class Experts(nn.Module):
    """A mixture of experts: the weighted sum of the experts that the router chooses for each token.

    ``sum_x g_x down_x(act(gate_x(h)) * up_x(h))``, over the X experts with the greatest
    ``softmax(h R)`` of the token. The gates ``g`` are the router's probabilities, normalised to a
    sum of one if ``normed`` (Mixtral). The router is in float32. Leaves ``a`` and ``b`` of a LoRA
    are as in `jaxgrow.models.modules.Linear`, and each expert has its own.

    Without a capacity, no token is dropped: each expert takes all tokens that are sent to it, in
    `expert_blocks` of rows of one expert each. XLA for CPUs and GPUs compiles `jax.lax.ragged_dot`
    to the products of all assignments with all experts (JAX 0.10 and 0.12). Therefore the products
    are computed by blocks, in several rounds. TPUs use `jax.lax.ragged_dot`.

    With a ``capacity`` c, each expert takes ``ceil(c A / E)`` assignments on each device, in the
    order of the tokens. Further assignments add nothing (Lepikhin et al., 2021). No kernel is
    copied. If the mesh has the axis ``RULES["experts"]``, experts are sharded along it, and devices
    exchange tokens by two all-to-all operations, before and after the experts.

    In training, two losses are added. The load-balancing loss is ``balance * E sum_e f_e p_e``
    (Fedus et al., 2022, section 2.2). Here f is the share of the assignments that an expert gets
    and p is its mean probability, over the tokens of a micro-batch on all devices. It is smallest
    if all experts get equally many assignments. The z-loss ``z_loss * mean(logsumexp(h R)^2)``
    (Zoph et al., 2022) keeps the router's logits small. The gradients of both losses are added in
    the backward pass (`_adding`); the reported loss does not contain them.

    Each device routes its own samples. MLP units are sharded by the rule for the axis ``mlp``
    (`jaxgrow.sharding.partition_spec`).

    Attributes:
      experts: number of experts, E.
      active: number of experts for each token, X.
      normed: whether the gates of a token are normalised to a sum of one.
      balance: factor of the load-balancing loss; 0: none.
      embed: hidden size.
      mlp: units of each expert.
      kernel_init: initializer of the router and of the kernels ``gate`` and ``up``.
      out_init: initializer of the kernel ``down``.
      dtype: dtype of activations.
      activation: activation function of the gate.
      capacity: assignments of an expert, relative to the mean; 0: no token is dropped.
      z_loss: factor of the z-loss; 0: none.
      shared: units of a shared expert, which processes every token: ``sigmoid(h w) * mlp(h)`` is
        added to the output (Qwen2-MoE). 0: none.
      clamp: bound of gates and units (gpt-oss); 0: none. If it is set, the router and all kernels
        have biases, and a unit is ``(u + 1) g sigmoid(1.702 g)``, with the gate ``g`` at most
        ``clamp``, and ``u`` between ``-clamp`` and ``clamp``.

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

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        """Return the gate of each expert for each token [B, T, E]; 0 for experts not chosen."""
        w = nn.meta.unbox(self.variables["params"]["router"])
        wide = jnp.promote_types(self.dtype, jnp.float32)
        scores = _lora_product(
            x_BTD.astype(wide), jax.tree.map(lambda x: x.astype(wide), w), jnp.matmul
        )
        gates, chosen = jax.lax.top_k(jax.nn.softmax(scores + w.get("bias", 0)), self.active)
        if self.normed:
            gates = gates / gates.sum(-1, keepdims=True)
        return (gates[..., None] * jax.nn.one_hot(chosen, self.experts, dtype=wide)).sum(-2)

    def contributions(self, x_BTD: jax.Array) -> jax.Array:
        """Return the gate of each expert times the L2 norm of its output for each token [B, T, E].

        It is 0 for experts that are not chosen. All experts are computed for all tokens.
        """
        w = nn.meta.unbox(self.variables["params"])

        def product(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
            return _lora_product(x, w, jnp.matmul) + w.get("bias", 0)

        def norm_BT(w: dict[str, dict[str, jax.Array]]) -> jax.Array:
            units = self._units(product(x_BTD, w["gate"]), product(x_BTD, w["up"]))
            return jnp.linalg.norm(product(units, w["down"]), axis=-1)

        norms_EBT = jax.lax.map(norm_BT, {name: w[name] for name in ("gate", "up", "down")})
        return self.gates(x_BTD) * jnp.moveaxis(norms_EBT, 0, -1)

    @property
    def _units(self) -> Callable:
        """The function of the outputs of the kernels ``gate`` and ``up``."""
        if self.clamp:
            return partial(_clamped, self.clamp)
        return partial(_gated_units, self.activation)

    @nn.compact
    def __call__(self, x_BTD):
        y_BTD = self._chosen(x_BTD)
        if not self.shared:
            return y_BTD
        expert = MLP(
            self.embed,
            self.shared,
            self.kernel_init,
            self.out_init,
            self.dtype,
            self.activation,
            axes=("embed", SHARED),
            gated=True,
            bias=False,
            name=SHARED,
        )
        axes = ("embed" + READ, "gates")
        shape = (self.embed, 1)
        gate = Linear(axes, shape, 1, self.kernel_init, self.dtype, bias=False, name="shared_gate")
        return y_BTD + jax.nn.sigmoid(gate(x_BTD)) * expert(x_BTD)

    def _chosen(self, x_BTD):
        """Return the weighted sum over the experts that the router chooses."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        x_GND = group_samples(x_BTD)
        x_ND = x_GND.reshape(-1, self.embed)
        sizes = {EXPERTS: self.experts, "embed": self.embed, "mlp": self.mlp}

        def kernel(name, axes, init, dtype):
            return _Kernel(
                axes, tuple(sizes[axis_of(a)] for a in axes), init, dtype, self.clamp > 0, name=name
            )()

        router = kernel("router", ("embed" + READ, EXPERTS), self.kernel_init, wide)
        scores_NE = _lora_product(x_ND.astype(wide), router, jnp.matmul)
        scores_NE = scores_NE + router["bias"][None] if "bias" in router else scores_NE
        probs_NE = jax.nn.softmax(scores_NE)
        axes = {name: (EXPERTS, "embed" + READ, "mlp") for name in ("gate", "up")} | {
            "down": (EXPERTS, "mlp" + READ, "embed")
        }
        inits = {"gate": self.kernel_init, "up": self.kernel_init, "down": self.out_init}
        kernels = {name: kernel(name, axes[name], inits[name], self.dtype) for name in axes}
        counts_E, y_ND = self._mixed(x_ND, probs_NE, kernels, axes, x_BTD.shape)
        if self.balance:
            share_E = mean_of_devices(counts_E.astype(wide) / (self.active * len(x_ND)))
            y_ND = _adding(y_ND, self.balance * self.experts * (share_E * probs_NE.mean(0)).sum())
        if self.z_loss:
            y_ND = _adding(y_ND, self.z_loss * jnp.square(jax.nn.logsumexp(scores_NE, -1)).mean())
        return ungroup_samples(y_ND.reshape(x_GND.shape), x_BTD.shape)

    def _mixed(self, x_ND, probs_NE, kernels, axes: dict[str, Names], shape: tuple[int, ...]):
        """Return ``(number of assignments of each expert [E], the output [N, D])``.

        Each device computes its own samples and positions of ``shape`` [B, T, D].
        """
        over = RULES[EXPERTS] if axis_parts(EXPERTS) > 1 else None
        if over and not self.capacity:
            raise ValueError(
                f"the mesh shards experts over {over!r}, which needs a capacity (each device "
                "sends equally many rows to every other one), but capacity is 0: set it, for "
                "example to 1.25, or set that mesh axis to 1"
            )
        if over and self.experts % axis_parts(EXPERTS):
            raise ValueError(
                f"{self.experts} experts are not divisible by the {axis_parts(EXPERTS)} devices of the "
                f"mesh axis {over!r}"
            )
        # Each device processes its own tokens. Otherwise XLA would sort all tokens on each device,
        # and sum activations instead of gathering kernels.
        samples, positions, _ = shape
        along = (*batch_axes(samples), *[CONTEXT] * (sequence_parts(positions) > 1))
        tokens = P(along or None)
        (units,) = undivided_by_samples(("mlp",), (self.mlp,))
        # Each device adds the bias to its partial sum, so the bias is divided by the number of
        # devices that share the units.
        if "bias" in kernels["down"] and units:
            down = kernels["down"]
            kernels = {**kernels, "down": {**down, "bias": down["bias"] / axis_parts("mlp")}}
        lie = (
            tokens,
            tokens,
            {name: _kernel_specs(axes[name], w, over) for name, w in kernels.items()},
        )
        routing = _Routing(self.active, self.normed, self.capacity, over)
        mixed = map_devices(partial(_mixed, routing, self._units), lie, (P(units, *tokens), tokens))
        y_1ND, counts_1E = mixed(x_ND, probs_NE, kernels)
        # With jnp.sum, devices would exchange the partial sums in float32.
        return counts_1E.sum(0), jax.lax.reduce_sum(y_1ND, (0,))


class _Kernel(nn.Module):
    """``{"kernel": W}``, with the bias and the LoRA leaves ``a`` and ``b`` if they exist."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kernel_init: Initializer
    dtype: DTypeLike
    biased: bool = False

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        w = {"kernel": self.param("kernel", named_init(self.kernel_init, *self.axes), self.shape)}
        if self.biased:
            axes = (*self.axes[:-2], self.axes[-1])
            shape = (*self.shape[:-2], self.shape[-1])
            w["bias"] = self.param(
                "bias", named_init(nn.initializers.zeros, *axes, role="bias"), shape
            )
        w |= {
            name: self.get_variable("params", name)
            for name in ("a", "b")
            if self.has_variable("params", name)
        }
        return {name: x.astype(self.dtype) for name, x in w.items()}


def _kernel_specs(axes: Names, w: dict[str, jax.Array], over: str | None) -> dict[str, P]:
    """Return the sharding of a kernel and its LoRA while each device computes its own samples.

    Experts are sharded along the mesh axis ``over``.
    """
    *lead, reads, writes = axes
    names = {
        "kernel": axes,
        "bias": (*lead, writes),
        "a": (*lead, reads, "rank"),
        "b": (*lead, "rank" + READ, writes),
    }
    return {name: P(over, *undivided_by_samples(names[name], x.shape)[1:]) for name, x in w.items()}


def _lora_product(x: jax.Array, w: dict[str, jax.Array], product: Callable) -> jax.Array:
    """Return ``x W``, or ``x W + (x a) b`` with a LoRA, where ``product`` multiplies matrices."""
    y = product(x, w["kernel"])
    return y + product(product(x, w["a"]), w["b"]) if "a" in w else y


class Blocks(NamedTuple):
    """Blocks of rows, each of one expert, and the number of rounds that compute them.

    Attributes:
      number: number of blocks, a multiple of ``rounds``.
      size: rows of each block.
      rounds: number of rounds. Each round copies a kernel for each of its ``number / rounds``
        blocks.
    """

    number: int
    size: int
    rounds: int

    @property
    def rows(self) -> int:
        return self.number * self.size


def expert_blocks(assignments: int, experts: int) -> Blocks:
    """Return blocks that suffice for any distribution of assignments over experts.

    The last block of each expert may be partly empty.

    An average expert fills 32 blocks, so that one row in 33 is empty. The blocks are computed in 33
    rounds of E blocks. If the average expert gets fewer than 128 assignments, it fills two blocks,
    and up to a third of the rows are empty. In this case, reading the kernels for more blocks would
    take longer than computing empty rows. TPUs have a product of ragged groups, which has no empty
    rows.

    Args:
      assignments: number of assignments of a token to an expert.
      experts: number of experts.

    Example:
      >>> expert_blocks(16384, 8)  # 8192 tokens of a Mixtral
      Blocks(number=264, size=64, rounds=33)
      >>> 1 - 16384 / expert_blocks(16384, 8).rows < 0.05
      True
    """
    if current_platform() == "tpu":
        return Blocks(assignments, 1, 1)
    many = assignments >= FEW * experts
    size = -(-assignments // ((32 if many else 2) * experts))
    number = (assignments + min(assignments, experts) * (size - 1)) // size
    rounds = -(-number // experts) if many else 1
    return Blocks(-(-number // rounds) * rounds, size, rounds)


def expert_rows(assignments: int, experts: int, capacity: float = 0.0) -> int:
    """Return the number of rows that a device computes in each product of all experts.

    Args:
      assignments: number of assignments of a token to an expert, for the tokens that the device
        computes at once.
      experts: number of experts.
      capacity: as in `Experts`; 0: no token is dropped.

    Returns:
      The number of rows, including empty rows.

    Example:
      >>> expert_rows(16384, 8), expert_rows(16384, 8, capacity=1.25)
      (16896, 20480)
    """
    if capacity:
        return experts * expert_room(assignments, experts, capacity)
    return expert_blocks(assignments, experts).rows


def expert_room(assignments: int, experts: int, capacity: float) -> int:
    """Return the maximum number of assignments that an expert takes on one device."""
    return math.ceil(capacity * assignments / experts)


class _Routing(NamedTuple):
    """How tokens are sent to experts (see `Experts`); the mesh axis ``over`` shards experts."""

    active: int
    normed: bool
    capacity: float
    over: str | None


def _gated_units(activation: Callable, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(gate) * up


def _clamped(limit: float, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jnp.clip(up, -limit, limit) + 1) * quick_gelu(jnp.minimum(gate, limit))


def _mixed(
    routing: _Routing, units_of: Callable, x_ND, probs_NE, kernels: dict[str, dict[str, jax.Array]]
):
    """Return ``(output of the active experts [1, N, D], assignments of each expert [1, E])``.

    If the device has only a part of the units of ``mlp``, the output is a partial sum. The counts
    are over the tokens of one device.
    """
    gates_NX, chosen_NX = jax.lax.top_k(probs_NE, routing.active)
    if routing.normed:
        gates_NX = gates_NX / gates_NX.sum(-1, keepdims=True)
    experts = probs_NE.shape[1]
    chosen_A = chosen_NX.reshape(-1)
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
        y_RO = _lora_product(x, kernels[name], grouped)
        bias_EO = kernels[name].get("bias")
        if bias_EO is None:
            return y_RO
        # Add to each row the bias of its expert.
        return y_RO + grouped(jnp.ones_like(x[:, :1]), bias_EO[:, None])

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
    """Return ``(number of rows, row of each assignment, product of rows with kernels)``.

    The assignments are in the order of their experts.
    """
    taken = expert_room(len(chosen_A), len(counts_E), routing.capacity)
    total = taken * len(counts_E)
    # The index of each assignment within its expert.
    number_A = jnp.arange(len(chosen_A)) - (jnp.cumsum(counts_E) - counts_E)[chosen_A]
    row_A = jnp.where(
        number_A < taken, taken * chosen_A + number_A, total + jnp.arange(len(chosen_A))
    )

    def grouped(x_RI, w_EIO):
        y_ECO = jnp.einsum("eci,eio->eco", x_RI.reshape(len(w_EIO), -1, x_RI.shape[1]), w_EIO)
        return y_ECO.reshape(len(x_RI), -1)

    return total, row_A, grouped


def _sent(routing: _Routing, x_RD: jax.Array, experts: int) -> jax.Array:
    """Send each device the rows of the experts that it holds."""
    if routing.over is None:
        return x_RD
    x_ECD = x_RD.reshape(experts, -1, x_RD.shape[1])
    return jax.lax.all_to_all(x_ECD, routing.over, 0, 1, tiled=True).reshape(x_RD.shape)


def _returned(routing: _Routing, y_RD: jax.Array, experts: int) -> jax.Array:
    """Invert `_sent`."""
    if routing.over is None:
        return y_RD
    own = experts // jax.lax.axis_size(routing.over)
    y_ECD = y_RD.reshape(own, -1, y_RD.shape[1])
    return jax.lax.all_to_all(y_ECD, routing.over, 1, 0, tiled=True).reshape(y_RD.shape)


def _by_blocks(
    chosen_A: jax.Array, counts_E: jax.Array, wide: DTypeLike
) -> tuple[int, jax.Array, Callable]:
    """`_by_capacity` without a capacity: the rows of each expert begin with a new block.

    No assignment is dropped.
    """
    shape = expert_blocks(len(chosen_A), len(counts_E))
    end_E = jnp.cumsum(-(-counts_E // shape.size))  # in blocks
    begin_E = jnp.concatenate([jnp.zeros_like(end_E[:1]), end_E[:-1]])
    # The number of empty rows before the first row of each expert.
    empty_E = shape.size * begin_E - (jnp.cumsum(counts_E) - counts_E)
    row_A = jnp.arange(len(chosen_A)) + empty_E[chosen_A]
    expert_S = (jnp.arange(shape.number)[:, None] >= end_E[None, :-1]).sum(1)

    def grouped(x_RI, w_EIO):
        if current_platform() == "tpu":
            return jax.lax.ragged_dot(x_RI, w_EIO, counts_E)
        return _of_blocks(shape, expert_S, x_RI, w_EIO, wide)

    return shape.rows, row_A, grouped


def _of_blocks(
    shape: Blocks, expert_S: jax.Array, x_RI: jax.Array, w_EIO: jax.Array, wide: DTypeLike
) -> jax.Array:
    """Return the product of each block with the kernel of its expert.

    Gradients of kernels are added in the dtype ``wide``.
    """
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
def _adding(x: jax.Array, loss: jax.Array) -> jax.Array:
    """Return ``x``, and add ``loss`` to the differentiated function.

    The gradient of ``loss`` is one, independent of the gradient of ``x``.
    """
    return x


def _adding_forward(x, loss):
    return x, None


def _adding_backward(_, dx):
    return dx, jnp.ones((), jnp.promote_types(dx.dtype, jnp.float32))


_adding.defvjp(_adding_forward, _adding_backward)

MIXTURES.add("Experts", Experts)
MIXTURES.add("expert_rows", expert_rows)
