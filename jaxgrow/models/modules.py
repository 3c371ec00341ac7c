"""The layers that the families are built from: products, attention, MLP.

Shape suffixes: B batch, T positions, S positions of keys, D embed, H heads, K head_dim, F mlp, N
rows of a matrix, I inputs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, VALUE, named_init
from jaxgrow.models.attention import CONTINUING, FUSED_OPERATIONS, KEPT, ScoreForm, attention
from jaxgrow.sharding import axis_parts, current_platform, flatten_features


class Linear(nn.Module):
    """``y = x W + b``, with a name for every axis of ``W``.

    If leaves ``a`` and ``b`` of a LoRA are stored with the kernel
    (`jaxgrow.extras.peft.lora.attach_lora`), the output is ``y + (x a) b``.

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
    def leaves(self) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array] | None]:
        """Return ``(kernel, bias, lora)`` in the dtype of activations.

        The kernel is [inputs, outputs], and the bias is [outputs] or None. ``lora`` is ``(a, b)``
        or None.
        """
        inputs = math.prod(self.shape[: self.contract])
        kernel = self.param("kernel", named_init(self.kernel_init, *self.axes), self.shape)
        kernel = kernel.astype(self.dtype).reshape(inputs, -1)
        bias = lora = None
        if self.has_variable("params", "a"):
            a, b = (self.get_variable("params", name).astype(self.dtype) for name in ("a", "b"))
            lora = a.reshape(inputs, -1), b.reshape(b.shape[0], -1)
        if self.bias:
            outputs = self.axes[self.contract :]
            bias = self.param(
                "bias",
                named_init(nn.initializers.zeros, *outputs, role="bias"),
                self.shape[self.contract :],
            )
            bias = bias.astype(self.dtype).reshape(-1)
        return kernel, bias, lora

    def product(self, x) -> tuple[jax.Array, jax.Array | None]:
        """Return ``x W``, of the axes of `jaxgrow.sharding.flatten_features`, and the bias or None.

        The bias is [1, outputs], with as many axes as ``x W``.
        """
        kernel, bias, lora = self.leaves()
        x_NI = flatten_features(x, self.contract)
        y = x_NI @ kernel
        y = y if lora is None else y + x_NI @ lora[0] @ lora[1]
        return y, None if bias is None else bias_row(bias, y)

    def shaped(self, y, x):
        """Give ``y`` (a `product`) the leading axes of ``x`` and the output axes of the kernel."""
        return y.reshape(*x.shape[: x.ndim - self.contract], *self.shape[self.contract :])

    def __call__(self, x):
        return self.shaped(with_bias(self.product(x)), x)


def with_bias(product: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    """Return ``x W + b`` from the result of `Linear.product`."""
    y, bias = product
    return y if bias is None else y + bias


def bias_row(bias: jax.Array, y: jax.Array) -> jax.Array:
    """Give a bias [outputs] as many axes as ``y`` [.., outputs] has."""
    return jnp.expand_dims(bias, range(y.ndim - 1))


def split_heads(
    config: Any, kernel_init: Initializer, dtype: DTypeLike, name: str, *outputs: str
) -> Linear:
    """Return the kernel of the queries, keys or values, whose axes after ``embed`` are ``outputs``."""
    shape = (config.embed, config.heads, config.head_dim)
    return Linear(("embed" + READ, *outputs), shape, 1, kernel_init, dtype, name=name)


def merge_heads(
    config: Any, kernel_init: Initializer, dtype: DTypeLike, bias: bool = True
) -> Linear:
    """Return the output kernel of an attention, from all heads to ``embed``."""
    axes = ("heads" + READ, "head_dim" + READ, "embed")
    shape = (config.heads, config.head_dim, config.embed)
    return Linear(axes, shape, 2, kernel_init, dtype, bias, name="out")


def project_together(linears: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    """Apply several `Linear` modules to the same input, for example for queries, keys and values.

    On GPUs, their kernels are concatenated, unless the heads are sharded.
    """
    if current_platform() == "gpu" and axis_parts("heads") == 1:
        return FUSED_OPERATIONS["projections"](linears, x)
    return [linear(x) for linear in linears]


class SelfAttention(nn.Module):
    """Multi-head self-attention with separate query, key and value kernels.

    The kernels are separate leaves, so that a growth never has to split a leaf. The ``head_dim`` of
    the key is declared as an input axis: it is an output axis of the query, and the scores contract
    it with the key.

    Attributes:
      config: the config of the model, for its sizes, ``causal`` and ``attention``.
      kernel_init: initializer of the query, key and value kernels.
      out_init: initializer of the output kernel.
      dtype: dtype of activations.
    """

    config: Any
    kernel_init: Initializer
    out_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, mask_BS=None, past=None, asking_BTD=None, segments_BT=None):
        """Apply attention.

        Args:
          x_BTD: input.
          mask_BS: True for the keys that are visible; None: all of them.
          past: the KV cache of this layer, as in `run_after`.
          asking_BTD: input of the query kernel; None: ``x_BTD``.
          segments_BT: segment ids of the tokens; None: all tokens are in one segment.
        """
        c = self.config
        project = partial(split_heads, c, self.kernel_init, self.dtype)
        query = project("query", "heads", "head_dim")
        key = project("key", "heads", "head_dim" + READ)
        value = project("value", "heads", "head_dim" + VALUE)
        if asking_BTD is None:
            q_BTHK, k_BTHK, v_BTHK = project_together((query, key, value), x_BTD)
        else:
            q_BTHK = query(asking_BTD)
            k_BTHK, v_BTHK = project_together((key, value), x_BTD)
        self.sow(*KEPT, (k_BTHK, v_BTHK))
        if past is None:
            y_BTHK = attention(
                q_BTHK,
                k_BTHK,
                v_BTHK,
                causal=c.causal,
                mask_BS=mask_BS,
                by=c.attention,
                form=ScoreForm(segments_BT=segments_BT),
            )
        else:
            y_BTHK = CONTINUING["attention"](past, q_BTHK, k_BTHK, v_BTHK)
        return merge_heads(c, self.out_init, self.dtype)(y_BTHK)


def activate_units(
    activation: Callable, x: jax.Array, up: Linear, gate: Linear | None
) -> jax.Array:
    """Return ``activation(up(x))``, or ``activation(gate(x)) * up(x)`` with a gate."""
    if current_platform() == "gpu":
        return FUSED_OPERATIONS["units"](activation, x, up, gate)
    return activation(gate(x)) * up(x) if gate else activation(up(x))


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
            axes = (outer + READ, inner)
            shape = (embed, mlp)
            return Linear(axes, shape, 1, self.kernel_init, self.dtype, self.bias, name=name)

        h_BTF = activate_units(
            self.activation, x_BTD, inwards("up"), inwards("gate") if self.gated else None
        )
        axes = (inner + READ, outer)
        shape = (mlp, embed)
        return Linear(axes, shape, 1, self.out_init, self.dtype, self.bias, name="down")(h_BTF)


def quick_gelu(x: jax.Array) -> jax.Array:
    """The approximation of GELU in CLIP: ``x sigmoid(1.702 x)``."""
    return x * jax.nn.sigmoid(1.702 * x)


# The activations by the names that configs have.
ACTIVATIONS: dict[str, Callable] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "quick_gelu": quick_gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


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
        name, named_init(nn.initializers.constant(init), "embed", role="scale"), (y_BTD.shape[-1],)
    )
    return size_D.astype(y_BTD.dtype).reshape(1, 1, -1) * y_BTD
