"""Token dropping: some tokens of each sequence go around the layers in the middle."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TokenDrop:
    """Which fraction of the tokens goes around which layers; at random, others in every step and sequence.

    The tokens that stay keep their order, so that causal attention stays causal. LiGO's appendix
    B.3 drops 15 % in "middle layers", which we take for all but the first and the last (as random
    layerwise token dropping does, Yao et al., 2022).
    """

    rate: float = 0.15
    first: int = 1  # layers at the bottom that see all tokens
    last: int = 1  # at the top

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise ValueError(f"rate lies between 0 and 1, but is {self.rate}")
        if self.first < 0 or self.last < 0:
            raise ValueError(
                f"first and last are not negative, but are {self.first} and {self.last}"
            )

    def kept(self, length: int) -> int:
        """How many tokens of ``length`` stay."""
        return max(1, round((1 - self.rate) * length))

    def middle(self, layers: int) -> tuple[int, int]:
        """The layers ``begin .. end - 1`` that see the kept tokens alone.

        Raises:
          ValueError: there are none.
        """
        if self.first + self.last >= layers:
            raise ValueError(
                f"token dropping leaves out {self.first} + {self.last} layers, but the model has {layers}"
            )
        return self.first, layers - self.last


def sample_tokens(drop: TokenDrop, key: jax.Array, rows: jax.Array, length: int) -> jax.Array:
    """Places of the tokens that stay, int32 [batch, kept], ascending: a uniform choice for every sequence.

    Args:
      drop: which fraction is dropped.
      key: of a step, the same on every device.
      rows: int [batch], which sequences of the step's batch these are: each draws for itself,
        wherever it is.
      length: tokens of each.

    Returns:
      The places, the same number in every sequence.

    Example:
      >>> sample_tokens(TokenDrop(rate=0.25), jax.random.key(0), rows=jnp.arange(2), length=8).shape
      (2, 6)
    """
    chances = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row), (length,)))(
        rows
    )
    order = jnp.argsort(chances, axis=-1)
    return jnp.sort(order[:, : drop.kept(length)], axis=-1).astype(jnp.int32)
