"""What do the decoders share? The length of a text, the final norm and the heads.

Shape suffixes: B batch, T positions, D embed, V vocab.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgrow.axes.names import READ, Tree, named_init
from jaxgrow.models.config import TextConfig
from jaxgrow.models.loss import class_logits, last_tokens, token_logits_or_loss, vocabulary_logits
from jaxgrow.models.model import INIT, Call, Model


class Decoder(Model):
    """A decoder: ``apply({"params": p}, tokens [B, T]) -> logits [B, T, vocab]``, in float32.

    With ``head="classes"``, the output is ``logits [B, classes]`` of the text up to its last token.
    Inputs ``{"tokens": .., "lengths": ..}`` give the length of each text, int [B]; the last token
    of a text is the one at position ``length - 1``. With ``head="states"``, the output is the last
    hidden states [B, T, D]. The keyword arguments are described in `jaxgrow.models.model.Model`.

    With a tied head, the embedding has two roles: it writes to the residual stream, and it reads the
    output of the final norm. It is declared with ``embed`` as an output axis, so growing copies it.
    As a head, it would also need the factor 1/k for k copies of a unit. The final norm takes over
    this factor: it is declared with ``embed`` as an *input axis*. This preserves the function, and
    coalescing still inverts it. (`Config.paper_axes` is the choice of the published code.)
    """

    supports: ClassVar[tuple[str, ...]] = ("targets", "each", "kept_tokens", "past")

    def norm(self, name: str, axis: str) -> nn.Module:
        """Return a norm over ``axis``."""
        raise NotImplementedError

    def check(self, call: Call) -> None:
        super().check(call)
        length = last_tokens(call.inputs)[0].shape[1]
        if length > self.config.longest:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the context of {self.config.longest}"
            )
        inputs = call.inputs if isinstance(call.inputs, Mapping) else {}
        if unknown := [name for name in inputs if name not in self.config.inputs]:
            raise ValueError(
                f"a {type(self).__name__} has no input {', '.join(unknown)}: give only "
                f"{', '.join(self.config.inputs)}"
            )
        if "lengths" in inputs and self.config.head == "tokens" and call.past is None:
            raise ValueError(
                "lengths choose the token that head=classes reads, and have no effect on head=tokens: leave out "
                "lengths; for the loss, give padding a weight of 0 in the input weights"
            )
        if call.named("segments") is not None and call.given("mask_BS", "past"):
            raise ValueError(
                "segments cannot be combined with mask_BS or cached decoding (past): give padding a "
                "segment of its own, and leave them out"
            )

    def output(self, x_BTD: jax.Array, embeddings: dict[str, jax.Array], call: Call) -> Tree:
        c = self.config
        x_BTD = self.norm("final_norm", "embed" + READ if c.ties else "embed")(x_BTD)
        if c.head == "classes":
            _, last_B = last_tokens(call.inputs)
            return class_logits(x_BTD[jnp.arange(len(x_BTD)), last_B], c.classes, INIT, bias=False)
        if c.head == "states":
            return self.wide(x_BTD)
        if c.logit_divisor != 1:
            x_BTD = x_BTD / c.logit_divisor
        head_DV = head_kernel(self, c, embeddings["token_embedding"])
        if call.past is not None:
            return vocabulary_logits(x_BTD, head_DV, self.dtype, c.logit_cap)[:, 0]
        return token_logits_or_loss(
            x_BTD,
            head_DV,
            call.targets,
            self.dtype,
            each=call.each,
            cap=c.logit_cap,
            positions=c.head_positions,
            weights_BT=call.named("weights"),
        )


def head_kernel(module: nn.Module, config: TextConfig, embedding_VD: jax.Array) -> jax.Array:
    """Return the kernel of the token head [D, V]: the tied embedding, or a separate kernel.

    Call it inside the compact ``module``.
    """
    if config.tied:
        return embedding_VD.T
    axes = named_init(INIT, "embed" + READ, "vocab")
    return module.param("head_kernel", axes, (config.embed, config.vocab))
