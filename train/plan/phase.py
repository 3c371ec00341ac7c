"""What is a phase of a plan? It reads models, makes one, has a cost, and runs.

Models have names between the phases. A run uses phases only through this interface, so that a new
kind of phase is one class.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

import jax
import numpy as np
import optax

from jaxgrow.axes import Tree
from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.data.dataset import Batch
from train.plan.ledger import Ledger
from train.state.model import TrainState

Models: TypeAlias = Mapping[str, TrainState]
# A value for the log: a number, or an array.
LogValue: TypeAlias = float | np.number | np.ndarray | jax.Array

# Names of the models of a run for people.
NAMES = {"large": "full", "small": "small", "coarse1": "coarse"}


def spoken_phase(label: str, labels: Collection[str]) -> str:
    """Return the name of a phase for people.

    Args:
      label: label of the phase.
      labels: labels of all phases of the run. A run of a single model needs no name for it.
    """
    kind, _, model = label.partition(" ")
    if kind != "train":
        return kind if model in NAMES else label
    several = len({other for other in labels if other.startswith("train ")}) > 1
    return f"{NAMES.get(model, model)} model" if several else "training"


class Context(Protocol):
    """The services of a run for its phases."""

    seed: int
    models: dict[str, TrainState]  # models that are still needed
    ledger: Ledger
    validation: dict[str, float]  # metrics of the last evaluation
    best: Json  # for `train.extras.fine_tune`: the best evaluation, and how many followed it

    @property
    def key(self) -> jax.Array:
        """Random key for the samples of the phase."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint in the middle of the phase."""
        ...

    def begin(self, phase: "Phase", model: Tree) -> None:
        """Open the account of the phase; ``model`` is the model that it makes, as shapes."""
        ...

    def compute(
        self,
        phase: "Phase",
        function: Callable[..., TrainState],
        *arguments: Tree,
        donate: bool = False,
    ) -> tuple[TrainState, float]:
        """Compile and run ``function(phase, tx, *arguments)``, and return its result and its FLOPs.

        This also opens the account of the phase. The FLOPs are counted by `jaxgrow.flops.counted`,
        and are the same on every platform. With ``donate``, the result may reuse the memory of the
        first argument, which is deleted.
        """
        ...

    def train(self, phase: "Phase") -> TrainState:
        """Run the remaining steps of a `train.plan.training.Train`, and return the trained model."""
        ...

    def validation_batches(self, batches: int) -> Batch:
        """Return micro-batches of validation data that evaluation never reads, stacked along a new axis."""
        ...

    def keep(self, name: str, arrays: Tree, write: Callable[[Path, Tree], None]) -> None:
        """Write small arrays of a model to a file in the folder of the run.

        Args:
          name: name of the file.
          arrays: arrays, which may be sharded over the devices of all processes.
          write: function that writes NumPy arrays to a path.
        """
        ...

    def imported(
        self, folder: str, config: Config, headless: bool = False
    ) -> tuple[TrainState, Json | None]:
        """Read a model from another finished run, or from a checkpoint.

        Args:
          folder: folder of the run or of the checkpoint.
          config: config of the model.
          headless: whether to leave out the head, which may differ from the head of ``config``.

        Returns:
          The model, and the result of the run; None for another checkpoint.
        """
        ...

    def validate(self, step: int, model: TrainState) -> None: ...

    def scores(self, model: TrainState) -> dict[str, float]:
        """Return the metrics of the task for ``model``, the main one first, and log them."""
        ...

    def log(self, step: int, **values: float | list[float]) -> None: ...
    def finite(self, step: int, values: Mapping[str, LogValue]) -> dict[str, float]: ...


class Phase:
    """A part of a plan. Phases are frozen dataclasses; equal ones share their compiled programs.

    A class declares which of its fields are the names of models: ``class Measure(Phase,
    reads=("name",), writes="name")``.
    """

    _reads: ClassVar[tuple[str, ...]] = ()
    _writes: ClassVar[str]
    kind: ClassVar[str]  # the name of this kind of phase in logs and results

    def __init_subclass__(
        cls,
        reads: tuple[str, ...] | None = None,
        writes: str | None = None,
        kind: str | None = None,
    ):
        cls.kind = kind or cls.__name__.lower()
        if reads is not None:
            cls._reads = reads
        if writes is not None:
            cls._writes = writes

    @property
    def label(self) -> str:
        """The name of the phase in logs and tables."""
        return f"{self.kind} {' '.join(self.reads or (self.writes,))}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The models that the phase reads. Their optimizer state is consumed.

        If such a model exists, it must still be available at the start of the phase.
        """
        return tuple(getattr(self, field) for field in self._reads)

    @property
    def looks_at(self) -> tuple[str, ...]:
        """Further models that the phase reads. They keep their optimizer state."""
        return ()

    @property
    def writes(self) -> str:
        """The model that the phase makes."""
        return getattr(self, self._writes)

    @property
    def needs(self) -> tuple[str, ...]:
        """The models that the phase reads until its end. Checkpoints during the phase contain them."""
        return ()

    probes = 0  # number of micro-batches that the phase reads from `Context.validation_batches`
    judges = False  # whether the phase depends on the last evaluation
    notes: object = None  # JSON value that checkpoints record about the phase
    after_early_stop = False  # whether a run that stops early continues with this phase

    def stops(self, context: Context) -> bool:
        """Whether to skip the phases up to the next one with ``after_early_stop``."""
        return False

    def cost(self, samples: int, accumulate: int = 1) -> float:
        """Expected FLOPs of the training. Transformations have negligible cost.

        Args:
          samples: number of samples in a batch.
          accumulate: number of micro-batches in a batch.
        """
        return 0.0

    def warnings(self) -> list[str]:
        """Warnings about settings that are allowed but probably not intended."""
        return []

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        """Return the model that the phase makes from ``models``. It is only traced for shapes."""
        raise NotImplementedError

    def run(self, context: Context) -> TrainState:
        """Return the model that the phase makes, and charge all costs to its account."""
        raise NotImplementedError
