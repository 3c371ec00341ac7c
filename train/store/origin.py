"""How does a run start from a checkpoint of another run? `train.extras.branching` has the origins."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jax.sharding import Mesh

from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.config.experiment import Experiment
from train.plan.record import RunRecord
from train.state.model import TrainState
from train.store.seen import Order
from train.store.workdir import Workdir

if TYPE_CHECKING:  # its import takes seconds
    from train.data.batches import Stream


class RunOrigin(Protocol):
    """A checkpoint of another run that a run starts from."""

    @property
    def folder(self) -> Path:
        """The folder of the other run."""
        ...

    def as_json(self) -> Json: ...

    def record(self) -> RunRecord:
        """Read the record of the checkpoint."""
        ...

    def restore(
        self, experiment: Experiment, data: "Stream", identity: Json, mesh: Mesh, order: Order
    ) -> tuple[dict[str, TrainState], RunRecord, list[str]]:
        """Load the checkpoint for the plan of another experiment.

        Args:
          experiment: experiment of the new run.
          data: data iterator of the new run; it is moved to the position of the other run.
          identity: identity of the data of the new run.
          mesh: mesh that the models are placed on.
          order: order of the training samples of the new run.

        Returns:
          ``(models, record, lines)``; the lines say where the new run starts.

        Raises:
          UserError: the checkpoint is damaged, or it does not fit the plan.
        """
        ...

    def copy_log(self, workdir: Workdir, record: RunRecord) -> None:
        """Let the log of the new run begin with the lines of the other run up to the checkpoint."""
        ...


# Returns the origin of the run in a folder, if it has one, from ``RUN`` or ``RUN@STEP`` if the user
# gave it.
ORIGINS: Registry[Callable[[str | None, Workdir], RunOrigin | None]] = Registry(
    "origin", "train.extras"
)
