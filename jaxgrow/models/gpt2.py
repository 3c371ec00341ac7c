"""GPT-2 (Radford et al., 2019) and OPT (Zhang et al., 2022).

Both are pre-LN decoders with learned position embeddings.

Shape suffixes: B batch, T positions, D embed, H heads, K head_dim, F mlp, V vocab, C classes, L
layers.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.layerdrop.execution import rescaled
from jaxgrow.models.attention import mean_keys, segment_positions
from jaxgrow.models.bottleneck import add_adapter
from jaxgrow.models.config import Cost, TextConfig, head_cost
from jaxgrow.models.decoder import Decoder
from jaxgrow.models.loss import last_tokens
from jaxgrow.models.model import Call, Stack
from jaxgrow.models.modules import ACTIVATIONS, MLP, SelfAttention
from jaxgrow.models.norms import LayerNorm


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
    optional: ClassVar = ("first_position",)
    depth_scaled = True
    loops = True
    causal: ClassVar = True
    segments: ClassVar = True
    tied_parts: ClassVar = ("token_embedding", "position_embedding", "final_norm")

    @property
    def module(self) -> nn.Module:
        return GPT2(self)

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        The kernels of a layer take ``2 * (4 D HK + 2 D F)``. Attention scores and their weighted
        sum take ``4 * S HK``, where S is the mean number of keys that are computed for a query,
        including some that the mask hides. The head takes ``2 D V``, or ``2 D C`` per text.

        Args:
          length: positions of a sample.
        """
        width = self.heads * self.head_dim
        head = head_cost(self, length)
        kernels = 2 * (4 * self.embed * width + 2 * self.embed * self.mlp)
        return Cost(
            kernels + 4 * mean_keys(length) * width, head, embedding=head if self.ties else 0
        )


class GPT2Block(nn.Module):
    """A pre-LN block: ``x += attention(norm(x)); x += mlp(norm(x))``."""

    config: GPT2Config
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, scale=None, past=None, segments_BT=None):
        """Apply the block.

        Args:
          x_BTD: the residual stream.
          scale: factor of each sublayer's output (`jaxgrow.layerdrop.KeepMask`); None: 1.
          past: the KV cache of this layer, as in `run_after`.
          segments_BT: segment ids of the tokens; None: all tokens are in one segment.
        """
        c = self.config
        init = nn.initializers.normal(0.02)
        # The residual stream is the sum of 2 L of these outputs.
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="attention_norm")(x_BTD)
        attention = SelfAttention(c, init, out_init, self.dtype, name="attention")
        y_BTD = attention(h_BTD, past=past, segments_BT=segments_BT)
        x_BTD = x_BTD + rescaled(add_adapter(self, "attention", y_BTD), scale, "attention")
        h_BTD = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(x_BTD)
        activation = ACTIVATIONS[c.activation]
        mlp = MLP(c.embed, c.mlp, init, out_init, self.dtype, activation, name="mlp")
        return x_BTD + rescaled(add_adapter(self, "mlp", mlp(h_BTD)), scale, "mlp")


class GPT2(Decoder):
    """A GPT-2: a `Decoder` with learned position embeddings."""

    config: GPT2Config

    def norm(self, name: str, axis: str) -> nn.Module:
        return LayerNorm(axis, self.config.eps, self.dtype, name=name)

    def embeddings(self) -> dict[str, jax.Array]:
        c = self.config
        return {
            "token_embedding": self.embedding("token_embedding", "vocab", c.vocab),
            "position_embedding": self.embedding("position_embedding", "context", c.context),
        }

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        block = GPT2Block(self.config, self.dtype, parent=None)
        return self.stack_of(block, segments_BT=call.named("segments"))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        tokens_BT, _ = last_tokens(call.inputs)
        position_embedding_TD = embeddings["position_embedding"]
        first = self.config.first_position
        length = tokens_BT.shape[1]
        x_BTD = jnp.take(embeddings["token_embedding"], tokens_BT, axis=0)
        segments_BT = call.named("segments")
        if segments_BT is not None:
            x_BTD = x_BTD + position_embedding_TD[first + segment_positions(segments_BT)]
        elif call.past is not None:
            x_BTD = x_BTD + position_embedding_TD[first + call.past.positions_BT(length)]
        else:
            x_BTD = x_BTD + position_embedding_TD[None, first : first + length]
        return x_BTD.astype(self.dtype)
