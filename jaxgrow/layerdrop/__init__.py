"""Layer dropping that reduces the training time.

The package contains schedules, sensitivities, keep masks, and two ways to skip a layer. `LayerDrop`
holds the settings, and `keep_masks` samples the keep masks of a step. `KeepMask` specifies which
layers a stack runs. `jaxgrow.extras.integrations.linen` applies a `KeepMask` to other Flax models.
"""

from jaxgrow.layerdrop.allocation import (
    Sensitivity,
    block_list,
    keep_probabilities,
    layer_sensitivity,
)
from jaxgrow.layerdrop.counts import padded, program_counts, program_odds
from jaxgrow.layerdrop.execution import KeepMask, conditional
from jaxgrow.layerdrop.sampling import independent, keep_masks, sample, systematic
from jaxgrow.layerdrop.schedules import (
    LayerDrop,
    Variance,
    output_divisors,
    schedule,
    theta,
)

__all__ = [
    "KeepMask",
    "LayerDrop",
    "Sensitivity",
    "Variance",
    "block_list",
    "conditional",
    "independent",
    "keep_masks",
    "keep_probabilities",
    "layer_sensitivity",
    "output_divisors",
    "padded",
    "program_counts",
    "program_odds",
    "sample",
    "schedule",
    "systematic",
    "theta",
]
