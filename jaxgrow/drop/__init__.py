"""Layer dropping that saves time: schedules, sensitivities, gates, and two ways not to run a layer.

`LayerDrop` says how; `gates` draws for a step; `Kept` tells a stack, and `dropping` any Flax model, what to run.
"""

from jaxgrow.drop.allocation import Sensitivity, allocate, block_list, sensitivity
from jaxgrow.drop.execution import Kept, conditional, dropping
from jaxgrow.drop.sampling import gates, sample, systematic
from jaxgrow.drop.schedules import LayerDrop, schedule, theta

__all__ = [
    "Kept",
    "LayerDrop",
    "Sensitivity",
    "allocate",
    "block_list",
    "conditional",
    "dropping",
    "gates",
    "sample",
    "schedule",
    "sensitivity",
    "systematic",
    "theta",
]
