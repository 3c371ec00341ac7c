"""How are bottleneck adapters read and written in the layout of AdapterHub's library ``adapters``?

An adapter in this layout has the files ``adapter_config.json`` and ``adapter.safetensors``. It is
supported if it is computed as in jaxgrow: after a sublayer and before its residual connection and
norm (``double_seq_bn`` of Houlsby, and its parts), in BERT, RoBERTa, GPT-2 or Llama. The library
writes such files with ``use_safetensors=True``; pickle files are not read. An existing adapter can
be read, grown with its model, and written again::

    own, adapter = load("their-adapter", config)
    config = replace(config, adapter=own)
    save("grown-adapter", config.resized(g), grow(adapters.growth(g, config), adapter, adapters.axes_of(config)))
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrow.axes.names import Params
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.checkpoints.io.files import CheckpointError, inside, listed, read_json, write_json
from jaxgrow.checkpoints.io.folders import appearing
from jaxgrow.checkpoints.source import flat, nested
from jaxgrow.models import Adapter, Config
from jaxgrow.peft.adapters import detach
from jaxgrow.untrusted import CheckedPath

CONFIG = "adapter_config.json"
WEIGHTS = "adapter.safetensors"
_AT = {"attention": "mh_adapter", "mlp": "output_adapter"}
_LEAVES = {"down/kernel": "adapter_down.0.weight", "down/bias": "adapter_down.0.bias"}
_LEAVES |= {"up/kernel": "adapter_up.weight", "up/bias": "adapter_up.bias"}
# The library's names of activation functions, and the names in jaxgrow.
_ACTIVATIONS = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu_new": "gelu"}
# The keys that change the function, with the only values that are supported. Other keys describe
# the training of the adapter, or have no effect.
_PLAIN: Mapping[str, Any] = {
    "architecture": None,
    "original_ln_before": False,
    "original_ln_after": True,
    "ln_before": False,
    "ln_after": False,
    "is_parallel": False,
    "scaling": 1.0,
    "use_gating": False,
    "inv_adapter": None,
    "cross_adapter": False,
    "leave_out": [],
    "phm_layer": False,
}


def load(folder: str | Path, config: Config) -> tuple[Adapter, Params]:
    """Read an adapter of a model of ``config``, as float32 or wider.

    Args:
      folder: the folder with the two files.
      config: the config of the model that the adapter was trained for.

    Returns:
      ``(Adapter, parameters)``. The parameters have the structure of `jaxgrow.peft.adapters.init`.

    Raises:
      CheckpointError: a file is missing or damaged, the adapter is computed in a way that is not
        supported, or it belongs to another model.
    """
    folder = Path(folder).expanduser()
    file = inside(folder, CONFIG)
    weights = inside(folder, WEIGHTS)
    about = read_json(file)
    stored = safetensors.header(weights)
    how = about.get("config")
    how = how if isinstance(how, dict) else {}
    wrong = [f"{key} {how[key]!r}" for key, plain in _PLAIN.items() if how.get(key, plain) != plain]
    name = about.get("name")
    activation = _ACTIVATIONS.get(str(how.get("non_linearity")))
    at: Any = tuple(place for place, key in _AT.items() if how.get(key) is True)
    if wrong or activation is None or not at or not isinstance(name, str):
        said = ", ".join(
            [*wrong, f"non_linearity {how.get('non_linearity')!r}, at {at}, name {name!r}"]
        )
        raise CheckpointError(f"{file} describes an adapter that is not supported: {said}")
    adapter = Adapter(_bottleneck(stored, weights), at, activation)  # type: ignore[arg-type]
    leaves = {}
    known = set()
    for leaf, names, shape in _leaves(replace(config, adapter=adapter), name):
        # In an adapter of the model without its head, the names lack the first part.
        if not any(n in stored for n in names):
            names = [n.partition(".")[2] for n in names]
        x = safetensors.stacked(stored, weights, names, shape)
        leaves[leaf] = x.swapaxes(1, -1) if x.ndim == 3 else x
        known |= {*names}
    if unknown := [tensor for tensor in stored if tensor not in known]:
        raise CheckpointError(
            f"{weights} has {listed(unknown)}, but this {type(config).__name__} does not have such adapters"
        )
    return adapter, nested(leaves)


def _bottleneck(stored: Mapping[str, safetensors.Tensor], weights: CheckedPath) -> int:
    """Return the number of units that all bottlenecks have."""
    sizes = {
        stored[t].shape[0]
        for t in stored
        if t.endswith(_LEAVES["down/bias"]) and len(stored[t].shape) == 1
    }
    if len(sizes) != 1:
        raise CheckpointError(
            f"{weights} has bottlenecks of {sorted(sizes)} units, but all have to have the same size"
        )
    return sizes.pop()


def save(folder: str | Path, config: Config, adapter: Params, name: str = "adapter") -> None:
    """Write an adapter for the library, to a folder that appears only when it is complete.

    Args:
      folder: the new folder.
      config: the config of the model with its adapter.
      adapter: the parameters, as from `jaxgrow.peft.adapters.init`.
      name: the name of the adapter in the library.

    Raises:
      CheckpointError: the folder exists, the config has no adapter or a fused one, or the library
        does not support such a model.
    """
    own = config.adapter
    leaves = {path: np.asarray(x) for path, x in flat(detach(adapter)[1]).items()}
    tensors: dict[str, np.ndarray] = {}
    for leaf, names, shape in _leaves(config, name):
        x = leaves[leaf].swapaxes(1, -1) if leaves[leaf].ndim == 3 else leaves[leaf]
        if x.shape != (len(names), *shape):
            raise CheckpointError(
                f"{leaf} has shape {leaves[leaf].shape}, which does not fit the adapter of the config"
            )
        tensors |= dict(zip(names, map(np.ascontiguousarray, x), strict=True))
    # `_leaves` has checked this.
    assert own is not None
    # The library computes the number of units as floor(hidden size / factor).
    divisible = config.embed % own.size == 0
    activation = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}[own.activation]
    how = {
        **_PLAIN,
        "reduction_factor": config.embed // own.size
        if divisible
        else config.embed / (own.size + 0.5),
    }
    how |= {"non_linearity": activation, **{key: place in own.at for place, key in _AT.items()}}
    family = family_for(replace(config, adapter=None), None)[0]
    about = {
        "config": {k: v for k, v in how.items() if k != "architecture"},
        "hidden_size": config.embed,
        "name": name,
    }
    about |= {"model_type": family.model_type, "model_class": family.architecture, "model_name": ""}
    # The version of the library whose layout this is.
    about |= {"version": "adapters.1.3.0"}
    planned = [safetensors.Planned(n, x.dtype, x.shape, lambda x=x: x) for n, x in tensors.items()]
    with appearing(Path(folder), [], False) as part:
        safetensors.write_file(part / WEIGHTS, planned)
        write_json(part / CONFIG, about)


def _leaves(config: Config, name: str) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yield each leaf: its path, the names of its tensors by layer, and their shape.

    The kernels in PyTorch are stored as [outputs, inputs].
    """
    own = config.adapter
    family = family_for(replace(config, adapter=None), None)[0]
    places = family.adapters(config)
    if own is None or own.fused is not None or not places:
        raise CheckpointError(
            f"the library adapters does not support {own} in this {type(config).__name__}. Keep it in the checkpoint of its "
            "run, which stores any adapter"
        )
    stored = family.names(config)["blocks/mlp/down/kernel"].name
    layer = stored[: stored.index("{layers}")]
    shapes = {"down/kernel": (own.size, config.embed), "down/bias": (own.size,)}
    shapes |= {"up/kernel": (config.embed, own.size), "up/bias": (config.embed,)}
    for place in own.at:
        for leaf, theirs in _LEAVES.items():
            names = [f"{layer}{i}.{places[place]}.{name}.{theirs}" for i in range(config.layers)]
            yield f"blocks/{place}_adapter/{leaf}", names, shapes[leaf]
