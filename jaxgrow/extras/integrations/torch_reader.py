"""How are folders of ``torch.distributed.checkpoint`` opened without running code from them?

PyTorch stores the metadata of such a folder, and all entries that are not tensors, as pickles.
Loading a pickle may run any code. `open_reader` therefore loads the metadata with the classes that
PyTorch writes and no others. Entries that are not tensors stay bytes: they are copied without being
loaded.
"""

import importlib
import io
import math
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from jaxgrow.checkpoints.io.files import CheckpointError, inside, listed
from jaxgrow.extras.limited_process import run_limited
from jaxgrow.untrusted import CheckedPath, checked_path, checked_tree, file_limits, one_line

# An object of PyTorch, which may not be installed.
Torch: TypeAlias = Any

METADATA = ".metadata"
# The classes and functions in the metadata of all versions of PyTorch that this project supports.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    # The path of the folder when it was written. It is not used.
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


# Values that contain a part twice, at each of many levels, take forever to be hashed or printed. This
# program does both, with a class that stands for all classes.
_TRIAL = """
import io, pickle, zipfile
class Stub:
    def __new__(cls, *values, **named):
        self = object.__new__(cls)
        self.values = [*values, named]
        return self
    def append(self, *item):
        self.values.append(item)
    # Opcodes call these methods of lists, sets, dicts, objects, and functions that were made.
    add = extend = __setitem__ = __setstate__ = append
    def __call__(self, *values, **named):
        return Stub(self, *values, **named)
    def __repr__(self):
        return repr(self.__dict__)
    def __hash__(self):
        return hash(repr(self))
    def __eq__(self, other):
        return repr(self) == repr(other)
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return Stub
    def persistent_load(self, name):
        return Stub(name)
with open(request["value"], "rb") as file:
    if file.read(4) == b"PK\\3\\4":  # of torch.save
        archive = zipfile.ZipFile(file)
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        streams = [archive.open(name) for name in names]
    else:
        file.seek(0)
        streams = [io.BytesIO(file.read())]
    for stream in streams:
        repr(Unpickler(stream).load())
print("null")
"""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Torch:
        torch = import_module_of("torch")
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}, which is no part of the metadata of PyTorch"
            )
        import_module_of(module)
        return super().find_class(module, name)


def import_module_of(name: str) -> Torch:
    """Import a module of PyTorch or transformers.

    Raises:
      CheckpointError: the module is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"growing the optimizer state of PyTorch requires {name}: run pip install -e "
            f"'.[torch]' in a clone of jaxgrow ({error})"
        ) from error


def open_reader(folder: Path, home: Path | None = None) -> tuple[Torch, dict[str, Torch]]:
    """Open a folder of ``torch.distributed.checkpoint``.

    Args:
      folder: the folder with the metadata.
      home: the folder that the user named, which contains ``folder``; None: ``folder``.

    Returns:
      ``(reader, entries)``: the reader for `load_entries`, and the description of each entry by its
      name.

    Raises:
      CheckpointError: the metadata is damaged, or contains other classes.
      UntrustedError: a file name leads out of the folder, or a tensor is too large for the files.
    """
    stored = checked_tree(folder, home or folder)
    with one_line(CheckpointError, f"{folder / METADATA} is not the metadata of a checkpoint"):
        metadata = read_metadata(folder)
        for place in metadata.storage_data.values():
            checked_path(folder, place.relative_path, deep=True)
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(f"{folder} is compressed; save it without extensions")
        entries = dict(metadata.state_dict_metadata)
        for name, about in entries.items():
            if is_tensor(about):
                size = math.prod(about.size) * about.properties.dtype.itemsize
                file_limits().check_expansion(f"{folder}: tensor {name!r}", size, stored)
    reader = _classes()["reader"](folder)
    reader.checked = metadata
    return reader, entries


def read_metadata(folder: Path) -> Torch:
    """Load the metadata of a folder."""
    file = inside(folder, METADATA)
    file_limits().check(str(file), bytes=file.path.stat().st_size)
    check_pickle(file)
    with file.open() as opened:
        return _Unpickler(io.BytesIO(opened.read())).load()


def check_pickle(file: CheckedPath) -> None:
    """Check that a pickle, or a file of ``torch.save``, can be loaded and printed within the limits.

    Raises:
      UntrustedError: it is damaged, or takes too much time or memory.
    """
    run_limited(_TRIAL, str(file.path), str(file))


def is_tensor(about: object) -> bool:
    """Whether an entry is a tensor; ``about``: its description."""
    return hasattr(about, "size")


def load_entries(reader: Torch, entries: dict[str, Torch]) -> None:
    """Read entries of a folder in place: tensors, and the bytes of all others as `io.BytesIO`."""
    checkpoint = import_module_of("torch.distributed.checkpoint")
    planner = _classes()["load"]()
    try:
        checkpoint.load(entries, storage_reader=reader, planner=planner, no_dist=True)
    except checkpoint.CheckpointException as error:
        # It is not an `Exception`, and its message is a traceback.
        causes = [str(cause) for cause, _ in error.failures.values()]
        raise CheckpointError(f"{reader.path} cannot be read: {listed(causes)}") from error


def save_entries(entries: dict[str, Torch], folder: Path) -> None:
    """Write entries to a new folder. An `io.BytesIO` of `load_entries` is written unchanged."""
    checkpoint = import_module_of("torch.distributed.checkpoint")
    target = checkpoint.FileSystemWriter(folder)
    checkpoint.save(entries, storage_writer=target, planner=_classes()["save"](), no_dist=True)


@lru_cache
def _classes() -> dict[str, Torch]:
    """The classes that extend PyTorch's, which is imported only when it is needed."""
    checkpoint = import_module_of("torch.distributed.checkpoint")

    class Reader(checkpoint.FileSystemReader):
        checked: Torch = None

        def read_metadata(self, *arguments: object, **more: object) -> Torch:
            return self.checked

    class RawLoad(checkpoint.DefaultLoadPlanner):
        def __init__(self) -> None:
            super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

        def load_bytes(self, read_item: Torch, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = value

    class RawSave(checkpoint.DefaultSavePlanner):
        def transform_object(self, write_item: Torch, object: object) -> Torch:
            if isinstance(object, io.BytesIO):
                return io.BytesIO(object.getvalue())
            return super().transform_object(write_item, object)

    return {"reader": Reader, "load": RawLoad, "save": RawSave}
