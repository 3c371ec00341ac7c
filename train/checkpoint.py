"""Checkpoints of a run: models, data iterator and record, written together, in the background, whole or not at all."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from train.errors import UserError, is_full_disk
from train.step import Model


class Checkpoints:
    """The checkpoints in ``folder``. ``record`` is JSON: where the run is, and what it has cost so far."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder
        self._orbax = ocp.training.Checkpointer(
            str(self.folder),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=True,  # what a killed save left behind
        )

    def save(self, step: int, models: dict[str, Model], data: Any, record: dict[str, Any]) -> None:
        """Starts saving; returns as soon as the arrays may change."""
        trees = {name: _tree(model) for name, model in models.items()}
        self._orbax.save_checkpointables_async(
            step, {"models": trees, "data": data}, force=True, custom_metadata=record
        )

    def restore(
        self, shapes: Callable[[dict[str, Any]], dict[str, Model]], data: Any, sharding: Any
    ) -> tuple[dict[str, Model], dict[str, Any]] | None:
        """``(models, record)`` of the newest whole checkpoint, or None if there is none; ``data`` moves to its position.

        ``shapes`` tells from a record which models its checkpoint holds. A damaged checkpoint is reported and set aside.

        Raises:
          UserError: there are checkpoints, but none is whole.
        """
        damaged = []
        for info in reversed(self._orbax.checkpoints):
            try:
                record: Any = self._orbax.checkpointables_metadata(info.step).custom_metadata
                expected = shapes(record)
                abstract = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                    {name: _tree(model) for name, model in expected.items()},
                )
                found = self._orbax.load_checkpointables(info.step, {"models": abstract, "data": data})
            except Exception as error:
                damaged.append((info.step, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
                continue
            for step, why in damaged:
                print(f"checkpoint {step} is damaged ({why}); using {info.step}", file=sys.stderr)
                times = len(list(self.folder.glob(f"damaged-{step}.*")))
                (self.folder / str(step)).rename(self.folder / f"damaged-{step}.{times}")
            if damaged:
                self._orbax.reload()
            trees = found["models"]
            models = {
                n: replace(m, **{field: trees[n].get(field) for field in ("params", "opt", "sensitivity", "base")})
                for n, m in expected.items()
            }
            return models, record
        if damaged:
            raise UserError(
                f"no checkpoint in {self.folder} is whole ({'; '.join(f'{s}: {w}' for s, w in damaged)}); "
                "move the folder away to start anew"
            )
        return None

    def wait(self) -> None:
        self._orbax.wait()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._orbax.close()
        except Exception as late:
            if error is None or not is_full_disk(error):
                raise late


def _tree(model: Model) -> dict[str, Any]:
    rest = {"opt": model.opt, "sensitivity": model.sensitivity, "base": model.base}
    return {"params": model.params} | {name: x for name, x in rest.items() if x is not None}


def load(folder: str | Path, name: str = "large") -> dict[str, Any]:
    """The parameters of the model ``name`` in the newest checkpoint of a run, as NumPy arrays."""
    with ocp.training.Checkpointer(str(Path(folder).resolve() / "checkpoints")) as checkpoints:
        if checkpoints.latest is None:
            raise UserError(f"there is no checkpoint in {folder}")
        metadata = checkpoints.checkpointables_metadata(checkpoints.latest).metadata["models"]
        abstract = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), metadata[name]["params"])
        some = ocp.Context()
        some.pytree.loading.partial_load = True
        with some:
            found = checkpoints.load_checkpointables(checkpoints.latest, {"models": {name: {"params": abstract}}})
        return found["models"][name]["params"]
