"""What the model families share. Shapes in names: B batch, T time, D embed, H heads, K head_dim, F mlp, V vocab, L layers."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from jaxgrow.axes import LAYERS, READ, named


class Linear(nn.Module):
    """``y = x W + b``, with an axis name for every axis of ``W``. Its leading axes that end in ``.in`` are contracted."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    contract: int  # how many leading axes of the kernel, and trailing ones of x, are contracted
    kernel_init: Callable
    dtype: Any

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", named(self.kernel_init, *self.axes), self.shape)
        outputs = self.axes[self.contract :]
        bias = self.param("bias", named(nn.initializers.zeros, *outputs), self.shape[self.contract :])
        inner = (tuple(range(x.ndim - self.contract, x.ndim)), tuple(range(self.contract)))
        y = jax.lax.dot_general(x, kernel.astype(self.dtype), (inner, ((), ())))
        return y + jnp.broadcast_to(bias.astype(self.dtype), y.shape)


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * scale + bias`` over the last axis, in float32.

    ``axis`` is ``"embed"``, or ``"embed.in"`` where a tied head follows (see `jaxgrow.models.gpt2`).
    """

    axis: str
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x):
        size = (x.shape[-1],)
        scale = self.param("scale", named(nn.initializers.ones, self.axis), size)
        bias = self.param("bias", named(nn.initializers.zeros, self.axis), size)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        scale, bias = (jnp.broadcast_to(p, x.shape) for p in (scale, bias))
        return (x * scale + bias).astype(self.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention. Query, key and value are leaves of their own, so that growth never has to split one.

    The key's ``head_dim`` is declared as a reader: the query writes that axis, the key contracts it away.
    """

    embed: int
    heads: int
    head_dim: int
    causal: bool
    kernel_init: Callable
    out_init: Callable
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD):
        shape = (self.embed, self.heads, self.head_dim)

        def project(name, *outputs):
            return Linear(("embed" + READ, *outputs), shape, 1, self.kernel_init, self.dtype, name=name)(x_BTD)

        q_BTHK = project("query", "heads", "head_dim")
        k_BTHK = project("key", "heads", "head_dim" + READ)
        v_BTHK = project("value", "heads", "head_dim")
        y_BTHK = jax.nn.dot_product_attention(
            q_BTHK, k_BTHK, v_BTHK, is_causal=self.causal, implementation=attention_kernel(self.dtype, self.head_dim)
        )
        axes = ("heads" + READ, "head_dim" + READ, "embed")
        out_shape = (self.heads, self.head_dim, self.embed)
        return Linear(axes, out_shape, 2, self.out_init, self.dtype, name="out")(y_BTHK)


class MLP(nn.Module):
    embed: int
    mlp: int
    kernel_init: Callable
    out_init: Callable
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD):
        h_BTF = Linear(("embed" + READ, "mlp"), (self.embed, self.mlp), 1, self.kernel_init, self.dtype, name="up")(
            x_BTD
        )
        h_BTF = jax.nn.gelu(h_BTF, approximate=True)
        return Linear(("mlp" + READ, "embed"), (self.mlp, self.embed), 1, self.out_init, self.dtype, name="down")(h_BTF)


def attention_kernel(dtype: Any, head_dim: int) -> Literal["cudnn"] | None:
    """cuDNN's fused attention, where it exists: jax's default is XLA's own, on every GPU."""
    fits = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0
    return "cudnn" if jax.default_backend() == "gpu" and fits else None


def stacked_init(block: nn.Module, key: jax.Array, layers: int, *args) -> Any:
    """Parameters of ``layers`` blocks, stacked on a leading axis of that name."""
    params = jax.vmap(lambda k: block.init(k, *args)["params"])(jax.random.split(key, layers))
    return meta.add_axis(params, 0, {nn.PARTITION_NAME: LAYERS})


def run_stack(apply: Callable, stacked: Any, x: jax.Array, *, remat: bool, rms: bool = False) -> tuple[Any, Any]:
    """``x`` through all blocks, one after the other: ``(output, RMS of each block's output [layers], or None)``.

    One scan, so that compile time does not grow with depth. ``remat`` recomputes a block in the backward pass instead of
    storing its activations: less memory, and on a CPU also faster.
    """

    def body(x, w):
        y = apply(w, x)
        return y, jnp.sqrt(jnp.square(y.astype(jnp.float32)).mean()) if rms else None

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if remat else body, x, stacked)
