"""Orbax folders: a run's work directory, and parameters alone with their config in ``jaxgrow.json``.

Unlike tensors of Hugging Face's, Orbax's are read and written all at once: the whole model is in memory. An interrupt waits
until it is: Orbax's threads would go on, make files in folders that are being removed, and print their tracebacks.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxgrow.axes import Params
from jaxgrow.interop.checksums import NAME, damage, seal
from jaxgrow.interop.files import RECORD, CheckpointError, read_json
from jaxgrow.interop.huggingface import family_of
from jaxgrow.interop.source import Checkpoint, Loaded, Source
from jaxgrow.models import from_json
from jaxgrow.signals import uninterrupted

PARAMS = "params"  # the folder of parameters
CHECKPOINTS = "checkpoints"  # the folder of a run's


class Orbax(Loaded, Checkpoint):
    """The parameters of a folder that `write` wrote, or of a run's newest checkpoint.

    Raises:
      CheckpointError: the run has not ended, or what is there is damaged or does not fit its config.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that it also raises
        about = folder / (RECORD if (folder / PARAMS).is_dir() else "result.json")
        if not about.is_file():
            raise CheckpointError(f"{folder} is no finished run: it has no result.json; let it end first")
        record = read_json(about)
        field = "config" if about.name == RECORD else "model"
        self.foreign = record.get("huggingface")  # ``config.json`` of where it came from
        if self.foreign is not None:
            if not isinstance(self.foreign, dict):
                raise CheckpointError(f"{about}: huggingface is {self.foreign!r:.100}, no config.json")
            family_of(self.foreign, about)
        try:
            config = from_json(record[field])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{about}: no config of a model in {field!r}: {error}") from error
        try:
            with uninterrupted():
                params = _newest(folder / CHECKPOINTS) if field == "model" else _params(folder / PARAMS)
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and TensorStore raise whatever they come across
            raise CheckpointError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
        super().__init__(config, params)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path, leaf in self.leaves.items():
            numbers = np.ascontiguousarray(self._arrays[path]).reshape(-1).view(np.uint8)
            digest.update(f"{path} {leaf.dtype} {leaf.shape}\n".encode())
            digest.update(numbers[:2048].tobytes() + numbers[-2048:].tobytes())
        return digest.hexdigest()

    def place(self, path: str) -> str:
        return PARAMS if (self.folder / PARAMS).is_dir() else CHECKPOINTS


def _params(folder: Path) -> Params:
    if (folder / NAME).exists() and (found := damage(folder)):
        raise CheckpointError(f"{folder} is damaged: {found}; take another copy of it")
    shapes: Any = ocp.metadata(str(folder.resolve())).metadata
    return ocp.load(str(folder.resolve()), jax.tree.map(_empty, shapes))


def _newest(folder: Path) -> Params:
    """The model that a run's plan ends with."""
    with ocp.training.Checkpointer(str(folder.resolve())) as checkpoints:
        if checkpoints.latest is None:
            raise CheckpointError(f"there is no checkpoint in {folder}")
        if found := damage(folder / str(checkpoints.latest.step)):
            raise CheckpointError(
                f"checkpoint {checkpoints.latest.step} in {folder} is damaged: {found}; without its result.json the run's "
                "own command makes it again, from the checkpoint before"
            )
        models: Any = checkpoints.checkpointables_metadata(checkpoints.latest).metadata["models"]
        name = "large" if "large" in models else next(iter(models))
        some = ocp.Context()
        some.pytree.loading.partial_load = True
        with some:
            wanted = {"models": {name: {"params": jax.tree.map(_empty, models[name]["params"])}}}
            loaded: Any = checkpoints.load_checkpointables(checkpoints.latest, wanted)
        return loaded["models"][name]["params"]


def _empty(x: Any) -> np.ndarray:
    return np.empty(x.shape, x.dtype)


def write(source: Source, folder: Path) -> None:
    """Writes the parameters."""
    params = source.params()
    with uninterrupted():
        ocp.save(str((folder / PARAMS).resolve()), params)
    seal(folder / PARAMS)
