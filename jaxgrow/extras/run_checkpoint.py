"""How is the model in a checkpoint of a run opened, before the run has finished?"""

import logging
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from jaxgrow.axes.names import Params, Tree
from jaxgrow.checkpoints.io.checksums import NAME, damage
from jaxgrow.checkpoints.io.files import CheckpointError, inside, read_json
from jaxgrow.checkpoints.opening import UNFINISHED
from jaxgrow.checkpoints.orbax import COMPRESSED, Orbax, check_chunks, checked_files
from jaxgrow.checkpoints.source import Loaded, check_sizes
from jaxgrow.models import from_json

CHECKPOINTS = "checkpoints"  # the folder with the checkpoints of a run


class RunCheckpoint(Orbax):
    """A model in a checkpoint of a run.

    It is the model that the run makes or, as long as this does not exist, the one that is trained.

    Args:
      folder: the folder of the run.
      step: the step of the checkpoint; None: the newest intact one.

    Raises:
      CheckpointError: the checkpoint is missing or damaged, or does not hold a complete model.
    """

    hf_config = None
    of_run = True

    @staticmethod
    def accepts(folder: Path) -> bool:
        """Whether a folder belongs to a run that has saved a checkpoint."""
        if not (folder / CHECKPOINTS).is_dir() or not (folder / "config.json").is_file():
            return False
        try:
            known = {"name", "model", "data"} <= read_json(inside(folder, "config.json")).keys()
        except CheckpointError:
            return False
        return known and any(_saved_checkpoints(folder))

    def __init__(self, folder: Path, step: int | None = None):
        self.folder = folder
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._handed_over()
        self._at = _intact_checkpoint(folder, step)
        self.stored_in = f"{CHECKPOINTS}/{self._at.name}"
        stored = checked_files(self._at, folder)
        with self._reading():
            metadata: Tree = ocp.checkpointables_metadata(str(self._at))
            record, models = metadata.custom_metadata, metadata.metadata["models"]
            check_chunks(models, stored, self._at)
        phase = record["ledger"]["phases"][-1]
        configs = record.get("configs") or {
            "large": read_json(inside(folder, "config.json"))["model"]
        }
        self._name = "large" if "large" in configs else phase["model"]
        if configs.get(self._name) is None or self._name not in models:
            raise CheckpointError(
                f"{self._at} has no complete model: the parameters of {self._name!r} belong to an adapter or to growth "
                "maps. Continue the run until it has finished"
            )
        check_sizes(configs[self._name], COMPRESSED * stored, self._at)
        self._head = record.get("head")
        self._shapes: Tree = models[self._name]["params"]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._shapes)
        Loaded.__init__(self, from_json(configs[self._name]), shapes)
        self._loaded = False
        now = f"checkpoint {self._at.name}, at step {record['step']} of {phase['phase']}"
        ended = "" if step is not None else " has not finished"
        self.notes = (f"{folder}{ended}: the model is {self._name!r} of {now}",)

    def _stored(self, like: Params, context: ocp.Context) -> Params:
        context.pytree.loading.partial_load = True
        with context:
            found: Tree = ocp.load_checkpointables(
                str(self._at), {"models": {self._name: {"params": like}}}
            )
        return found["models"][self._name]["params"]


def _saved_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that were saved completely, the newest one first."""
    found = [
        path
        for path in (folder / CHECKPOINTS).iterdir()
        if path.name.isascii() and path.name.isdecimal() and not path.is_symlink()
    ]
    complete = (path for path in found if (path / NAME).is_file())
    return sorted(complete, key=lambda path: int(path.name), reverse=True)


def _intact_checkpoint(folder: Path, step: int | None) -> Path:
    """Return the checkpoint of a step, or the newest one that is intact."""
    saved = _saved_checkpoints(folder)
    wrong: list[str] = []
    for path in saved:
        if step in (None, int(path.name)):
            if (why := damage(path)) is None:
                return path
            wrong.append(f"{path.name}: {why}")
    steps = ", ".join(path.name for path in reversed(saved))
    if not wrong:
        raise CheckpointError(
            f"{folder / CHECKPOINTS} does not have checkpoint {step}, only {steps}. Give one of them, such as "
            f"{folder}@{saved[0].name}"
        )
    raise CheckpointError(
        f"{folder / CHECKPOINTS} does not have an intact checkpoint ({'; '.join(wrong)}). Give another step of {steps}, or "
        "start the run again in another folder"
    )


UNFINISHED.add("run", RunCheckpoint)
