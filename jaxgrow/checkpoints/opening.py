"""How is a checkpoint on disk opened as a `Source`, or loaded?"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jax.sharding import Mesh

from jaxgrow.axes.names import Params
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import (
    ADAPTER,
    RECORD,
    CheckpointError,
    at_step,
    inside,
    read_json,
)
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.untrusted import one_line


class RunFormat(Protocol):
    """Opens the model in a checkpoint of a run."""

    def accepts(self, folder: Path) -> bool:
        """Whether a folder belongs to a run that has saved a checkpoint."""
        ...

    def __call__(self, folder: Path, step: int | None) -> Checkpoint:
        """Open the checkpoint of a step; None: the newest intact one."""
        ...


UNFINISHED: Registry[RunFormat] = Registry("run checkpoint")
#: "snapshot" finds the snapshot to read in the folder of a model in the cache of Hugging Face.
LOCATIONS: Registry[Callable[[Path], Path]] = Registry("location of a model")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open the checkpoint in a Hugging Face folder or an Orbax folder.

    A Hugging Face folder gives a `HuggingFace`. An Orbax folder that jaxgrow wrote, such as the
    folder of a finished run, gives an `Orbax`. The folder of an unfinished run gives the model in
    its newest checkpoint, and a note names the step; ``RUN@STEP`` gives the model in
    another checkpoint of a run.

    Args:
      folder: a folder on disk. In the cache of Hugging Face, it may be the folder of the model or
        one of its snapshots.

    Returns:
      A `Source`. At first, only names and sizes are read. An Orbax folder is read completely as soon
      as one leaf is read.

    Raises:
      CheckpointError: the folder does not exist, is damaged, or has a model that is not supported.
    """
    folder, step = at_step(Path(folder).expanduser())
    folder = LOCATIONS["snapshot"](folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}{', but a file: give its folder' * folder.is_file()}. jaxgrow reads models from "
            "disk and does not download them"
        )
    with one_line(CheckpointError, f"{folder} cannot be read"):
        if step is None and (folder / RECORD).is_file() and (folder / "params").is_dir():
            # The import takes seconds, and Hugging Face folders do not need it.
            from jaxgrow.checkpoints.orbax import Orbax

            return Orbax(folder)
        if (folder / "checkpoints").is_dir() and UNFINISHED["run"].accepts(folder):
            return UNFINISHED["run"](folder, step)
        if step is not None:
            raise CheckpointError(
                f"{folder} is not the folder of a run with checkpoints, so it has no step {step}. Give the folder alone"
            )
        if (folder / ADAPTER[0]).is_file() and not os.path.lexists(folder / "config.json"):
            raise CheckpointError(
                f"{folder} holds only an adapter: give the folder of its base model. The commands grow, coalesce, "
                f"decoalesce and prune change both with --lora {shlex.quote(str(folder))}"
            )
        if _is_huggingface(folder):
            return HuggingFace(folder)
    raise CheckpointError(
        f"{folder} is neither a finished run nor a Hugging Face folder. A run writes {RECORD} and params/ when it "
        "ends, and checkpoints before; a Hugging Face folder has a config.json that names an architecture. Only the "
        "commands grow and inspect read checkpoints of other trainers"
    )


def _is_huggingface(folder: Path) -> bool:
    """Whether a folder is meant to be a Hugging Face folder, even if it is damaged."""
    if any(folder.glob("*.safetensors")):
        return True
    if not os.path.lexists(folder / "config.json"):
        return False
    try:
        about = read_json(inside(folder, "config.json"))
    except CheckpointError:
        return True
    return not {"architectures", "model_type"}.isdisjoint(about)


def load(folder: str | Path, mesh: Mesh | None = None) -> tuple[Config, Params]:
    """Load the config and the parameters of a checkpoint, with stacked blocks.

    To shard with other rules, or to grow a model while it is read, use `Source.shard` instead of
    ``mesh``.

    Args:
      folder: the folder of the checkpoint, as for `open_checkpoint`.
      mesh: the devices onto which the parameters are sharded while they are read (`Source.shard`).
        None keeps the parameters on the host.

    Returns:
      ``(config, parameters)``. The parameters are NumPy arrays, or arrays on the mesh.
      ``config.module.apply({"params": params}, tokens)`` computes the outputs of the model.

    Raises:
      CheckpointError: as `open_checkpoint`.
    """
    source = open_checkpoint(folder)
    return source.config, source.params() if mesh is None else source.shard(mesh)
