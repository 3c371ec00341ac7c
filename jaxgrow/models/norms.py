"""How activations are normalised: `LayerNorm` and `RMSNorm`."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import named_init
from jaxgrow.models.attention import FUSED_OPERATIONS
from jaxgrow.sharding import current_platform


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
            return FUSED_OPERATIONS["norm"](x, scale, bias, self.eps, self.dtype, True)
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
            return FUSED_OPERATIONS["norm"](x, scale, None, self.eps, self.dtype, False)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x * jax.lax.rsqrt(jnp.square(x).mean(over, keepdims=True) + self.eps)
        return (x * jnp.broadcast_to(scale, x.shape)).astype(self.dtype)
