"""Orbax folders: parameters in ``params/``, and their config in ``jaxgrow.json``. A finished run is one, too.

Unlike tensors of Hugging Face's, Orbax's are read and written all at once: the whole model is in
memory, or, on a mesh, each device's part. An interrupt waits until it is: Orbax's threads would go
on, make files in folders that are being removed, and print their tracebacks.
"""

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from jaxgrow import __version__
from jaxgrow.axes.names import Params
from jaxgrow.checkpoints.hf.storage import family_of
from jaxgrow.checkpoints.io.checksums import NAME, damage, seal
from jaxgrow.checkpoints.io.files import RECORD, CheckpointError, read_json, spelt, write_json
from jaxgrow.checkpoints.source import Checkpoint, Leaf, Loaded, Source, flat, nested
from jaxgrow.models import Config, from_json
from jaxgrow.sharding import RULES, spec
from jaxgrow.signals import uninterrupted

PARAMS = "params"  # the folder of parameters


class Orbax(Loaded, Checkpoint):
    """The parameters of a folder that `write` or `export` wrote.

    Raises:
      CheckpointError: what is there is damaged, or does not fit its config.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        logging.getLogger("absl").setLevel(
            logging.CRITICAL
        )  # Orbax logs tracebacks of errors that it also raises
        about = folder / RECORD
        record = read_json(about)
        self.foreign = record.get("huggingface")  # ``config.json`` of where it came from
        self._head = record.get("head")
        if self._head is not None and not isinstance(self._head, dict):
            raise CheckpointError(f"{about}: head is {self._head!r:.100}, but should be an object")
        if self.foreign is not None:
            if not isinstance(self.foreign, dict):
                raise CheckpointError(
                    f"{about}: huggingface is {spelt(self.foreign)}, but should be a config.json"
                )
            family_of(self.foreign, about)
        try:
            config = from_json(record["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{about}: no config of a model in 'config': {error}") from error
        with self._reading():
            if (folder / PARAMS / NAME).exists() and (found := damage(folder / PARAMS)):
                raise CheckpointError(
                    f"{folder / PARAMS} is damaged: {found}; take another copy of it"
                )
            self._shapes: Any = ocp.metadata(self._where).metadata
        super().__init__(
            config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._shapes)
        )
        self._loaded = False

    @property
    def head(self) -> dict[str, Any]:
        return self._head if self._head is not None else super().head

    @property
    def _where(self) -> str:
        return str((self.folder / PARAMS).resolve())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with uninterrupted():
                yield
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and TensorStore raise whatever they come across
            raise CheckpointError(
                f"{self.folder} is damaged: {type(error).__name__}: {error}"
            ) from error

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        self._load()
        return super().read(path, layer)

    def _load(self) -> None:
        if self._loaded:
            return
        with self._reading(), _alone():
            params = ocp.load(
                self._where, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), self._shapes)
            )
        self._arrays, self._loaded = flat(params), True

    def shard(self, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Params:
        """As of `Source`; of several processes, all call it."""

        def lies(leaf: Leaf) -> jax.ShapeDtypeStruct:
            where = NamedSharding(mesh, spec(leaf.names, leaf.shape, mesh, rules))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        with self._reading():
            return ocp.load(
                self._where, nested({path: lies(leaf) for path, leaf in self.leaves.items()})
            )

    def fingerprint(self) -> str:
        self._load()
        digest = hashlib.sha256()
        for path, leaf in self.leaves.items():
            numbers = np.ascontiguousarray(self._arrays[path]).reshape(-1).view(np.uint8)
            digest.update(f"{path} {leaf.dtype} {leaf.shape}\n".encode())
            digest.update(numbers[:2048].tobytes() + numbers[-2048:].tobytes())
        return digest.hexdigest()

    def place(self, path: str) -> str:
        return PARAMS


def _alone() -> ocp.Context:
    """Of several processes, the one that reads does not wait for the others to do the same."""
    me = jax.process_index()
    return ocp.Context(
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}
        )
    )


def write(source: Source, folder: Path) -> None:
    """Writes the parameters."""
    params = source.params()
    with uninterrupted():
        ocp.save(str((folder / PARAMS).resolve()), params)
    seal(folder / PARAMS)


def export(
    folder: Path, config: Config, params: Params, head: Mapping[str, Any] | None = None
) -> None:
    """Makes a folder that holds other things, such as a run's, one that `Orbax` reads, in place of what it exported before.

    ``head`` describes the head of the model, as of `jaxgrow.checkpoints.source.Checkpoint.head`. Of
    several processes, all call it, with arrays that lie on the devices of all: each writes its
    part.
    """
    Loaded(config, params)  # they are its own
    if jax.process_index() == 0:
        (folder / RECORD).unlink(
            missing_ok=True
        )  # which comes last: until then there is no checkpoint
        shutil.rmtree(folder / PARAMS, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("export")
    with uninterrupted():
        ocp.save(str((folder / PARAMS).resolve()), params)
    if jax.process_index() != 0:
        return
    seal(folder / PARAMS)
    about = {
        "version": __version__,
        "operator": "train",
        "sources": [],
        "config": config.as_json(),
        "files": [],
    }
    write_json(folder / RECORD, about | ({"head": dict(head)} if head else {}))
