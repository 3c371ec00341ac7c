"""How are tensors found that wrappers have renamed, and those left out that predict further tokens?"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.registry import FAMILIES, NAMING
from jaxgrow.checkpoints.hf.tensor_layout import TensorLayout
from jaxgrow.checkpoints.io.files import CheckpointError, listed, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor
from jaxgrow.extras.families import layer_lists
from jaxgrow.models import Config
from jaxgrow.typed import Json

# Parts that wrappers of PyTorch and PEFT insert into the names of modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module"
    r"|base_layer)\."
)

# The number of further layers that predict tokens behind the next one. jaxgrow does not read them.
FURTHER = (
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_layers"),
    "mtp_num_hidden_layers",
)


def unwrapped_tensors(
    stored: dict[str, Tensor], family: Family, config: Config, folder: Path
) -> tuple[dict[str, Tensor], Family, tuple[str, ...]]:
    """Remove prefixes and wrappers from the names of tensors.

    Args:
      stored: the tensors by their names in the files.
      family: the architecture.
      config: the config of the model.
      folder: the folder, for messages.

    Returns:
      The tensors by their plain names; the architecture, which is the one without a head if the head
      of a decoder is missing; and remarks for the user.

    Raises:
      CheckpointError: the files have the factors of a LoRA.
    """
    places = family.names(config)
    stored, notes = _unwrapped_names(stored, places.values(), family.prefix, folder)
    head = places.get("head_kernel")
    lost = head.name if config.causal and head is not None else ""
    if lost and family.current(lost) not in stored and (body := body_of(family.model_type)):
        missing = (
            f"{lost} is missing, so the model is read as a {body.architecture}, without a head"
        )
        return stored, body, (*notes, missing)
    return stored, family, notes


def body_of(model_type: object) -> Family | None:
    """The architecture of a model without its head; None: there is none."""
    alike = (family for family in FAMILIES.values() if family.model_type == model_type)
    return next((family for family in alike if family.fixed.get("head") == "states"), None)


def _unwrapped_names(
    stored: dict[str, Tensor], places: Iterable[TensorLayout], prefix: str, folder: Path
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
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


def without_further_layers(hf_config: Json, key: str) -> tuple[Json, tuple[str, ...]]:
    """Remove the number of the layers that predict further tokens, and their entries in lists.

    Args:
      hf_config: the content of ``config.json``.
      key: the key of the number of layers.

    Returns:
      The new ``config.json``, and remarks for the user.
    """
    layers = hf_config.get(key)
    named = [n for n in FURTHER if type(hf_config.get(n)) is int and hf_config[n] > 0]
    if type(layers) is not int or not named:
        return hf_config, ()
    count = hf_config[named[0]]
    out = {name: value for name, value in hf_config.items() if name not in named}
    cut = {
        n: v[:layers]
        for n, v in layer_lists.listed_keys(out, layer_lists.ENTRIES).items()
        if len(v) == layers + count
    }
    less = f", and {listed(list(cut))} without the {count} entries for them" if cut else ""
    return out | cut, (
        f"{named[0]} is {count}: these layers for the prediction of further tokens are not read. A "
        f"new config.json is written without this key{less}",
    )


def without_further_tensors(
    stored: Mapping[str, Tensor], names: Collection[TensorLayout], layers: int | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Leave out the tensors that predict further tokens.

    Args:
      stored: the tensors by their plain names.
      names: the layouts of the leaves of the model.
      layers: the layers from this one on are left out as well; None: only the tensors of a separate
        module.

    Returns:
      The other tensors, and remarks for the user about a separate module.
    """
    own = [name for name in stored if name.startswith(("mtp.", "model.mtp."))]
    behind = {name for name in stored if layers is not None and layer_of(name, names) >= layers}
    others = {n: tensor for n, tensor in stored.items() if n not in behind.union(own)}
    if not own:
        return others, ()
    named = listed(own, most=2)
    return others, (f"the tensors that predict further tokens are not read: {named}",)


def layer_of(name: str, places: Collection[TensorLayout]) -> int:
    """Return the layer of a tensor by the layouts of the model; -1: it belongs to no layer."""
    for begin in {
        place.name.partition("{layers}")[0] for place in places if "{layers}" in place.name
    }:
        index = name.removeprefix(begin).partition(".")[0]
        if name.startswith(begin) and index.isdecimal() and len(index) < 7:
            return int(index)
    return -1


NAMING.add("unwrapped", unwrapped_tensors)
NAMING.add("predicted layers", without_further_layers)
NAMING.add("predicted tensors", without_further_tensors)
