"""Checkpoints of a run: models, and a record with the place in the data; by all processes, in the background, whole or not at
all, for any number of processes to go on from.

A checkpoint is whole when it has its checksums (`jaxgrow.interop.checksums`), which come last, and they are right.
"""

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
from jaxgrow.interop.checksums import damage, seal
from train.errors import UserError, is_full_disk
from train.hosts import is_first, once
from train.state.model import Model, shardings


class Checkpoints:
    """The checkpoints in ``folder``. ``record`` is JSON: where the run is, and what it has cost so far."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder
        # Replicas share the writing of what is large; of what is small they would only compile slices.
        context = ocp.Context()
        context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
        context.array.saving.enable_write_sharding_file = False  # who restores says where arrays go
        self._orbax = ocp.training.Checkpointer(
            str(self.folder),
            context=context,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=True,  # what a killed save left behind
        )
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._sealed: Future[None] | None = None

    def save(self, step: int, models: dict[str, Model], data: Any, record: dict[str, Any]) -> None:
        """Starts saving, when the save before is done; returns as soon as the arrays may change."""
        self.wait()  # for the one before to be sealed, too: until then the one before that must not be deleted
        trees = {name: _tree(model) for name, model in models.items()}
        saving: Any = self._orbax.save_checkpointables_async(
            step, {"models": trees}, force=True, custom_metadata=record | {"data": data.get_state()}
        )

        def finish() -> None:
            saving.result()
            if is_first():
                seal(self.folder / str(step))

        self._sealed = self._sealing.submit(finish)

    def restore(
        self, shapes: Callable[[dict[str, Any]], dict[str, Model]], data: Any, mesh: Mesh
    ) -> tuple[dict[str, Model], dict[str, Any]] | None:
        """``(models, record)`` of the newest whole checkpoint, or None if there is none; ``data`` moves to its position.

        ``shapes`` tells from a record which models its checkpoint holds; they come onto the mesh as `specs` of
        `train.state.model` says, whatever mesh they were saved from. A damaged checkpoint is named on stderr and set aside.

        Raises:
          UserError: there are checkpoints, but none is whole.
        """
        step = once(self._chosen)
        if step is None:
            return None
        self._orbax.reload()
        saved: Any = self._orbax.checkpointables_metadata(step).custom_metadata
        record, position = {k: x for k, x in saved.items() if k != "data"}, saved.get("data")
        expected = shapes(record)
        where = {name: shardings(model, mesh) for name, model in expected.items()}
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            *({name: _tree(m) for name, m in models.items()} for models in (expected, where)),
        )
        own = {"data": data} if position is None else {}  # of checkpoints before there were several processes
        trees = self._orbax.load_checkpointables(step, {"models": abstract} | own)["models"]
        if position is not None:
            data.set_state(position)
        models = {
            n: replace(m, **{field: trees[n].get(field) for field in ("params", "opt", "sensitivity", "base")})
            for n, m in expected.items()
        }
        return models, record

    def _chosen(self) -> int | None:
        """The newest whole checkpoint, if there are any; later ones are set aside."""
        steps = [info.step for info in self._orbax.checkpoints]
        if not steps:
            return None
        step = newest_whole(self.folder, steps)
        for damaged in (s for s in steps if s > step):
            times = len(list(self.folder.glob(f"damaged-{damaged}.*")))
            (self.folder / str(damaged)).rename(self.folder / f"damaged-{damaged}.{times}")
        return step

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
                self._orbax.close()
        except Exception as late:
            if error is None or not is_full_disk(error):
                raise late


def _tree(model: Model) -> dict[str, Any]:
    rest = {"opt": model.opt, "sensitivity": model.sensitivity, "base": model.base}
    return {"params": model.params} | {name: x for name, x in rest.items() if x is not None}


def load(folder: Path, name: str, step: int | None = None) -> Tree:
    """The parameters of the model ``name`` in the newest whole checkpoint in ``folder``, or in that of ``step`` alone.

    Raises:
      UserError: there is no such checkpoint, or none that is whole.
    """
    with ocp.training.Checkpointer(str(folder)) as checkpoints:
        step = newest_whole(folder, [c.step for c in checkpoints.checkpoints if step in (None, c.step)])
        metadata = checkpoints.checkpointables_metadata(step).metadata["models"]
        abstract = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), metadata[name]["params"])
        partial = ocp.Context()
        partial.pytree.loading.partial_load = True
        with partial:
            loaded = checkpoints.load_checkpointables(step, {"models": {name: {"params": abstract}}})
        return loaded["models"][name]["params"]


def newest_whole(folder: Path, steps: list[int]) -> int:
    """The last of ``steps`` whose checkpoint in ``folder`` is whole; later ones, which are damaged, are named on stderr.

    Raises:
      UserError: there is none.
    """
    damaged: list[tuple[int, str]] = []
    for step in sorted(steps, reverse=True):
        wrong = damage(folder / str(step))
        if wrong is None:
            for other, why in damaged:
                print(f"checkpoint {other} is damaged ({why}); using {step}", file=sys.stderr)
            return step
        damaged.append((step, wrong))
    if not damaged:
        raise UserError(f"there is no checkpoint in {folder}")
    whys = "; ".join(f"{step}: {why}" for step, why in damaged)
    raise UserError(f"no checkpoint in {folder} is whole ({whys}); move the folder away to start anew")
