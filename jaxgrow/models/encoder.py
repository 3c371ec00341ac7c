"""What do the text encoders share? Inputs by name, and a head that predicts masked tokens.

Shape suffixes: B batch, T positions, S positions of the head, D embed, V vocab.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgrow.axes.names import READ, Tree, named_init
from jaxgrow.models.config import Array, Shapes, TextConfig
from jaxgrow.models.decoder import head_kernel
from jaxgrow.models.loss import token_logits_or_loss
from jaxgrow.models.model import INIT, Call, Model
from jaxgrow.models.modules import ACTIVATIONS, Linear


def masked_positions(masked: float, length: int) -> int:
    """Return the number of predicted positions in a sample of this length."""
    return max(1, round(masked * length))


class EncoderConfig(TextConfig):
    """The base of the configs of text encoders.

    Tokens see the tokens before and after them. The pre-training task is to predict masked tokens.
    A norm follows the embeddings and produces the residual stream.
    """

    # The fraction of the positions that is predicted. It determines the cost of the head in training.
    masked: float

    tasks: ClassVar = ("tokens", "classes", "spans", "token_classes", "states")
    run_by: ClassVar = (*TextConfig.run_by, "masked")
    means_stay = False

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.masked <= 1:
            raise ValueError(f"masked must be above 0 and at most 1, but is {self.masked}")

    @property
    def example(self) -> dict[str, jax.Array]:
        return {"tokens": jnp.zeros((1, 1), jnp.int32)}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the module accepts."""
        types = ("types",) if self.types else ()
        segments = ("segments",) if self.segments else ()
        return ("tokens", *types, "mask", "positions", *segments)

    def inputs_of(self, samples: Array) -> dict[str, Array]:
        return {"tokens": samples}

    def batch_shapes(self, samples: int) -> Shapes:
        tokens, _ = super().batch_shapes(samples)
        count = masked_positions(self.masked, self.length)
        positions = jax.ShapeDtypeStruct((samples, count), jnp.int32)
        # Other heads read the first token or all tokens.
        return {"tokens": tokens} | (
            {"positions": positions} if self.head == "tokens" else {}
        ), positions

    def predicted_positions(self, length: int) -> int:
        """Return the number of positions of a sample at which training computes the head."""
        positions = {"tokens": masked_positions(self.masked, length), "classes": 1, "states": 0}
        return positions.get(self.head, length)


class Encoder(Model):
    """A text encoder: ``apply({"params": p}, inputs) -> outputs``, in float32.

    ========== =================== =================================================================
    inputs
    ========== =================== =================================================================
    tokens     int [B, T]
    types      int [B, T]          the type of each token; zeros if left out
    mask       bool [B, T]         the visible tokens; all if left out. RoBERTa's positions
                                   count only visible tokens
    positions  int [B, S]          the positions for which logits [B, S, vocab] are returned;
                                   all if left out. Not for classes and poolers. With mask and
                                   targets, the loss needs positions, or each
    segments   int [B, T]          the number of the document of each token, instead of a mask;
                                   all tokens are in one document if left out
    ========== =================== =================================================================

    The keyword arguments are described in `jaxgrow.models.model.Model`. ``frozen`` also freezes the
    norm of the embeddings.
    """

    supports: ClassVar[tuple[str, ...]] = ("targets", "each", "kept_tokens")

    def check(self, call: Call) -> None:
        """Raise an error if the model does not support the inputs or their combination.

        Raises:
          TypeError: the inputs are not a mapping.
          ValueError: an input is unknown or cannot be combined with another one, or a sequence is
            too long.
        """
        config = self.config
        inputs = call.inputs
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
        super().check(call)
        if "positions" in inputs and (config.head == "classes" or getattr(config, "pooler", False)):
            raise ValueError(
                "a head of classes and a pooler read the first token or all of them, but the input positions would choose "
                "others: leave out positions"
            )
        if {"mask", "segments"} <= set(inputs):
            raise ValueError("inputs have mask and segments: give padding a segment of its own")
        drops_layers = call.keep_mask is not None and call.keep_mask.layers is not None
        if "mask" in inputs and (drops_layers or call.kept_tokens is not None):
            raise ValueError(
                "layer and token dropping do not support padding: pack the text, and leave out mask"
            )
        length = inputs["tokens"].shape[1]
        if length > config.length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {config.length} positions that "
                f"context={config.context} leaves from first_position={config.first_position} on"
            )

    def output(self, x_BTD: jax.Array, embeddings: dict[str, jax.Array], call: Call) -> Tree:
        if "positions" in call.inputs:
            x_BTD = jnp.take_along_axis(x_BTD, call.inputs["positions"][..., None], axis=1)
        return self.answer(x_BTD, embeddings["token_embedding"], call)

    def answer(self, x_BTD: jax.Array, embedding_VD: jax.Array, call: Call) -> Tree:
        """Return the output of the head at the positions that it reads."""
        raise NotImplementedError

    def transformed(self, x_BTD: jax.Array, norm: nn.Module, bias: bool = True) -> jax.Array:
        """Return the first part of the head, ``norm(gelu(x W + b))``."""
        axes = ("embed" + READ, "embed")
        shape = (self.config.embed, self.config.embed)
        y_BTD = Linear(axes, shape, 1, INIT, x_BTD.dtype, bias, name="transform")(x_BTD)
        return norm(ACTIVATIONS["gelu"](y_BTD))

    def predicted(self, x_BTD: jax.Array, embedding_VD: jax.Array, call: Call) -> Tree:
        """Return `token_logits_or_loss` with a bias for every token of the vocabulary."""
        c = self.config
        head_DV = head_kernel(self, c, embedding_VD)
        zeros = named_init(nn.initializers.zeros, "vocab", role="bias")
        return token_logits_or_loss(
            x_BTD,
            head_DV,
            call.targets,
            self.dtype,
            self.param("head_bias", zeros, (c.vocab,)),
            each=call.each,
            cap=c.logit_cap,
            positions=c.head_positions,
        )


def mask_of(call: Call) -> jax.Array | None:
    """Return the visible tokens, bool [B, T]; None: all."""
    return call.inputs["mask"].astype(bool) if "mask" in call.inputs else None
