"""Layer and token dropping that reduce the training time.

The package contains schedules, sensitivities, keep masks, and two ways to skip a layer. `LayerDrop`
holds the settings, and `gates` samples the keep masks of a step. `Kept` specifies which layers a
stack runs. `dropping` does the same for a Flax model that calls its blocks one after the other.
"""

from jaxgrow.layerdrop.allocation import Sensitivity, allocate, block_list, sensitivity
from jaxgrow.layerdrop.counts import padded, program_counts, program_odds
from jaxgrow.layerdrop.execution import Kept, conditional, dropping
from jaxgrow.layerdrop.sampling import gates, independent, sample, systematic
from jaxgrow.layerdrop.schedules import LayerDrop, Variance, fit_variance, schedule, theta
from jaxgrow.layerdrop.tokens import TokenDrop, sample_tokens

__all__ = [
    "Kept",
    "LayerDrop",
    "Sensitivity",
    "TokenDrop",
    "Variance",
    "allocate",
    "block_list",
    "conditional",
    "dropping",
    "fit_variance",
    "gates",
    "independent",
    "padded",
    "program_counts",
    "program_odds",
    "sample",
    "sample_tokens",
    "schedule",
    "sensitivity",
    "systematic",
    "theta",
]
