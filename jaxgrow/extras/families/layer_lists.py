"""Which keys of ``config.json`` repeat each other, and do they agree with the number of layers?

There are four kinds: lists with one entry per layer, lists of layer indices, numbers that are a
shorter form of such a list, for example "every n-th layer has full attention", and synonyms.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from jaxgrow.checkpoints.hf.base import REPEATED_KEYS
from jaxgrow.checkpoints.io.files import spelt
from jaxgrow.typed import Json

# One entry per layer. Some of the keys may also hold one number for all layers.
ENTRIES = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_layers"),
    *("no_rope_layers", "moe_layer_freq", "attn_type_list", "activation_sparsity_pattern"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("sliding_window", "moe_intermediate_size", "num_experts", "num_local_experts", "rope_theta"),
    *("block_configs", "layer_group_types", "num_query_heads", "num_kv_heads", "ffn_multipliers"),
)
# Indices of layers.
_INDICES = (
    *("mlp_only_layers", "moe_layers", "moe_layer_indices", "dense_layers", "attn_layer_indices"),
    *("full_attn_idxs", "global_attn_idxs", "full_attention_layers", "sliding_window_layers"),
)
# Numbers that stand for a list: a letter of `jaxgrow.models.Config.layer_kinds`, and whether it is
# the kind of the layers from this number on; otherwise of the last of every group of that many.
_SHORT: Mapping[str, tuple[str, bool]] = {
    "sliding_window_pattern": ("f", False),
    "_sliding_window_pattern": ("f", False),
    "full_attention_interval": ("f", False),
    "no_rope_layer_interval": ("n", False),
    "max_window_layers": ("s", True),
}
# Names that programs have for one number.
SYNONYMS = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "dim"),
    ("num_attention_heads", "n_head", "n_heads"),
    (
        *("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts"),
        *("moe_num_experts", "num_moe_experts", "n_experts"),
    ),
    (
        *("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk"),
        *("moe_top_k", "moe_k", "moe_router_topk", "num_selected_experts"),
    ),
)
# Entries that have no effect, because models without the list compute the same.
_WITHOUT_EFFECT = ("full_attention", "attention", 1)


def contradictions(hf_config: Json, key: str, own: Collection[str]) -> list[str]:
    """Return a message about each key that contradicts another one.

    Args:
      hf_config: the content of ``config.json``.
      key: the key of the number of layers.
      own: the keys of numbers that the architecture reads.
    """
    wrong = [
        f"{given[0]} is {hf_config[given[0]]}, but {other} is {hf_config[other]}, although both are the same number of the "
        "model. Set both to the number that its weights have"
        for _, every in _synonyms(hf_config, own)
        for given in [[name for name in every if hf_config[name]]]
        for other in given[1:]
        if hf_config[other] != hf_config[given[0]]
    ]
    layers = hf_config.get(key)
    if type(layers) is not int:
        return wrong
    wrong += [
        f"{name} has {len(found)} entries, but {key} is {layers}. Write one entry for each layer, or correct {key}"
        for name, found in listed_keys(hf_config, ENTRIES).items()
        if len(found) != layers
    ]
    outside = [
        f"{name} has layer {i}, but {key} is {layers}, so the last layer is {layers - 1}. Write the indices "
        f"of layers of this model into {name}, counted from 0"
        for name, found in listed_keys(hf_config, _INDICES).items()
        for i in found
        if type(i) is int and not 0 <= i < layers
    ]
    return wrong + outside[:1]


def listed_keys(hf_config: Json, names: Iterable[str]) -> dict[str, list[object]]:
    """The keys of ``names`` whose value is a list."""
    return {name: hf_config[name] for name in names if isinstance(hf_config.get(name), list)}


def _synonyms(hf_config: Json, own: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """The key of an architecture for each number, and all keys that a ``config.json`` has for it."""
    for group in SYNONYMS:
        if mine := [key for key in group if key in own]:
            yield mine[0], [key for key in group if type(hf_config.get(key)) is int]


def with_own_keys(hf_config: Json, own: Collection[str]) -> Json:
    """Add the keys in ``own`` that are missing, if there is a synonym."""
    found = {mine: hf_config[given[0]] for mine, given in _synonyms(hf_config, own) if given}
    return {**found, **{k: v for k, v in hf_config.items() if v is not None or k not in found}}


def without_old_lists(like: Json, key: str, layers: int, written: Json, architecture: str) -> Json:
    """Remove the lists of another number of layers that the architecture does not write.

    `transformers` loads no ``config.json`` with a ``layer_types`` of another length.

    Raises:
      ValueError: such a list may change the function.
    """
    if like.get(key) == layers:
        return like
    old = listed_keys(like, {*ENTRIES, *_INDICES} - written.keys())
    for name, found in old.items():
        if found and (name in _INDICES or not all(entry in _WITHOUT_EFFECT for entry in found)):
            raise ValueError(
                f"{name} of config.json has {len(found)} entries, but the new model has {layers} layers, and jaxgrow does "
                f"not read the {name} of a {architecture}. Remove {name} from config.json if the model does not use it, or "
                "use --to orbax"
            )
    return {name: value for name, value in like.items() if not old.get(name)}


def consistent_keys(out: Json, like: Json, written: Json, kinds: str) -> Json:
    """Correct the keys of a new ``config.json`` that repeat others, or remove them.

    Args:
      out: the new content.
      like: the content that it follows.
      written: the keys that describe the model.
      kinds: the kinds of its layers.
    """
    now = dict(out)
    for mine, given in _synonyms(out, written):
        # An architecture may have two names for a number, and one of them suffices.
        missing = [] if written.keys() & {*given} else [mine]
        now |= dict.fromkeys([*missing, *given], written[mine]) if given else {}
    lists = {"layer_types", "no_rope_layers"} & written.keys()
    # Other architectures use these numbers in another way, if at all.
    if lists and any(out.get(k) != like.get(k) for k in (*lists, *SYNONYMS[0])):
        for key in [key for key in _SHORT if type(out.get(key)) is int]:
            every = (out[key], *range(len(kinds) + 2))
            now[key] = next((n for n in every if _describes(*_SHORT[key], n, kinds)), None)
    return {key: value for key, value in now.items() if value is not None or out[key] is None}


def _describes(letter: str, behind: bool, n: int, kinds: str) -> bool:
    """Whether ``n`` stands for the layers of kind ``letter``."""
    layers = [i for i in range(len(kinds)) if (i >= n if behind else n > 0 and (i + 1) % n == 0)]
    return layers == [i for i, kind in enumerate(kinds) if kind == letter]


def removed_numbers(before: Json, after: Json) -> list[str]:
    """Return a note about each number that `consistent_keys` removed from a ``config.json``."""
    return [
        f"the kinds of the new layers are not periodic, so {key} {spelt(before[key])} is not in the new config.json. Its "
        "layer_types or no_rope_layers describe the layers; programs that do not read these lists compute another function"
        for key in _SHORT
        if type(before.get(key)) is int and key not in after
    ]


REPEATED_KEYS.add("contradictions", contradictions)
REPEATED_KEYS.add("own names", with_own_keys)
REPEATED_KEYS.add("old lists", without_old_lists)
REPEATED_KEYS.add("corrected", consistent_keys)
REPEATED_KEYS.add("removed", removed_numbers)
