"""What every phase of a plan is: which models it reads, which one it makes, what that costs, and how it runs.

Models live under names between the phases. A run asks phases nothing but this: a new kind of phase
is one class.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import optax

from train.engine.state.model import Model

if TYPE_CHECKING:
    from train.engine.run.ledger import Ledger

Models: TypeAlias = Mapping[str, Model]


class Context(Protocol):
    """What a run offers its phases."""

    seed: int
    models: dict[str, Model]  # those that are still needed
    ledger: "Ledger"
    validation: dict[str, float]  # the last evaluation
    best: dict[str, Any]  # of `train.plan.best`: the best evaluation, and how many followed it

    @property
    def key(self) -> jax.Array:
        """Of what the phase draws."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether a checkpoint was in the middle of the phase."""
        ...

    def begin(self, phase: "Phase", made: Any) -> None:
        """Opens the phase's account; ``made`` is its model, as shapes."""
        ...

    def compute(
        self, phase: "Phase", function: Callable[..., Model], *arguments: Any
    ) -> tuple[Model, float]:
        """Open the phase's account, compile and run ``function(phase, tx, *arguments)``, and return its result and FLOPs.

        The FLOPs are those of `jaxgrow.flops.counted`, which are the same on every platform.
        """
        ...

    def train(self, phase: Any, model: Model) -> Model:
        """``model`` after the steps of ``phase``, a `train.plan.training.Train`."""
        ...

    def held_out(self, batches: int) -> Any:
        """Micro-batches of text that evaluation never reads, along a new axis."""
        ...

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """Has ``write`` make the file ``name`` of the run's folder."""
        ...

    def imported(
        self, folder: str, config: Any, headless: bool = False
    ) -> tuple[Model, dict[str, Any] | None]:
        """The model of a finished run beside this one, and its result; or of another checkpoint,
        and None. ``headless``: without its head, which may be another than ``config``'s.
        """
        ...

    def validate(self, step: int, model: Model) -> None: ...
    def log(self, step: int, **values: Any) -> None: ...
    def finite(self, step: int, values: Mapping[str, Any]) -> dict[str, float]: ...


class Phase:
    """A step of a plan. Phases are frozen dataclasses: equal ones share their compiled programs."""

    @property
    def kind(self) -> str:
        """As logs and results name it."""
        return type(self).__name__.lower()

    @property
    def label(self) -> str:
        """Its name in logs and tables."""
        return f"{self.kind} {' '.join(self.reads or (self.writes,))}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The models that must be there when it begins, if they exist at all. It uses up their optimizer state."""
        return ()

    @property
    def looks_at(self) -> tuple[str, ...]:
        """Further models that it reads. They keep their optimizer state."""
        return ()

    @property
    def writes(self) -> str:
        """The model that it makes."""
        raise NotImplementedError

    @property
    def needs(self) -> tuple[str, ...]:
        """The models that it reads until its end, so that a checkpoint in its middle holds them."""
        return ()

    probes = 0  # held-out micro-batches that it reads
    notes: Any = None  # what checkpoints say of it, as JSON
    after_early_stop = False  # whether a run that stops early goes on with it

    def stops(self, context: Context) -> bool:
        """Whether the phases up to the next one with ``after_early_stop`` are skipped."""
        return False

    def cost(self, samples: int) -> float:
        """FLOPs of its training, expected, with batches of ``samples``; transformations cost next to nothing."""
        return 0.0

    def warnings(self) -> list[str]:
        """What is allowed, but hardly meant."""
        return []

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        """What it makes of ``models``, to be traced for shapes alone."""
        raise NotImplementedError

    def run(self, context: Context) -> Model:
        """What it makes, with everything that it costs charged to its account."""
        raise NotImplementedError
