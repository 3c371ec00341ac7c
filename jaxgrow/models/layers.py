"""The layers that the model families share.

Shape suffixes: B batch, T positions, S positions of keys or of a piece, D embed, H heads, G
key/value heads or groups of samples, K head_dim, F mlp, V vocab, L layers, N rows of a matrix.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.custom_derivatives import SymbolicZero
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import LAYERS, READ, VALUE, named
from jaxgrow.layerdrop.execution import Kept, conditional, scaled, unbatched
from jaxgrow.models.attention import By, attention, attention_after, put_at
from jaxgrow.sharding import (
    batch_parts,
    gathered,
    parts,
    platform,
    sequence_parts,
    split_batch,
    split_groups,
    split_sequences,
)

# The number of positions on a device for which logits over the vocabulary exist at the same time
# when only a loss is computed. On a CPU, a small piece stays in the caches. An accelerator reads
# and writes the gradient of the head once for each piece, so large pieces are faster.
SCORED = 1024
SCORED_BY_ACCELERATORS = 4096


class Linear(nn.Module):
    """``y = x W + b``, with a name for every axis of ``W``.

    If leaves ``a`` and ``b`` of a LoRA are stored with the kernel (`jaxgrow.peft.lora.attach`), the
    output is ``y + (x a) b``.

    Attributes:
      axes: the axis names of the kernel. Leading axes that end in ``.in`` are contracted.
      shape: the shape of the kernel.
      contract: the number of leading axes of the kernel, and of trailing axes of ``x``, that are
        contracted.
      kernel_init: initializer of the kernel.
      dtype: dtype of activations.
      bias: whether there is a bias.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    contract: int
    kernel_init: Initializer
    dtype: DTypeLike
    bias: bool = True

    @nn.compact
    def leaves(self) -> tuple[Any, Any, Any]:
        """Return ``(kernel, bias, lora)`` in the dtype of activations.

        The kernel is [inputs, outputs], and the bias is [1, outputs] or None. ``lora`` is
        ``(a, b)`` or None.
        """
        inputs = math.prod(self.shape[: self.contract])
        kernel = self.param("kernel", named(self.kernel_init, *self.axes), self.shape)
        kernel = kernel.astype(self.dtype).reshape(inputs, -1)
        bias = lora = None
        if self.has_variable("params", "a"):
            a, b = (self.get_variable("params", name).astype(self.dtype) for name in ("a", "b"))
            lora = a.reshape(inputs, -1), b.reshape(b.shape[0], -1)
        if self.bias:
            outputs = self.axes[self.contract :]
            bias = self.param(
                "bias",
                named(nn.initializers.zeros, *outputs, role="bias"),
                self.shape[self.contract :],
            )
            bias = bias.astype(self.dtype).reshape(1, -1)
        return kernel, bias, lora

    def product(self, x) -> tuple[Any, Any]:
        """Return ``(x W [N, outputs], b [1, outputs] or None)``."""
        # Reshape to a product of two matrices: XLA then makes no transposed copies of activations
        # in the backward pass, which saves 6 % of a training step on a CPU.
        kernel, bias, lora = self.leaves()
        x_NI = x.reshape(-1, len(kernel))
        y = x_NI @ kernel
        return y if lora is None else y + x_NI @ lora[0] @ lora[1], bias

    def shaped(self, y, x):
        """Give ``y`` [N, outputs] the leading axes of ``x`` and the output axes of the kernel."""
        return y.reshape(*x.shape[: x.ndim - self.contract], *self.shape[self.contract :])

    def __call__(self, x):
        y, bias = self.product(x)
        return self.shaped(y if bias is None else y + bias, x)


def projected(linears: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    """Apply several `Linear` modules to the same input, for example for queries, keys and values.

    On GPUs, all kernels are concatenated and applied in one product, and the backward pass also has
    one product for each gradient: fewer and larger kernels. On other platforms, and for modules
    with a LoRA, each module computes its own product.
    """
    leaves = (
        [linear.leaves() for linear in linears]
        if platform() == "gpu" and parts("heads") == 1
        else []
    )
    biases = [bias for _, bias, _ in leaves if bias is not None]
    if not leaves or any(lora for _, _, lora in leaves) or len(biases) not in (0, len(linears)):
        return [linear(x) for linear in linears]
    kernel = jnp.concatenate([kernel for kernel, _, _ in leaves], 1)
    y = x.reshape(-1, len(kernel)) @ kernel
    y = y + jnp.concatenate(biases, 1) if biases else y
    each = jax.lax.split(y, [kernel.shape[1] for kernel, _, _ in leaves], 1)
    return [linear.shaped(part, x) for linear, part in zip(linears, each, strict=True)]


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
    axes, shape = (axis + READ, "classes"), (x.shape[-1], classes)
    return Linear(axes, shape, 1, kernel_init, dtype, bias, name=name)(x.astype(dtype))


def last_tokens(inputs: Any) -> tuple[jax.Array, jax.Array]:
    """Return ``(tokens [B, T], position of the last token [B])``.

    Args:
      inputs: tokens [B, T], or ``{"tokens": .., "lengths": [B]}``, where tokens after the lengths
        are padding.
    """
    tokens_BT = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    lengths = inputs.get("lengths") if isinstance(inputs, Mapping) else None
    return tokens_BT, jnp.full(
        len(tokens_BT), tokens_BT.shape[1] - 1
    ) if lengths is None else lengths - 1


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, in float32.

    ``(x - mean) / sqrt(var + eps) * scale + bias``

    Attributes:
      axis: the axis name: ``"embed"`` with its suffixes, for example ``"embed.in"`` before a tied
        head (see `jaxgrow.models.gpt2`).
      eps: added to the variance.
      dtype: dtype of the output.
      scale_init: initializer of the scale.
      bias: whether there is a bias.
      scale: whether there is a scale.
    """

    axis: str
    eps: float
    dtype: DTypeLike
    scale_init: Initializer = nn.initializers.ones
    bias: bool = True
    scale: bool = True

    @nn.compact
    def __call__(self, x):
        size = (x.shape[-1],)
        scale = bias = None
        if self.scale:
            scale = self.param("scale", named(self.scale_init, self.axis, role="norm scale"), size)
        if self.bias:
            bias = self.param(
                "bias", named(nn.initializers.zeros, self.axis, role="norm bias"), size
            )
        if platform() == "gpu" and scale is not None:
            return normed(x, scale, bias, self.eps, self.dtype, True)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        y = x if scale is None else x * jnp.broadcast_to(scale, x.shape)
        y = y if bias is None else y + jnp.broadcast_to(bias, x.shape)
        return y.astype(self.dtype)


def normed(x, scale_D, bias_D, eps: float, dtype: DTypeLike, centred: bool) -> jax.Array:
    """`LayerNorm` or `RMSNorm` with a backward pass that reads only ``x`` and the gradient.

    If JAX differentiates a norm, XLA for GPUs writes the normalised activations in float32, several
    times for each norm, and reads them back: a fifth of the memory traffic of a layer. This version
    saves only ``x`` and two numbers per position.

    Args:
      x: input, [.., D].
      scale_D: scale.
      bias_D: bias, or None.
      eps: added to the variance.
      dtype: dtype of the output.
      centred: True for `LayerNorm`, False for `RMSNorm`.
    """
    return _normed(x, scale_D, bias_D, eps, dtype, centred)  # type: ignore[return-value]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _normed(x, scale_D, bias_D, eps, dtype, centred):
    return _normed_forward(x, scale_D, bias_D, eps, dtype, centred)[0]


def _statistics(x, eps, centred):
    """Return ``(x [N, D], mean, 1 / deviation [N, 1])``, in float32 or better."""
    x_ND = x.reshape(-1, x.shape[-1]).astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_N1 = x_ND.mean(-1, keepdims=True) if centred else jnp.zeros((), x_ND.dtype)
    return x_ND, mean_N1, jax.lax.rsqrt(jnp.square(x_ND - mean_N1).mean(-1, keepdims=True) + eps)


def _normed_forward(x, scale_D, bias_D, eps, dtype, centred):
    x_ND, mean_N1, inverse_N1 = _statistics(x, eps, centred)
    y_ND = (x_ND - mean_N1) * inverse_N1 * scale_D[None]
    y_ND = y_ND if bias_D is None else y_ND + bias_D[None]
    return y_ND.astype(dtype).reshape(x.shape), (x, scale_D, bias_D, mean_N1, inverse_N1)


def _normed_backward(eps, dtype, centred, saved, slope):
    x, scale_D, bias_D, mean_N1, inverse_N1 = saved
    # The barrier makes XLA recompute the intermediate values instead of saving them.
    x, slope = jax.lax.optimization_barrier((x, slope))
    wide = inverse_N1.dtype
    z_ND = (x.reshape(-1, x.shape[-1]).astype(wide) - mean_N1) * inverse_N1
    slope_ND = slope.reshape(z_ND.shape).astype(wide)
    by_ND = slope_ND * scale_D[None]
    back_ND = by_ND - z_ND * (by_ND * z_ND).mean(-1, keepdims=True)
    if centred:
        back_ND = back_ND - by_ND.mean(-1, keepdims=True)
    bias = None if bias_D is None else slope_ND.sum(0).astype(bias_D.dtype)
    scale = (slope_ND * z_ND).sum(0).astype(scale_D.dtype)
    return (back_ND * inverse_N1).astype(x.dtype).reshape(x.shape), scale, bias


_normed.defvjp(_normed_forward, _normed_backward)


def capped(x: jax.Array, cap: float) -> jax.Array:
    """Apply logit soft-capping: ``c tanh(x / c)``. A cap of 0 returns ``x``."""
    return cap * jnp.tanh(x / cap) if cap else x


@jax.named_scope("head")
def vocabulary_logits(
    x_BTD: jax.Array, head_DV: jax.Array, dtype: DTypeLike, cap: float = 0.0
) -> jax.Array:
    """Return ``x W`` in float32 or better, as one product of two matrices (see `Linear`)."""
    embed, vocab = head_DV.shape
    wide = jnp.promote_types(dtype, jnp.float32)
    logits_NV = jnp.matmul(
        x_BTD.reshape(-1, embed), head_DV.astype(dtype), preferred_element_type=wide
    )
    return capped(logits_NV, cap).reshape(*x_BTD.shape[:-1], vocab)


def vocabulary_loss(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    dtype: DTypeLike,
    bias_V: jax.Array | None = None,
    cap: float = 0.0,
    positions: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Return ``(mean cross-entropy of the targets, accuracy)`` of the logits ``x W + b``, `capped`.

    The accuracy is the share of targets that have the greatest logit.

    Logits exist for only ``positions`` positions on a device at a time. The gradients of ``x``,
    ``W`` and ``b`` are computed from the same logits. This takes three products, as with all logits
    at once, and a fraction of the memory. The products for the gradients are also in ``dtype``. The
    result equals the loss of all logits at once, up to the rounding of sums. In a sharded batch,
    each part computes its own sums, and the parts are added once.

    Args:
      x_BTD: final hidden states.
      head_DV: kernel of the head.
      targets_BT: target tokens.
      dtype: dtype of the products.
      bias_V: bias of the head; None: zeros.
      cap: soft cap of the logits; 0: none.
      positions: positions on a device whose logits exist at once; 0: the number from `scored`.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    bias_V = jnp.zeros(head_DV.shape[1], wide) if bias_V is None else bias_V.astype(wide)
    return _vocabulary_loss(x_BTD, head_DV, bias_V, targets_BT, jnp.dtype(dtype), cap, positions)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
@jax.named_scope("head")
def _vocabulary_loss(x_BTD, head_DV, bias_V, targets_BT, dtype, cap, positions):
    cast_DV = gathered(head_DV.astype(dtype), ("embed", "vocab"))

    def piece(total, part):
        x_BSD, of_BS = part
        _, _, _, (loss_BS, right_BS) = _scored(x_BSD, of_BS, cast_DV, bias_V, dtype, cap)
        return jax.tree.map(jnp.add, total, (loss_BS.sum(), right_BS.sum(dtype=bias_V.dtype))), None

    zero = jnp.zeros((), bias_V.dtype)
    (loss, right), _ = _in_pieces(piece, (zero, zero), (x_BTD, targets_BT), positions)
    return loss / targets_BT.size, right / targets_BT.size


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
    cast_DV = gathered(head_DV.astype(dtype), ("embed", "vocab"))

    def piece(_, part):
        x_BSD, of_BS = part
        _, _, _, each_BS = _scored(x_BSD, of_BS, cast_DV, bias_V, dtype, cap)
        return None, each_BS

    return _in_pieces(piece, None, (x_BTD, targets_BT), positions)[1]


def token_head(
    x_BTD,
    head_DV,
    targets_BT,
    dtype,
    bias_V=None,
    *,
    each: bool = False,
    cap: float = 0.0,
    positions: int = 0,
):
    """Return logits of tokens, or with targets the loss.

    The loss is `vocabulary_loss`, or with ``each`` the values per position of `vocabulary_scores`.
    """
    if targets_BT is not None:
        if each:
            return vocabulary_scores(x_BTD, head_DV, targets_BT, dtype, bias_V, cap, positions)
        return vocabulary_loss(x_BTD, head_DV, targets_BT, dtype, bias_V, cap, positions)
    logits_BTV = vocabulary_logits(x_BTD, head_DV, dtype)
    return capped(logits_BTV if bias_V is None else logits_BTV + bias_V[None, None], cap)


def _scored(x_BSD, targets_BS, head_DV, bias_V, dtype, cap):
    """Return the logits of a piece and their losses.

    The result is ``(logits, log of the sum of their exponentials, one-hot targets, (loss of each
    position, whether its target has the greatest logit))``.
    """
    logits_BSV = vocabulary_logits(x_BSD, head_DV, dtype) + jnp.broadcast_to(
        bias_V, (1, 1, len(bias_V))
    )
    logits_BSV = capped(logits_BSV, cap)
    chosen_BSV = jnp.arange(len(bias_V))[None, None] == targets_BS[..., None]
    if platform() == "gpu":
        log_z_BS, target_BS, right_BS = _in_one_pass(logits_BSV, chosen_BSV, targets_BS)
        return logits_BSV, log_z_BS[..., None], chosen_BSV, (log_z_BS - target_BS, right_BS)
    log_z_BS1 = jax.nn.logsumexp(logits_BSV, axis=-1, keepdims=True)
    loss_BS = log_z_BS1[..., 0] - jnp.where(chosen_BSV, logits_BSV, 0).sum(-1)
    return logits_BSV, log_z_BS1, chosen_BSV, (loss_BS, logits_BSV.argmax(-1) == targets_BS)


def _in_one_pass(logits_BSV, chosen_BSV, targets_BS):
    """Return the values of the loss from one pass over the logits.

    They are ``(log of the sum of exponentials, logit of the target, whether the target is right)``.
    The target is right if it is the first of the greatest logits. The logits are read only once:
    the sum of exponentials is kept relative to the greatest logit so far, and is rescaled when that
    maximum grows (Milakov and Gimelshein, 2018). GPUs are limited by memory here. On a CPU, the
    additional exponentials would take longer.
    """
    dtype, vocab = logits_BSV.dtype, logits_BSV.shape[-1]
    places_BSV = jax.lax.broadcasted_iota(jnp.int32, logits_BSV.shape, 2)
    least = jnp.asarray(jnp.finfo(dtype).min, dtype)

    def join(a, b):
        (most_a, sum_a, first_a, target_a), (most_b, sum_b, first_b, target_b) = a, b
        most = jnp.maximum(most_a, most_b)
        total = sum_a * jnp.exp(most_a - most) + sum_b * jnp.exp(most_b - most)
        first_a, first_b = (
            jnp.where(m == most, first, vocab)
            for m, first in ((most_a, first_a), (most_b, first_b))
        )
        return most, total, jnp.minimum(first_a, first_b), target_a + target_b

    zero = jnp.zeros((), dtype)
    operands = (
        logits_BSV,
        jnp.ones_like(logits_BSV),
        places_BSV,
        jnp.where(chosen_BSV, logits_BSV, zero),
    )
    begin = least, zero, jnp.asarray(vocab, jnp.int32), zero
    most_BS, sum_BS, first_BS, target_BS = jax.lax.reduce(operands, begin, join, (2,))
    return most_BS + jnp.log(sum_BS), target_BS, first_BS == targets_BS


@jax.named_scope("head")
def _loss_forward(x_BTD, head_DV, bias_V, targets_BT, dtype, cap, positions):
    # Gradients that are not needed, such as the gradient of a frozen embedding, are not computed.
    asked = (x_BTD.perturbed, head_DV.perturbed, bias_V.perturbed)
    x_BTD, head_DV, bias_V, targets_BT = x_BTD.value, head_DV.value, bias_V.value, targets_BT.value
    groups, wide = batch_parts(len(x_BTD)), jnp.promote_types(dtype, jnp.float32)
    cast_DV = gathered(head_DV.astype(dtype), ("embed", "vocab"))

    def piece(total, part):
        x_BSD, targets_BS = part
        scored = _scored(x_BSD, targets_BS, cast_DV, bias_V, dtype, cap)
        logits_BSV, log_z_BS1, chosen_BSV, (loss_BS, right_BS) = scored
        sums = loss_BS.sum(), right_BS.sum(dtype=wide)
        slope_BSV = jnp.exp(logits_BSV - log_z_BS1) - chosen_BSV
        if cap:
            slope_BSV = slope_BSV * (1 - jnp.square(logits_BSV / cap))
        rows_GNV = _grouped(slope_BSV.astype(dtype), groups)
        back_BSD = head_GDV = bias_GV = None
        if asked[0]:
            back_GND = jnp.einsum("gnv,dv->gnd", rows_GNV, cast_DV, preferred_element_type=wide)
            back_BSD = _ungrouped(back_GND.astype(x_BSD.dtype), x_BSD.shape, groups)
        if asked[1]:
            x_GND = _grouped(x_BSD.astype(dtype), groups)
            head_GDV = jnp.einsum("gnd,gnv->gdv", x_GND, rows_GNV, preferred_element_type=wide)
        if asked[2]:
            bias_GV = _grouped(slope_BSV, groups).sum(1)
        return jax.tree.map(jnp.add, total, (sums, head_GDV, bias_GV)), back_BSD

    def zeros(*shape):
        return split_groups(jnp.zeros((groups * sequence_parts(x_BTD.shape[1]), *shape), wide))

    zero = jnp.zeros((), wide)
    begin = (
        (zero, zero),
        zeros(*head_DV.shape) if asked[1] else None,
        zeros(len(bias_V)) if asked[2] else None,
    )
    ((loss, right), head_GDV, bias_GV), back_BTD = _in_pieces(
        piece, begin, (x_BTD, targets_BT), positions
    )
    head = None if head_GDV is None else head_GDV.sum(0).astype(head_DV.dtype)
    bias = None if bias_GV is None else bias_GV.sum(0).astype(bias_V.dtype)
    count = targets_BT.size
    return (loss / count, right / count), ((back_BTD, head, bias), count)


@jax.named_scope("head")
def _loss_backward(dtype, cap, positions, saved, cotangents):
    loss, _ = cotangents  # the accuracy has no gradient
    if isinstance(loss, SymbolicZero):
        return None, None, None, None
    gradients, count = saved
    return (*(None if g is None else (g * (loss / count)).astype(g.dtype) for g in gradients), None)


_vocabulary_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _grouped(x_BSV: jax.Array, groups: int) -> jax.Array:
    """Reshape to [groups x parts of the sequences, N, V], so that each device has one row."""
    samples, positions, width = x_BSV.shape
    parts = sequence_parts(positions)
    if parts == 1:
        return x_BSV.reshape(groups, -1, width)
    x = x_BSV.reshape(groups, samples // groups, parts, positions // parts, width)
    return split_groups(x.swapaxes(1, 2).reshape(groups * parts, -1, width))


def _ungrouped(x_GNV: jax.Array, shape: tuple[int, ...], groups: int) -> jax.Array:
    """Invert `_grouped`."""
    samples, positions, width = shape
    parts = sequence_parts(positions)
    if parts == 1:
        return x_GNV.reshape(shape)
    x = x_GNV.reshape(groups, parts, samples // groups, positions // parts, width)
    return split_sequences(x.swapaxes(1, 2).reshape(shape))


def scored() -> int:
    """Return the default number of positions on a device whose logits exist at once.

    Call it in traced code, because it depends on the platform of the program.
    """
    return SCORED if platform() == "cpu" else SCORED_BY_ACCELERATORS


def _in_pieces(function: Callable, total: Any, sequences: Any, positions: int) -> tuple[Any, Any]:
    """Run `jax.lax.scan` over pieces of the sequences [B, T, ..].

    Args:
      function: function of the total and a piece. It returns the new total and arrays of the
        positions of the piece, or None.
      total: the initial total.
      sequences: arrays [B, T, ..].
      positions: positions of a piece on each device; 0: the number from `scored`. The last piece
        may be shorter.
    """
    samples, length = sequences[0].shape[:2]
    size = max(1, min(length, (positions or scored()) * batch_parts(samples) // samples))
    if sequence_parts(length) > 1:
        return _in_pieces_of_parts(function, total, sequences, size)
    whole = length // size * size
    cut = [x[:, :whole].reshape(samples, -1, size, *x.shape[2:]).swapaxes(0, 1) for x in sequences]
    total, each = jax.lax.scan(function, total, tuple(cut))
    each = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(samples, whole, *x.shape[3:]), each)
    if whole < length:
        total, last = function(total, tuple(x[:, whole:] for x in sequences))
        each = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), each, last)
    return total, each


def _in_pieces_of_parts(
    function: Callable, total: Any, sequences: Any, size: int
) -> tuple[Any, Any]:
    """`_in_pieces` for sharded sequences: a piece has equally many positions of each shard."""
    samples, length = sequences[0].shape[:2]
    parts = sequence_parts(length)
    own = length // parts
    size = max(n for n in range(1, min(size, own) + 1) if own % n == 0)

    def cut(x):
        x = x.reshape(samples, parts, own // size, size, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0).reshape(own // size, samples, parts * size, *x.shape[4:])

    def joined(x):
        x = x.reshape(own // size, samples, parts, size, *x.shape[3:])
        return split_sequences(jnp.moveaxis(x, 0, 2).reshape(samples, length, *x.shape[4:]))

    total, each = jax.lax.scan(function, total, tuple(cut(x) for x in sequences))
    return total, jax.tree.map(joined, each)


class RMSNorm(nn.Module):
    """RMS normalisation in float32: ``x / sqrt(mean(x^2) + eps) * scale``.

    Attributes:
      axis: the name of the last axis, as in `LayerNorm`.
      eps: added to the mean square.
      dtype: dtype of the output.
      before: names of axes before the last one over which the mean is also taken.
    """

    axis: str
    eps: float
    dtype: DTypeLike
    before: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        over = tuple(range(-1 - len(self.before), 0))
        names, shape = (*self.before, self.axis), x.shape[over[0] :]
        scale = self.param("scale", named(nn.initializers.ones, *names, role="norm scale"), shape)
        if platform() == "gpu" and not self.before:
            return normed(x, scale, None, self.eps, self.dtype, False)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x * jax.lax.rsqrt(jnp.square(x).mean(over, keepdims=True) + self.eps)
        return (x * jnp.broadcast_to(scale, x.shape)).astype(self.dtype)


# The collection and the name under which attention sows its keys and values for `run_after`. They
# are stored only if the collection is mutable.
KEPT = ("intermediates", "keys_and_values")


class SelfAttention(nn.Module):
    """Multi-head self-attention with separate query, key and value kernels.

    They are separate leaves, so that growth never has to split a leaf. The key's ``head_dim`` is
    declared as a reader: the query writes that axis, and the product of scores contracts it with
    the key.

    Attributes:
      embed: hidden size.
      heads: number of heads.
      head_dim: size of each head.
      causal: whether a position sees only itself and earlier positions.
      kernel_init: initializer of the query, key and value kernels.
      out_init: initializer of the output kernel.
      dtype: dtype of activations.
      by: the attention kernel (`jaxgrow.models.attention`).
    """

    embed: int
    heads: int
    head_dim: int
    causal: bool
    kernel_init: Initializer
    out_init: Callable
    dtype: DTypeLike
    by: By = "auto"

    @nn.compact
    def __call__(self, x_BTD, mask_BS=None, past=None, asking_BTD=None):
        """Apply attention.

        Args:
          x_BTD: input.
          mask_BS: True for the keys that are visible; None: all of them.
          past: the KV cache of this layer, as in `run_after`.
          asking_BTD: input of the query kernel; None: ``x_BTD``.
        """
        shape = (self.embed, self.heads, self.head_dim)

        def project(name, *outputs):
            return Linear(
                ("embed" + READ, *outputs), shape, 1, self.kernel_init, self.dtype, name=name
            )

        query = project("query", "heads", "head_dim")
        key = project("key", "heads", "head_dim" + READ)
        value = project("value", "heads", "head_dim" + VALUE)
        if asking_BTD is None:
            q_BTHK, k_BTHK, v_BTHK = projected((query, key, value), x_BTD)
        else:
            q_BTHK, (k_BTHK, v_BTHK) = query(asking_BTD), projected((key, value), x_BTD)
        self.sow(*KEPT, (k_BTHK, v_BTHK))
        if past is None:
            y_BTHK = attention(
                q_BTHK, k_BTHK, v_BTHK, causal=self.causal, mask_BS=mask_BS, by=self.by
            )
        else:
            y_BTHK = attention_after(past, q_BTHK, k_BTHK, v_BTHK)
        axes = ("heads" + READ, "head_dim" + READ, "embed")
        out_shape = (self.heads, self.head_dim, self.embed)
        return Linear(axes, out_shape, 2, self.out_init, self.dtype, name="out")(y_BTHK)


def activated(activation: Callable, x: jax.Array, up: Linear, gate: Linear | None) -> jax.Array:
    """Return ``activation(up(x))``, or ``activation(gate(x)) * up(x)`` with a gate.

    On GPUs, the backward pass recomputes biases and activation from the products. Otherwise XLA
    would save a second array of the same size, and writing and reading it takes longer than
    computing it.
    """
    if platform() != "gpu":
        return activation(gate(x)) * up(x) if gate else activation(up(x))

    @jax.checkpoint
    def inner(up, gate):
        y, z = (None if p is None else p[0] if p[1] is None else p[0] + p[1] for p in (up, gate))
        return activation(y) if z is None else activation(z) * y

    return up.shaped(inner(up.product(x), gate.product(x) if gate else None), x)


class MLP(nn.Module):
    """``down(activation(up(x)))``, or gated ``down(activation(gate(x)) * up(x))`` (Shazeer, 2020).

    Attributes:
      embed: hidden size.
      mlp: number of units.
      kernel_init: initializer of the kernels ``up`` and ``gate``.
      out_init: initializer of the kernel ``down``.
      dtype: dtype of activations.
      activation: activation function.
      axes: names of the outer and the inner axis.
      gated: whether there is a gate.
      bias: whether the kernels have biases.
    """

    embed: int
    mlp: int
    kernel_init: Initializer
    out_init: Callable
    dtype: DTypeLike
    activation: Callable = jax.nn.gelu  # the tanh approximation
    axes: tuple[str, str] = ("embed", "mlp")
    gated: bool = False
    bias: bool = True

    @nn.compact
    def __call__(self, x_BTD):
        (outer, inner), embed, mlp = self.axes, self.embed, self.mlp

        def inwards(name):
            axes, shape = (outer + READ, inner), (embed, mlp)
            return Linear(axes, shape, 1, self.kernel_init, self.dtype, self.bias, name=name)

        h_BTF = activated(
            self.activation, x_BTD, inwards("up"), inwards("gate") if self.gated else None
        )
        axes, shape = (inner + READ, outer), (mlp, embed)
        return Linear(axes, shape, 1, self.out_init, self.dtype, self.bias, name="down")(h_BTF)


def quick_gelu(x: jax.Array) -> jax.Array:
    """The approximation of GELU in CLIP: ``x sigmoid(1.702 x)``."""
    return x * jax.nn.sigmoid(1.702 * x)


def layer_scaled(module: nn.Module, name: str, y_BTD: jax.Array, init: float) -> jax.Array:
    """Scale each unit of a sublayer's output by a learned factor (LayerScale).

    See Touvron et al. (2021). Call it inside the compact ``module``, which gets the factors as
    ``name``.

    Args:
      module: the calling module.
      name: name of the parameter.
      y_BTD: output of the sublayer.
      init: initial value of each factor.
    """
    size_D = module.param(
        name, named(nn.initializers.constant(init), "embed", role="scale"), (y_BTD.shape[-1],)
    )
    return size_D.astype(y_BTD.dtype).reshape(1, 1, -1) * y_BTD


# Flax checks the shapes of parameters at each call of a model. With `jit`, the initialisation is
# traced only once for each block.
@partial(jax.jit, static_argnums=(0, 2), static_argnames="axis")
def stacked_init(block: nn.Module, key: jax.Array, layers: int, *args, axis: str = LAYERS) -> Any:
    """Return the parameters of ``layers`` blocks, stacked on a leading ``axis``.

    Only an axis of layers grows and drops as layers.
    """
    params = jax.vmap(lambda k: block.init(k, *args)["params"])(jax.random.split(key, layers))
    return meta.add_axis(params, 0, {nn.PARTITION_NAME: axis})


def stacked(
    module: nn.Module, name: str, block: nn.Module, layers: int, *args, axis: str = LAYERS
) -> Any:
    """Return the stacked blocks of a compact module, as `stacked_init` makes them.

    The module gets them as the parameter ``name``. If a LoRA is stored with the kernels of the
    blocks (`jaxgrow.peft.lora.attach`), it is included.
    """
    given = flatten_dict(module.get_variable("params", name, {}))
    beside = {path: x for path, x in given.items() if path[-1] in ("a", "b")}

    def init(key: jax.Array) -> Any:
        fresh = stacked_init(block, key, layers, *args, axis=axis)
        return unflatten_dict(flatten_dict(fresh) | beside) if beside else fresh

    return module.param(name, init)


@struct.dataclass
class KeptTokens:
    """The tokens that pass through the layers ``begin .. end - 1``.

    Attributes:
      places_BS: positions of these tokens, int32, ascending.
      begin: the first of the layers.
      end: the layer after the last one.
    """

    places_BS: jax.Array
    begin: int = struct.field(pytree_node=False)
    end: int = struct.field(pytree_node=False)


def run_parts(
    apply: Callable,
    stacked: Any,
    x_BTD: jax.Array,
    *,
    kept_tokens: KeptTokens | None = None,
    apply_kept_tokens: Callable | None = None,
    frozen: int = 0,
    **options: Any,
) -> tuple[Any, Any]:
    """Call `run_stack` for each part of the stack that needs its own treatment.

    The stack is cut where tokens leave the layers or rejoin them, and above the bottom ``frozen``
    layers.

    Args:
      apply: the block, as in `run_stack`.
      stacked: parameters of the blocks, stacked.
      x_BTD: input of the first block.
      kept_tokens: the tokens that pass through some of the layers; None: all tokens pass.
      apply_kept_tokens: replaces ``apply`` in the layers of ``kept_tokens`` if a block must know
        the positions of its tokens.
      frozen: number of frozen layers at the bottom.
      options: further arguments of `run_stack`.
    """
    layers = len(jax.tree.leaves(stacked)[0])
    begin, end = (kept_tokens.begin, kept_tokens.end) if kept_tokens else (0, 0)
    cuts = sorted({0, min(frozen, layers), begin, end, layers})
    observed = []
    for start, stop in itertools.pairwise(cuts):
        part = (
            stacked
            if stop - start == layers
            else jax.tree.map(lambda w, a=start, b=stop: w[a:b], stacked)
        )
        if stop <= frozen:
            part = jax.lax.stop_gradient(part)
        if kept_tokens is not None and begin <= start < end:
            rows = jnp.arange(len(x_BTD))[:, None]
            y, own = run_stack(
                apply_kept_tokens or apply, part, x_BTD[rows, kept_tokens.places_BS], **options
            )
            x_BTD = x_BTD.at[rows, kept_tokens.places_BS].set(
                y, unique_indices=True, indices_are_sorted=True
            )
        else:
            x_BTD, own = run_stack(apply, part, x_BTD, **options)
        observed.append(own)
    return x_BTD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *observed)


@struct.dataclass
class Past:
    """The KV cache: keys and values of the tokens that a model has read.

    ``Past()`` is an empty cache.

    Attributes:
      keys: keys of every layer, [L, B, S, G, K], with G key/value heads.
      values: values of every layer, of the same shape.
      lengths_B: the number of valid positions of each row, int32. Entries at later positions are
        undefined.
    """

    keys: Any = None
    values: Any = None
    lengths_B: Any = None

    def places_BT(self, length: int) -> jax.Array:
        """Return the positions of the next ``length`` tokens; [1, T] if the cache is empty."""
        first = jnp.zeros(1, jnp.int32) if self.lengths_B is None else self.lengths_B
        return first[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    @property
    def places(self) -> int:
        """The number of positions in the cache, S."""
        return 0 if self.keys is None else self.keys.shape[2]

    def with_room(self, places: int) -> "Past":
        """Return the same cache, padded to ``places`` positions."""
        more = [(0, places - self.places) if axis == 2 else (0, 0) for axis in range(5)]
        return Past(jnp.pad(self.keys, more), jnp.pad(self.values, more), self.lengths_B)

    def and_then(self, new: "Past") -> "Past":
        """Return the cache with the tokens of ``new`` appended. There must be room for them."""
        put = jax.vmap(put_at, (0, 0, None))  # over the layers
        keys, values = (
            put(a, b, self.lengths_B) for a, b in ((self.keys, new.keys), (self.values, new.values))
        )
        return Past(keys, values, self.lengths_B + new.lengths_B)


def run_after(
    apply: Callable,
    stacked: Any,
    x_BTD: jax.Array,
    past: Past,
    last_B: jax.Array,
    *,
    scan: bool = True,
) -> tuple[jax.Array, Past]:
    """Run ``x`` through the blocks after the tokens in a KV cache.

    Args:
      apply: the block: ``apply(w, x, past=.., mutable=..) -> (x, variables)``. ``past`` is
        ``((keys, values) of the layer, positions [B, T])``. For an empty cache it is None; then
        attention sees the full sequence and may use any kernel.
      stacked: parameters of the blocks, stacked.
      x_BTD: embeddings of the new tokens.
      past: the cache.
      last_B: index of each row's last token among the new ones.
      scan: whether the layers run in one scan.

    Returns:
      ``(output of each row's last token [B, 1, D], the cache of only the new tokens)``.
    """
    places_BT = past.places_BT(x_BTD.shape[1])

    def body(x, inputs):
        w, before = inputs
        y, left = apply(w, split_batch(x), past=before and (before, places_BT), mutable=KEPT[0])
        (kept,) = left[KEPT[0]]["attention"][KEPT[1]]
        return y, kept

    before = (past.keys, past.values) if past.places else None
    x_BTD, (keys, values) = jax.lax.scan(body, x_BTD, (stacked, before), unroll=not scan)
    return x_BTD[jnp.arange(len(x_BTD)), last_B][:, None], Past(keys, values, last_B + 1)


Remat: TypeAlias = Literal["none", "products", "projections", "full"]
# A function of a layer's input and output. Its result is returned with the model's output.
Observe: TypeAlias = Callable[[jax.Array, jax.Array], Any]


def products(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that saves the results of matrix products.

    It includes the products of experts and the results of attention kernels.
    """
    return primitive.name in ("dot_general", "pallas_call") or primitive.name.startswith(
        ("ragged_dot", "dot_product_attention_fwd")
    )


POLICIES = {
    "auto": products,
    "products": products,
    "projections": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _rows(of: jax.Array, a: jax.Array | np.ndarray) -> jax.Array:
    return (
        jnp.asarray(a)
        .at[of]
        .get(unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")
    )


def run_stack(
    apply: Callable,
    stacked: Any,
    x: jax.Array,
    *,
    remat: Literal["auto", Remat],
    scan: bool = True,
    observe: Observe | None = None,
    kept: Kept | None = None,
) -> tuple[Any, Any]:
    """Run ``x`` through the blocks, one after the other.

    The blocks run in one scan, so that compile time does not grow with depth.

    ``remat`` sets the values that each block saves for the backward pass, which recomputes the
    others:

    - ``"products"``: the results of matrix products. The operations between them take less time to
      compute than to write and read.
    - ``"projections"``: the results of products with weights only, so that attention is recomputed
      (`docs/results/speed.md`).
    - ``"full"``: only the block's input.
    - ``"none"``: all values, so that nothing is recomputed.

    Args:
      apply: a block, ``apply(w, x) -> x``; with ``kept.scaling == "sublayer"``,
        ``apply(w, x, scale)``.
      stacked: parameters of the blocks, stacked.
      x: input of the first block.
      remat: see above.
      scan: False unrolls the scan, except for layers behind conditionals.
      observe: function of each block's input and output.
      kept: the blocks that run; None: all. Blocks that do not run cost only their zero gradients.

    Returns:
      ``(output, stacked results of observe, or None)``.
    """
    kept = kept or Kept(None)
    if observe is not None and kept.layers is not None:
        raise ValueError(
            "observe needs a pass through all layers, but kept drops some: leave out kept"
        )
    layers, scale = kept.layers, kept.scale
    if layers is not None:
        layers = unbatched(layers)
        if layers.dtype != bool:
            # The weights of the kept layers are copied once, which costs less than adding into the
            # gradients of the full stack at every layer. Indices are in order and unique, so as
            # many indices as layers keep all layers.
            if len(layers) < len(jax.tree.leaves(stacked)[0]):
                stacked, scale = jax.tree.map(partial(_rows, layers), (stacked, scale))
            layers = None
    layer = scaled(lambda w, x, *scale: split_sequences(apply(w, split_sequences(x), *scale)), kept)
    unrolled = not scan and layers is None
    if remat != "none":
        layer = jax.checkpoint(layer, prevent_cse=unrolled, policy=POLICIES[remat])
    if layers is not None:
        return conditional(lambda inputs, x: layer(inputs[0], x, inputs[1]))(
            layers, (stacked, scale), x
        ), None

    def body(x, inputs):
        w, scale = inputs
        y = layer(w, x, scale)
        return y, observe and observe(x, y)

    return (
        _unrolled(body, x, (stacked, scale))
        if unrolled
        else jax.lax.scan(body, x, (stacked, scale))
    )


def _unrolled(body: Callable, x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
    """`jax.lax.scan` without a loop.

    The gradients of the stacked inputs are concatenated once, because the transpose of
    `jax.lax.split` is a concatenation. The transpose of indexing would be a full stack of zeros for
    each layer.
    """
    leaves, tree = jax.tree.flatten(inputs)
    layers = len(leaves[0])
    parts = [[part[0] for part in jax.lax.split(leaf, (1,) * layers)] for leaf in leaves]
    observed = []
    for own in zip(*parts, strict=True):
        x, seen = body(x, jax.tree.unflatten(tree, own))
        observed.append(seen)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *observed)
