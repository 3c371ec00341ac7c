"""The data of a run: training samples, validation samples and sensitivity batches."""

from collections.abc import Sequence
from functools import partial

from jax.sharding import Mesh

from jaxgrow.typed import Json
from train.common.errors import UserError
from train.config.experiment import Experiment
from train.data import batches
from train.data.dataset import MixedSource
from train.plan.training import Train
from train.state.mesh import How, MeshDevice, batch_devices, put, rows
from train.store.origin import RunOrigin
from train.store.seen import order_of
from train.store.workdir import Workdir


class RunData:
    """The training data, validation data and sensitivity batches of an experiment.

    The samples of each batch are the same in every run. This process reads only the samples of a
    batch that belong to its devices.
    """

    def __init__(
        self, experiment: Experiment, mesh: Mesh, workdir: Workdir, origin: RunOrigin | None = None
    ):
        e = experiment
        self.mesh = mesh
        self.batch = e.batch  # number of samples in the next batch
        training, validation = e.data.sources(e.model)
        # The samples of a batch, and of a micro-batch, that belong to the devices of this process.
        mine, few = rows(e.batch, mesh), rows(e.batch // e.accumulate, mesh)
        about = e.data.identity(e.model)
        # Later, the other run may be gone.
        before = None if origin is None or workdir.begun else (origin.folder, origin.record())
        self.order, self.continued = order_of(e, workdir, about, training, before)
        order = self.order
        orders = [(part.seed, part.first) for part in order.parts.values()]
        self.source = training
        self.training = batches.training_batches(
            training, e.batch, order.seed, mine, order.first, orders
        )
        more = {name: partial(e.data.more_validation, name) for name in validation}
        self.validation = {
            name: batches.validation_batches(source, e.batch, e.eval_batches, mine, more[name])
            for name, source in validation.items()
        }
        micro = e.batch // e.accumulate
        probes = max(phase.probes for phase in e.plan)
        first = next(iter(more.values()))
        self.probe = put(
            batches.probe_batches(validation, e.batch, e.eval_batches, micro, probes, few, first),
            mesh,
            dim=1,
        )
        # A small validation set can have fewer samples than `eval_batches * batch`.
        evaluated = sum(map(len, self.validation.values())) * e.batch
        self.identity = about | {"evaluated": evaluated}
        self.head = e.data.head(e.model)
        self.report = e.data.report()
        trained = [phase for phase in e.plan if isinstance(phase, Train)]
        planned = sum((phase.end - phase.begin) * phase.samples(e.batch) for phase in trained)
        if epochs := self.epochs(order.first + planned):
            times = ", ".join(f"{name} {times:.2f} times" for name, times in epochs.items())
            self.report.append(f"data: at the end of this run, the sources have been read: {times}")

    def resize(self, samples: int) -> None:
        """Let the next training batches have this number of samples."""
        self.batch = samples
        self.training.resize(samples, rows(samples, self.mesh))

    @property
    def taken(self) -> int:
        """The number of samples that were read, with those that were skipped."""
        return self.training.get_state()["next_index"]

    @property
    def order_so_far(self) -> Json:
        """The order of the samples, with the number of those that were read, as JSON."""
        return self.order.until(self.taken, self.source)

    def as_json(self) -> Json:
        """The entries of the result about the data."""
        about = {"order": self.order_so_far, "corpus": self.identity}
        epochs = self.epochs(self.taken)
        return about | ({"source_epochs": epochs} if epochs else {})

    def epochs(self, taken: int) -> dict[str, float]:
        """How often each source of a mixture is read after ``taken`` samples; empty without one."""
        if not isinstance(self.source, MixedSource):
            return {}
        firsts = (part.first for part in self.order.parts.values())
        parts = zip(self.source.parts.items(), firsts, self.source.counts(taken), strict=True)
        return {name: (first + count) / len(part) for (name, part), first, count in parts}

    def last_drawn(self, length: int) -> dict[str, int]:
        """The tokens of each source of a mixture in the last batch, of samples of this length."""
        if not isinstance(self.source, MixedSource):
            return {}
        counts = map(self.source.counts, (self.taken - self.batch, self.taken))
        return {
            name: (after - before) * length
            for name, before, after in zip(self.source.parts, *counts, strict=True)
        }


def fitting_mesh(e: Experiment, devices: Sequence[MeshDevice], how: How, where: str = "") -> Mesh:
    """Return the mesh of an experiment on ``devices``.

    Args:
      e: the experiment.
      devices: devices of the run.
      how: "mesh" or "pmap".
      where: beginning of the message, such as the name of one of several experiments.

    Raises:
      UserError: the mesh does not fit the devices, or the samples of a micro-batch cannot be divided
        among them.
    """
    try:
        mesh = e.mesh.over(devices, how)
    except ValueError as error:
        raise UserError(f"{where}{error}") from error
    smallest = e.batch // e.accumulate // 2 ** len(e.ramp)
    if smallest % (parts := batch_devices(mesh)):
        raise UserError(
            f"{where}a micro-batch of {smallest} (batch={e.batch}, accumulate={e.accumulate}"
            f"{f', ramp={e.ramp}' if e.ramp else ''}) is not divisible by "
            f"{parts} devices; use a batch that is a multiple of {parts * e.accumulate * 2 ** len(e.ramp)}"
            + _fewer(e, parts)
        )
    return mesh


def _fewer(experiment: Experiment, devices: int) -> str:
    """The part of a message with the largest ``accumulate`` that fits, if there is one."""
    e = experiment
    smallest = e.batch // 2 ** len(e.ramp)
    fitting = [n for n in range(1, e.accumulate) if smallest % (n * devices) == 0]
    return f", or a smaller accumulate, such as {fitting[-1]}" if fitting else ""
