"""Rotary positions for contexts longer than in pre-training: "longrope", "yarn" and "dynamic".

`jaxgrow.models.llama.rotary_angles` finds them by name. The settings are fields of `LlamaConfig`.
Shape suffixes: B batch, T positions, R rotated dimensions of a head.
"""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.models.attention import segment_positions
from jaxgrow.models.llama import SCALINGS, SEGMENTS, LlamaConfig, frequencies, rotary_angles


def longrope_frequencies(c: LlamaConfig, length: int) -> tuple[np.ndarray, float]:
    """Divide each frequency by its own factor (Ding et al., 2024)."""
    factors = c.rope_long if length > c.rope_context else c.rope_short
    return frequencies(c, c.rope_theta) / np.array(factors), c.rope_scale


def dynamic_frequencies(c: LlamaConfig, length: int) -> tuple[np.ndarray, float]:
    """Use a greater base in sequences that are longer than the context."""
    theta = c.rope_theta
    if length > c.context:
        more = c.rope_factor * length / c.context - (c.rope_factor - 1)
        theta *= more ** (c.rotary_dims / (c.rotary_dims - 2))
    return frequencies(c, theta), 1.0


def yarn_frequencies(c: LlamaConfig, length: int) -> tuple[np.ndarray, float]:
    """Divide frequencies, with a weight that is linear in the index of the pair (Peng et al., 2023)."""

    def pair(turns: float) -> float:
        """Return the fractional index of the pair whose frequency makes this number of turns."""
        full = math.log(c.rope_context / (turns * 2 * math.pi))
        return c.rotary_dims * full / (2 * math.log(c.rope_theta))

    first, last = pair(c.rope_high), pair(c.rope_low)
    if c.rope_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, c.rotary_dims - 1)
    steps = last - first or 0.001
    share = 1 - np.clip((np.arange(c.rotary_dims // 2) - first) / steps, 0, 1)
    frequency = frequencies(c, c.rope_theta)
    return frequency * (share + (1 - share) / c.rope_factor), c.rope_scale


# The rotations of each kind of layer: cosine and sine.
Rotations: TypeAlias = list[tuple[np.ndarray, np.ndarray]]


def longrope_segments(
    c: LlamaConfig,
    at_BT: jax.Array,
    segments_BT: jax.Array,
    kinds: list[tuple[str, bool]],
    whole: Rotations,
) -> tuple[list, jax.Array]:
    """Return the rotations of each kind of layer, and the row of each token in them, [B, T].

    The rows of short segments are before the rows of the others.

    Args:
      c: the config.
      at_BT: the position of each token in its segment.
      segments_BT: segment ids of the tokens.
      kinds: the kinds of layers.
      whole: `rotary_angles` of each kind for the length of the sequence.
    """
    if segments_BT.shape[1] <= c.rope_context:
        return whole, at_BT
    last_BT = jnp.flip(segment_positions(jnp.flip(segments_BT, 1)), 1)
    short = [rotary_angles(c, c.rope_context, kind) for kind, _ in kinds]
    both = [
        [np.concatenate(pair) for pair in zip(a, b, strict=True)]
        for a, b in zip(short, whole, strict=True)
    ]
    return both, jnp.where(at_BT + last_BT < c.rope_context, at_BT, at_BT + c.rope_context)


def dynamic_segments(
    c: LlamaConfig,
    at_BT: jax.Array,
    segments_BT: jax.Array,
    kinds: list[tuple[str, bool]],
    whole: Rotations,
) -> tuple[list, jax.Array]:
    """Return the rotations of a sequence within the context, as `longrope_segments` does.

    Raises:
      ValueError: the sequence is longer, so the rotations would depend on the length of each segment.
    """
    length = segments_BT.shape[1]
    if length > c.context:
        raise ValueError(
            f"rope_by='dynamic' does not support segments in sequences of {length} tokens, more than "
            f"context={c.context}: use shorter sequences"
        )
    return whole, at_BT


SCALINGS.add("longrope", longrope_frequencies)
SCALINGS.add("dynamic", dynamic_frequencies)
SCALINGS.add("yarn", yarn_frequencies)
SEGMENTS.add("longrope", longrope_segments)
SEGMENTS.add("dynamic", dynamic_segments)
