"""How activations are normalised: `LayerNorm` and `RMSNorm`.

Shape suffixes: D embed, N rows of a matrix.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import named_init
from jaxgrow.sharding import current_platform, flatten_features


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
            scale = self.param(
                "scale", named_init(self.scale_init, self.axis, role="norm scale"), size
            )
        if self.bias:
            bias = self.param(
                "bias", named_init(nn.initializers.zeros, self.axis, role="norm bias"), size
            )
        if current_platform() == "gpu" and scale is not None:
            return saving_norm(x, scale, bias, self.eps, self.dtype, True)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        y = x if scale is None else x * jnp.broadcast_to(scale, x.shape)
        y = y if bias is None else y + jnp.broadcast_to(bias, x.shape)
        return y.astype(self.dtype)


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
        names = (*self.before, self.axis)
        shape = x.shape[over[0] :]
        scale = self.param(
            "scale", named_init(nn.initializers.ones, *names, role="norm scale"), shape
        )
        if current_platform() == "gpu" and not self.before:
            return saving_norm(x, scale, None, self.eps, self.dtype, False)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x * jax.lax.rsqrt(jnp.square(x).mean(over, keepdims=True) + self.eps)
        return (x * jnp.broadcast_to(scale, x.shape)).astype(self.dtype)


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
    return _saving_norm(x, scale_D, bias_D, eps, dtype, centred)  # type: ignore[return-value]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _saving_norm(x, scale_D, bias_D, eps, dtype, centred):
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


_saving_norm.defvjp(_normed_forward, _normed_backward)
