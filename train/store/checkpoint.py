"""Checkpoints of a run: its models, the position in the data, and a record of its progress.

All processes write a checkpoint together, in the background, and any number of processes can
continue from it. Orbax writes into the hidden folder ``.saving-STEP``. Then the checksums are
written (`jaxgrow.checkpoints.io.checksums`), and renaming the folder to ``STEP`` is the last
action. A killed process therefore never leaves a visible checkpoint that is incomplete.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from jaxgrow.axes import Tree
from jaxgrow.checkpoints.io.checksums import NAME, seal
from jaxgrow.checkpoints.io.folders import atomic_file, sync, sync_folder
from jaxgrow.checkpoints.orbax import check_chunks, checked_files, context_without_deadline
from jaxgrow.typed import Json
from jaxgrow.untrusted import one_line
from train.common.errors import UserError, is_full_disk
from train.common.files import read_own
from train.common.hosts import is_first, on_process_zero
from train.common.output import say
from train.plan.record import RunRecord
from train.state.model import TrainState, shardings
from train.store import intact
from train.store.intact import KEPT, LOG, SAVING, STEP

if TYPE_CHECKING:  # its import takes seconds
    from train.data.batches import Stream

# The fields of a `TrainState` that a checkpoint stores.
STORED = ("params", "opt", "sensitivity", "base", "average")


class Checkpoints:
    """The two newest checkpoints of a run, and those that are kept for later.

    Args:
      folder: folder of the checkpoints; it is created if it does not exist.
      log: log file. Each checkpoint contains a copy of it, from which `restore` repairs a damaged
        log.
      keep: steps of the run whose checkpoints are saved and not deleted.
      guard: function that is called before each save. It raises a `UserError` if this process may
        not write into the folder any more.
    """

    def __init__(
        self,
        folder: Path,
        log: Path | None = None,
        keep: Collection[int] = (),
        guard: Callable[[], None] = lambda: None,
    ):
        if folder.is_symlink():
            raise UserError(
                f"{folder} is a link, which a run does not follow; move the folder of the checkpoints back, or give a "
                "--workdir on the other disk"
            )
        self.folder = folder
        self._guard = guard
        self._log = log
        self.keep = frozenset(keep)
        folder.mkdir(parents=True, exist_ok=True)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._sealed: Future[None] | None = None

    def save(
        self, step: int, models: dict[str, TrainState], data: "Stream", record: RunRecord
    ) -> None:
        """Start saving a checkpoint, after the previous save has finished.

        The function returns as soon as the arrays may change.

        Args:
          step: step of the run; it is the name of the checkpoint.
          models: models by name.
          data: data iterator, whose position is saved.
          record: position of the run and its cost so far.
        """
        self.wait()
        arrays = {name: stored_trees(model) for name, model in models.items()}
        new = self.folder / f"{SAVING}{step}"
        on_process_zero(lambda: self._check_place(new))
        logged = read_own(self._log) if self._log and is_first() else None
        with _saving_options():
            saving = ocp.save_checkpointables_async(
                str(new),
                {"models": arrays},
                custom_metadata=dict(record.as_json(), data=data.get_state()),
            )

        def finish() -> None:
            saving.result()
            if is_first():
                if logged is not None:
                    (new / LOG).write_bytes(logged)
                if record.kept:
                    (new / KEPT).touch()
                (new / STEP).write_text(f"{step}\n")
                seal(new)
                sync(new)
                self._appear(new, step)
                sync_folder(self.folder)
                self._delete_old()

        self._sealed = self._sealing.submit(finish)

    def _check_place(self, new: Path) -> None:
        self._guard()
        if os.path.lexists(new):
            raise _name_is_taken(new)

    def _appear(self, new: Path, step: int) -> None:
        target = self.folder / str(step)
        try:
            new.rename(target)
        except OSError as error:
            if os.path.lexists(target):
                raise _name_is_taken(target) from error
            raise

    def _delete_old(self) -> None:
        """Delete the checkpoints that newer ones have replaced, but nothing that somebody changed."""
        sealed = [
            s
            for s in intact.checkpoint_steps(self.folder)
            if (self.folder / str(s) / NAME).is_file()
        ]
        for step in set(sealed[:-2]) - self.keep:
            path = self.folder / str(step)
            theirs = not intact.only_written(path) or intact.added_files(path)
            if not theirs and not (path / KEPT).exists():
                intact.delete_replaced(path)

    def restore(
        self, shapes: Callable[[RunRecord], dict[str, TrainState]], data: "Stream", mesh: Mesh
    ) -> tuple[dict[str, TrainState], RunRecord] | None:
        """Load the newest intact checkpoint.

        Unfinished saves are deleted. A damaged checkpoint is renamed and kept. Both are reported on
        stderr.

        Args:
          shapes: function from a record to the expected models as shapes.
          data: data iterator; it is moved to the saved position.
          mesh: mesh that the models are placed on, with the `specs` of `train.state.model`.
            The checkpoint may have been saved from another mesh.

        Returns:
          ``(models, record)``; None before the first checkpoint.

        Raises:
          UserError: there are checkpoints, but all of them are damaged.
        """
        step = on_process_zero(self._chosen)
        if step is None:
            return None
        where = self.folder / str(step)
        record = _recorded(where)
        models, position = read_models(where, shapes(record), mesh)
        with reading_checkpoint(where):
            data.set_state(position)
        return models, record

    def _chosen(self) -> int | None:
        """Return the step of the newest intact checkpoint; None before the first checkpoint."""
        intact.delete_unfinished(self.folder)
        step, damaged = intact.newest_intact(
            self.folder, intact.checkpoint_steps(self.folder, report=True)
        )
        if step is None:
            intact.some_left(self.folder)
            return None
        for other in damaged:
            intact.set_aside(self.folder / str(other))
        self._restore_log(step)
        return step

    def _restore_log(self, step: int) -> None:
        copy = self.folder / str(step) / LOG
        if self._log is None or not copy.exists():
            return
        logged = read_own(copy)
        there = read_own(self._log) if os.path.lexists(self._log) else b""
        if not there.startswith(logged):
            with atomic_file(self._log) as part:
                part.write_bytes(logged)
            say(f"{self._log} was damaged; restored it from checkpoint {step}", file=sys.stderr)

    def wait(self) -> None:
        """Wait until the last save is complete."""
        if self._sealed is not None:
            self._sealed.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            try:
                self.wait()
            finally:
                self._sealing.shutdown()
        except Exception as late:
            if error is None or not is_full_disk(error):
                raise late


def _name_is_taken(path: Path) -> UserError:
    return UserError(
        f"{path} exists and is not a checkpoint of this run, so the new checkpoint cannot have this name; move it away, then "
        "the same command continues"
    )


def stored_trees(model: TrainState) -> Json:
    """Return the parts of a model that a checkpoint stores."""
    found = {name: getattr(model, name) for name in STORED}
    return {name: tree for name, tree in found.items() if tree is not None}


def _saving_options() -> ocp.Context:
    """Return the Orbax settings for saving.

    Replicas share the writing of large arrays only, because for small arrays they would compile
    slices without any gain.
    """
    context = context_without_deadline()
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    # `restore` decides the sharding of the arrays.
    context.array.saving.enable_write_sharding_file = False
    return context


@contextmanager
def reading_checkpoint(where: Path) -> Iterator[None]:
    """Turn errors about a wrong content of a checkpoint, whose checksums are right, into one line."""
    try:
        with one_line(UserError, f"the checkpoint {where} cannot be read"):
            yield
    except UserError as error:
        # Too little memory, or the end of another process, has its own line.
        cause = error.__cause__
        if cause is not None and isinstance(cause, jax.errors.JaxRuntimeError):
            raise cause from None
        raise


def read_models(
    where: Path, expected: dict[str, TrainState], mesh: Mesh, partial: bool = False
) -> tuple[dict[str, TrainState], Any]:
    """Read models from a checkpoint.

    Args:
      where: folder of the checkpoint, which is intact.
      expected: the models as shapes, by name.
      mesh: mesh that the models are placed on.
      partial: whether the checkpoint may contain more than these models.

    Returns:
      The models, and the state of the data iterator.
    """
    placed = {name: shardings(model, mesh) for name, model in expected.items()}
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        {name: stored_trees(model) for name, model in expected.items()},
        {name: stored_trees(model) for name, model in placed.items()},
    )
    context = ocp.Context()
    context.pytree.loading.partial_load = partial
    saved_models(where)
    with reading_checkpoint(where):
        with context:
            loaded: Any = ocp.load_checkpointables(str(where), {"models": abstract})
        saved: Any = ocp.checkpointables_metadata(str(where)).custom_metadata
        position = saved["data"]
    _check_squares(where, loaded["models"])
    models = {}
    for name, model in expected.items():
        own = loaded["models"][name]
        models[name] = replace(model, **{field: own.get(field) for field in STORED})
    return models, position


def _check_squares(where: Path, models: Tree) -> None:
    """Refuse second moments that no training makes. An infinite one would freeze its weight."""
    squares = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(models)
        if jax.tree_util.GetAttrKey("nu") in path
    }
    right = jax.jit(lambda xs: {name: ((x >= 0) & (x < jnp.inf)).all() for name, x in xs.items()})
    for name, fits in jax.device_get(right(squares)).items():
        if not fits:
            raise UserError(
                f"the checkpoint {where} has NaN, infinite or negative second moments in {name}: continue from an earlier "
                "checkpoint with --from RUN@STEP, or start again, in a new --workdir"
            )


def saved_models(where: Path) -> Json:
    """Return the shapes of the models of a checkpoint, by name, as Orbax describes them."""
    with reading_checkpoint(where):
        stored = checked_files(where, where)
        metadata: Any = ocp.checkpointables_metadata(str(where)).metadata
        models = metadata["models"]
        check_chunks(models, stored, where)
        # Orbax would drop the imaginary parts without a message.
        if any(np.issubdtype(x.dtype, np.complexfloating) for x in jax.tree.leaves(models)):
            raise UserError(f"the checkpoint {where} has complex numbers, which no model has")
        return models


def checkpoint_record(checkpoint: Path) -> RunRecord:
    """Read the record of an intact checkpoint in the folder ``checkpoint``.

    Raises:
      UserError: the checkpoint is damaged.
    """
    intact.newest_intact(checkpoint.parent, [int(checkpoint.name)])
    return _recorded(checkpoint)


def _recorded(checkpoint: Path) -> RunRecord:
    with one_line(UserError, f"the record of the checkpoint {checkpoint} is damaged"):
        saved: Any = ocp.checkpointables_metadata(str(checkpoint)).custom_metadata
        return RunRecord.from_json(saved)
