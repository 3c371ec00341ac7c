"""How are folders of ``torch.distributed.checkpoint`` read and written tensor by tensor?

torchtitan stores the parameters under their names in the model, the optimizer state as
``optimizer.state.PARAMETER.KIND``, and other values as pickled objects, which are copied without
being loaded. One process reads and
writes these folders, whatever the number of processes that wrote them. PyTorch is required:
``pip install -e '.[torch]'`` in a clone of jaxgrow.
"""

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.extras.integrations import torch_reader
from jaxgrow.extras.integrations.orbax_tree import Array, last_step
from jaxgrow.extras.integrations.torch_reader import METADATA, Torch, import_module_of, is_tensor

_STATE = re.compile(r"^optimizer\.state\.(?P<parameter>.+)\.(?P<kind>\w+)$")
_MODEL = "model/"
_OPTIMIZER = "optimizer/"


class TorchTree:
    """The tensors of a checkpoint, with the interface of `orbax_tree.OrbaxTree`.

    The path of a parameter is ``model/layers/0/attention/wq/weight``. The path of its first moment
    is ``optimizer/exp_avg/layers/0/attention/wq/weight``.

    Args:
      folder: the folder of all steps of a run (its last step is used), or of one step.

    Attributes:
      folder: as given.
      item: the folder of the step.
      arrays: `Array` by path.
      objects: the names of all other entries.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.item = _last_torch_step(folder)
        self.left_out: list[str] = []
        self._torch = import_module_of("torch")
        self._reader, about = torch_reader.open_reader(self.item, folder)
        self._about = {
            _path_of_entry(key): entry for key, entry in about.items() if is_tensor(entry)
        }
        self.arrays = {
            path: Array(tuple(entry.size), _numpy_dtype(entry.properties.dtype), tuple(entry.size))
            for path, entry in self._about.items()
        }
        self.objects = [key for key, entry in about.items() if not is_tensor(entry)]

    def read(self, path: str) -> np.ndarray:
        """Read one tensor, with all its shards."""
        about = self._about[path]
        tensor = self._torch.empty(tuple(about.size), dtype=about.properties.dtype)
        torch_reader.load_entries(self._reader, {entry_name(path): tensor})
        if tensor.dtype == self._torch.bfloat16:
            return tensor.view(self._torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def read_objects(self) -> dict[str, Torch]:
        """Read the bytes of the entries that are not tensors, by name."""
        content: dict[str, Torch] = dict.fromkeys(self.objects)
        torch_reader.load_entries(self._reader, content)
        return content


class TorchWriter:
    """Write a checkpoint in the format of a `TorchTree`, with the interface of `Writer`.

    Each tensor is written when it is given, in a separate folder. At the end, one metadata file
    describes all of them.
    """

    def __init__(self, source: TorchTree, folder: Path, process: int = 0):
        self._source = source
        self._item = folder / source.item.relative_to(source.folder)
        self._item.mkdir(parents=True, exist_ok=True)
        self._torch = import_module_of("torch")
        self._parts: list[str] = []

    def write(self, path: str, x: np.ndarray, like: str) -> None:
        """Write one tensor, in the dtype of the tensor ``like``."""
        x = np.array(x, self._source.arrays[like].dtype, order="C")
        if x.dtype == ml_dtypes.bfloat16:
            tensor = self._torch.from_numpy(x.view(np.uint16)).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_numpy(x)
        self._save({entry_name(path): tensor})

    def finish(
        self, places: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], processes: int = 1
    ) -> None:
        """Write everything except the tensors.

        Args:
          places: the path of the source tensor for each path.
          shapes: the shape of each tensor.
          processes: the number of processes, which must be one.

        Raises:
          CheckpointError: several processes wrote tensors.
        """
        if processes > 1:
            raise CheckpointError(
                "checkpoints of torch.distributed.checkpoint are grown by one process. Run the "
                f"growth without jax.distributed; it has {processes} processes"
            )
        objects = self._source.read_objects()
        for path, like in places.items():
            if path.startswith(_MODEL) and path not in self._source.arrays:
                # A new layer has the settings of the layer that it was made from.
                old = f".{entry_name(like)}."
                new = f".{entry_name(path)}."
                objects |= {k.replace(old, new): x for k, x in objects.items() if old in k}
        if objects:
            self._save(objects)
        self._merge()

    def _save(self, content: dict[str, Torch]) -> None:
        part = f"part_{len(self._parts)}"
        torch_reader.save_entries(content, self._item / part)
        self._parts.append(part)

    def _merge(self) -> None:
        every = [(part, torch_reader.read_metadata(self._item / part)) for part in self._parts]
        merged = every[0][1]
        merged.storage_data = {
            index: replace(where, relative_path=f"{part}/{where.relative_path}")
            for part, about in every
            for index, where in about.storage_data.items()
        }
        for _, about in every[1:]:
            merged.state_dict_metadata |= about.state_dict_metadata
            merged.planner_data |= about.planner_data or {}
        content = io.BytesIO()
        pickle.dump(merged, content)
        (self._item / METADATA).write_bytes(content.getvalue())
        for part in self._parts:
            (self._item / part / METADATA).unlink()


def is_distributed(folder: Path) -> bool:
    """Whether a folder is a checkpoint of parameters, or holds the steps of a run.

    A folder next to a Hugging Face model holds only an optimizer state.
    """
    if (folder / "config.json").is_file():
        return False
    return (folder / METADATA).is_file() or any(folder.glob(f"*/{METADATA}"))


def entry_name(path: str) -> str:
    """The name of the entry of a path.

    Example:
      >>> entry_name("optimizer/exp_avg/norm/weight"), entry_name("model/norm/weight")
      ('optimizer.state.norm.weight.exp_avg', 'norm.weight')
    """
    if not path.startswith(_OPTIMIZER):
        return path.removeprefix(_MODEL).replace("/", ".")
    _, kind, parameter = path.split("/", 2)
    kind = "step" if kind == "count" else kind
    return f"optimizer.state.{parameter.replace('/', '.')}.{kind}"


def _path_of_entry(name: str) -> str:
    found = _STATE.match(name)
    if not found:
        return _MODEL + name.replace(".", "/")
    # The step counts of PyTorch exist once per parameter.
    kind = "count" if found["kind"] == "step" else found["kind"]
    return f"{_OPTIMIZER}{kind}/{found['parameter'].replace('.', '/')}"


def _numpy_dtype(dtype: object) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _last_torch_step(folder: Path) -> Path:
    if (folder / METADATA).is_file():
        return folder
    return last_step(path.parent for path in folder.glob(f"*/{METADATA}")) or folder
