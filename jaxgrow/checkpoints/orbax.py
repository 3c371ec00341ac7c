"""How does jaxgrow store a model as an Orbax checkpoint?

An Orbax folder has the parameters in ``params/`` and their config in ``jaxgrow.json``. The folder
of a finished run has this layout. `jaxgrow.extras.run_checkpoint` reads the models of an unfinished run.

Orbax reads and writes all tensors at once, so the complete model is in memory, or, on a mesh, the
shards of each device. An interrupt is delayed until Orbax has finished. Otherwise its threads would
continue, create files in folders that are being removed, and print tracebacks.
"""

import hashlib
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import hexdigits

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from jaxgrow._version import __version__
from jaxgrow.axes.names import Params, Tree
from jaxgrow.checkpoints.hf.storage import family_of
from jaxgrow.checkpoints.io.checksums import NAME, damage, seal
from jaxgrow.checkpoints.io.files import (
    PARAMS,
    RECORD,
    TRANSFORMERS,
    CheckpointError,
    inside,
    read_json,
    spelt,
    write_json,
)
from jaxgrow.checkpoints.source import (
    Checkpoint,
    Leaf,
    Loaded,
    Source,
    check_sizes,
    leaves_by_path,
    tree_from_paths,
)
from jaxgrow.models import Config, from_json
from jaxgrow.sharding import RULES, partition_spec
from jaxgrow.signals import defer_signals
from jaxgrow.untrusted import UntrustedError, checked_path, checked_tree, file_limits

# A model of at most this size in bytes is read completely for its fingerprint, because each read by
# Orbax takes about 20 ms, also of a small leaf.
_AT_ONCE = 2**28
COMPRESSED = 100  # the largest factor by which weights are compressed
# Files that Orbax reads completely, and their largest size in bytes.
_READ_WHOLE = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "manifest.ocdbt", "process_*")
_LARGEST = 100 << 20
_EXPORTING = ".exporting-"  # the prefix of working folders, which end in random digits


class Orbax(Loaded, Checkpoint):
    """The checkpoint in a folder that `write_orbax` or `export_model` wrote.

    Args:
      folder: the folder.

    Raises:
      CheckpointError: the folder is damaged, or the parameters do not fit the config.
    """

    stored_in = PARAMS

    def __init__(self, folder: Path):
        self.folder = folder
        # Orbax logs the tracebacks of errors that it also raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        about = inside(folder, RECORD)
        record = read_json(about)
        self.hf_config = record.get("huggingface")
        if record.get("files") or self.hf_config is not None:
            self.files_beside = folder
        self._handed_over()
        self._head = record.get("head")
        if self._head is not None and not isinstance(self._head, dict):
            raise CheckpointError(f"{about}: head is {self._head!r:.100}, but should be an object")
        if self.hf_config is not None:
            if not isinstance(self.hf_config, dict):
                raise CheckpointError(
                    f"{about}: huggingface is {spelt(self.hf_config)}, but should be a config.json"
                )
            family_of(self.hf_config, about)
        stored = checked_files(folder / PARAMS, folder)
        if isinstance(settings := record.get("config"), dict):
            check_sizes(settings, COMPRESSED * stored, about)
        try:
            config = from_json(record["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{about}: 'config' does not describe a model: {error}"
            ) from error
        with self._reading():
            if (folder / PARAMS / NAME).exists() and (found := damage(folder / PARAMS)):
                raise CheckpointError(
                    f"{folder / PARAMS} is damaged: {found}; restore it from another copy"
                )
            self._shapes: Tree = ocp.metadata(self._where).metadata
            if self._shapes is None:
                raise CheckpointError(
                    f"{folder / PARAMS} is damaged: an array cannot be opened; restore it from another copy"
                )
            check_chunks(self._shapes, stored, folder / PARAMS)
        super().__init__(
            config, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._shapes)
        )
        self._loaded = False

    def _handed_over(self) -> None:
        """Find the files that a run has written for `transformers`."""
        if (self.folder / TRANSFORMERS).is_dir():
            self.of_run = True
            self.files_beside = checked_path(self.folder, TRANSFORMERS).path
            self.own_settings = read_json(inside(self.files_beside, "config.json"))

    @property
    def _where(self) -> str:
        return str((self.folder / PARAMS).resolve())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with defer_signals():
                yield
        except (CheckpointError, UntrustedError):
            raise
        # Orbax and TensorStore raise many kinds of exceptions for damaged files.
        except Exception as error:
            raise CheckpointError(
                f"{self.folder} is damaged: {type(error).__name__}: {error}"
            ) from error

    def _stored(self, like: Params, context: ocp.Context) -> Params:
        """Read the parameters with the shapes and the shardings of ``like``."""
        with context:
            return ocp.load(self._where, like)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        self._load()
        return super().read(path, layer)

    def _load(self) -> None:
        if self._loaded:
            return
        like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), self._shapes)
        with self._reading():
            params = self._stored(like, _alone_context())
        self._arrays = leaves_by_path(params)
        self._loaded = True

    def shard(self, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Params:
        """Read all parameters onto a mesh, as `Source.shard`. Every process has to call it."""

        def sharded(leaf: Leaf) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, partition_spec(leaf.names, leaf.shape, mesh, rules))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        with self._reading():
            like = tree_from_paths({path: sharded(leaf) for path, leaf in self.leaves.items()})
            return self._stored(like, ocp.Context())

    def _read_alone(self, path: str) -> np.ndarray:
        """Read one leaf."""
        leaf = self.leaves[path]
        context = _alone_context()
        context.pytree.loading.partial_load = True
        with self._reading():
            like = tree_from_paths({path: np.empty(leaf.shape, leaf.dtype)})
            return leaves_by_path(self._stored(like, context))[path]

    def fingerprint(self) -> str:
        """Return the hash, as `Checkpoint.fingerprint`.

        In a run of several processes, every process has to call it.
        """
        if self.bytes <= _AT_ONCE:
            self._load()
        digest = hashlib.sha256()
        for path, leaf in self.leaves.items():
            # One leaf at a time, because the host may not be able to hold the complete model.
            x = self._arrays[path] if self._loaded else self._read_alone(path)
            numbers = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            digest.update(f"{path} {leaf.dtype} {leaf.shape}\n".encode())
            digest.update(numbers[:2048].tobytes() + numbers[-2048:].tobytes())
        return digest.hexdigest()


def checked_files(folder: Path, home: Path) -> int:
    """Check the files of a checkpoint before Orbax reads it, as `checked_tree`.

    Raises:
      UntrustedError: also, a file that Orbax reads completely is too large.
    """
    stored = checked_tree(folder, home)
    for file in (file for name in _READ_WHOLE for file in folder.rglob(name)):
        if (size := file.stat().st_size) > _LARGEST:
            raise UntrustedError(f"{file} has {size:,} bytes, but at most {_LARGEST:,} are read")
    return stored


def check_chunks(arrays: Tree, stored: int, where: Path) -> None:
    """Check that no chunk is too large for the files, because a chunk is decompressed at once.

    Args:
      arrays: the metadata of the arrays.
      stored: size of the files in bytes.
      where: the folder, for the message.

    Raises:
      UntrustedError: a chunk is too large.
    """
    for array in jax.tree.leaves(arrays):
        chunk = getattr(array.storage_metadata, "chunk_shape", None) or ()
        size = math.prod(chunk) * array.dtype.itemsize
        file_limits().check_expansion(f"{where}: a chunk of shape {chunk}", size, stored)


def _alone_context() -> ocp.Context:
    """A context in which this process reads without waiting for other processes to do the same."""
    me = jax.process_index()
    return ocp.Context(
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}
        )
    )


def context_without_deadline() -> ocp.Context:
    """A context for saving without a deadline.

    Orbax measures its deadlines by the wall clock, so a jump of the clock would end a save. The
    deadline is longer than a jump from the year 1970. Another deadline, for the creation of
    folders, cannot be set, so nothing waits for them.
    """
    context = ocp.Context()
    context.asynchronous.timeout_secs = 4_000_000_000
    context.asynchronous.create_directories_asynchronously = False
    return context


def write_orbax(source: Source, folder: Path) -> None:
    """Write the parameters of a model, and their checksums, into a folder.

    Args:
      source: the model.
      folder: a folder that exists.
    """
    params = source.params()
    with defer_signals(), context_without_deadline():
        ocp.save(str((folder / PARAMS).resolve()), params)
    seal(folder / PARAMS)


def export_model(
    folder: Path, config: Config, params: Params, head: Mapping[str, object] | None = None
) -> None:
    """Write a model into a folder that may hold other files, such as the folder of a run.

    The folder is then a checkpoint that `Orbax` reads. A model that was exported there before is
    replaced; a folder ``params`` of another origin is renamed. Every process has to call this
    function, with arrays that are sharded over the devices of all processes. Each process writes its
    own shards.

    Args:
      folder: the folder, which exists.
      config: the config of the model.
      params: the parameters.
      head: the task and the labels of the head, as `jaxgrow.checkpoints.source.Checkpoint.head`.

    Raises:
      CheckpointError: the parameters do not fit the config.
    """
    # This checks that the parameters fit the config.
    Loaded(config, params)
    if jax.process_index() == 0:
        _delete_unfinished(folder)
    work = folder / f"{_EXPORTING}{_token()}"
    with defer_signals(), context_without_deadline():
        ocp.save(str((work / PARAMS).resolve()), params)
    if jax.process_index() != 0:
        return
    seal(work / PARAMS)
    about = {
        "version": __version__,
        "operator": "train",
        "sources": [],
        "config": config.as_json(),
        "files": [],
    }
    write_json(work / RECORD, about | ({"head": dict(head)} if head else {}))
    with defer_signals():
        _move_export(work, folder)


def _move_export(work: Path, folder: Path) -> None:
    """Move an export to its place. The record comes last, because it makes the folder a checkpoint."""
    target = folder / PARAMS
    if os.path.lexists(target):
        # Every export is sealed before it appears, so other folders are not ours to delete.
        sealed = not target.is_symlink() and (target / NAME).is_file()
        os.rename(
            target, work / "old" if sealed else folder / f"damaged-{PARAMS}-{secrets.token_hex(8)}"
        )
    os.rename(work / PARAMS, target)
    os.replace(work / RECORD, folder / RECORD)
    shutil.rmtree(work)


def _delete_unfinished(folder: Path) -> None:
    """Delete the working folders of exports that were killed."""
    for path in folder.glob(f"{_EXPORTING}*"):
        token = path.name.removeprefix(_EXPORTING)
        if len(token) == 16 and set(token) <= set(hexdigits) and not path.is_symlink():
            shutil.rmtree(path)


def _token() -> str:
    """Return random hexadecimal digits, equal in all processes."""
    token = np.frombuffer(secrets.token_bytes(8), np.uint8)
    if jax.process_count() > 1:
        token = np.asarray(multihost_utils.broadcast_one_to_all(token))
    return token.tobytes().hex()
