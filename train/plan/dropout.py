"""How does a training phase apply dropout?

A random subset of the entries of each sublayer's output is set to zero. The subset differs between
steps and samples.
"""

from dataclasses import dataclass
from typing import Any

import jax

from jaxgrow.layerdrop import KeepMask
from jaxgrow.layerdrop.execution import Dropout
from jaxgrow.models import Config
from train.plan.modifiers import (
    DropLayers,
    DropTokens,
    FreezeParts,
    Micro,
    Modifier,
    Ramp,
    ShortContext,
    TrainedPhase,
)

# These modifiers also change the keep mask, or the samples that it belongs to.
OTHERS = (DropLayers, DropTokens, FreezeParts, Ramp, ShortContext)


@dataclass(frozen=True)
class DropUnits(Modifier, key="dropout"):
    """Dropout of the outputs of attention and MLPs, before they are added to the residual stream.

    Deviation(BERT): embeddings, attention probabilities and the input of the head are not dropped.
    """

    rate: float

    def check(self, phase: TrainedPhase) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"dropout must be between 0 and 1, but is {self.rate}")
        if any(isinstance(other, OTHERS) for other in phase.modifiers):
            raise ValueError(
                "dropout is not supported together with dropped layers or tokens, frozen layers, a ramp or a short context: "
                "leave out dropout or the others"
            )

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        layers = jax.random.split(jax.random.fold_in(micro.key, 1), config.depth)
        of_rows = jax.vmap(jax.random.fold_in, (None, 0))
        keys = jax.vmap(lambda key: of_rows(key, micro.rows))(layers)
        return {"keep_mask": KeepMask(None, Dropout(keys, self.rate), "sublayer")}
