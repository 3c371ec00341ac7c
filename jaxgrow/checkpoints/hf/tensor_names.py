"""How are the names of the tensors in files matched to the leaves of a model?"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from jaxgrow.axes.names import Names
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import CheckpointError, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor

# Parts that wrappers of PyTorch and PEFT insert into the names of modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module"
    r"|base_layer)\."
)
# Fused experts in the modules of transformers 5, and experts that are only stacked.
_FUSED_EXPERTS: tuple[Mapping[str, TensorLayout], ...] = (
    {
        "gate": TensorLayout("gate_up_proj", "experts (2 mlp) embed", 0),
        "up": TensorLayout("gate_up_proj", "experts (2 mlp) embed", 1),
        "down": TensorLayout("down_proj", "experts embed mlp"),
    },
    {
        "gate": TensorLayout("gate_proj", "experts mlp embed"),
        "up": TensorLayout("up_proj", "experts mlp embed"),
        "down": TensorLayout("down_proj", "experts embed mlp"),
    },
)


def unwrapped_names(
    stored: Mapping[str, Tensor], places: Iterable[TensorLayout], prefix: str, folder: Path
) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
    """Remove prefixes and wrappers from the names of tensors.

    Args:
      stored: the tensors by their names in the files.
      places: the layouts of the leaves of the model.
      prefix: the prefix of the names of its body, which files may omit.
      folder: the folder, for messages.

    Returns:
      The tensors by their plain names, and remarks for the user.

    Raises:
      CheckpointError: the files have the factors of a LoRA.
    """
    if factors := [name for name in stored if ".lora_A." in name]:
        raise CheckpointError(
            f"{folder} has the weights of a model of PEFT whose LoRA is not merged, such as {spelt(factors[0])}. Merge it with "
            "PEFT (merge_and_unload), and save the merged model"
        )
    parts = sorted({part for name in stored for part in _WRAPPERS.findall(name)})
    found = {_WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}
    expected = {place.name.format(layers=0, experts=0) for place in places}
    removed = _common_prefix(found, expected | {name.removeprefix(prefix) for name in expected})
    short = {name.removeprefix(removed): tensor for name, tensor in found.items()}
    # Different tensors keep different names.
    if len(short) < len(stored) or not (parts or removed):
        return stored, ()
    every = ", ".join([*parts, *[removed] * bool(removed)])
    return short, (f"removed from the names of the tensors: {every}",)


def _common_prefix(stored: Collection[str], expected: Collection[str]) -> str:
    """Return the prefix whose removal makes the most names expected; it may be empty."""
    found = Counter({"": 0})
    for name in stored:
        ends = accumulate(name.split("."), "{}.{}".format)
        found.update(p for p in ["", *(f"{end}." for end in ends)] if name[len(p) :] in expected)
    return max(found, key=lambda prefix: (found[prefix], -len(prefix)))


def with_fused_experts(
    names: Mapping[str, TensorLayout],
    stored: Mapping[str, Tensor],
    axes: Mapping[str, tuple[Names, tuple[int, ...]]],
    sizes: Mapping[str, int],
) -> dict[str, TensorLayout]:
    """Return the layouts of leaves, with the layouts that the files have for fused experts.

    The shapes decide whether the outputs or the inputs of a kernel come first. If both or
    neither fit, the layout of the architecture decides, or else the layout of transformers 5.

    Args:
      names: the layouts in the architecture.
      stored: the tensors by their names.
      axes: the axis names of each leaf.
      sizes: the size of every axis.
    """

    def first(place: TensorLayout) -> str:
        return place.name.format(layers=0)

    def fits(places: Mapping[str, TensorLayout]) -> bool:
        shapes = {path: place.shape(axes[path][0], sizes) for path, place in places.items()}
        return all(stored[first(places[path])].shape == shape for path, shape in shapes.items())

    forms = _expert_forms(names)
    found = [form for form in forms if all(first(place) in stored for place in form.values())]
    return {**names, **next(filter(fits, found), next(iter(found), {}))}


def _expert_forms(names: Mapping[str, TensorLayout]) -> Iterator[dict[str, TensorLayout]]:
    """The layouts that files may have for the kernels of experts, in the order of preference."""
    own = {
        part: names.get(f"blocks/mlp/{part}/kernel", TensorLayout())
        for part in ("gate", "up", "down")
    }
    forms = [own] if "experts" in own["down"].layout else []
    begin, apart, _ = own["down"].name.partition("{experts}.")
    for ending in ("", ".weight") if apart else ():
        for form in _FUSED_EXPERTS:
            forms.append({p: replace(s, name=f"{begin}{s.name}{ending}") for p, s in form.items()})
    for form in forms:
        for places in (form, {part: _inputs_first(place) for part, place in form.items()}):
            yield {f"blocks/mlp/{part}/kernel": place for part, place in places.items()}


def _inputs_first(place: TensorLayout) -> TensorLayout:
    """The same layout with the last two axes of the tensor exchanged."""
    first, *last = place.groups
    return replace(place, layout=" ".join([first, *reversed(last)]))


def without_further_tensors(
    stored: Mapping[str, Tensor], names: Collection[TensorLayout], layers: int | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Leave out the tensors that predict further tokens.

    Args:
      stored: the tensors by their plain names.
      names: the layouts of the leaves of the model.
      layers: the layers from this one on are left out as well; None: only the tensors of a separate
        module.

    Returns:
      The other tensors, and the names of the tensors of the separate module.
    """
    own = [name for name in stored if name.startswith(("mtp.", "model.mtp."))]
    behind = {name for name in stored if layers is not None and layer_of(name, names) >= layers}
    return {n: tensor for n, tensor in stored.items() if n not in behind.union(own)}, own


def layer_of(name: str, places: Collection[TensorLayout]) -> int:
    """Return the layer of a tensor by the layouts of the model; -1: it belongs to no layer."""
    for begin in {
        place.name.partition("{layers}")[0] for place in places if "{layers}" in place.name
    }:
        index = name.removeprefix(begin).partition(".")[0]
        if name.startswith(begin) and index.isdecimal() and len(index) < 7:
            return int(index)
    return -1
