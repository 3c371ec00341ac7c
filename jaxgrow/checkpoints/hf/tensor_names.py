"""Which tensor of a file is which tensor of a model, and why do they not fit each other?"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from jaxgrow.checkpoints.hf.base import Stored
from jaxgrow.checkpoints.io.files import CheckpointError, spelt
from jaxgrow.checkpoints.io.safetensors import Tensor

# Parts that wrappers of PyTorch insert into the names of modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_FUSED = re.compile(
    r"(?P<mlp>.*\.(?P<layer>\d+)\..*)\.experts\.(?P<part>gate_up|gate|up|down)_proj(\.weight)?"
)


def plain(
    stored: Mapping[str, Tensor], expected: Collection[str], bare: Collection[str], folder: Path
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Remove prefixes and wrappers from the names of tensors.

    Args:
      stored: the tensors by their names in the files.
      expected: the names of the model.
      bare: the names of the model without the prefix of its body.
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
    prefix = _prefix(found, [expected, bare])
    short = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    # Different tensors keep different names.
    if len(short) < len(stored) or not (parts or prefix):
        return dict(stored), ()
    removed = " and ".join([*parts, *[prefix] * bool(prefix)])
    return short, (f"{removed} was removed from the names of the tensors",)


def _prefix(stored: Collection[str], groups: Iterable[Collection[str]]) -> str:
    """Return the prefix without which most names are those of a model; empty if there is none."""
    found = {"": 0}
    for expected in groups:
        hits = len(set(expected) & set(stored))
        found[""] = max(found[""], hits)
        # A long name is that of a module in a layer, so nothing else ends with it.
        anchor = max(expected, key=len, default="")
        for name in stored:
            if anchor and name.endswith(f".{anchor}"):
                prefix = name.removesuffix(anchor)
                named = {n.removeprefix(prefix) for n in stored}
                found[prefix] = max(found.get(prefix, 0), len(set(expected) & named))
    return max(found, key=lambda prefix: found[prefix])


def unfused(
    stored: dict[str, Tensor], names: Mapping[str, Stored], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the tensors with one tensor for each expert, if the experts are stored fused.

    `transformers` 5 has one tensor ``[experts, 2 mlp, embed]`` for the gates and units of a layer,
    and one ``[experts, embed, mlp]`` for its outputs. An expert is a slice of the file.
    """
    single = {
        part: names[path].name
        for part in ("gate", "up", "down")
        if "{experts}" in names.get(path := f"blocks/mlp/{part}/kernel", Stored("", "")).name
    }
    if not single:
        return stored
    # The modules of a Mixtral have the name "mlp" in transformers 5.
    own = single["gate"].partition(".{layers}.")[2].partition(".experts")[0]
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        name = name if f".{own}." in name else name.replace(".mlp.", f".{own}.")
        if (match := _FUSED.fullmatch(name)) is None:
            out[name] = tensor
            continue
        parts = match["part"].split("_")
        rows, columns = sizes["mlp"], sizes["embed"]
        rows, columns = (columns, rows) if parts == ["down"] else (rows, columns)
        shape = (sizes["experts"], len(parts) * rows, columns)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.name} in {tensor.file.name} has shape {tensor.shape}, but fused experts of this config have {shape} "
                "(experts, outputs, inputs). Load the model in transformers, and save it"
            )
        size = tensor.size // (sizes["experts"] * len(parts))
        for i in range(sizes["experts"] * len(parts)):
            expert, part = divmod(i, len(parts))
            new = single[parts[part]].format(layers=match["layer"], experts=expert)
            begin = tensor.begin + i * size
            out[new] = replace(tensor, name=new, shape=(rows, columns), begin=begin, size=size)
    return out


def layer_of(name: str, patterns: Iterable[str]) -> int:
    """Return the layer of a tensor, or -1; ``patterns``: the names of the model with ``{layers}``."""
    for begin in {p.partition("{layers}")[0] for p in patterns if "{layers}" in p}:
        index = name.removeprefix(begin).partition(".")[0]
        if name.startswith(begin) and index.isdecimal() and len(index) < 7:
            return int(index)
    return -1


def without_values(names: Collection[str], stored: Mapping[str, Tensor]) -> str:
    """Return the reason why tensors have no values; "": all of them have some."""
    empty = [name for name in names if stored[name].shape == (0,)]
    if not empty:
        return ""
    return (
        f"{len(empty)} tensors have no values, such as {spelt(empty[0])}. DeepSpeed saves such tensors under ZeRO stage 3. "
        "Convert the state with its zero_to_fp32.py, or save the model again with the setting "
        '"stage3_gather_16bit_weights_on_model_save": true'
    )


def cause(
    missing: Collection[str],
    unknown: Collection[str],
    stored: Mapping[str, Tensor],
    layers_of: Callable[[str], int],
    key: str,
    depth: int,
) -> str:
    """Return the one reason why names are only in the model or only in the files; "": not known."""
    if empty := without_values([name for name in stored if name not in unknown], stored):
        return empty
    layers = 1 + max(map(layers_of, stored), default=-1)
    least = min(map(layers_of, {*missing, *unknown}), default=-1)
    if not layers or layers == depth or least < min(depth, layers):
        return ""
    fewer = f"; `jaxgrow prune --layers {depth}` then removes the others" if depth < layers else ""
    return f"{key} is {depth}, but the folder has the tensors of {layers} layers. Set {key} to {layers}{fewer}"
