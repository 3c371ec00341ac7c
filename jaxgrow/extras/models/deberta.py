"""DeBERTa v2 and v3 (He et al., 2021, 2023): a BERT whose attention has relative positions.

Shape suffixes: B batch, T positions, S positions of keys, D embed, H heads, K head_dim, P rows of
the relative position embedding, V vocab.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, READ, VALUE
from jaxgrow.models import bert
from jaxgrow.models.attention import ScoreForm, attention
from jaxgrow.models.bert import BERTConfig
from jaxgrow.models.config import Array, Cost
from jaxgrow.models.encoder import mask_of
from jaxgrow.models.model import INIT, Call, Stack, tokens_at
from jaxgrow.models.modules import merge_heads, project_together, split_heads
from jaxgrow.models.stack import stacked_blocks


@dataclass(frozen=True)
class DeBERTaConfig(BERTConfig):
    """Config of a DeBERTa. The defaults are DeBERTa-v3-base.

    Absolute positions and token types are not supported. All layers share one embedding of
    relative positions. Each layer projects it to the keys and queries of positions, by the kernels
    for tokens. The other fields are described in `jaxgrow.models.bert.BERTConfig`.
    """

    eps: float = 1e-7
    vocab: int = 128100
    context: int = 512
    types: int = 0
    # The rows of the relative position embedding. Signed distances up to a quarter of them have a row
    # each, and larger ones share logarithmic buckets.
    distances: int = 512
    # The distance at which the last bucket begins.
    farthest: int = 512
    pooling: Literal["tanh", "relu", "gelu"] = dataclasses.field(default="gelu", repr=False)

    no_axes: ClassVar = ("context", "first_position", "farthest")

    def __post_init__(self):
        super().__post_init__()
        fixed = {"norm": "post", "first_position": 0, "types": 0}
        wrong = [f"{n}={getattr(self, n)}" for n, x in fixed.items() if getattr(self, n) != x]
        if wrong:
            raise ValueError(f"a DeBERTa does not support {', '.join(wrong)}")
        if self.distances % 4:
            raise ValueError(f"distances is {self.distances}, but must be a multiple of 4")
        if self.farthest <= self.distances // 4 + 1 < self.context:
            raise ValueError(
                f"farthest is {self.farthest}, but must be above {self.distances // 4 + 1}, because buckets are "
                f"used for distances above {self.distances // 4}"
            )

    @property
    def module(self) -> nn.Module:
        return DeBERTa(self)

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position.

        The scores with positions add ``4 P HK`` to a layer of a BERT. The keys and queries of
        relative positions are not counted: ``2 P D HK`` each, once for a batch of any size.

        Args:
          length: positions of a sample, T.
        """
        plain = super().cost(length)
        both = 4 * self.distances * self.heads * self.head_dim
        return plain._replace(layer=plain.layer + both)


class DisentangledAttention(nn.Module):
    """Attention whose scores depend on tokens and on their distance.

    With the query, key and value ``q``, ``k``, ``v`` of tokens, and the query ``r`` and key ``s`` of
    relative positions:

    ``softmax((q_i k_j + q_i s_ij + r_ij k_j) / sqrt(3 K)) v_j``

    Attributes:
      config: the config of the model.
      out_init: initializer of the output kernel.
      dtype: dtype of activations.
    """

    config: DeBERTaConfig
    out_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD, mask_BS, relative_PD, rows_BTS, segments_BT=None):
        """Apply attention.

        Args:
          x_BTD: input.
          mask_BS: True for the visible tokens; None: all of them. A hidden query sees all keys
            equally, as in the published code.
          relative_PD: the relative position embedding.
          rows_BTS: the row of the embedding for each query and key; the first axis may be 1.
          segments_BT: segment ids of the tokens; None: all tokens are in one segment.
        """
        c = self.config
        project = partial(split_heads, c, INIT, self.dtype)
        query = project("query", "heads", "head_dim")
        key = project("key", "heads", "head_dim" + READ)
        value = project("value", "heads", "head_dim" + VALUE)
        q_BTHK, k_BTHK, v_BTHK = project_together((query, key, value), x_BTD)
        by_query_BHTS = _scores_at(rows_BTS, q_BTHK, key(relative_PD))
        by_key_BHST = _scores_at(rows_BTS.swapaxes(1, 2), k_BTHK, query(relative_PD))
        scores_BHTS = by_query_BHTS + by_key_BHST.swapaxes(2, 3)
        scale = (3 * c.head_dim) ** -0.5
        y_BTHK = attention(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            causal=False,
            mask_BS=mask_BS,
            by=c.attention,
            form=ScoreForm(scale, bias_BHTS=scores_BHTS * scale, segments_BT=segments_BT),
        )
        if mask_BS is not None:
            y_BTHK = jnp.where(mask_BS[..., None, None], y_BTHK, v_BTHK.mean(1, keepdims=True))
        return merge_heads(c, self.out_init, self.dtype)(y_BTHK)


def _scores_at(rows_BTS, x_BTHK, positions_PHK):
    """Return the score of each token with the relative positions in the given rows."""
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    scores_BHTP = jnp.einsum("bthk,phk->bhtp", x_BTHK, positions_PHK, preferred_element_type=wide)
    return jnp.take_along_axis(scores_BHTP, rows_BTS[:, None], axis=-1)


class DeBERTaBlock(bert.BERTBlock):
    """A post-LN block with `DisentangledAttention`."""

    def attention_layer(self, out_init: Initializer) -> nn.Module:
        assert isinstance(self.config, DeBERTaConfig)
        return DisentangledAttention(self.config, out_init, self.dtype, name="attention")


def distance_rows(config: DeBERTaConfig) -> np.ndarray:
    """Return the row of the relative position embedding for each distance, int32 [2 T - 1].

    The distances are ``1 - T, .., T - 1`` for the ``context`` T: the position of the query minus
    the position of the key. The middle row is for distance 0. Rows below it are for keys after the
    query. Distances up to a quarter of the rows have separate rows. Larger distances share rows in
    logarithmic buckets, up to ``farthest``. In each direction, all distances beyond it share one row.

    Example:
      >>> distance_rows(DeBERTaConfig(context=8, distances=8, farthest=8)).tolist()
      [1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]
    """
    span = config.distances // 2
    distance = np.arange(1 - config.context, config.context)
    near = span // 2
    # The published code computes in float32, which decides at the border of two buckets.
    far = np.maximum(np.abs(distance), near).astype(np.float32) / np.float32(near)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.log(far) / np.log(np.float32((config.farthest - 1) / near))
        bucket = np.sign(distance) * (np.ceil(share * np.float32(near - 1)) + near)
    distance = np.where(np.abs(distance) <= near, distance, bucket)
    return np.clip(distance + span, 0, config.distances - 1).astype(np.int32)


def _embedding_rows(
    config: DeBERTaConfig, length: int, positions_BT: jax.Array | None = None
) -> Array:
    """Return the row of the embedding for each query and key, [B or 1, T, S].

    Args:
      config: the config of the model.
      length: the number of tokens.
      positions_BT: their positions; None: 0, 1, 2, ...
    """
    row_of = distance_rows(config)
    if positions_BT is None:
        positions_T = np.arange(length)
        return row_of[positions_T[:, None] - positions_T + config.context - 1][None]
    distance_BTS = positions_BT[:, :, None] - positions_BT[:, None]
    return jnp.asarray(row_of)[distance_BTS + config.context - 1]


class DeBERTa(bert.BERT):
    """A DeBERTa: a BERT without token types, whose attention has relative positions.

    The head of classes uses GELU. ``frozen`` also freezes the relative position embedding and its
    norm.

    Deviation(DeBERTa): the enhanced mask decoder and the discriminator of the pre-training are not
    implemented. `transformers` does not have them either.
    """

    config: DeBERTaConfig  # type: ignore[assignment]

    def embeddings(self) -> dict[str, jax.Array]:
        c = self.config
        embedding_VD = self.embedding("token_embedding", "vocab", c.vocab)
        relative_PD = self.embedding("relative_embedding", "distances", c.distances)
        relative_PD = self.norm("relative_norm", "embed" + BELOW)(relative_PD)
        return {
            "token_embedding": embedding_VD,
            "relative_embedding": relative_PD.astype(self.dtype),
        }

    def stack(self, embeddings: dict[str, jax.Array], call: Call) -> Stack:
        c = self.config
        relative_PD = embeddings["relative_embedding"]
        # The block is detached: only its init and apply are used.
        block = DeBERTaBlock(c, self.dtype, parent=None)
        one = jnp.zeros((1, 1, c.embed), self.dtype)
        blocks = stacked_blocks(
            self, "blocks", block, c.layers, one, None, None, relative_PD[:1], _embedding_rows(c, 1)
        )
        mask_BT = mask_of(call)

        def layer(w, x, scale=None, positions=None):
            w, relative_PD = w
            rows_BTS = _embedding_rows(c, x.shape[1], positions)
            segments = tokens_at(call.named("segments"), positions)
            inputs = x, scale, mask_BT, relative_PD, rows_BTS
            return block.apply({"params": w}, *inputs, segments_BT=segments)

        # Every layer gets a copy as an argument, because a layer that may be dropped must not
        # differentiate a value from its closure.
        return Stack(layer, (blocks, jnp.broadcast_to(relative_PD, (c.layers, *relative_PD.shape))))

    def embed(self, embeddings: dict[str, jax.Array], call: Call) -> jax.Array:
        x_BTD = jnp.take(embeddings["token_embedding"], call.inputs["tokens"], axis=0)
        x_BTD = self.norm("embedding_norm", "embed" + BELOW)(x_BTD)
        mask_BT = mask_of(call)
        return x_BTD if mask_BT is None else x_BTD * mask_BT[..., None]
