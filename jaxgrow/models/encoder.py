"""The parts that text encoders share: inputs by name, and a head that predicts masked tokens.

Shape suffixes: B batch, T positions, D embed, V vocab.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, named
from jaxgrow.layerdrop.execution import KeepMask
from jaxgrow.models.config import TextConfig
from jaxgrow.models.loss import token_head
from jaxgrow.models.modules import Linear
from jaxgrow.models.stack import KeptTokens

INIT = nn.initializers.normal(0.02)
gelu = partial(jax.nn.gelu, approximate=False)


def masked_positions(masked: float, length: int) -> int:
    """Return the number of predicted positions in a sample of this length."""
    return max(1, round(masked * length))


class EncoderConfig(TextConfig):
    """The base of the configs of text encoders.

    Tokens see the tokens before and after them. The pre-training task is to predict masked tokens.
    A norm follows the embeddings and produces the residual stream.
    """

    # The part of a sample's positions that is predicted. It sets the cost of the head in training.
    masked: float
    # The number of token types; 0: tokens have no type.
    types: int = 0
    # The row of the position embedding for the first token.
    first_position: int = 0

    tasks: ClassVar = ("tokens", "classes", "spans", "token_classes", "states")
    run_by: ClassVar = (*TextConfig.run_by, "masked")

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.masked <= 1:
            raise ValueError(f"masked must be above 0 and at most 1, but is {self.masked}")

    @property
    def example(self) -> dict[str, jax.Array]:
        return {"tokens": jnp.zeros((1, 1), jnp.int32)}

    @property
    def length(self) -> int:
        return self.context - self.first_position

    @property
    def means_stay(self) -> bool:
        return False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the module accepts."""
        return ("tokens", *(("types",) if self.types else ()), "mask", "positions")

    def predicted_positions(self, length: int) -> int:
        """Return at how many positions of a sample of ``length`` training computes the head."""
        positions = {"tokens": masked_positions(self.masked, length), "classes": 1, "states": 0}
        return positions.get(self.head, length)


def check_inputs(
    config: EncoderConfig,
    inputs: Mapping[str, jax.Array],
    keep_mask: KeepMask | None,
    kept_tokens: KeptTokens | None,
    frozen: int,
) -> None:
    """Raise an error if the module does not support the inputs or their combination.

    Raises:
      TypeError: the inputs are not a mapping.
      ValueError: an input is unknown or cannot be combined with another one, or a sequence is too
        long.
    """
    known = config.inputs
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs must be a mapping with tokens and optionally {', '.join(known[1:])}, not "
            f"{type(inputs).__name__}"
        )
    if "tokens" not in inputs or set(inputs) - set(known):
        raise ValueError(
            f"inputs must be tokens and optionally {', '.join(known[1:])}, but are "
            f"{', '.join(inputs)}"
        )
    if keep_mask is not None and (kept_tokens is not None or frozen):
        raise ValueError(
            "layer dropping (keep_mask) cannot be combined with token dropping (kept_tokens) or "
            "frozen layers: pass keep_mask alone"
        )
    if "mask" in inputs and (
        (keep_mask is not None and keep_mask.layers is not None) or kept_tokens is not None
    ):
        raise ValueError(
            "layer and token dropping do not support padding: pack the text, and leave out mask"
        )
    length = inputs["tokens"].shape[1]
    if length > config.length:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the {config.length} positions that "
            f"context={config.context} leaves from first_position={config.first_position} on"
        )


def transformed(
    config: EncoderConfig, x_BTD: jax.Array, norm: nn.Module, bias: bool = True
) -> jax.Array:
    """Return the first part of the head, ``norm(gelu(x W + b))``.

    Call it inside a compact module, which gets the kernel as ``transform``.
    """
    axes, shape = ("embed" + READ, "embed"), (config.embed, config.embed)
    return norm(gelu(Linear(axes, shape, 1, INIT, x_BTD.dtype, bias, name="transform")(x_BTD)))


def predicted(
    module: nn.Module,
    config: EncoderConfig,
    x_BTD: jax.Array,
    embedding_VD: jax.Array,
    targets: jax.Array | None,
    dtype: DTypeLike,
    each: bool,
    cap: float = 0.0,
):
    """Return the output of `token_head`, with the tied embedding or a separate kernel.

    There is a bias for every token of the vocabulary. Call it inside the compact ``module``.
    """
    head_axes, head_shape = ("embed" + READ, "vocab"), (config.embed, config.vocab)
    head_DV = (
        embedding_VD.T
        if config.tied
        else module.param("head_kernel", named(INIT, *head_axes), head_shape)
    )
    bias_V = module.param(
        "head_bias", named(nn.initializers.zeros, "vocab", role="bias"), (config.vocab,)
    )
    return token_head(
        x_BTD, head_DV, targets, dtype, bias_V, each=each, cap=cap, positions=config.head_positions
    )
