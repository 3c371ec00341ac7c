"""What encoders of text have in common: inputs by name, and a head that predicts masked tokens."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ, named
from jaxgrow.layerdrop.execution import Kept
from jaxgrow.models.config import TextConfig
from jaxgrow.models.layers import KeptTokens, Linear, token_head

INIT = nn.initializers.normal(0.02)
gelu = partial(jax.nn.gelu, approximate=False)


def masked_places(masked: float, length: int) -> int:
    """How many places of a sample of ``length`` are predicted: the same for every sample."""
    return max(1, round(masked * length))


class EncoderConfig(TextConfig):
    """Tokens see those before and after them; it is pre-trained to predict the ones that are
    masked. A norm makes the residual stream of the embeddings.
    """

    masked: (
        float  # the part of a sample's places that is predicted: what the head costs in training
    )
    types: int = 0  # of tokens, if they have any
    first_position: int = 0  # that of a first token

    tasks: ClassVar = ("tokens", "classes", "spans", "token_classes", "states")

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.masked <= 1:
            raise ValueError(f"masked lies between 0 and 1, but is {self.masked}")

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
        """What the module may be given by name."""
        return ("tokens", *(("types",) if self.types else ()), "mask", "places")

    def head_places(self, length: int) -> int:
        """At how many places of a sample of ``length`` the head is computed in training."""
        places = {"tokens": masked_places(self.masked, length), "classes": 1, "states": 0}
        return places.get(self.head, length)


def check_inputs(
    config: EncoderConfig,
    inputs: Mapping[str, jax.Array],
    kept: Kept | None,
    kept_tokens: KeptTokens | None,
    frozen: int,
) -> None:
    """
    Raises:
      TypeError, ValueError: inputs that the module does not take, or not together.
    """
    known = config.inputs
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs are a mapping, of tokens and perhaps {', '.join(known[1:])}, not {type(inputs).__name__}"
        )
    if "tokens" not in inputs or set(inputs) - set(known):
        raise ValueError(
            f"inputs are tokens and perhaps {', '.join(known[1:])}, not {', '.join(inputs)}"
        )
    if kept is not None and (kept_tokens is not None or frozen):
        raise ValueError(
            "layers are dropped from a whole stack: not together with token dropping or frozen layers"
        )
    if "mask" in inputs and (
        (kept is not None and kept.layers is not None) or kept_tokens is not None
    ):
        raise ValueError(
            "layers and tokens are dropped from samples without padding: pack the text, and leave out mask"
        )
    length = inputs["tokens"].shape[1]
    if length > config.length:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the {config.length} that a context of {config.context} has "
            f"from position {config.first_position}"
        )


def transformed(
    config: EncoderConfig, x_BTD: jax.Array, norm: nn.Module, bias: bool = True
) -> jax.Array:
    """``norm(gelu(x W + b))``. Inside of a compact module, which gets the kernel as ``transform``."""
    axes, shape = ("embed" + READ, "embed"), (config.embed, config.embed)
    return norm(gelu(Linear(axes, shape, 1, INIT, x_BTD.dtype, bias, name="transform")(x_BTD)))


def predicted(
    module: nn.Module,
    config: EncoderConfig,
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets: jax.Array | None,
    dtype: DTypeLike,
    each: bool,
    cap: float = 0.0,
):
    """`token_head`, by the table or a kernel of its own, and a bias for every word. Inside of the compact ``module``."""
    head_axes, head_shape = ("embed" + READ, "vocab"), (config.embed, config.vocab)
    head_DV = (
        table_VD.T
        if config.tied
        else module.param("head_kernel", named(INIT, *head_axes), head_shape)
    )
    bias_V = module.param(
        "head_bias", named(nn.initializers.zeros, "vocab", role="bias"), (config.vocab,)
    )
    return token_head(
        x_BTD, head_DV, targets, dtype, bias_V, each=each, cap=cap, positions=config.head_positions
    )
