"""How are fused experts stored, and experts that are only stacked?"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from jaxgrow.axes.names import Names
from jaxgrow.checkpoints.hf.registry import STORED_EXPERTS
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.safetensors import Tensor

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


STORED_EXPERTS.add("fused", with_fused_experts)
