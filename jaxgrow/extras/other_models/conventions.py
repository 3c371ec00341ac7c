"""What do the usual names of axes and modules in Flax, PyTorch, Equinox and public trainers mean?

A kernel between the residual stream and an inner axis of a layer has one of them as its input axis.
The name of its module decides which one: ``down`` contracts the MLP units in every layout. If the
name is unknown, the layout of the framework decides. If neither is known, the axis names of the
parameter get a ``?`` instead of a guess.
"""

import itertools
import re
from collections.abc import Iterable, Sequence, Set

from jaxgrow.axes.names import READ, STACKS, UNSURE, VALUE, Names, axis_of, is_layers

# Axis names of public trainers -> axis names of jaxgrow. The meaning of ``norm`` in MaxText depends
# on the path, see `translate_names`.
_AXES = {
    # MaxText
    "q_heads": "heads",
    "kv": "head_dim",
    "kv_head_dim": "head_dim",
    "embed_vocab": "embed",
    "embed_moe": "embed",
    "mlp_moe": "mlp",
    "exp": "experts",
    "activation_mlp": "mlp",
    "activation_embed": "embed",
    # levanter
    "head_size": "head_dim",
    "kv_head": "kv_heads",
    "position": "context",
}
_INNER = {"heads", "kv_heads", "head_dim", "mlp", "shared"}  # inner axes of a layer
_OUTPUTS = {"vocab", "classes"}
# Further input and output axes of kernels of the models in jaxgrow.
_OTHERS = {"channels", "patch_rows", "patch_columns", "context", "types", "q_heads_per_group"}
KNOWN = frozenset({"layers", "embed"} | _INNER | STACKS | _OUTPUTS | _OTHERS)
# Stacked kernels of Gemma: word in the path -> (number of kernels, axis).
FUSED = {"qkv": (3, "qkv"), "kv": (2, "kv_parts"), "gating": (2, "gates")}

_QUERIES = {"q", "query", "wq"}
_KEYS = {"k", "key", "wk"}
_VALUES = {"v", "value", "wv"}
_HEADS = {"head", "logits", "unembed", "classifier", "score"}
_READS_EMBED = (
    _QUERIES
    | _KEYS
    | _VALUES
    | _HEADS
    | {
        "qkv",
        "kv",
        "wqkv",
        "in",
        "gate",
        "gating",
        "up",
        "fc",
        "fc1",
        "wi",
        "w1",
        "w3",
        "intermediate",
        "router",
    }
)
_WRITES_EMBED = {"o", "out", "output", "down", "wo", "fc2", "w2", "vec"}
# Parts of a path that have a meaning only as complete words.
_WHOLE = {"c_attn": "in", "c_proj": "out", "proj": "out"}
_EMBEDDINGS = re.compile(r"(?<!un)emb|\bw[tp]e\b")
_KERNELS = {"kernel", "weight", "embedding"}
_NORM = re.compile(r"norm|ln|rms", re.IGNORECASE)


def translate_names(leaf: str, names: Iterable[str | None]) -> Names:
    """Translate axis names to the names of jaxgrow; axes without a name become ``"?"``."""
    norm = "head_dim" if _words(leaf.split("/")) & (_QUERIES | _KEYS) else "embed"
    return tuple(UNSURE if n is None else norm if n == "norm" else _AXES.get(n, n) for n in names)


def fused_axis(leaf: str, first: Sequence[int]) -> str | None:
    """Return the axis along which Gemma stacks kernels in this leaf, or None.

    Args:
      leaf: path of the leaf. Only layers that are separate subtrees are recognized.
      first: size of the first axis, as a sequence of at most one number.
    """
    if not re.search(r"(layers?|blocks?|h)[_/]\d+/", leaf):
        return None
    for word in _words(leaf.split("/")) & FUSED.keys():
        count, name = FUSED[word]
        if count in first:
            return name
    return None


def is_scale(leaf: str) -> bool:
    """Whether a vector with this path has the usual name of a norm scale."""
    *parents, last = leaf.split("/")
    return last in ("scale", "weight", "gamma") or (
        last == "w" and bool(_NORM.search("".join(parents[-1:])))
    )


def with_suffixes(
    leaf: str, names: Names, known: Set[str], has_scale: bool, has_kernel: bool, is_gemma: bool
) -> Names:
    """Return the names with suffixes.

    Args:
      leaf: the path of the parameter.
      names: axis names, from `translate_names`.
      known: axes that are accepted. All other axes get a ``?``, except in embeddings.
      has_scale: whether the module that contains the parameter also contains a norm scale.
      has_kernel: whether the module that contains the parameter also contains a kernel. A scale in
        such a module does not belong to a norm.
      is_gemma: whether the leaf is the output kernel of Gemma's MLP, next to ``gating_einsum``.
    """
    parts = leaf.split("/")
    if not _is_embedding(parts):
        names = tuple(n if n in known or n.endswith(UNSURE) else n + UNSURE for n in names)
    if len(parts) > 1 and parts[-2] in _KERNELS and parts[-1] in ("scale", "bias"):
        # Such as the scale of a quantised kernel, whose axes the path does not determine.
        return tuple(n if n.endswith(UNSURE) else n + UNSURE for n in names)
    groups = _axis_groups(names)
    if not groups:
        return (*names[:-1], names[-1] + UNSURE) if names else ()
    if parts[-1].endswith("bias") or (len(parts) > 1 and parts[-2].endswith("bias")):
        return _vector_names(
            parts, names, groups[-1], ".norm.bias" if has_scale and len(groups) == 1 else ".bias"
        )
    if len(groups) > 1:
        return _matrix_names(parts, names, groups, is_gemma)
    return _vector_names(
        parts, names, groups[-1], ".norm.scale" if is_scale(leaf) and not has_kernel else UNSURE
    )


def _words(parts: Sequence[str]) -> set[str]:
    """Return the words of parts of a path: ``attn_vec_einsum`` has three."""
    spaced = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in parts)
    return set(re.findall(r"[a-z]+\d*", " ".join(spaced)))


def _axis_groups(names: Names) -> list[list[int]]:
    """Group the axes of a leaf, without the axes that stack kernels.

    Heads and their head dimension are one group.
    """
    groups: list[list[int]] = []
    for i, name in enumerate(names):
        heads = [group for group in groups if axis_of(names[group[0]]).endswith("heads")]
        if axis_of(name) in ("head_dim", "q_heads_per_group") and heads:
            heads[0].append(i)
        elif not is_layers(axis_of(name)):
            groups.append([i])
    whole = [group for group in groups if axis_of(names[group[0]]) not in STACKS]
    # A stacked axis and one other group: a stack of biases if the group is heads, else a kernel.
    biases = len(groups) == 2 and len(whole) == 1 and _is_heads(names, whole[0])
    return whole if len(whole) > 1 or biases else groups


def _is_heads(names: Names, group: list[int]) -> bool:
    return axis_of(names[group[0]]).endswith("heads")


def _vector_names(parts: Sequence[str], names: Names, group: list[int], mark: str) -> Names:
    out = list(names)
    if not (mark == UNSURE and UNSURE in out[group[-1]]):
        out[group[-1]] += _of_attention(parts, names[group[-1]], strict=False) + mark
    return tuple(out)


def _matrix_names(
    parts: Sequence[str], names: Names, groups: list[list[int]], is_gemma: bool
) -> Names:
    # The last two parts are needed, because `split_fused` puts the parts of a fused kernel one level
    # below its name.
    last = parts[-2:]
    if _is_embedding(parts):
        return names
    plain = [axis_of(n) for n in names]
    side = None
    if plain.count("embed") == 1:
        side = (
            "in"
            if _OUTPUTS & set(plain) and (_words(parts) & _HEADS or "kernel" in last)
            else _side(parts, is_gemma)
        )
    if side == "in":
        read = [plain.index("embed")]
    elif side == "out":
        read = [i for i in itertools.chain.from_iterable(groups) if plain[i] != "embed"]
    else:
        read = _by_layout(last, names, groups)
    if not read or (side == "out" and any(plain[i] not in _INNER for i in read)):
        return tuple(n if n.endswith(UNSURE) else n + UNSURE for n in names)
    return tuple(
        n + (READ if i in read else _of_attention(parts, n, strict=True))
        for i, n in enumerate(names)
    )


def _is_embedding(parts: Sequence[str]) -> bool:
    last = parts[-2:]
    return "embedding" in last or ("kernel" not in last and any(map(_EMBEDDINGS.search, last)))


def _side(parts: Sequence[str], is_gemma: bool) -> str | None:
    """Return ``"in"`` if ``embed`` is an input axis of a kernel, ``"out"`` if an output axis.

    The last part of the path that has a known name decides. If there is none, return None.
    """
    if is_gemma:
        return "out"
    for part in reversed(parts):
        words = _words([part])
        before = bool(words & _READS_EMBED)
        after = bool(words & _WRITES_EMBED)
        if part in _WHOLE:
            return _WHOLE[part]
        if before != after:
            return "in" if before else "out"
    return None


def _by_layout(last: Sequence[str], names: Names, groups: list[list[int]]) -> list[int]:
    """Return the input axes of a kernel according to the layout of its framework.

    The result is empty if the leaf is called neither kernel nor weight.
    """
    if "weight" in last:  # [outputs, inputs], as in Equinox and PyTorch
        # The weight is either a head or an embedding, and the name does not determine which one.
        vocab = axis_of(names[groups[0][0]]) in _OUTPUTS
        return [] if vocab else groups[-1]
    if "kernel" not in last:
        return []
    if _is_heads(names, max(groups, key=max)):
        of = [group for group in groups if axis_of(names[group[0]]) == "embed"] or groups[:1]
    else:
        of = groups[:-1]
    return [i for group in of for i in group]


def _of_attention(parts: Sequence[str], name: str, strict: bool) -> str:
    """Return the suffix of ``head_dim``, which keys and values have and queries do not have.

    If the path does not determine the suffix and ``strict`` is set, return ``?``.
    """
    if name != "head_dim":
        return ""
    for part in reversed(parts):
        words = _words([part])
        if words & _KEYS:
            return READ
        if words & _VALUES:
            return VALUE
        if words & (_QUERIES | _READS_EMBED) or part == "c_attn":
            return ""
    return UNSURE * strict
