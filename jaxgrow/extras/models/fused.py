"""Operations that are faster on GPUs in fewer and larger parts. They compute the same numbers.

The models find them in ``jaxgrow.models.attention.FUSED_OPERATIONS``. Shape suffixes: B batch, S
positions of a piece, D embed, V vocab, N rows of a matrix.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgrow.models.attention import FUSED_OPERATIONS
from jaxgrow.models.modules import Linear, bias_row, with_bias
from jaxgrow.sharding import flatten_features


def concatenated_projections(linears: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    """Apply several `Linear` modules to the same input.

    All kernels are concatenated and applied in one product, and the backward pass also has one
    product for each gradient. This gives fewer and larger GPU kernels. Modules with a LoRA compute
    their own products.
    """
    leaves = [linear.leaves() for linear in linears]
    biases = [bias for _, bias, _ in leaves if bias is not None]
    if any(lora for _, _, lora in leaves) or len(biases) not in (0, len(linears)):
        return [linear(x) for linear in linears]
    kernel = jnp.concatenate([kernel for kernel, _, _ in leaves], 1)
    y = flatten_features(x, linears[0].contract) @ kernel
    y = y + bias_row(jnp.concatenate(biases), y) if biases else y
    each = jax.lax.split(y, [kernel.shape[1] for kernel, _, _ in leaves], y.ndim - 1)
    return [linear.shaped(part, x) for linear, part in zip(linears, each, strict=True)]


def recomputed_units(
    activation: Callable, x: jax.Array, up: Linear, gate: Linear | None
) -> jax.Array:
    """Return the units of an MLP, as `jaxgrow.models.modules.activate_units` does.

    The backward pass recomputes biases and activation from the products. Otherwise XLA would save a
    second array of the same size, and writing and reading it takes longer than computing it.
    """

    @jax.checkpoint
    def inner(up, gate):
        if gate is None:
            return activation(with_bias(up))
        return activation(with_bias(gate)) * with_bias(up)

    return up.shaped(inner(up.product(x), gate.product(x) if gate else None), x)


def log_sum_in_one_pass(logits_BSV, chosen_BSV, targets_BS):
    """Return the values of the loss from one pass over the logits.

    They are ``(log of the sum of exponentials, logit of the target, whether the target is right)``.
    The target is right if it is the first of the greatest logits. The logits are read only once:
    the sum of exponentials is kept relative to the greatest logit so far, and is rescaled when that
    maximum grows (Milakov and Gimelshein, 2018). This is faster on GPUs, where memory bandwidth is
    the limit. On a CPU, the additional exponentials would take longer.
    """
    dtype = logits_BSV.dtype
    vocab = logits_BSV.shape[-1]
    positions_BSV = jax.lax.broadcasted_iota(jnp.int32, logits_BSV.shape, 2)
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
        positions_BSV,
        jnp.where(chosen_BSV, logits_BSV, zero),
    )
    begin = least, zero, jnp.asarray(vocab, jnp.int32), zero
    most_BS, sum_BS, first_BS, target_BS = jax.lax.reduce(operands, begin, join, (2,))
    return most_BS + jnp.log(sum_BS), target_BS, first_BS == targets_BS


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def saving_norm(x, scale_D, bias_D, eps: float, dtype: DTypeLike, centred: bool) -> jax.Array:
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
    return _normed_forward(x, scale_D, bias_D, eps, dtype, centred)[0]


def _statistics(x, eps, centred):
    """Return ``(x [N, D], mean, 1 / deviation [N, 1])``, in float32 or better.

    N stands for the axes that `jaxgrow.sharding.flatten_features` returns.
    """
    x_ND = flatten_features(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_N1 = x_ND.mean(-1, keepdims=True) if centred else jnp.zeros((), x_ND.dtype)
    return x_ND, mean_N1, jax.lax.rsqrt(jnp.square(x_ND - mean_N1).mean(-1, keepdims=True) + eps)


def _normed_forward(x, scale_D, bias_D, eps, dtype, centred):
    x_ND, mean_N1, inverse_N1 = _statistics(x, eps, centred)
    y_ND = (x_ND - mean_N1) * inverse_N1 * jnp.broadcast_to(scale_D, x_ND.shape)
    y_ND = y_ND if bias_D is None else y_ND + jnp.broadcast_to(bias_D, x_ND.shape)
    return y_ND.astype(dtype).reshape(x.shape), (x, scale_D, bias_D, mean_N1, inverse_N1)


def _normed_backward(eps, dtype, centred, saved, slope):
    x, scale_D, bias_D, mean_N1, inverse_N1 = saved
    # The barrier makes XLA recompute the intermediate values instead of saving them.
    x, slope = jax.lax.optimization_barrier((x, slope))
    wide = inverse_N1.dtype
    z_ND = (flatten_features(x).astype(wide) - mean_N1) * inverse_N1
    slope_ND = slope.reshape(z_ND.shape).astype(wide)
    by_ND = slope_ND * jnp.broadcast_to(scale_D, z_ND.shape)
    back_ND = by_ND - z_ND * (by_ND * z_ND).mean(-1, keepdims=True)
    if centred:
        back_ND = back_ND - by_ND.mean(-1, keepdims=True)
    over_N = tuple(range(z_ND.ndim - 1))
    bias = None if bias_D is None else slope_ND.sum(over_N).astype(bias_D.dtype)
    scale = (slope_ND * z_ND).sum(over_N).astype(scale_D.dtype)
    return (back_ND * inverse_N1).astype(x.dtype).reshape(x.shape), scale, bias


saving_norm.defvjp(_normed_forward, _normed_backward)

FUSED_OPERATIONS.add("projections", concatenated_projections)
FUSED_OPERATIONS.add("units", recomputed_units)
FUSED_OPERATIONS.add("log sum", log_sum_in_one_pass)
FUSED_OPERATIONS.add("norm", saving_norm)
