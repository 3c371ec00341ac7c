"""How do the last hidden states become logits, and how do logits become a loss?

Shape suffixes: B batch, T positions, S positions of a piece, D embed, V vocab, G groups of samples,
N rows of a matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, Tree
from jaxgrow.models.attention import FUSED_OPERATIONS
from jaxgrow.models.config import Inputs
from jaxgrow.models.modules import Linear
from jaxgrow.sharding import (
    batch_parts,
    current_platform,
    flatten_features,
    gather_samples,
    group_samples,
    sequence_parts,
    split_groups,
    split_sequences,
    ungroup_samples,
)

# The number of positions on a device for which logits over the vocabulary exist at the same time
# when only a loss is computed. On a CPU, a small piece stays in the caches. An accelerator reads
# and writes the gradient of the head once for each piece, so large pieces are faster.
SCORED = 1024
SCORED_BY_ACCELERATORS = 4096


def class_logits(
    x: jax.Array,
    classes: int,
    kernel_init: Initializer,
    name: str = "classifier",
    bias: bool = True,
    axis: str = "embed",
) -> jax.Array:
    """Return the logits of classes, ``x W + b``, [.., classes], in float32 or better.

    Call it inside a compact module, which gets the kernel as ``name``.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    axes = (axis + READ, "classes")
    shape = (x.shape[-1], classes)
    return Linear(axes, shape, 1, kernel_init, dtype, bias, name=name)(x.astype(dtype))


def last_tokens(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return ``(tokens [B, T], position of the last token [B])``.

    Args:
      inputs: tokens [B, T], or ``{"tokens": .., "lengths": [B]}``, where tokens after the lengths
        are padding.
    """
    if not isinstance(inputs, Mapping):
        inputs = {"tokens": inputs}
    tokens_BT = inputs["tokens"]
    if (lengths_B := inputs.get("lengths")) is not None:
        return tokens_BT, lengths_B - 1
    return tokens_BT, jnp.full(len(tokens_BT), tokens_BT.shape[1] - 1)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """Apply logit soft-capping: ``c tanh(x / c)``. A cap of 0 returns ``x``."""
    return cap * jnp.tanh(x / cap) if cap else x


@jax.named_scope("head")
def vocabulary_logits(
    x_BTD: jax.Array, head_DV: jax.Array, dtype: DTypeLike, cap: float = 0.0
) -> jax.Array:
    """Return ``x W`` in float32 or better, as one product of two matrices (see `Linear`)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    logits_NV = jnp.matmul(
        flatten_features(x_BTD), head_DV.astype(dtype), preferred_element_type=wide
    )
    return soft_capped(logits_NV, cap).reshape(*x_BTD.shape[:-1], head_DV.shape[1])


def vocabulary_loss(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    dtype: DTypeLike,
    bias_V: jax.Array | None = None,
    cap: float = 0.0,
    positions: int = 0,
    weights_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return ``(mean cross-entropy of the targets, accuracy)`` of the logits ``x W + b``, `soft_capped`.

    The accuracy is the share of targets that have the greatest logit.

    Logits exist for only ``positions`` positions on a device at a time. The gradients of ``x``,
    ``W`` and ``b`` are computed from the same logits. This takes the same three products as
    computing all logits at once, but only a fraction of the memory. The products for the gradients
    are also in ``dtype``. The result equals the loss from all logits, up to the rounding of sums.
    In a sharded batch, each shard computes its own sums, and these are added once at the end.

    Args:
      x_BTD: final hidden states.
      head_DV: kernel of the head.
      targets_BT: target tokens.
      dtype: dtype of the products.
      bias_V: bias of the head; None: zeros.
      cap: soft cap of the logits; 0: none.
      positions: positions on a device whose logits exist at once; 0: the number from `logit_positions`.
      weights_BT: weight of each target in both means; None: 1. They are not differentiated.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    bias_V = jnp.zeros(head_DV.shape[1], wide) if bias_V is None else bias_V.astype(wide)
    given = targets_BT if weights_BT is None else (targets_BT, weights_BT.astype(wide))
    return _vocabulary_loss(x_BTD, head_DV, bias_V, given, jnp.dtype(dtype), cap, positions)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
@jax.named_scope("head")
def _vocabulary_loss(x_BTD, head_DV, bias_V, given, dtype, cap, positions):
    cast_DV = gather_samples(head_DV.astype(dtype), ("embed", "vocab"))

    def piece(total, part):
        x_BSD, of_BS, *weights = part
        scored = _scored(x_BSD, of_BS, cast_DV, bias_V, dtype, cap)
        return jax.tree.map(jnp.add, total, _piece_sums(scored, weights, bias_V.dtype)), None

    zero = jnp.zeros((), bias_V.dtype)
    given = jax.tree.leaves(given)
    (loss, right), _ = _in_pieces(piece, (zero, zero), (x_BTD, *given), positions)
    count = _count(*given)
    return loss / count, right / count


def _piece_sums(scored, weights, dtype):
    """Return the sums of the losses and of the right targets of a piece, from `_scored`."""
    _, _, _, (loss_BS, right_BS) = scored
    for weights_BS in weights:
        loss_BS, right_BS = loss_BS * weights_BS, right_BS * weights_BS
    return loss_BS.sum(), right_BS.sum(dtype=dtype)


def weighted_mean(values: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return the mean of ``values`` with these weights; None: 1. It is 0 if all weights are 0."""
    return values.mean() if weights is None else (values * weights).sum() / _count(values, weights)


def _count(targets_BT, weights_BT=None):
    """Return the sum of the weights of the targets, and a positive number if it is 0."""
    if weights_BT is None:
        return targets_BT.size
    return jnp.maximum(weights_BT.sum(), jnp.finfo(weights_BT.dtype).tiny)


@jax.named_scope("head")
def vocabulary_scores(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    dtype: DTypeLike,
    bias_V: jax.Array | None = None,
    cap: float = 0.0,
    positions: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Return ``(cross-entropy, whether the target has the greatest logit)`` per position, [B, T].

    These are the values that `vocabulary_loss` averages. The arguments are the same.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    bias_V = jnp.zeros(head_DV.shape[1], wide) if bias_V is None else bias_V.astype(wide)
    cast_DV = gather_samples(head_DV.astype(dtype), ("embed", "vocab"))

    def piece(_, part):
        x_BSD, of_BS = part
        _, _, _, each_BS = _scored(x_BSD, of_BS, cast_DV, bias_V, dtype, cap)
        return None, each_BS

    return _in_pieces(piece, None, (x_BTD, targets_BT), positions)[1]


def token_logits_or_loss(
    x_BTD,
    head_DV,
    targets_BT,
    dtype,
    bias_V=None,
    *,
    each: bool = False,
    cap: float = 0.0,
    positions: int = 0,
    weights_BT=None,
):
    """Return logits of tokens, or with targets the loss.

    The loss is `vocabulary_loss`, or with ``each`` the values per position of `vocabulary_scores`,
    without weights.
    """
    if targets_BT is not None:
        if each:
            return vocabulary_scores(x_BTD, head_DV, targets_BT, dtype, bias_V, cap, positions)
        how = bias_V, cap, positions, weights_BT
        return vocabulary_loss(x_BTD, head_DV, targets_BT, dtype, *how)
    logits_BTV = vocabulary_logits(x_BTD, head_DV, dtype)
    return soft_capped(logits_BTV if bias_V is None else logits_BTV + bias_V[None, None], cap)


def _scored(x_BSD, targets_BS, head_DV, bias_V, dtype, cap):
    """Return the logits of a piece and their losses.

    The result is ``(logits, log of the sum of their exponentials, one-hot targets, (loss of each
    position, whether its target has the greatest logit))``.
    """
    logits_BSV = vocabulary_logits(x_BSD, head_DV, dtype) + jnp.broadcast_to(
        bias_V, (1, 1, len(bias_V))
    )
    logits_BSV = soft_capped(logits_BSV, cap)
    chosen_BSV = jnp.arange(len(bias_V))[None, None] == targets_BS[..., None]
    if current_platform() == "gpu":
        log_z_BS, target_BS, right_BS = FUSED_OPERATIONS["log sum"](
            logits_BSV, chosen_BSV, targets_BS
        )
        return logits_BSV, log_z_BS[..., None], chosen_BSV, (log_z_BS - target_BS, right_BS)
    log_z_BS1 = jax.nn.logsumexp(logits_BSV, axis=-1, keepdims=True)
    loss_BS = log_z_BS1[..., 0] - jnp.where(chosen_BSV, logits_BSV, 0).sum(-1)
    return logits_BSV, log_z_BS1, chosen_BSV, (loss_BS, logits_BSV.argmax(-1) == targets_BS)


class _Needed(NamedTuple):
    """Whether each gradient is computed. The gradients of frozen parameters are not needed."""

    x: bool
    head: bool
    bias: bool


@jax.named_scope("head")
def _loss_forward(x_BTD, head_DV, bias_V, given, dtype, cap, positions):
    needed = _Needed(x_BTD.perturbed, head_DV.perturbed, bias_V.perturbed)
    x_BTD = x_BTD.value
    head_DV = head_DV.value
    bias_V = bias_V.value
    given = [leaf.value for leaf in jax.tree.leaves(given)]
    groups = batch_parts(len(x_BTD))
    wide = jnp.promote_types(dtype, jnp.float32)
    cast_DV = gather_samples(head_DV.astype(dtype), ("embed", "vocab"))

    def piece(total, part):
        x_BSD, targets_BS, *weights = part
        scored = _scored(x_BSD, targets_BS, cast_DV, bias_V, dtype, cap)
        sums = _piece_sums(scored, weights, wide)
        slope_BSV = _logit_slope(scored, cap)
        for weights_BS in weights:
            slope_BSV = slope_BSV * weights_BS[..., None]
        back_BSD, *others = _piece_gradients(x_BSD, slope_BSV, cast_DV, dtype, needed)
        return jax.tree.map(jnp.add, total, (sums, *others)), back_BSD

    def zeros(*shape):
        return split_groups(jnp.zeros((groups * sequence_parts(x_BTD.shape[1]), *shape), wide))

    zero = jnp.zeros((), wide)
    begin = (
        (zero, zero),
        zeros(*head_DV.shape) if needed.head else None,
        zeros(len(bias_V)) if needed.bias else None,
    )
    ((loss, right), head_GDV, bias_GV), back_BTD = _in_pieces(
        piece, begin, (x_BTD, *given), positions
    )
    head = None if head_GDV is None else head_GDV.sum(0).astype(head_DV.dtype)
    bias = None if bias_GV is None else bias_GV.sum(0).astype(bias_V.dtype)
    count = _count(*given)
    return (loss / count, right / count), ((back_BTD, head, bias), count)


def _logit_slope(scored, cap):
    """Return the derivative of the summed loss by the uncapped logits, from `_scored`."""
    logits_BSV, log_z_BS1, chosen_BSV, _ = scored
    slope_BSV = jnp.exp(logits_BSV - log_z_BS1) - chosen_BSV
    return slope_BSV * (1 - jnp.square(logits_BSV / cap)) if cap else slope_BSV


def _piece_gradients(x_BSD, slope_BSV, head_DV, dtype, needed: _Needed):
    """Return the gradients of one piece with respect to its inputs, the head and the bias.

    A gradient that is not needed is None. The gradients of the head and the bias have a leading
    axis of groups.
    """
    wide = slope_BSV.dtype
    rows_GNV = group_samples(slope_BSV.astype(dtype))
    back_BSD = head_GDV = bias_GV = None
    if needed.x:
        back_GND = jnp.einsum("gnv,dv->gnd", rows_GNV, head_DV, preferred_element_type=wide)
        back_BSD = ungroup_samples(back_GND.astype(x_BSD.dtype), x_BSD.shape)
    if needed.head:
        x_GND = group_samples(x_BSD.astype(dtype))
        head_GDV = jnp.einsum("gnd,gnv->gdv", x_GND, rows_GNV, preferred_element_type=wide)
    if needed.bias:
        bias_GV = group_samples(slope_BSV).sum(1)
    return back_BSD, head_GDV, bias_GV


@jax.named_scope("head")
def _loss_backward(dtype, cap, positions, saved, cotangents):
    loss, _ = cotangents  # the accuracy has no gradient
    if isinstance(loss, SymbolicZero):
        return None, None, None, None
    gradients, count = saved
    return (*(None if g is None else (g * (loss / count)).astype(g.dtype) for g in gradients), None)


_vocabulary_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def logit_positions() -> int:
    """Return the default number of positions on a device whose logits exist at once.

    Call it in traced code, because it depends on the platform of the program.
    """
    return SCORED if current_platform() == "cpu" else SCORED_BY_ACCELERATORS


def _in_pieces(
    function: Callable, total: Tree, sequences: Sequence[jax.Array], positions: int
) -> tuple[Tree, Tree]:
    """Run `jax.lax.scan` over pieces of the sequences [B, T, ..].

    Args:
      function: function of the total and a piece. It returns the new total and arrays of the
        positions of the piece, or None.
      total: the initial total.
      sequences: arrays [B, T, ..].
      positions: positions of a piece on each device; 0: the number from `logit_positions`. The last piece
        may be shorter.
    """
    samples, length = sequences[0].shape[:2]
    size = max(1, min(length, (positions or logit_positions()) * batch_parts(samples) // samples))
    parts = sequence_parts(length)
    own = length // parts
    if parts > 1:  # a piece has the same number of positions of each shard of a sequence
        size = max(n for n in range(1, min(size, own) + 1) if own % n == 0)
    whole = own // size * size * parts

    def cut(x):
        x = x[:, :whole].reshape(samples, parts, -1, size, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0).reshape(-1, samples, parts * size, *x.shape[4:])

    def joined(x):
        x = x.reshape(-1, samples, parts, size, *x.shape[3:])
        x = jnp.moveaxis(x, 0, 2).reshape(samples, whole, *x.shape[4:])
        return split_sequences(x) if parts > 1 else x

    total, each = jax.lax.scan(function, total, tuple(cut(x) for x in sequences))
    each = jax.tree.map(joined, each)
    if whole < length:
        total, last = function(total, tuple(x[:, whole:] for x in sequences))
        each = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), each, last)
    return total, each
