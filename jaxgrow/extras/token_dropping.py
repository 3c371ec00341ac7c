"""Token dropping: some tokens of each sequence skip the middle layers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TokenDrop:
    """Settings of token dropping: the tokens that skip, and the layers that they skip.

    The tokens are sampled separately for each step and sequence. The remaining tokens keep their
    order, so causal attention stays causal. LiGO (appendix B.3) drops 15 % of the tokens in "middle
    layers". We take these to be all layers except the first and the last, as in random layerwise
    token dropping (Yao et al., 2022).

    Attributes:
      rate: fraction of the tokens that skip the middle layers, above 0 and below 1.
      first: number of layers at the bottom that process all tokens.
      last: number of layers at the top that process all tokens.
    """

    rate: float = 0.15
    first: int = 1
    last: int = 1

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise ValueError(f"rate must be above 0 and below 1, but is {self.rate}")
        if self.first < 0 or self.last < 0:
            raise ValueError(
                f"first and last must not be negative, but are {self.first} and {self.last}"
            )

    def kept(self, length: int) -> int:
        """The number of kept tokens of a sequence of ``length`` tokens."""
        return max(1, round((1 - self.rate) * length))

    def middle(self, layers: int) -> tuple[int, int]:
        """The range of layers ``begin .. end - 1`` that process only the kept tokens.

        Raises:
          ValueError: every layer is one of the first or last layers.
        """
        if self.first + self.last >= layers:
            raise ValueError(
                f"token dropping excludes {self.first} + {self.last} layers, but the model has only {layers}"
            )
        return self.first, layers - self.last


def sample_tokens(drop: TokenDrop, key: jax.Array, rows: jax.Array, length: int) -> jax.Array:
    """Sample the positions of the kept tokens of each sequence uniformly.

    Args:
      drop: the fraction of tokens that is dropped.
      key: random key of the step, equal on all devices.
      rows: int [batch], the index of each sequence in the batch of the step. The sample of a
        sequence depends on this index and not on the device.
      length: number of tokens of each sequence.

    Returns:
      Positions, int32 [batch, kept], in ascending order. Their number is the same for all
      sequences.

    Example:
      >>> sample_tokens(TokenDrop(rate=0.25), jax.random.key(0), rows=jnp.arange(2), length=8).shape
      (2, 6)
    """

    def chances(row: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, row), (length,))

    order = jnp.argsort(jax.vmap(chances)(rows), axis=-1)
    return jnp.sort(order[:, : drop.kept(length)], axis=-1).astype(jnp.int32)
