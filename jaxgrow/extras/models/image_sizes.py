"""How do the position embeddings of patches fit another image size? Shape suffixes: T positions, D embed."""

import math

import jax
import jax.numpy as jnp
from einops import rearrange

from jaxgrow.models.patches import RESIZING, PatchConfig


def resized_positions(
    position_embedding_TD: jax.Array, old: PatchConfig, new: PatchConfig
) -> jax.Array:
    """Return the position embeddings for another image size, [T, D] -> [T', D].

    The positions of patches form a grid, which is interpolated (bicubic, as in DeiT, Touvron et
    al., 2021, section 3). The positions of learned tokens are copied.

    Args:
      position_embedding_TD: position embeddings of ``old``.
      old: the config of the model.
      new: the config with the new image size.
    """
    if old.patches == new.patches:
        return position_embedding_TD
    tokens = old.positions - old.patches
    before, after = (math.isqrt(c.patches) for c in (old, new))
    grid = rearrange(position_embedding_TD[tokens:], "(h w) d -> h w d", h=before)
    grid = jax.image.resize(grid, (after, after, grid.shape[-1]), "cubic")
    return jnp.concatenate(
        [
            position_embedding_TD[:tokens],
            rearrange(grid, "h w d -> (h w) d").astype(position_embedding_TD.dtype),
        ]
    )


RESIZING.add("positions", resized_positions)
