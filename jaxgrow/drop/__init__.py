"""Layer and token dropping that save time: schedules, sensitivities, gates, and two ways not to run a layer.

`LayerDrop` says how; `gates` draws for a step; `Kept` tells a stack what to run, and `dropping` a Flax model
that calls its blocks one after the other.
"""

from jaxgrow.drop.allocation import Sensitivity, allocate, block_list, sensitivity
from jaxgrow.drop.execution import Kept, conditional, dropping
from jaxgrow.drop.sampling import gates, sample, systematic
from jaxgrow.drop.schedules import LayerDrop, Variance, fit_variance, schedule, theta
from jaxgrow.drop.tokens import TokenDrop, sample_tokens

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
    "sample",
    "sample_tokens",
    "schedule",
    "sensitivity",
    "systematic",
    "theta",
]
