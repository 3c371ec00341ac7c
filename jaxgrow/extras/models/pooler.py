"""The pooler of SigLIP (Zhai et al., 2023).

Shape suffixes: B batch, T positions, D embed.
"""

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import BELOW, named_init
from jaxgrow.models.model import INIT
from jaxgrow.models.modules import ACTIVATIONS, MLP, SelfAttention
from jaxgrow.models.norms import LayerNorm
from jaxgrow.models.vit import POOLERS, ViTConfig


class AttentionPooler(nn.Module):
    """The pooler of SigLIP: ``y = attention of a learned query over x; y + mlp(norm(y))``."""

    config: ViTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        probe_D = self.param(
            "probe", named_init(INIT, "embed" + BELOW, role="embedding"), (c.embed,)
        )
        probe_B1D = jnp.broadcast_to(probe_D.astype(self.dtype), (len(x_BTD), 1, c.embed))
        attention = SelfAttention(c, INIT, INIT, self.dtype, name="attention")
        y_B1D = attention(x_BTD, asking_BTD=probe_B1D)
        h_B1D = LayerNorm("embed", c.eps, self.dtype, name="mlp_norm")(y_B1D)
        mlp = MLP(c.embed, c.mlp, INIT, INIT, self.dtype, ACTIVATIONS[c.activation], name="mlp")
        return (y_B1D + mlp(h_B1D))[:, 0]


POOLERS.add("attention", AttentionPooler)
