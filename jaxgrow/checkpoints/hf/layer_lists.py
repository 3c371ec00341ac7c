"""Which keys of ``config.json`` describe single layers, and do they fit the number of layers?

There are three kinds: lists with one entry per layer, lists of layer indices, and numbers that are
a shorter form of such a list, for example "every n-th layer has full attention".
"""

from collections.abc import Mapping
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
# Entries that have no effect, because models without the list compute the same.
_PLAIN = ("full_attention", "attention", 1)
# Numbers that stand for a list: a letter of `jaxgrow.models.Config.layer_kinds`, and whether it is
# the kind of the layers from this number on; otherwise of the last of every group of that many.
SHORT: Mapping[str, tuple[str, bool]] = {
    "sliding_window_pattern": ("f", False),
    "_sliding_window_pattern": ("f", False),
    "full_attention_interval": ("f", False),
    "no_rope_layer_interval": ("n", False),
    "max_window_layers": ("s", True),
}


def problems(theirs: Mapping[str, Any], key: str) -> list[str]:
    """Return a message about each list that does not fit ``key``, the number of layers."""
    layers = theirs.get(key)
    wrong: list[str] = []
    if type(layers) is not int:
        return wrong
    for name in (*ENTRIES, *INDICES):
        found = theirs.get(name)
        if not isinstance(found, list):
            continue
        if name in ENTRIES and len(found) != layers:
            wrong.append(
                f"{name} has {len(found)} entries, but {key} is {layers}. If the folder has the weights of {layers} layers, "
                f"write one entry for each of them into {name}; if it has the weights of {len(found)} layers, set {key} to "
                f"{len(found)}"
            )
        outside = [i for i in found if type(i) is int and not 0 <= i < layers]
        if name in INDICES and outside:
            wrong.append(
                f"{name} has layer {outside[0]}, but {key} is {layers}, so the last layer is {layers - 1}. Write the indices "
                f"of layers of this model into {name}, counted from 0"
            )
    return wrong


def without_further(theirs: dict[str, Any], key: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the number of the layers that predict further tokens, and their entries in lists.

    Returns:
      The new ``config.json``, and remarks for the user.
    """
    layers = theirs.get(key)
    named = [n for n in FURTHER if type(theirs.get(n)) is int and theirs[n] > 0]
    if type(layers) is not int or not named:
        return theirs, ()
    count = theirs[named[0]]
    out = {name: value for name, value in theirs.items() if name not in named}
    lists = [name for name in ENTRIES if isinstance(out.get(name), list)]
    cut = {name: out[name][:layers] for name in lists if len(out[name]) == layers + count}
    less = f", and {listed(list(cut))} without the {count} entries for them" if cut else ""
    return out | cut, (
        f"{named[0]} is {count}: these layers for the prediction of further tokens are not read. A "
        f"new config.json is written without this key{less}",
    )


def without_old(
    like: Mapping[str, Any], key: str, layers: int, written: Mapping[str, Any], architecture: str
) -> dict[str, Any]:
    """Remove the lists of another number of layers that the architecture does not write.

    `transformers` loads no ``config.json`` with a ``layer_types`` of another length.

    Raises:
      ValueError: such a list may change the function.
    """
    out = dict(like)
    for name in ({*ENTRIES, *INDICES} & like.keys()) - written.keys():
        found = like[name]
        if not isinstance(found, list) or not found or like.get(key) == layers:
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
    """Correct the numbers that stand for a list of ``kinds``, or remove those that no value makes right."""
    now = dict(out)
    for key in SHORT.keys() & out.keys():
        if type(out[key]) is int:
            every = (out[key], *range(len(kinds) + 2))
            fits = [n for n in every if _described(*SHORT[key], n, kinds)]
            now[key] = fits[0] if fits else None
    return {key: value for key, value in now.items() if value is not None or out[key] is None}


def _described(letter: str, behind: bool, n: int, kinds: str) -> bool:
    """Whether ``n`` stands for the layers of kind ``letter``."""
    layers = [i for i in range(len(kinds)) if (i >= n if behind else n > 0 and (i + 1) % n == 0)]
    return layers == [i for i, kind in enumerate(kinds) if kind == letter]


def lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a note about each number that `with_short` removed from a ``config.json``."""
    return [
        f"the kinds of the new layers are not periodic, so {key} {spelt(before[key])} is not in the new config.json. Its "
        "layer_types or no_rope_layers describe the layers; programs that do not read these lists compute another function"
        for key in SHORT
        if type(before.get(key)) is int and key not in after
    ]
