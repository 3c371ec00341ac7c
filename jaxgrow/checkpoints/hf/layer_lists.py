"""Which keys of ``config.json`` describe single layers, and do they fit the number of layers?

There are three kinds: lists with one entry per layer, lists of layer indices, and numbers that are
a shorter form of such a list, for example "every n-th layer has full attention".
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxgrow.checkpoints.io.files import listed, spelt

# One entry per layer. Some of the keys may also hold one number for all layers.
ENTRIES = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_layers"),
    *("no_rope_layers", "moe_layer_freq", "attn_type_list", "activation_sparsity_pattern"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("sliding_window", "moe_intermediate_size", "num_experts", "num_local_experts", "rope_theta"),
)
# Indices of layers.
INDICES = (
    *("mlp_only_layers", "moe_layers", "moe_layer_indices", "dense_layers", "attn_layer_indices"),
    *("full_attn_idxs", "global_attn_idxs", "full_attention_layers", "sliding_window_layers"),
)
# The number of further layers that predict tokens behind the next one. jaxgrow does not read them.
FURTHER = (
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_layers"),
    "mtp_num_hidden_layers",
)
# Entries of lists that have no effect, because models without the list compute the same.
_PLAIN = ("full_attention", "attention", 1)


def _every(n: int, layer: int) -> bool:
    return n > 0 and (layer + 1) % n == 0


def _from(n: int, layer: int) -> bool:
    return layer >= n


# The letters of the layers (`jaxgrow.models.Config.layer_kinds`) that a number describes, and which
# layers these are.
SHORT: Mapping[str, tuple[str, Callable[[int, int], bool]]] = {
    "sliding_window_pattern": ("f", _every),
    "_sliding_window_pattern": ("f", _every),
    "full_attention_interval": ("f", _every),
    "no_rope_layer_interval": ("n", _every),
    "max_window_layers": ("s", _from),
}


def problems(theirs: Mapping[str, Any], key: str) -> list[str]:
    """Return a message about each list that does not fit the number of layers.

    Args:
      theirs: the content of ``config.json``.
      key: the key of the number of layers.
    """
    layers = theirs.get(key)
    wrong: list[str] = []
    if type(layers) is not int:
        return wrong
    for name in ENTRIES:
        found = theirs.get(name)
        if isinstance(found, list) and len(found) != layers:
            wrong.append(
                f"{name} has {len(found)} entries, but {key} is {layers}. If the folder has the weights of {layers} layers, "
                f"write one entry for each of them into {name}; if it has the weights of {len(found)} layers, set {key} to "
                f"{len(found)}"
            )
    for name in INDICES:
        outside = [i for i in _indices(theirs, name) if not 0 <= i < layers]
        if outside:
            wrong.append(
                f"{name} has layer {outside[0]}, but {key} is {layers}, so the last layer is {layers - 1}. Write the indices "
                f"of layers of this model into {name}, counted from 0"
            )
    return wrong


def _indices(theirs: Mapping[str, Any], name: str) -> list[int]:
    found = theirs.get(name)
    return [i for i in found if type(i) is int] if isinstance(found, list) else []


def without_further(theirs: dict[str, Any], key: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the description of layers that predict tokens behind the next one.

    Args:
      theirs: the content of ``config.json``.
      key: the key of the number of layers.

    Returns:
      The content without the key of their number and without their entries in lists, and remarks
      for the user.
    """
    layers = theirs.get(key)
    named = [n for n in FURTHER if type(theirs.get(n)) is int and theirs[n] > 0]
    if type(layers) is not int or not named:
        return theirs, ()
    count = theirs[named[0]]
    out = {name: value for name, value in theirs.items() if name not in named}
    cut = []
    for name in ENTRIES:
        if isinstance(out.get(name), list) and len(out[name]) == layers + count:
            out[name] = out[name][:layers]
            cut.append(name)
    lists = f", and {listed(cut)} without the {count} entries for them" if cut else ""
    return out, (
        f"{named[0]} is {count}: these layers for the prediction of further tokens are not read. A "
        f"new config.json is written without this key{lists}",
    )


def without_old(
    like: Mapping[str, Any], key: str, layers: int, written: Mapping[str, Any], architecture: str
) -> dict[str, Any]:
    """Remove the lists of another number of layers that the architecture does not use.

    `transformers` loads no ``config.json`` with a ``layer_types`` of another length.

    Args:
      like: a ``config.json``.
      key: the key of the number of layers.
      layers: the new number of layers.
      written: the keys that the architecture writes.
      architecture: its name.

    Raises:
      ValueError: such a list may change the function.
    """
    out = dict(like)
    for name in ({*ENTRIES, *INDICES} & like.keys()) - written.keys():
        found = like[name]
        if not isinstance(found, list) or like.get(key) == layers:
            continue
        if name in INDICES or not all(entry in _PLAIN for entry in found):
            raise ValueError(
                f"{name} of config.json has {len(found)} entries, but the new model has {layers} layers, and jaxgrow does "
                f"not read the {name} of a {architecture}. Remove {name} from config.json if the model does not use it, or "
                "use --to orbax"
            )
        del out[name]
    return out


def with_short(out: dict[str, Any], kinds: str) -> dict[str, Any]:
    """Correct the numbers that are a shorter form of a list, or remove those that cannot be right.

    Args:
      out: a ``config.json`` whose lists are right.
      kinds: the letter of each layer.
    """
    for key in SHORT.keys() & out.keys():
        if type(out[key]) is not int:
            continue
        fits = [n for n in (out[key], *range(len(kinds) + 2)) if _described(key, n, kinds)]
        if fits:
            out[key] = fits[0]
        else:
            del out[key]
    return out


def _described(key: str, n: int, kinds: str) -> bool:
    letter, of = SHORT[key]
    return all((kind == letter) == of(n, layer) for layer, kind in enumerate(kinds))


def lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a note about each number that `with_short` removed from a ``config.json``."""
    return [
        f"the kinds of the new layers are not periodic, so {key} {spelt(before[key])} is not in the new config.json. Its "
        "layer_types or no_rope_layers describe the layers; programs that do not read these lists compute another function"
        for key in SHORT
        if type(before.get(key)) is int and key not in after
    ]
