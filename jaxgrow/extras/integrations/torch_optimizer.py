"""How is the optimizer state of a PyTorch run grown together with its Hugging Face model?

Supported formats are the ``optimizer.pt`` of the Hugging Face Trainer, folders of
``torch.distributed.checkpoint``, and safetensors files, which are read without PyTorch. The last two
have one tensor ``[...]state.PARAMETER.KIND`` for each parameter and kind of state. These are the
names of ``get_optimizer_state_dict(.., flatten_optimizer_state_dict=True)`` of PyTorch. The state of
a parameter is grown by the maps of that parameter, under a policy of `jaxgrow.growth.moments`. The
first two formats require PyTorch and transformers: ``pip install -e '.[torch]'`` in a clone of
jaxgrow installs both.

The complete optimizer state is in memory, both before and after the growth.
"""

import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxgrow.axes.names import Names, is_layers
from jaxgrow.checkpoints.hf import storage
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import CheckpointError, inside, listed
from jaxgrow.checkpoints.io.permissions import keep_private
from jaxgrow.checkpoints.source import Checkpoint, Grown, Leaf, Source
from jaxgrow.checkpoints.writing import COMPANIONS, Output
from jaxgrow.extras.hf_peft.places import name_in_memory
from jaxgrow.extras.integrations import torch_reader
from jaxgrow.extras.integrations.copying import copy_tree, not_copied
from jaxgrow.extras.integrations.torch_reader import Torch, import_module_of
from jaxgrow.growth import maps
from jaxgrow.growth.maps import Growth, Term
from jaxgrow.typed import check_choice
from jaxgrow.untrusted import checked_tree, chosen_file, narrow_permissions, one_line

Policy: TypeAlias = Literal["copy", "exact", "asymmetric"]
FILE = "optimizer.pt"
SAFETENSORS = "optimizer.safetensors"
_NAMED_STATE = re.compile(r"^(?:.*\.)?state\.(?P<parameter>.+)\.(?P<kind>\w+)$")
# Files of the Trainer that remain valid after a growth. They are copied without being read.
BESIDE = ("scheduler.pt", "trainer_state.json", "training_args.bin", "scaler.pt")
# The power of the gradient in each kind of state. Other kinds can only be copied.
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
COPIES = ("z",)  # copies of the parameters, which do not grow like moments


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer state of a model.

    Attributes:
      arrays: ``{kind: {parameter: array}}``, such as ``{"exp_avg": {"model.norm.weight": x}}``.
      scalars: ``{parameter: {kind: value}}`` for values without axes, such as ``step``.
    """

    arrays: dict[str, dict[str, Torch]]
    scalars: dict[str, dict[str, Torch]]


def grow_state(
    model: HuggingFace, grown: HuggingFace, state: OptimizerState, growth: Growth, policy: Policy
) -> OptimizerState:
    """Grow the optimizer state of a model.

    Args:
      model: the checkpoint before the growth.
      grown: the checkpoint after it.
      state: the optimizer state of ``model``, by the names of its tensors.
      growth: the growth from ``model`` to ``grown``.
      policy: the policy, as for `jaxgrow.growth.moments.grow_optimizer`. With ``asymmetric``, new
        layers have no state, and PyTorch initialises it at their first step. Other axes must not
        grow in this case, because PyTorch counts steps per tensor.

    Returns:
      The state of ``grown``.

    Raises:
      CheckpointError: a state and its parameter have different shapes, or this kind of
        state is not supported, or not by the policy.
    """
    check_choice("policy", policy, Policy)
    if policy == "asymmetric" and any(not is_layers(axis) for axis in maps.new_sizes(growth)):
        raise CheckpointError(
            "policy 'asymmetric' restarts single entries, but PyTorch counts steps per tensor. Use "
            "'copy' or 'exact', or grow only the layers"
        )
    arrays = {}
    for kind, of in state.arrays.items():
        if kind in COPIES:
            raise CheckpointError(
                f"optimizer state {kind!r} is a copy of the parameters, as schedule-free optimizers "
                "hold it. Growing it is not supported: grow the model without its optimizer"
            )
        if policy == "exact" and kind not in POWERS:
            raise CheckpointError(
                f"optimizer state {kind!r}: policy 'exact' supports only {', '.join(POWERS)}. Use "
                "'copy'"
            )
        _check_shapes(model, kind, of)
        _check_numbers(kind, of)
        arrays[kind] = _grow_kind(model, grown, of, growth, policy, POWERS.get(kind, 1))
    count = next(iter(state.scalars.values()), {})
    # PyTorch initialises the state of the other parameters, including their step counts.
    have = [name for name in grown.tensors if any(name in of for of in arrays.values())]
    return OptimizerState(arrays, {name: dict(state.scalars.get(name, count)) for name in have})


def _check_numbers(kind: str, of: Mapping[str, Torch]) -> None:
    """Check that each array of one kind of state has dense real numbers.

    Raises:
      CheckpointError: an array is sparse, quantized, complex, or has integers.
    """
    wrong: list[str] = []
    for name, x in of.items():
        if isinstance(x, safetensors.Tensor):
            _ = x.dtype  # raises an error if it is not supported
        elif str(x.layout) != "torch.strided" or not x.is_floating_point():
            wrong.append(f"{name}: {x.dtype}, {x.layout}")
    if wrong:
        raise CheckpointError(
            f"optimizer state {kind!r} does not consist of dense real numbers: {listed(wrong)}. Grow "
            "the model without its optimizer"
        )


def _check_shapes(model: HuggingFace, kind: str, of: Mapping[str, Torch]) -> None:
    """Check that each array of one kind of state has the shape of its parameter.

    Raises:
      CheckpointError: an array has another shape than its parameter, or belongs to no tensor of the
        model.
    """
    unknown = [name for name in of if name not in model.tensors]
    shapes = {
        name: (tuple(x.shape), model.tensors[name].shape)
        for name, x in of.items()
        if name not in unknown
    }
    wrong = [f"{name}: {mine}, not {its}" for name, (mine, its) in shapes.items() if mine != its]
    if unknown and any("{experts}" in stored.name for stored in model.names.values()):
        raise CheckpointError(
            f"optimizer state {kind!r} has one array for all experts of a layer, as transformers 5 "
            f"holds them in memory ({listed(unknown)}), but {model.folder} stores a tensor for each "
            "expert. Growing such a state is not supported: grow the model without its optimizer"
        )
    if unknown or wrong:
        raise CheckpointError(
            f"optimizer state {kind!r} does not fit the model in {model.folder}: "
            f"{listed(unknown, wrong)}. Grow the model without its optimizer, or give the "
            "checkpoint that belongs to this state"
        )


def _grow_kind(
    model: HuggingFace,
    grown: HuggingFace,
    of: Mapping[str, Torch],
    growth: Growth,
    policy: Policy,
    power: int,
) -> dict[str, np.ndarray]:
    # Second moments grow by the map of their square roots.
    root = policy == "exact" and power == 2
    power = 1 if root else power
    source = _GrownState(_StateOf(model, of, power, root), growth, policy, power)
    tensors = {}
    for planned in storage.planned_tensors(source, _gradient_family(grown.family, power)):
        x = planned.content()
        assert isinstance(x, np.ndarray)
        if policy != "asymmetric" or x.any():
            tensors[planned.name] = np.square(x) if root else x
    return tensors


class _StateOf(HuggingFace):
    """Optimizer state of one kind, read like the parameters of the model. Missing arrays are zero."""

    def __init__(self, model: HuggingFace, of: Mapping[str, Torch], power: int, root: bool):
        self.__dict__.update(model.__dict__)
        self.names = {path: _gradient_layout(stored, power) for path, stored in model.names.items()}
        self.leaves = {
            path: Leaf(x.names, x.shape, np.dtype(np.float32)) for path, x in model.leaves.items()
        }
        arrays: Torch = {
            name: _StateArray(name, tensor.shape, of.get(name), root)
            for name, tensor in model.tensors.items()
        }
        self.tensors = arrays
        self._kept = ("", np.zeros(0))

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        leaf = self.leaves[path]
        if layer not in self.names[path].layers(leaf.layers):
            # The model has no such parameter, so it never had a gradient.
            return np.zeros(leaf.shape[1:], leaf.dtype)
        return super().read(path, layer)

    def origin(self, path: str, layer: int | None) -> None:
        return None


@dataclass(frozen=True)
class _StateArray:
    """A tensor of PyTorch or in a file, in float32, or its square root."""

    name: str
    shape: tuple[int, ...]
    content: Torch
    root: bool

    def read(self) -> np.ndarray:
        if self.content is None:
            return np.zeros(self.shape, np.float32)
        on_disk = isinstance(self.content, safetensors.Tensor)
        x = self.content.read() if on_disk else self.content.float().numpy()
        x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all() or (self.root and (x < 0).any()):
            raise CheckpointError(
                f"the optimizer state of {self.name} has NaN or infinite values, or negative second "
                "moments. Grow the model without its optimizer, or use an earlier checkpoint"
            )
        return np.sqrt(x) if self.root else x


class _GrownState(Grown):
    def __init__(self, source: Source, growth: Growth, policy: Policy, power: int):
        self._policy = policy
        self._power = power
        super().__init__(source, growth)

    def _terms(self, path: str, names: Names) -> list[Term]:
        found = super()._terms(path, names)
        if self._policy == "copy":
            return maps.copying(found, squares=self._power == 2)
        if self._policy == "asymmetric" and found:
            return maps.first_copies(found, "policy 'asymmetric'")
        return [maps.dual(term) for term in found]


def _gradient_layout(stored: TensorLayout, power: int) -> TensorLayout:
    """Adapt the stored form of a leaf to moments.

    If ``times * leaf + plus`` is stored, the gradient of the stored value is ``1 / times`` of the
    gradient of the leaf.
    """
    return replace(stored, times=stored.times**-power, plus=0.0)


def _gradient_family(family: Family, power: int) -> Family:
    return replace(
        family,
        names=lambda config: {
            p: _gradient_layout(s, power) for p, s in family.names(config).items()
        },
    )


# --- optimizer.pt ---


def read_optimizer(file: Path, model: HuggingFace) -> tuple[OptimizerState, dict[str, Torch]]:
    """Read an ``optimizer.pt``, which stores the state by the number of each parameter.

    Args:
      file: the file; it is loaded with ``weights_only``.
      model: the model that it belongs to.

    Returns:
      ``(state, the complete content of the file)``.

    Raises:
      CheckpointError: the file is damaged, holds no optimizer state, or has another number of
        parameters than the model.
    """
    torch = import_module_of("torch")
    real = chosen_file(file)
    try:
        torch_reader.check_pickle(real)
        content = torch.load(os.fspath(real), map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # PyTorch raises many types of errors for damaged files.
        raise CheckpointError(
            f"{file} cannot be read by torch.load: {error}. Omit --optimizer and --optimizer-state, or give another file "
            "with --optimizer-state"
        ) from error
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        raise CheckpointError(
            f"{file} is not the state_dict of an optimizer, with the keys state and param_groups. "
            "Give another file with --optimizer-state"
        )
    with one_line(CheckpointError, f"{file} is not an optimizer state of PyTorch"):
        return _state_by_number(file, model, content), content


def _state_by_number(file: Path, model: HuggingFace, content: dict[str, Torch]) -> OptimizerState:
    """The state in the content of an ``optimizer.pt``, by the names of the tensors of the model."""
    names = parameter_groups(model, len(content["param_groups"]))
    sizes = [len(group["params"]) for group in content["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise CheckpointError(
            f"{file} has groups of {sizes} parameters, but {model.folder} has "
            f"{[len(group) for group in names]}; supported "
            "are a single group and the two groups of the Trainer (with and without weight decay)"
        )
    groups = zip((group["params"] for group in content["param_groups"]), names, strict=True)
    number = {i: name for of, group in groups for i, name in zip(of, group, strict=True)}
    if lost := [str(i) for i in content["state"] if i not in number]:
        raise CheckpointError(
            f"{file} has the state of parameters {listed(lost)}, which are in no group. Give another "
            "file with --optimizer-state"
        )
    return _state_by_kind({number[i]: entry for i, entry in content["state"].items()})


def write_optimizer(
    file: Path, grown: HuggingFace, state: OptimizerState, like: Mapping[str, Torch]
) -> None:
    """Write an ``optimizer.pt`` with the settings of an older one.

    Args:
      file: the new file.
      grown: the model that it belongs to.
      state: the optimizer state.
      like: the content of the old file, whose learning rates and other settings are kept.
    """
    torch = import_module_of("torch")
    groups = []
    entries = {}
    begin = 0
    for old, names in zip(
        like["param_groups"], parameter_groups(grown, len(like["param_groups"])), strict=True
    ):
        groups.append({**old, "params": list(range(begin, begin + len(names)))})
        for i, name in enumerate(names, begin):
            of = {
                kind: torch.from_numpy(np.ascontiguousarray(x[name]))
                for kind, x in state.arrays.items()
                if name in x
            }
            if of:
                entries[i] = {**state.scalars[name], **of}
        begin += len(names)
    torch.save({"state": entries, "param_groups": groups}, file)


def parameter_groups(model: HuggingFace, count: int) -> list[list[str]]:
    """The names of the tensors of a model, in the order of the parameters of its optimizer.

    Args:
      model: a checkpoint that transformers can load.
      count: the number of parameter groups: 1 for all parameters, or 2 for the groups of the
        Trainer, with and without weight decay.

    Returns:
      The names of each group.
    """
    torch = import_module_of("torch")
    transformers = import_module_of("transformers")
    config = transformers.AutoConfig.from_pretrained(model.folder, trust_remote_code=False)
    with torch.device("meta"):
        module = getattr(transformers, model.family.architecture)(config)
    stored: dict[str, str] = {name_in_memory(model.family, name): name for name in model.tensors}
    own: list[str] = [name for name, _ in module.named_parameters()]
    names = {n: stored.get(n, n) for n in own}
    if count != 2:
        return [list(names.values())]
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, module))
    with_decay = [name for n, name in names.items() if n in decayed]
    without_decay = [name for n, name in names.items() if n not in decayed]
    return [with_decay, without_decay]


def _state_by_kind(entries: Mapping[str, Mapping[str, Torch]]) -> OptimizerState:
    arrays: dict[str, dict[str, Torch]] = {}
    scalars: dict[str, dict[str, Torch]] = {}
    for name, entry in entries.items():
        for kind, x in entry.items():
            if getattr(x, "ndim", 0):
                arrays.setdefault(kind, {})[name] = x
            elif not _is_scalar(x):
                raise CheckpointError(
                    f"optimizer state {kind!r} of {name} is {x!r:.100}, but should be an array or a "
                    "number. Grow the model without its optimizer"
                )
            else:
                scalars.setdefault(name, {})[kind] = x
    return OptimizerState(arrays, scalars)


def _is_scalar(x: Torch) -> bool:
    """Whether a value is a finite number, or the bytes of an entry that is copied unread."""
    if isinstance(x, io.BytesIO | bool) or x is None:
        return True
    if isinstance(x, int | float):
        return math.isfinite(x)
    numeric = hasattr(x, "is_complex") and not x.is_complex()
    return numeric and str(x.layout) == "torch.strided" and math.isfinite(x.item())


# --- torch.distributed.checkpoint ---


def read_distributed(folder: Path, model: HuggingFace) -> tuple[OptimizerState, dict[str, Torch]]:
    """Read a folder of ``torch.distributed.checkpoint`` in one process.

    Any number of processes may have written it.

    Args:
      folder: a folder with entries ``[...]state.PARAMETER.KIND``, as FSDP and the Trainer write
        them.
      model: the model that it belongs to.

    Returns:
      ``(state, all entries by their names)``.

    Raises:
      CheckpointError: no entry belongs to a parameter of the model.
    """
    torch = import_module_of("torch")
    reader, described = torch_reader.open_reader(folder)
    content = {
        key: torch.empty(tuple(about.size), dtype=about.properties.dtype)
        if torch_reader.is_tensor(about)
        else None
        for key, about in described.items()
    }
    torch_reader.load_entries(reader, content)
    entries: dict[str, dict[str, Torch]] = {}
    for key, (name, kind) in state_keys(content, model).items():
        entries.setdefault(name, {})[kind] = content[key]
    if not entries:
        raise CheckpointError(
            f"{folder} has no optimizer state for the parameters in {model.folder}. Its entries "
            f"are {listed(list(content))}"
        )
    return _state_by_kind(entries), content


def write_distributed(
    folder: Path, model: HuggingFace, state: OptimizerState, like: Mapping[str, Torch]
) -> None:
    """Write a folder of ``torch.distributed.checkpoint`` with the other entries of an older one.

    Args:
      folder: the new folder.
      model: the model that ``like`` belongs to, before the growth.
      state: the state of the grown model.
      like: all entries of the old folder.
    """
    torch = import_module_of("torch")
    of = state_keys(like, model)
    content = {key: x for key, x in like.items() if key not in of}
    for key, x in _entries_like(of, state).items():
        is_array = isinstance(x, np.ndarray)
        content[key] = torch.from_numpy(np.ascontiguousarray(x)) if is_array else x
    torch_reader.save_entries(content, folder)


def state_keys(keys: Iterable[str], model: HuggingFace) -> dict[str, tuple[str, str]]:
    """``{key: (parameter, kind)}`` of the keys that belong to a parameter of the model."""
    found = {}
    for key in keys:
        match = _NAMED_STATE.match(key)
        if match and match["parameter"] in model.tensors:
            found[key] = (match["parameter"], match["kind"])
    return found


def _entries_like(of: Mapping[str, tuple[str, str]], state: OptimizerState) -> dict[str, Torch]:
    """The values of a state by keys with the prefix of the keys ``of`` (`state_keys`)."""
    key, (name, kind) = next(iter(of.items()))
    prefix = key.removesuffix(f"{name}.{kind}")
    entries = {
        f"{prefix}{name}.{kind}": x
        for kind, arrays in state.arrays.items()
        for name, x in arrays.items()
    }
    for name, scalars in state.scalars.items():
        entries |= {f"{prefix}{name}.{kind}": x for kind, x in scalars.items()}
    return entries


# --- safetensors ---


def read_safetensors(
    file: Path, model: HuggingFace
) -> tuple[OptimizerState, dict[str, safetensors.Tensor]]:
    """Read an optimizer state. The values of its tensors are read when they are needed.

    Args:
      file: the file.
      model: the model that it belongs to.

    Returns:
      ``(state, all tensors of the file by their names)``.

    Raises:
      CheckpointError: no tensor belongs to a parameter of the model.
    """
    stored = safetensors.read_header(chosen_file(file))
    state = OptimizerState({}, {})
    for key, (name, kind) in state_keys(stored, model).items():
        tensor = stored[key]
        if tensor.shape in ((), (1,)) and model.tensors[name].shape != tensor.shape:
            state.scalars.setdefault(name, {})[kind] = tensor.read()
        else:
            state.arrays.setdefault(kind, {})[name] = tensor
    if not state.arrays:
        raise CheckpointError(
            f"{file} has no optimizer state for the parameters in {model.folder}. Its tensors are "
            f"{listed(list(stored))}"
        )
    return state, stored


def write_safetensors(
    file: Path,
    model: HuggingFace,
    state: OptimizerState,
    like: Mapping[str, safetensors.Tensor],
) -> None:
    """Write an optimizer state with the dtypes and the other tensors of an older file.

    Args:
      file: the new file.
      model: the model that ``like`` belongs to, before the growth.
      state: the state of the grown model.
      like: the tensors of the older file.
    """
    of = state_keys(like, model)
    dtypes = {kind: like[key].dtype for key, (_, kind) in of.items()}
    arrays = {
        kind: {name: x.astype(dtypes[kind]) for name, x in arrays.items()}
        for kind, arrays in state.arrays.items()
    }
    values = _entries_like(of, replace(state, arrays=arrays))
    values |= {key: x for key, x in like.items() if key not in of}
    safetensors.write_file(
        file,
        [safetensors.Planned(k, x.dtype, x.shape, lambda x=x: x) for k, x in values.items()],
    )


# --- the folder of a model ---


class GrownOptimizer:
    """The optimizer state of a PyTorch run, grown by the growth of its model.

    Args:
      source: the model before the growth.
      growth: the growth.
      how: the policy, as for `grow_state`, and the path of the ``optimizer.pt``, of the safetensors
        file, or of the distributed folder; None instead of the path: it is in the folder of the
        model.

    Raises:
      CheckpointError: the model is not in a Hugging Face folder.
    """

    folders: Sequence[Path] = ()
    notes: Sequence[str] = ()

    def __init__(self, source: Checkpoint, growth: Growth, how: tuple[Policy, Path | None]):
        if not isinstance(source, HuggingFace):
            raise CheckpointError(
                f"--optimizer {how[0]} grows the optimizer state of a PyTorch run, but "
                f"{source.folder} is not a Hugging Face folder. Omit --optimizer"
            )
        self._source, self._growth, self._how = source, growth, how

    def write(self, part: Path, model: Source | None, output: Output) -> list[str]:
        """Grow the state into the folder of the grown model.

        Returns:
          The names of the new files and folders.

        Raises:
          CheckpointError: there is no optimizer state, or it does not fit the model.
        """
        policy, path = self._how
        source, grown = self._source, HuggingFace(part)
        where = path or find_optimizer(source.folder)
        new = where.name
        if where.suffix == ".safetensors":
            read, write, of = read_safetensors, write_safetensors, source
        elif where.is_dir():
            read, write, of = read_distributed, write_distributed, source
        else:
            read, write, of = read_optimizer, write_optimizer, grown
            new = FILE  # the name that the Trainer looks for; Accelerate writes optimizer.bin
        state, content = read(where, source)
        state = grow_state(source, grown, state, self._growth, policy)
        write(part / new, of, state, content)
        if where.is_dir():
            keep_private(part / new, [where])
        else:
            narrow_permissions(part / new, where.stat().st_mode)
        return [new, *_copy_files(source, part)]


COMPANIONS.add("optimizer", GrownOptimizer)


def _copy_files(model: HuggingFace, part: Path) -> list[str]:
    """Copy the files beside an optimizer state, and note those that are links out of the folder."""
    there = [name for name in BESIDE if os.path.lexists(model.folder / name)]
    there = [name for name in there if not (part / name).exists()]
    left_out = [
        path for name in there for path in copy_tree(model.folder / name, part / name, model.folder)
    ]
    if left_out:
        model.notes = (*model.notes, not_copied(left_out))
    return [name for name in there if (part / name).exists()]


def find_optimizer(folder: Path) -> Path:
    """Find the optimizer state in the folder of a model.

    Raises:
      CheckpointError: the folder does not contain exactly one.
    """
    for name in (FILE, SAFETENSORS):
        if os.path.lexists(folder / name):
            inside(folder, name)
            return folder / name
    found = [
        path
        for path in sorted(folder.iterdir())
        if (path / ".metadata").is_file() and "optim" in path.name
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} has no {FILE} or {SAFETENSORS}, and {len(found)} folders of torch.distributed.checkpoint "
            "whose name "
            "contains 'optim'. Give the path with --optimizer-state PATH"
        )
    checked_tree(found[0], folder)
    return found[0]
