"""Which tensor of a file is which tensor of a model, and why do they not fit each other?"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from jaxgrow.axes.names import Names
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import CheckpointError, listed, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor

# Parts that wrappers of PyTorch and PEFT insert into the names of modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module"
    r"|base_layer)\."
)
# The places of fused experts in the modules of transformers 5, and of experts that are only stacked.
_FUSED: tuple[Mapping[str, TensorLayout], ...] = (
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


def plain(
    stored: Mapping[str, Tensor], places: Iterable[TensorLayout], prefix: str, folder: Path
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Remove prefixes and wrappers from the names of tensors.

    Args:
      stored: the tensors by their names in the files.
      places: the places of the leaves of the model.
      prefix: the prefix of the names of its body, which files may omit.
      folder: the folder, for messages.

    Returns:
      The tensors by their plain names, and remarks for the user.
    """
    if factors := [name for name in stored if ".lora_A." in name]:
        raise CheckpointError(
            f"{folder} has the weights of a model of PEFT whose LoRA is not merged, such as {spelt(factors[0])}. Merge it with "
            "PEFT (merge_and_unload), and save the merged model"
        )
    parts = sorted({part for name in stored for part in _WRAPPERS.findall(name)})
    found = {_WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}
    expected = {place.name.format(layers=0, experts=0) for place in places}
    removed = _prefix(found, expected | {name.removeprefix(prefix) for name in expected})
    short = {name.removeprefix(removed): tensor for name, tensor in found.items()}
    # Different tensors keep different names.
    if len(short) < len(stored) or not (parts or removed):
        return dict(stored), ()
    every = ", ".join([*parts, *[removed] * bool(removed)])
    return short, (f"removed from the names of the tensors: {every}",)


def _prefix(stored: Collection[str], expected: Collection[str]) -> str:
    """Return the prefix without which most names are expected; empty if there is none."""
    found = Counter({"": 0})
    for name in stored:
        ends = accumulate(name.split("."), "{}.{}".format)
        found.update(p for p in ["", *(f"{end}." for end in ends)] if name[len(p) :] in expected)
    return max(found, key=lambda prefix: (found[prefix], -len(prefix)))


def with_experts(
    names: Mapping[str, TensorLayout],
    stored: Mapping[str, Tensor],
    axes: Mapping[str, tuple[Names, tuple[int, ...]]],
    sizes: Mapping[str, int],
) -> dict[str, TensorLayout]:
    """Return the places of leaves, with the places that the files have for fused experts.

    The shapes decide whether the outputs or the inputs of a kernel come first. If both fit, or none,
    the order is that of the architecture, or that of transformers 5.

    Args:
      names: the places in the architecture.
      stored: the tensors by their names.
      axes: the axis names of each leaf.
      sizes: the size of every axis.
    """

    def first(place: TensorLayout) -> str:
        return place.name.format(layers=0)

    def fits(places: Mapping[str, TensorLayout]) -> bool:
        shapes = {path: place.shape(axes[path][0], sizes) for path, place in places.items()}
        return all(stored[first(places[path])].shape == shape for path, shape in shapes.items())

    forms = _expert_places(names)
    found = [form for form in forms if all(first(place) in stored for place in form.values())]
    return {**names, **next(filter(fits, found), next(iter(found), {}))}


def _expert_places(names: Mapping[str, TensorLayout]) -> Iterator[dict[str, TensorLayout]]:
    """The places that files may have for the kernels of experts, in the order of preference."""
    own = {part: names.get(f"blocks/mlp/{part}/kernel", TensorLayout("", "")) for part in _FUSED[0]}
    forms = [own] if "experts" in own["down"].layout else []
    begin, apart, _ = own["down"].name.partition("{experts}.")
    for ending in ("", ".weight") if apart else ():
        for form in _FUSED:
            forms.append({p: replace(s, name=f"{begin}{s.name}{ending}") for p, s in form.items()})
    for form in forms:
        for places in (form, {part: _transposed(place) for part, place in form.items()}):
            yield {f"blocks/mlp/{part}/kernel": place for part, place in places.items()}


def _transposed(place: TensorLayout) -> TensorLayout:
    """The same place with the last two axes of the tensor exchanged."""
    first, *last = re.findall(r"\(.*?\)|\w+", place.layout)
    return replace(place, layout=" ".join([first, *reversed(last)]))


def layer_of(name: str, places: Mapping[str, TensorLayout]) -> int:
    """Return the layer of a tensor, or -1, by the places of the model."""
    for begin in {p.name.partition("{layers}")[0] for p in places.values() if "{layers}" in p.name}:
        index = name.removeprefix(begin).partition(".")[0]
        if name.startswith(begin) and index.isdecimal() and len(index) < 7:
            return int(index)
    return -1


def without_values(names: Iterable[str], stored: Mapping[str, Tensor]) -> str:
    """Return the reason why tensors have no values; "": all of them have some."""
    empty = [name for name in names if 0 in stored[name].shape]
    if not empty:
        return ""
    return (
        f"these tensors have no values: {listed(empty, most=2)}. DeepSpeed saves such tensors under ZeRO stage 3. "
        "Convert the state with its zero_to_fp32.py, or save the model again with the setting "
        '"stage3_gather_16bit_weights_on_model_save": true'
    )


def cause(
    missing: Collection[str],
    unknown: Collection[str],
    stored: Mapping[str, Tensor],
    places: Mapping[str, TensorLayout],
    key: str,
    depth: int,
) -> str:
    """Return the one reason why names are only in the model or only in the files; "": not known."""
    if empty := without_values([name for name in stored if name not in unknown], stored):
        return empty
    layers = 1 + max((layer_of(name, places) for name in stored), default=-1)
    least = min((layer_of(name, places) for name in (*missing, *unknown)), default=-1)
    if not layers or layers == depth or least < min(depth, layers):
        return ""
    fewer = (
        f"; to keep {depth} of them, use `jaxgrow prune --layers {depth}` then"
        if depth < layers
        else ""
    )
    return f"{key} is {depth}, but the folder has the tensors of {layers} layers. Set {key} to {layers}{fewer}"
