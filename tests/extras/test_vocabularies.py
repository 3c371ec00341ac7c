"""Axis names are found for trees with the paths and shapes that public trainers use.

Each tree has the paths, shapes and axis names of one trainer's source. All sizes differ, except
the number of layers and the sizes of kernels that lie side by side.
"""

import numpy as np
import pytest

from jaxgrow import by_convention, from_rules, grow, infer_rules, operators, sizes
from jaxgrow.axes import is_names
from jaxgrow.axes.names import by_path

SIZES = {"vocab": 31, "context": 17, "layers": 2, "embed": 12}
SIZES |= {"heads": 6, "kv_heads": 3, "head_dim": 5, "mlp": 19}
V, P, N, D, H, K, B, F = SIZES.values()


def tree(flat: dict):
    """Return a nested tree of the leaves, given by their paths."""
    out: dict = {}
    for of, leaf in flat.items():
        *parents, last = of.split("/")
        inside = out
        for part in parents:
            inside = inside.setdefault(part, {})
        inside[last] = leaf
    return out


def zeros(shapes: dict[str, tuple[int, ...]]):
    return tree({of: np.zeros(shape) for of, shape in shapes.items()})


def rows(text: str) -> dict[str, tuple[tuple, tuple[str, ...]]]:
    """Return the two sides of each row, ``leaf: what the trainer has -> names``.

    A letter or a number on the left side is a size, and a word is an axis name.
    """
    letters = dict(zip("VPNDHKBF", SIZES.values(), strict=True))
    found = {}
    for line in text.replace("->\n", "-> ").strip().splitlines():
        leaf, both = line.split(": ")
        theirs, ours = (side.split() for side in both.split("->"))
        sizes = [letters.get(x, int(x) if x.isdigit() else x) for x in theirs]
        found[leaf] = tuple(sizes), tuple(ours)
    return found


QUERY, KEY = ("embed.in", "heads", "head_dim"), ("embed.in", "kv_heads", "head_dim.in")
VALUE = ("embed.in", "kv_heads", "head_dim.value")
OUT, NORM = ("heads.in", "head_dim.in", "embed"), ("embed.norm.scale",)


# --- MaxText: axis names for sharding ---

MAXTEXT = {  # MaxText's names of one layer, and ours
    "self_attention/query/kernel": (("embed", "q_heads", "kv"), QUERY),
    "self_attention/key/kernel": (("embed", "kv_heads", "kv_head_dim"), KEY),
    "self_attention/value/kernel": (("embed", "kv_heads", "kv_head_dim"), VALUE),
    "self_attention/out/kernel": (("heads", "kv", "embed"), OUT),
    "self_attention/query/bias": (("q_heads", "kv"), ("heads", "head_dim.bias")),
    "self_attention/key/bias": (("kv_heads", "kv_head_dim"), ("kv_heads", "head_dim.in.bias")),
    "self_attention/query_norm/scale": (("norm",), ("head_dim.norm.scale",)),
    "self_attention/key_norm/scale": (("norm",), ("head_dim.in.norm.scale",)),
    "pre_self_attention_layer_norm/scale": (("norm",), NORM),
    "post_self_attention_layer_norm/scale": (("norm",), NORM),
    "mlp/wi_0/kernel": (("embed", "mlp"), ("embed.in", "mlp")),
    "mlp/wi_1/kernel": (("embed", "mlp"), ("embed.in", "mlp")),
    "mlp/wi/kernel": (("embed", "num_activations", "mlp"), ("embed.in", "num_activations", "mlp")),
    "mlp/wo/kernel": (("mlp", "embed"), ("mlp.in", "embed")),
    "mlp/wo/bias": (("embed",), ("embed.bias",)),
    "MoeBlock_0/gate/kernel": (("embed", None), ("embed.in", "?")),
    "MoeBlock_0/wi_0": (("exp", "embed_moe", "mlp_moe"), ("experts", "embed.in", "mlp")),
    "MoeBlock_0/wo": (("exp", "mlp_moe", "embed_moe"), ("experts", "mlp.in", "embed")),
    "MoeBlock_0/wo_bias": (("exp", "activation_embed"), ("experts", "embed.bias")),
}
MAXTEXT_OUTSIDE = {
    "token_embedder/embedding": (("vocab", "embed_vocab"), ("vocab", "embed")),
    "decoder/decoder_norm/scale": (("norm",), NORM),
    "decoder/logits_dense/kernel": (("embed_vocab", "vocab"), ("embed.in", "vocab")),
}


def stacked(names, at: int):
    return (*names[:at], "layers", *names[at:])


@pytest.mark.parametrize("scan", [None, 0, 1])
def test_the_axes_of_maxtext_wherever_it_stacks_its_layers(scan):
    """The default is ``param_scan_axis: 1``, and then norms have the axes [embed, layers]."""
    layers = {}
    for of, names in MAXTEXT.items():
        if scan is None:
            layers |= {f"decoder/layers_{i}/{of}": names for i in range(2)}
        else:
            layers[f"decoder/layers/{of}"] = [stacked(side, scan) for side in names]
    both = {**MAXTEXT_OUTSIDE, **layers}
    found = by_convention(tree({of: theirs for of, (theirs, _) in both.items()}))
    assert by_path(found, is_names) == {of: ours for of, (_, ours) in both.items()}


def shaped(names: dict[str, tuple], sizes: dict[str, int]):
    """Return arrays of zeros whose axes have these names."""
    return zeros({of: tuple(sizes[n.partition(".")[0]] for n in a) for of, a in names.items()})


def test_maxtext_s_shapes_tell_where_layers_are_stacked():
    attention = [f"self_attention/{name}/kernel" for name in ("query", "value", "out")]
    inside = (*attention, "mlp/wi_0/kernel", "mlp/wo/kernel")
    ours = {f"decoder/layers/{leaf}": stacked(MAXTEXT[leaf][1], 1) for leaf in inside}
    ours |= {"decoder/layers/pre_self_attention_layer_norm/scale": ("embed.norm.scale", "layers")}
    ours |= {leaf: names for leaf, (_, names) in MAXTEXT_OUTSIDE.items()}
    params = shaped(ours, SIZES)
    assert infer_rules(params, SIZES) == ours
    # The number of layers equals another axis size, which is ambiguous and must not be guessed.
    for layers in (D, K, F):
        known = SIZES | {"layers": layers}
        for leaf, names in infer_rules(shaped(ours, known), known).items():
            assert names == ours[leaf] or any("?" in n for n in names)
    axes = tree(ours)
    target = {"embed": 2 * D, "mlp": 2 * F, "heads": 2 * H, "kv_heads": 2 * K}
    wider = operators.hypercloning(sizes(params, axes), target)
    deeper = operators.llama_pro(sizes(params, axes), {"layers": 3})
    grown = grow(deeper, grow(wider, params, axes), axes)
    kernel = grown["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    assert kernel.shape == (2 * D, 3, 2 * H, B)


# --- levanter: named arrays of haliax, with the layers first ---

LEVANTER = rows(
    """
embeddings/token_embeddings/weight: vocab embed -> vocab embed
lm_head/weight: vocab embed -> vocab embed.in
transformer/norm/weight: embed -> embed.norm.scale
transformer/layers/stacked/input_layernorm/weight: layers embed -> layers embed.norm.scale
transformer/layers/stacked/self_attn/q_proj/weight: layers kv_head q_heads_per_group head_size embed ->
    layers kv_heads q_heads_per_group head_dim embed.in
transformer/layers/stacked/self_attn/k_proj/weight: layers kv_head head_size embed -> layers kv_heads head_dim.in embed.in
transformer/layers/stacked/self_attn/v_proj/weight: layers kv_head head_size embed -> layers kv_heads head_dim.value embed.in
transformer/layers/stacked/self_attn/o_proj/weight: layers embed heads head_size -> layers embed heads.in head_dim.in
transformer/layers/stacked/self_attn/k_norm/weight: layers head_size -> layers head_dim.in.norm.scale
transformer/layers/stacked/mlp/gate_proj/weight: layers mlp embed -> layers mlp embed.in
transformer/layers/stacked/mlp/down_proj/weight: layers embed mlp -> layers embed mlp.in
embeddings/position_embeddings/weight: position embed -> context embed
transformer/blocks/stacked/attn/c_attn/weight: layers embed qkv heads head_size -> layers embed.in qkv heads head_dim
transformer/blocks/stacked/attn/c_attn/bias: layers qkv heads head_size -> layers qkv heads head_dim.bias
transformer/blocks/stacked/attn/c_proj/weight: layers heads head_size embed -> layers heads.in head_dim.in embed
transformer/blocks/stacked/mlp/c_fc/weight: layers embed mlp -> layers embed.in mlp
transformer/blocks/stacked/mlp/c_fc/bias: layers mlp -> layers mlp.bias
transformer/blocks/stacked/mlp/c_proj/weight: layers mlp embed -> layers mlp.in embed
transformer/blocks/stacked/ln_1/weight: layers embed -> layers embed.norm.scale
transformer/blocks/stacked/ln_1/bias: layers embed -> layers embed.norm.bias
"""
)


def test_the_axes_of_levanter():
    found = by_convention(tree({of: theirs for of, (theirs, _) in LEVANTER.items()}))
    assert by_path(found, is_names) == {of: ours for of, (_, ours) in LEVANTER.items()}


# --- Tunix, Gemma and nanodo have no axis names: shapes and module names are used ---

ONE_LAYER = {
    # Tunix's Llama 3 and Qwen 3 (NNX), where ``w`` is a kernel or the scale of a norm.
    "tunix": rows(
        """
layers/{}/input_layernorm/w: D -> embed.norm.scale
layers/{}/post_attention_layernorm/w: D -> embed.norm.scale
layers/{}/attn/q_proj/w: D H B -> embed.in heads head_dim
layers/{}/attn/k_proj/w: D K B -> embed.in kv_heads head_dim.in
layers/{}/attn/v_proj/w: D K B -> embed.in kv_heads head_dim.value
layers/{}/attn/o_proj/w: H B D -> heads.in head_dim.in embed
layers/{}/attn/q_norm/w: B -> head_dim.norm.scale
layers/{}/attn/k_norm/w: B -> head_dim.in.norm.scale
layers/{}/mlp/gate_proj/kernel: D F -> embed.in mlp
layers/{}/mlp/up_proj/kernel: D F -> embed.in mlp
layers/{}/mlp/down_proj/kernel: F D -> mlp.in embed
embedder/input_embedding: V D -> vocab embed
final_norm/w: D -> embed.norm.scale
lm_head/w: D V -> embed.in vocab
"""
    ),
    # Gemma (Linen), and Tunix's Gemma with the same names: adjacent kernels on the first axis. Its tied
    # head reads the final norm.
    "gemma": rows(
        """
layer_{}/pre_attention_norm/scale: D -> embed.norm.scale
layer_{}/post_ffw_norm/scale: D -> embed.norm.scale
layer_{}/attn/q_einsum/w: H D B -> heads embed.in head_dim
layer_{}/attn/kv_einsum/w: 2 K D B -> kv_parts kv_heads embed.in head_dim
layer_{}/attn/attn_vec_einsum/w: H B D -> heads.in head_dim.in embed
layer_{}/attn/_query_norm/scale: B -> head_dim.norm.scale
layer_{}/attn/_key_norm/scale: B -> head_dim.in.norm.scale
layer_{}/mlp/gating_einsum: 2 F D -> gates mlp embed.in
layer_{}/mlp/linear: F D -> mlp.in embed
embedder/input_embedding: V D -> vocab embed
final_norm/scale: D -> embed.norm.scale?
"""
    ),
    # Gemma without GQA. An older version transposes its gates and has a ``w`` below them.
    "gemma, one kernel": rows(
        """
transformer/layer_{}/attn/qkv_einsum/w: 3 H D B -> qkv heads embed.in head_dim
transformer/layer_{}/attn/attn_vec_einsum/w: H B D -> heads.in head_dim.in embed
transformer/layer_{}/mlp/gating_einsum/w: 2 D F -> gates embed.in mlp
transformer/layer_{}/mlp/linear/w: F D -> mlp.in embed
"""
    ),
    # Its tied head reads the final norm.
    "nanodo": rows(
        """
blocks_{}/CausalAttn_0/query/kernel: D H B -> embed.in heads head_dim
blocks_{}/CausalAttn_0/key/kernel: D H B -> embed.in heads head_dim.in
blocks_{}/CausalAttn_0/value/kernel: D H B -> embed.in heads head_dim.value
blocks_{}/CausalAttn_0/attn_out_proj/kernel: H B D -> heads.in head_dim.in embed
blocks_{}/LayerNorm_0/scale: D -> embed.norm.scale
blocks_{}/Mlp_0/Dense_0/kernel: D F -> embed.in mlp
blocks_{}/Mlp_0/Dense_1/kernel: F D -> mlp.in embed
embed/embedding: V D -> vocab embed
pos_embed/embedding: P D -> context embed
out_ln/scale: D -> embed.norm.scale?
"""
    ),
}


def test_transposed_kernels_are_named_by_their_module():
    """GPT-2 of transformers 4 has kernels [outputs, inputs], under Flax's names of the transposed."""
    theirs = {
        "attn/c_attn/kernel/key": ("heads", "head_dim", "embed"),
        "attn/c_proj/kernel": ("embed", "heads", "head_dim"),
        "mlp/c_fc/kernel": ("mlp", "embed"),
        "mlp/c_proj/kernel": ("embed", "mlp"),
    }
    assert by_path(by_convention(tree(theirs)), is_names) == {
        "attn/c_attn/kernel/key": ("heads", "head_dim.in", "embed.in"),
        "attn/c_proj/kernel": ("embed", "heads.in", "head_dim.in"),
        "mlp/c_fc/kernel": ("mlp", "embed.in"),
        "mlp/c_proj/kernel": ("embed", "mlp.in"),
    }


def test_ambiguous_embeddings_heads_and_scales_are_left_open():
    found = by_convention({
        "shared": {"weight": ("vocab", "embed")},  # T5's embedding
        "mixing": {"w": ("embed", "mlp")},
        "dense": {"kernel": ("embed", "heads", "head_dim")},
        "quantized": {"kernel": ("embed", "mlp"), "scale": ("mlp",)},
        "gamma_1": ("embed",),  # of LayerScale
        "steps": ("layers",),
        "up": {"kernel": ("embed", "hidden")},
    })  # fmt: skip
    assert found == {
        "shared": {"weight": ("vocab?", "embed?")},
        "mixing": {"w": ("embed?", "mlp?")},
        "dense": {"kernel": ("embed.in", "heads", "head_dim?")},
        "quantized": {"kernel": ("embed.in", "mlp"), "scale": ("mlp?",)},
        "gamma_1": ("embed?",),
        "steps": ("layers?",),
        "up": {"kernel": ("embed.in", "hidden?")},
    }


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("leaves", ONE_LAYER.values(), ids=ONE_LAYER)
def test_models_that_name_no_axes(leaves, layers):
    """Two layers are a hard case: Gemma also has two adjacent kernels in one leaf."""
    every = {of.format(i): shape for of, (shape, _) in leaves.items() for i in range(layers)}
    shared = any("kv_heads" in names for _, names in leaves.values())
    known = {name: n for name, n in SIZES.items() if shared or name != "kv_heads"}
    rules = infer_rules(zeros(every), known | {"layers": layers})
    assert rules == {of.format("*"): names for of, (_, names) in leaves.items()}

    def told(name):
        return name.replace("embed.norm.scale?", "embed.in.norm.scale")

    from_rules(zeros(every), {of: tuple(map(told, names)) for of, names in rules.items()})


def test_linear_is_an_output_kernel_only_in_gemma():
    """Haiku calls every linear layer so; its ``w`` has no layout that the name determines."""
    alone = {"mlp/linear": {"w": ("embed", "mlp")}, "linear": {"w": ("embed", "mlp")}}
    assert by_convention(alone) == {of: {"w": ("embed?", "mlp?")} for of in alone}
    gemma = {"gating_einsum": ("gates", "embed", "mlp"), "linear": ("mlp", "embed")}
    found = by_convention({"mlp": gemma, **gemma, "other": {"linear": ("mlp", "embed")}})
    assert found["mlp"]["linear"] == found["linear"] == ("mlp.in", "embed")
    assert found["other"]["linear"] == ("mlp?", "embed?")


def test_mesh_axes_and_missing_names_are_reported_not_guessed():
    """Tunix shards by the axes of a mesh."""
    layers = {"q_proj": {"w": ("fsdp", "tp", None)}, "norm": {"w": ("tp",)}}
    layers["mlp"] = {"kernel": (None, None)}
    theirs = {"layers": layers, "embedder": {"input_embedding": ("tp", "fsdp")}}
    found = by_path(by_convention(theirs), is_names)
    assert found["layers/q_proj/w"] == ("fsdp?", "tp?", "?")
    assert found["layers/norm/w"] == ("tp?.norm.scale",)
    del found["embedder/input_embedding"]
    assert all(any("?" in n for n in names) for names in found.values())
    shapes = {"layers/q_proj/w": (D, H, B), "layers/norm/w": (D,), "layers/mlp/kernel": (D, F)}
    params, named = zeros(shapes), by_convention({"layers": layers})
    message = r"(?s)layers/mlp/kernel: the names .* contain '\?', .*layers/q_proj/w: the names"
    with pytest.raises(ValueError, match=message):
        grow({}, params, named)
