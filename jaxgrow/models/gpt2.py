"""GPT-2 (Radford et al., 2019) and OPT (Zhang et al., 2022).

Both are pre-LN decoders with learned position embeddings.

Shape suffixes: B batch, T positions, D embed, H heads, K head_dim, F mlp, V vocab, C classes, L
layers.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, named
from jaxgrow.layerdrop.execution import KeepMask, rescaled
from jaxgrow.models.attention import mean_keys
from jaxgrow.models.bottleneck import adapted
from jaxgrow.models.cache import Past, run_after
from jaxgrow.models.config import Cost, TextConfig, head_cost
from jaxgrow.models.loss import class_logits, last_tokens, token_head, vocabulary_logits
from jaxgrow.models.modules import MLP, SelfAttention
from jaxgrow.models.norms import LayerNorm
from jaxgrow.models.stack import KeptTokens, Observe, run_parts, stacked


@dataclass(frozen=True)
class GPT2Config(TextConfig):
    """Config of a GPT-2. Size fields have the names of the axes, so a growth resizes the config."""

    # GPT-2's 50257, padded to a multiple of 128.
    vocab: int = 50304
    # The activation of the MLP. Cerebras-GPT uses the exact GELU, OPT uses ReLU.
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    # The row of the position embedding for the first token: 2 in OPT. The field is hidden in repr
    # because it is 0 in nearly all models.
    first_position: int = dataclasses.field(default=0, repr=False)

    no_axes: ClassVar = ("first_position",)
    causal: ClassVar = True
    tied_parts: ClassVar = ("token_embedding", "position_embedding", "final_norm")
    later: ClassVar = ("activation", "first_position")

    def __post_init__(self):
        super().__post_init__()
        if self.length < 1:
            raise ValueError(
                f"context={self.context} leaves no position after "
                f"first_position={self.first_position}: set a larger context"
            )

    @classmethod
    def least(cls, field: str) -> int:
        return 0 if field == "first_position" else 1

    def integers(self) -> dict[str, int]:
        return {name: n for name, n in super().integers().items() if n or name != "first_position"}

    @property
    def module(self) -> nn.Module:
        return GPT2(self)

    @property
    def example(self) -> jax.Array:
        return jnp.zeros((1, 1), jnp.int32)  # tokens [B, T]

    @property
    def depth_scaled(self) -> bool:
        return True

    @property
    def length(self) -> int:
        return self.context - self.first_position

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        The kernels of a layer take ``2 * (4 D HK + 2 D F)``. Attention scores and their weighted
        sum take ``4 * S HK``, where S is the mean number of keys that are computed for a query,
        including some that the mask hides. The head takes ``2 D V``, or ``2 D C`` per text.

        Args:
          length: positions of a sample.
        """
        width, head = self.heads * self.head_dim, head_cost(self, length)
        kernels = 2 * (4 * self.embed * width + 2 * self.embed * self.mlp)
        return Cost(
            kernels + 4 * mean_keys(length) * width, head, embedding=head if self.ties else 0
        )


class Block(nn.Module):
    """A pre-LN block: ``x += attention(norm(x)); x += mlp(norm(x))``."""

    config: GPT2Config
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None, past=None):
        """Apply the block.

        Args:
          x_BTD: the residual stream.
          scale: factor of each sublayer's output (`jaxgrow.layerdrop.KeepMask`); None: 1.
          past: the KV cache of this layer, as in `run_after`.
        """
        c = self.config
        init = nn.initializers.normal(0.02)
        # The residual stream is the sum of 2 L of these outputs.
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(
            c.embed,
            c.heads,
            c.head_dim,
            True,
            init,
            out_init,
            self.dtype,
            c.attention,
            name="attention",
        )
        x_BTD = x_BTD + rescaled(
            adapted(self, "attention", attention(h_BTD, past=past)), scale, "attention"
        )
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        activation = (
            jax.nn.relu
            if c.activation == "relu"
            else partial(jax.nn.gelu, approximate=c.activation != "gelu")
        )
        mlp = MLP(c.embed, c.mlp, init, out_init, self.dtype, activation, name="mlp")
        return x_BTD + rescaled(adapted(self, "mlp", mlp(h_BTD)), scale, "mlp")


class GPT2(nn.Module):
    """A GPT-2: ``apply({"params": p}, tokens [B, T]) -> logits [B, T, vocab]``, in float32.

    With ``head="classes"``, the output is ``logits [B, classes]`` of the text up to its last token.
    Inputs ``{"tokens": .., "lengths": ..}`` give the length of each text, int [B]; the last token
    is the one before that position.

    A tied head uses the embedding in two roles: it writes to the residual stream, and it reads the
    output of the final norm. The embedding is declared as a writer, so growing copies it. The final
    norm is declared as a *reader* of ``embed``, so it takes the missing factor 1/k. This preserves
    the function, and coalescing still inverts it. (`GPT2Config.paper_axes` has the other choice.)

    The arguments of a call:

    - ``observe``: function of each layer's input and output, for example
      ``jaxgrow.growth.report.rms``. Its results are also returned, stacked [L, ..].
    - ``targets``: int [B, T]. The output is then ``(mean cross-entropy, accuracy)``, and the logits
      of all positions never exist at the same time (`vocabulary_loss`).
    - ``each``: with ``targets``, return both values for every position, [B, T].
    - ``keep_mask``: the layers that run (`jaxgrow.layerdrop.KeepMask`); None: all of them, without scaling.
    - ``kept_tokens``: the tokens that pass through some of the layers (`KeptTokens`). Other tokens
      bypass these layers.
    - ``frozen``: the number of frozen layers at the bottom. If it is not 0, these layers and the
      embeddings have no gradient, and no backward pass runs through them. A tied head has no
      gradient either.
    - ``past``: the KV cache (`Past`). The tokens follow the cached ones, and the output is
      ``(logits of the last token [B, vocab], the Past of only these tokens)``. ``lengths`` has the
      same meaning as above.
    """

    config: GPT2Config

    @nn.compact
    def __call__(
        self,
        inputs,
        *,
        observe: Observe | None = None,
        targets: jax.Array | None = None,
        each: bool = False,
        keep_mask: KeepMask | None = None,
        kept_tokens: KeptTokens | None = None,
        frozen: int = 0,
        past: Past | None = None,
    ):
        c = self.config
        if keep_mask is not None and (kept_tokens is not None or frozen):
            raise ValueError(
                "layer dropping (keep_mask) cannot be combined with token dropping (kept_tokens) or "
                "frozen layers: pass keep_mask alone"
            )
        if past is not None and (
            observe or frozen or not all(x is None for x in (targets, keep_mask, kept_tokens))
        ):
            raise ValueError(
                "cached decoding (past) does not support observe, targets, keep_mask, kept_tokens or "
                "frozen: pass past alone"
            )
        dtype, (tokens_BT, last_B) = jnp.dtype(c.dtype), last_tokens(inputs)
        if tokens_BT.shape[1] > c.length:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than the context of "
                f"{c.length}"
            )
        init = nn.initializers.normal(0.02)
        embedding_VD = self.param(
            "token_embedding", named(init, "vocab", "embed" + BELOW), (c.vocab, c.embed)
        )
        position_embedding_TD = self.param(
            "position_embedding", named(init, "context", "embed" + BELOW), (c.context, c.embed)
        )
        # The block is detached: only its init and apply are used.
        block = Block(c, dtype, parent=None)
        blocks = stacked(self, "blocks", block, c.layers, jnp.zeros((1, 1, c.embed), dtype))

        if frozen:
            embedding_VD, position_embedding_TD = jax.lax.stop_gradient(
                (embedding_VD, position_embedding_TD)
            )
        first, length, x_BTD = (
            c.first_position,
            tokens_BT.shape[1],
            jnp.take(embedding_VD, tokens_BT, axis=0),
        )
        at_BTD = (
            position_embedding_TD[None, first : first + length]
            if past is None
            else position_embedding_TD[first + past.positions_BT(length)]
        )
        x_BTD = (x_BTD + at_BTD).astype(dtype)

        def layer(w, x, *scale, **reading):
            return block.apply({"params": w}, x, *scale, **reading)

        if past is not None:
            x_BTD, more = run_after(layer, blocks, x_BTD, past, last_B, scan=c.scan_layers)
        else:
            x_BTD, more = run_parts(
                layer,
                blocks,
                x_BTD,
                kept_tokens=kept_tokens,
                frozen=frozen,
                remat=c.remat,
                scan=c.scan_layers,
                observe=observe,
                keep_mask=keep_mask,
            )
        x_BTD = LayerNorm("embed" + READ if c.ties else "embed", c.eps, dtype, name="final_norm")(
            x_BTD
        )
        if c.head == "classes":
            logits_BC = class_logits(
                x_BTD[jnp.arange(len(x_BTD)), last_B], c.classes, init, bias=False
            )
            return (logits_BC, more) if observe else logits_BC
        head_axes, head_shape = ("embed" + READ, "vocab"), (c.embed, c.vocab)
        head_DV = (
            embedding_VD.T
            if c.tied
            else self.param("head_kernel", named(init, *head_axes), head_shape)
        )
        if past is not None:
            return vocabulary_logits(x_BTD, head_DV, dtype)[:, 0], more
        said = token_head(x_BTD, head_DV, targets, dtype, each=each, positions=c.head_positions)
        return (said, more) if observe else said
