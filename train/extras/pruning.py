"""How does a V-cycle remove layers in place of coalescing them?"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jaxgrow.axes import stages
from jaxgrow.extras.operators.pruning import best_units, keep_units
from jaxgrow.growth.maps import Growth, swap
from jaxgrow.layerdrop import Sensitivity
from jaxgrow.models import Config
from train.plan.transforms import Way
from train.state.model import TrainState


@dataclass(frozen=True)
class Pruning(Way):
    """The small model has the most important layers, unchanged, in place of grouped layers.

    See `jaxgrow.extras.operators.pruning.keep_units`. On the way up, `train.plan.transforms.Correct` leaves the
    other layers as they were. With ``moments_up="asymmetric"`` their optimizer state starts from zero.
    """

    layers: int | tuple[int, ...]  # number of layers that are kept (in each stage)
    # How the importance of layers is measured: a kind of `Sensitivity`.
    by: Literal["influence", "loss_delta", "taylor"] = "influence"
    batches: int = 8  # number of micro-batches, outside training, for the measurement
    # Indices of the layers that are kept, from the input on; None: the most important layers.
    kept: tuple[int, ...] | None = None

    # The choices that use a field (`train.extras.effect`).
    used_with = {"by": {"kept": (None,)}, "batches": {"kept": (None,)}}

    def __post_init__(self):
        if self.kept is not None and len(self.kept) != sum(self.depths):
            raise ValueError(
                f"layers is {self.layers}, but kept names the layers {self.kept}: name one index for each layer that is kept"
            )

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of layers that are kept in each stage."""
        return self.layers if isinstance(self.layers, tuple) else (self.layers,)

    @property
    def measurement(self) -> Sensitivity | None:
        return Sensitivity(self.by, batches=self.batches) if self.kept is None else None

    def parts(self, large: Config) -> list[tuple[str, slice, slice]]:
        """Return the layer axis, the range of layers and the range of kept layers of each stage.

        Raises:
          ValueError: the model has another number of stages.
        """
        old = stages(large.sizes())
        if len(old) != len(self.depths):
            raise ValueError(
                f"a pruning to layers={self.layers} is for a model with {len(self.depths)} stages, but this one has "
                f"{len(old)}, with {large.depths} layers: give the number of layers to keep in each stage"
            )
        new = stages(dict(zip(old, self.depths, strict=True)))
        return [(axis, old[axis], new[axis]) for axis in old]

    def up(self, large: Config) -> Growth:
        """Return the growth to the large model, as `Grouping.up` does.

        Before the measurement, the first layers stand in for the kept ones; the shapes are the
        same.
        """
        kept = {
            axis: np.arange(new.stop - new.start)
            if self.kept is None
            else np.subtract(self.kept[new], old.start)
            for axis, old, new in self.parts(large)
        }
        return swap(keep_units(large.sizes(), kept))

    def measured(self, large: TrainState) -> "Pruning":
        """Return the pruning with the layers that are kept, by the measurements of this model.

        In a model with two alternating kinds of layers, the kinds still alternate.
        """
        if self.kept is not None:
            return self
        scores = np.asarray(large.sensitivity)
        alternating = large.config.traits["alternating"]
        kept = [
            old.start + best_units(scores[old], new.stop - new.start, axis in alternating)
            for axis, old, new in self.parts(large.config)
        ]
        return replace(self, kept=tuple(np.concatenate(kept).tolist()))
