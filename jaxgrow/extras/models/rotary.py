"""Rotary positions for contexts longer than in pre-training: "longrope", "yarn" and "dynamic".

`jaxgrow.models.llama.rotary_angles` finds them by name. The settings are fields of `LlamaConfig`.
Shape suffix: R rotated dimensions of a head.
"""

import math

import numpy as np

from jaxgrow.models.llama import SCALINGS, LlamaConfig, frequencies


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


SCALINGS.add("longrope", longrope_frequencies)
SCALINGS.add("dynamic", dynamic_frequencies)
SCALINGS.add("yarn", yarn_frequencies)
