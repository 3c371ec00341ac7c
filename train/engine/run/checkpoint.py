"""Checkpoints of a run: its models, and a record with the position in the data.

All processes write a checkpoint together, in the background, and any number of processes can
continue from it. Orbax writes into the hidden folder ``.saving-STEP``; then come the checksums
(`jaxgrow.checkpoints.io.checksums`), and renaming the folder to ``STEP`` is the last action. A
process that is killed therefore never leaves a visible checkpoint that is incomplete.
"""

import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from jaxgrow.axes import Tree
from jaxgrow.checkpoints.io.checksums import NAME, damage, seal
from jaxgrow.checkpoints.io.folders import sync, sync_folder
from train.common.errors import UserError, is_full_disk
from train.common.files import appears_whole
from train.engine.hosts import is_first, once
from train.engine.state.model import Model, shardings

_SAVING, _OLD, _DAMAGED = (
    ".saving-",
    ".old-",
    "damaged-",
)  # prefixes of the step, of folders that are no checkpoints
_LOG = "log"  # the name of its copy in a checkpoint


class Checkpoints:
    """The ``keep`` newest checkpoints in ``folder``. ``record`` is JSON: where the run is, and what it has cost so far.

    Each contains a copy of the file ``log``, if one is named: a log that was damaged is restored
    with the checkpoint.
    """

    def __init__(self, folder: Path, log: Path | None = None, keep: int = 2):
        self.folder, self._log, self._keep = folder, log, keep
        folder.mkdir(parents=True, exist_ok=True)
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._sealed: Future[None] | None = None

    def save(self, step: int, models: dict[str, Model], data: Any, record: dict[str, Any]) -> None:
        """Starts saving when the previous save has finished; returns as soon as the arrays may change."""
        self.wait()
        trees = {name: _tree(model) for name, model in models.items()}
        new = self.folder / f"{_SAVING}{step}"
        logged = self._log.read_bytes() if self._log and is_first() else None
        with _writing():
            saving = ocp.save_checkpointables_async(
                str(new), {"models": trees}, custom_metadata=record | {"data": data.get_state()}
            )

        def finish() -> None:
            saving.result()
            if is_first():
                if logged is not None:
                    (new / _LOG).write_bytes(logged)
                seal(new)
                sync(new)
                new.rename(self.folder / str(step))
                sync_folder(self.folder)
                self._delete_old()

        self._sealed = self._sealing.submit(finish)

    def _delete_old(self) -> None:
        for step in _complete(self.folder)[: -self._keep]:
            # Renamed first, so that a kill does not leave a part of it under the name of a
            # checkpoint.
            old = (self.folder / str(step)).rename(self.folder / f"{_OLD}{step}")
            shutil.rmtree(old)

    def restore(
        self, shapes: Callable[[dict[str, Any]], dict[str, Model]], data: Any, mesh: Mesh
    ) -> tuple[dict[str, Model], dict[str, Any]] | None:
        """``(models, record)`` of the newest whole checkpoint, or None if there is none; ``data`` moves to its position.

        ``shapes`` tells from a record which models its checkpoint holds; they come onto the mesh as
        `specs` of `train.engine.state.model` says, whatever mesh they were saved from. An
        incomplete checkpoint is deleted. A damaged one is renamed, and replaces the one that was
        renamed before. Both are reported on stderr.

        Raises:
          UserError: there are complete checkpoints, but all of them are damaged.
        """
        step = once(self._chosen)
        if step is None:
            return None
        where = str(self.folder / str(step))
        saved: Any = ocp.checkpointables_metadata(where).custom_metadata
        record = {k: x for k, x in saved.items() if k != "data"}
        expected = shapes(record)
        placed = {name: shardings(model, mesh) for name, model in expected.items()}
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            *({name: _tree(m) for name, m in models.items()} for models in (expected, placed)),
        )
        trees = ocp.load_checkpointables(where, {"models": abstract})["models"]
        data.set_state(saved["data"])
        models = {
            n: replace(
                m,
                **{
                    field: trees[n].get(field) for field in ("params", "opt", "sensitivity", "base")
                },
            )
            for n, m in expected.items()
        }
        return models, record

    def _chosen(self) -> int | None:
        """The step of the newest whole checkpoint, or None if there is no checkpoint."""
        complete = _complete(self.folder)
        self._delete_incomplete(complete)
        step, damaged = newest_whole(self.folder, complete)
        if damaged:
            for before in self.folder.glob(f"{_DAMAGED}*"):
                shutil.rmtree(before)
            newest, *others = damaged
            (self.folder / str(newest)).rename(self.folder / f"{_DAMAGED}{newest}")
            for other in others:
                shutil.rmtree(self.folder / str(other))
        if step is not None:
            self._restore_log(step)
        return step

    def _restore_log(self, step: int) -> None:
        copy = self.folder / str(step) / _LOG
        if self._log is None or not copy.exists():
            return
        logged = copy.read_bytes()
        if not self._log.exists() or not self._log.read_bytes().startswith(logged):
            with appears_whole(self._log) as part:
                part.write_bytes(logged)
            print(f"{self._log} was damaged; restored it from checkpoint {step}", file=sys.stderr)

    def _delete_incomplete(self, complete: list[int]) -> None:
        """Deletes what killed processes left: unfinished saves, and parts of old checkpoints that were being deleted."""
        for old in self.folder.glob(f"{_OLD}*"):
            shutil.rmtree(old)
        unsealed = [self.folder / str(step) for step in _steps(self.folder) if step not in complete]
        for folder in [*self.folder.glob(f"{_SAVING}*"), *unsealed]:
            shutil.rmtree(folder)
            step = folder.name.removeprefix(_SAVING).partition(".")[0]
            print(
                f"checkpoint {step} is incomplete: its save was interrupted; deleted it",
                file=sys.stderr,
            )

    def wait(self) -> None:
        """Until what was saved last is whole."""
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


def _tree(model: Model) -> dict[str, Any]:
    rest = {"opt": model.opt, "sensitivity": model.sensitivity, "base": model.base}
    return {"params": model.params} | {name: x for name, x in rest.items() if x is not None}


def _writing() -> ocp.Context:
    """Replicas share the writing of large arrays only: for small ones they would just compile slices."""
    context = ocp.Context()
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    context.array.saving.enable_write_sharding_file = False  # `restore` says where arrays go
    return context


def load(folder: Path, name: str, step: int | None = None) -> Tree:
    """The parameters of the model ``name`` in the newest whole checkpoint in ``folder``, or in that of ``step`` alone.

    Raises:
      UserError: there is no such checkpoint, or none that is whole.
    """
    found, _ = newest_whole(folder, [s for s in _complete(folder) if step in (None, s)])
    if found is None:
        raise UserError(
            f"there is no checkpoint in {folder}" + ("" if step is None else f" of step {step}")
        )
    where = str(folder / str(found))
    metadata: Any = ocp.checkpointables_metadata(where).metadata
    abstract = jax.tree.map(
        lambda x: np.empty(x.shape, x.dtype), metadata["models"][name]["params"]
    )
    partial = ocp.Context()
    partial.pytree.loading.partial_load = True
    with partial:
        loaded: Any = ocp.load_checkpointables(where, {"models": {name: {"params": abstract}}})
    return loaded["models"][name]["params"]


def newest_whole(folder: Path, steps: list[int]) -> tuple[int | None, list[int]]:
    """The newest of ``steps`` whose checkpoint in ``folder`` is whole, and the later ones, newest first.

    Those are damaged, which is reported on stderr. The step is None if ``steps`` is empty.

    Raises:
      UserError: all of them are damaged.
    """
    damaged: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        wrong = damage(folder / str(step))
        if wrong is None:
            for other, why in damaged.items():
                print(f"checkpoint {other} is damaged ({why}); using {step}", file=sys.stderr)
            return step, list(damaged)
        damaged[step] = wrong
    if damaged:
        whys = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise UserError(
            f"no checkpoint in {folder} is whole ({whys}); move the folder away to start anew"
        )
    return None, []


def _steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in ``folder``, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def _complete(folder: Path) -> list[int]:
    """`_steps` without the newest one if it has no checksums: they are written last.

    An earlier checkpoint without checksums has lost them: a save begins only when the one before is
    complete.
    """
    steps = _steps(folder)
    return steps[:-1] if steps and not (folder / str(steps[-1]) / NAME).exists() else steps
