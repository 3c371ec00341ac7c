"""Models without axis names are named by rules, converted for the operators and back."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import third_party
import tiny

from jaxgrow import (
    by_convention,
    from_rules,
    grow_optimizer,
    infer_rules,
    join_fused,
    operators,
    restructure,
    sizes,
    split_fused,
    stack_layers,
    unstack_layers,
)
from jaxgrow.axes import axis_of, is_names
from jaxgrow.axes.names import by_path
from jaxgrow.models import BERTConfig, LlamaConfig, ViTConfig

SIZES = {"vocab": 11, "context": 7, "layers": 2, "embed": 6, "heads": 3, "head_dim": 5, "mlp": 9}
CONFIGS = {
    "gpt2": tiny.config(dtype="float32"),
    "llama": LlamaConfig(**SIZES | {"heads": 4, "embed": 12, "head_dim": 8}, kv_heads=2),
    "bert": BERTConfig(**SIZES),
    "vit": ViTConfig(layers=2, embed=6, heads=3, head_dim=5, mlp=9),
}


def wrong(*lines: str):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, lines)))


# --- names ---


def test_rules_give_a_model_of_ours_its_own_names():
    config = tiny.config()
    shapes, axes = tiny.shapes(config), tiny.axes(config)
    assert from_rules(shapes, by_path(axes, is_names)) == axes
    by_pattern = by_path(axes, is_names)
    query = by_pattern.pop("blocks/attention/query/kernel")
    assert from_rules(shapes, {"*/query/kernel": query, **by_pattern}) == axes


@pytest.mark.parametrize("family", CONFIGS)
def test_conventions_name_all_axes_but_tied_and_below_marks(family):
    axes = CONFIGS[family].axes()
    plain = jax.tree.map(lambda names: tuple(map(axis_of, names)), axes, is_leaf=is_names)
    found, own = by_path(by_convention(plain), is_names), by_path(axes, is_names)
    others = {leaf for leaf, names in own.items() if found[leaf] != names}
    below = {leaf for leaf in others if any(".below" in name for name in own[leaf])}
    assert all(re.match("(final|head)_norm", leaf) for leaf in others - below)
    assert by_convention(axes) == axes


def test_conventions_of_einsums_and_of_pytorch():
    kernels = {"q": ("heads", "embed", "head_dim"), "qkv": ("qkv", "heads", "embed", "head_dim")}
    found = by_convention(kernels | {"out": ("heads", "head_dim", "embed")})
    assert found["q"] == ("heads", "embed.in", "head_dim")
    assert found["qkv"] == ("qkv", "heads", "embed.in", "head_dim")
    assert found["out"] == ("heads.in", "head_dim.in", "embed")
    tables = by_convention(
        {"tok_emb/weight": ("vocab", "embed"), "unembed/weight": ("vocab", "embed")}
    )
    assert [*tables.values()] == [("vocab", "embed"), ("vocab", "embed.in")]
    sizes_ = {"heads": 3, "embed": 4, "head_dim": 5}
    assert infer_rules({"qkv": np.ones((3, 3, 4, 5))}, sizes_)["qkv"][:2] == ("heads?", "heads?")


def test_known_sizes_give_proposed_rules_and_open_axes():
    tree, known = third_party.linen_shapes(third_party.SMALL), third_party.SMALL
    rules = infer_rules(tree, known)
    assert len(rules) < len(jax.tree.leaves(tree))
    assert from_rules(tree, rules) == from_rules(tree, third_party.LINEN.rules)
    twice = infer_rules(tree, {**known, "mlp": known["embed"]})
    assert twice["head/kernel"] == ("embed|mlp?.in", "vocab")
    with wrong("the rule 'head/kernel' has unknown axes 'embed|mlp?.in': write the right names"):
        from_rules(tree, twice)
    few = {"a": np.ones(4), "b": {"kernel": np.ones((4, 5))}}
    assert infer_rules(few, {"embed": 4}) == {"b/kernel": ("embed.in", "?"), "a": ("embed?",)}


def test_a_norm_that_no_kernel_reads_may_be_that_of_a_tied_head():
    norm, known = {"scale": np.ones(2)}, {"vocab": 5, "embed": 2}
    tree = {"embedding": np.ones((5, 2)), "layers": [norm] * 2, "norm": norm}
    rules = infer_rules(tree, known)
    assert rules["norm/scale"] == ("embed.norm.scale?",)
    assert rules["layers/*/scale"] == ("embed.norm.scale",)
    head = infer_rules({**tree, "head": {"kernel": np.ones((2, 5))}}, known)
    assert head["norm/scale"] == ("embed.norm.scale",)


def test_parts_that_differ_by_a_number_alone_are_one_rule():
    up, down = {"kernel": np.ones((2, 3))}, {"kernel": np.ones((3, 2))}
    block = {"Dense_0": up, "Dense_1": down, "LayerNorm_0": {"scale": np.ones(2)}}
    tree = {"blocks": [block, block], "kernel": np.ones((2, 7))}
    rules = infer_rules(tree, {"embed": 2, "mlp": 3, "vocab": 7})
    parts = ("Dense_0/kernel", "Dense_1/kernel", "LayerNorm_0/scale")
    assert list(rules) == [*(f"blocks/*/{part}" for part in parts), "kernel"]


def test_all_that_is_wrong_with_rules_is_in_one_error():
    up = {"kernel": np.ones((2, 3)), "bias": np.ones(3)}
    params = {"up": up, "down": np.ones((3, 2)), "norm": np.ones(2)}
    rules = {"up/kernel": ("embed.in",), "*/bias": ("mlp",), "*/b*": ("mlp.bias",), "norm": "embed"}
    with wrong(
        "down: no rule matches this leaf of shape (3, 2)",
        "norm: the rule 'norm' has the names 'embed', but expected a tuple of strings",
        "up/bias: the rule '*/bias': ('mlp',) declares no role",
        "up/kernel: the rule 'up/kernel' names 1 axes, ('embed.in',), but the leaf has shape (2, 3)",
        "the rule '*/b*': matches no leaf that is left by earlier rules",
    ):
        from_rules(params, rules)


def test_a_wrong_rule_is_reported_once_for_all_layers():
    layer = {"up": np.ones((2, 3)), "down": np.ones((3, 2)), "norm": np.ones(2), "new": np.ones(5)}
    params = {f"layers_{i}": layer for i in range(48)}
    rules = {"*/up": ("embed.in",), "*/down": ("mlp?", "embed"), "*/norm": ("embed",)}
    with pytest.raises(ValueError) as error:
        from_rules(params, rules)
    assert str(error.value).splitlines() == [
        "the rules do not fit the parameters; jaxgrow.infer_rules proposes rules:",
        "  layers_0/down and 47 others: the rule '*/down' has unknown axes 'mlp?': write the right names",
        "  layers_0/new and 47 others: no rule matches this leaf of shape (5,)",
        "  layers_0/norm and 47 others: the rule '*/norm': ('embed',) declares no role, so the role is ambiguous. "
        "Add exactly one of .bias, .scale, .norm.scale, .norm.bias, .embedding and .kernel to the last axis.",
        "  layers_0/up and 47 others: the rule '*/up' names 1 axes, ('embed.in',), but the leaf has shape (2, 3)",
    ]
    rules = {"*/up": ("embed.in", "mlp"), "*/down": ("mlp.in", "embed")}
    rules |= {"*/norm": ("mlp.bias",), "*/new": ("new.bias",)}
    with pytest.raises(ValueError) as error:
        from_rules(params, rules)
    assert str(error.value).splitlines()[1:] == [
        "  axis 'mlp' has size 3 in layers_0/down, but 2 in layers_0/norm and 47 others"
    ]


# --- layers ---


class Moments(NamedTuple):
    count: np.ndarray
    mu: dict


def layer(seed: int, **more):
    rng = np.random.default_rng(seed)
    return {"kernel": rng.normal(size=(2, 3)), "bias": rng.normal(size=3), **more}


@pytest.mark.parametrize(("pattern", "tree"), [
    ("layers_{}", {"norm": np.ones(2), **{f"layers_{i}": layer(i) for i in range(11)}}),
    ("decoder/h{:02d}", {"decoder": {f"h{i:02d}": layer(i) for i in range(3)}, "encoder": {"h00": layer(9)}}),
    ("layers/{}", {"layers": [layer(i) for i in range(11)], "norm": [np.ones(2)]}),
    ("layers/{}", {"layers": tuple(layer(i) for i in range(3))}),
    ("layers/{}", {"layers": {i: layer(i) for i in range(11)}}),
    ("layers/{}", {"layers": {str(i): layer(i) for i in range(11)}}),
])  # fmt: skip
def test_stacking_is_undone_to_the_bit_in_parameters_and_states(pattern, tree):
    state = (Moments(np.int32(3), jax.tree.map(lambda x: 2 * x, tree)), optax.EmptyState())
    for whole in (tree, state):
        stacked = stack_layers(whole, pattern)
        assert len(jax.tree.leaves(stacked)) < len(jax.tree.leaves(whole))
        back = unstack_layers(stacked, pattern)
        assert jax.tree.structure(back) == jax.tree.structure(whole)
        jax.tree.map(np.testing.assert_array_equal, back, whole)
    names = jax.tree.map(lambda x: ("a", "b")[: x.ndim], tree)
    stacked = stack_layers(names, pattern)
    assert ("layers", "a", "b") in by_path(stacked, is_names).values()
    number = 11 if len(jax.tree.leaves(tree)) > 20 else 3
    assert unstack_layers(stacked, pattern, number) == names


def test_layers_are_in_the_order_of_their_numbers():
    tree = {f"layers_{i}": {"w": np.full(1, i)} for i in range(12)}
    assert stack_layers(tree, "layers_{}")["layers_{}"]["w"].ravel().tolist() == list(range(12))
    on_device = stack_layers(jax.tree.map(jnp.asarray, tree), "layers_{}")
    assert isinstance(on_device["layers_{}"]["w"], jax.Array)


def test_layers_within_layers_are_stacked_one_after_the_other():
    tree = {f"layers_{i}": {"experts": [layer(2 * i), layer(2 * i + 1)]} for i in range(2)}
    stacked = stack_layers(stack_layers(tree, "layers_{}"), "experts/{}")
    assert stacked["layers_{}"]["experts"][0]["bias"].shape == (2, 2, 3)
    with wrong("layers_{}/experts/1/bias: missing, but layers_{}/experts/0/bias exists"):
        stack_layers({"layers_{}": {"experts": [{"bias": np.ones(3)}, {}]}}, "experts/{}")


@pytest.mark.parametrize("kind", [list, lambda layers: dict(enumerate(layers))])
def test_a_state_of_bare_layers_is_stacked_within_its_tuples(kind):
    """The tuples of `optax.chain` also have entries with numbers, but these are no layers."""
    tree = kind([layer(i) for i in range(2)])
    names = kind([{"kernel": ("embed.in", "mlp"), "bias": ("mlp.bias",)}] * 2)
    tx = optax.chain(optax.trace(0.9), optax.adam(0.1))
    state = tx.update(tree, tx.init(tree))[1]
    params, axes, stacked = (stack_layers(x, "{}") for x in (tree, names, state))
    assert stacked[0].trace[0]["bias"].shape == (2, 3)
    growth = operators.stack(sizes(params, axes), {"layers": 4})
    grown = grow_optimizer(tx, stacked, growth, params, axes, "copy", "{}")
    back = unstack_layers(grown, "{}")
    assert jax.tree.structure(back) == jax.tree.structure(tx.init(kind([layer(0)] * 4)))
    np.testing.assert_array_equal(back[1][0].mu[3]["bias"], state[1][0].mu[1]["bias"])
    way_out = "does not match tuples, .* use {'layers': params} and the pattern 'layers/{}'"
    with pytest.raises(ValueError, match=f"no layers found at '{{}}', which {way_out}"):
        stack_layers((layer(0), layer(1)), "{}")
    with pytest.raises(ValueError, match=f"nothing is stacked at '{{}}', which {way_out}"):
        unstack_layers((layer(0),), "{}")


def matrices(tree):
    return jax.tree.map(lambda x: x.ndim == 2, tree)


MASKING = {
    "masked": optax.masked(optax.adam(1e-3), matrices),
    "all of the layers masked": optax.chain(
        optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: x.shape == (5,), tree)), optax.trace(0.9)),
    "multi_transform": optax.multi_transform({"sgd": optax.sgd(1e-3, 0.9), "adam": optax.adam(1e-3)},
        lambda tree: jax.tree.map(lambda x: "sgd" if x.ndim == 2 else "adam", tree)),
    "muon": optax.contrib.muon(1e-3),
    "no state": optax.identity(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "as_list"), [*((name, False) for name in MASKING), ("masked", True)]
)
def test_what_an_optimizer_masks_is_stacked_and_taken_apart(name, as_list):
    """A masked leaf is a node without leaves, and it is not an axis name."""
    tx, layers = MASKING[name], [layer(i) for i in range(3)]
    tree = {"layers": layers} if as_list else {f"layers_{i}": x for i, x in enumerate(layers)}
    tree |= {"norm": np.ones(5)}
    pattern = "layers/{}" if as_list else "layers_{}"
    state = tx.update(tree, tx.init(tree), tree)[1]
    stacked = stack_layers(state, pattern)
    if name == "masked":
        assert isinstance(stacked.inner_state[0].mu["norm"], optax.MaskedNode)
        mu = stacked.inner_state[0].mu
        mu = mu["layers"][0] if as_list else mu["layers_{}"]
        assert isinstance(mu["bias"], optax.MaskedNode) and mu["kernel"].shape == (3, 2, 3)
    back = unstack_layers(stacked, pattern)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_layers_without_a_leaf_need_their_number():
    with wrong("layers_{}: the number of layers is unknown without a leaf. Pass number."):
        unstack_layers({"layers_{}": {}, "norm": np.ones(5)}, "layers_{}")
    tree = {"layers_0": {}, "layers_1": {}, "norm": np.ones(5)}
    assert unstack_layers(stack_layers(tree, "layers_{}"), "layers_{}", 2).keys() == tree.keys()


def test_named_tuples_are_no_axis_names():
    assert is_names(()) and is_names(("embed.in", "mlp"))
    assert not is_names(optax.MaskedNode()) and not is_names(optax.EmptyState())
    assert not is_names(Moments("embed", "mlp"))
    arrays = {f"layers_{i}": {"w": np.ones(2), "nothing": ()} for i in range(2)}
    assert stack_layers(arrays, "layers_{}")["layers_{}"]["nothing"] == ()
    scalars = {f"layers_{i}": {"w": ("mlp.bias",), "temperature": ()} for i in range(2)}
    assert stack_layers(scalars, "layers_{}")["layers_{}"]["temperature"] == ("layers",)


def test_layers_that_are_not_alike_are_named():
    with wrong("layers_1, layers_3: missing, but layers_4 exists"):
        stack_layers({f"layers_{i}": layer(0) for i in (0, 2, 4)}, "layers_{}")
    unlike = {"kernel": np.ones((2, 4)), "scale": np.ones(3)}
    with wrong(
        "d/layers_1/scale: missing in d/layers_0",
        "d/layers_1/bias: missing, but d/layers_0/bias exists",
        "d/layers_1/kernel: is of shape (2, 4) and float64, but d/layers_0/kernel is of shape (2, 3) and float64",
    ):
        stack_layers({"d": {"layers_0": layer(0), "layers_1": unlike}}, "layers_{}")
    with wrong("layers_1/a: is named ('y',), but layers_0/a is named ('x',)"):
        stack_layers({"layers_0": {"a": ("x",)}, "layers_1": {"a": ("y",)}}, "layers_{}")
    with wrong(
        "no layers found at 'h_{}'; the leaves of the tree are layers_0/bias, layers_0/kern"
    ):
        stack_layers({"layers_0": layer(0)}, "h_{}")
    with wrong("the pattern 'layers' must have one {} for the number of a layer"):
        stack_layers({"layers_0": layer(0)}, "layers")
    with wrong("nothing is stacked at 'layers_{}'"):
        unstack_layers({"layers_0": layer(0)}, "layers_{}")
    with wrong("layers_{}/b: is of shape (3,) and float64, expected 2 layers along the first axis"):
        unstack_layers({"layers_{}": {"a": np.ones((2, 3)), "b": np.ones(3)}}, "layers_{}")


# --- fused kernels ---

PARTS = ("query", "key", "value")


@pytest.mark.parametrize(("layout", "parts", "shape", "part"), [
    ("embed (parts heads head_dim)", PARTS, (2, 18), (2, 3, 2)),
    ("layers (heads parts head_dim) embed", PARTS, (4, 18, 2), (4, 3, 2, 2)),
    ("(parts heads head_dim)", PARTS, (18,), (3, 2)),
    ("embed (parts head_dim)", {"query": 3, "key": 1, "value": 1}, (2, 10), (2, 3, 2)),
])  # fmt: skip
def test_splitting_and_joining_fused_kernels_is_bitwise(layout, parts, shape, part):
    known = {} if isinstance(parts, dict) else {"heads": 3}
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tree = {"h_0": {"qkv": {"kernel": x, "other": np.ones(3)}}}
    for whole in (tree, Moments(np.int32(3), tree), jax.tree.map(jnp.asarray, tree)):
        apart = split_fused(whole, "qkv/kernel", layout, parts, **known)
        found = apart.mu if isinstance(apart, Moments) else apart
        assert list(found["h_0"]["qkv"]["kernel"]) == list(PARTS)
        assert found["h_0"]["qkv"]["kernel"]["query"].shape == part
        assert isinstance(found["h_0"]["qkv"]["kernel"]["key"], type(jax.tree.leaves(whole)[-1]))
        back = join_fused(apart, "qkv/kernel", layout, parts)
        jax.tree.map(np.testing.assert_array_equal, back, whole)


def test_queries_come_first_or_beside_their_keys():
    two = (("e (parts h)", [[0, 1]], [[2, 3]]), ("e (h parts)", [[0, 3]], [[1, 4]]))
    for layout, query, key in two:
        apart = split_fused({"w": np.arange(6)[None]}, "w", layout, PARTS)["w"]
        assert (apart["query"].tolist(), apart["key"].tolist()) == (query, key)


def test_a_fused_leaf_that_does_not_fit_is_named():
    tree = {"a": {"qkv": np.ones((2, 10))}, "b": {"qkv": np.ones((2, 3, 4))}}
    with wrong(
        "leaves do not have the layout 'embed (parts heads head_dim)'",
        "a/qkv, of shape (2, 10): ",
        "b/qkv, of shape (2, 3, 4): ",
    ):
        split_fused(tree, "qkv", "embed (parts heads head_dim)", PARTS, heads=2)
    with wrong("no node matches 'c_attn'; the leaves of the tree are a/qkv, b/qkv"):
        split_fused(tree, "c_attn", "embed (parts heads)", PARTS)
    with wrong("The layout must contain 'parts' if"):
        split_fused(tree, "qkv", "embed (heads head_dim)", PARTS)
    few = {"a": {"qkv": {"query": np.ones(2), "key": np.ones(2)}}}
    with wrong("no node matches 'qkv'"):
        join_fused(few, "qkv", "(parts a)", PARTS)


def test_leaves_that_do_not_fit_the_larger_model_are_named():
    with wrong(
        "b: has shape (2,) in the larger model, but is missing in the parameters",
        "c: has shape (3,), but is missing in the larger model",
        "a: has shape (2,), but (4,) in the larger model",
    ):
        restructure({"a": np.ones(2), "c": np.ones(3)}, {"a": np.ones(4), "b": np.ones(2)})


# --- complete models ---


# `test_nnx` and the README name a model of Linen.
@pytest.fixture(scope="module")
def journey(x64) -> third_party.Journey:
    return third_party.journey(third_party.equinox())


def test_a_stranger_s_model_keeps_its_function_and_trains_on(journey):
    before, after = journey.logits
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-10)
    first, later = journey.losses
    assert later[-1] < later[0] < first[0]


def test_each_axis_that_is_read_must_be_said_to_be(journey):
    """The control: without any one of the ``.in``, the grown model computes another function."""
    found = journey.forward(journey.grow(journey.axes))
    np.testing.assert_allclose(found, journey.logits[1], rtol=0, atol=1e-12)
    off = third_party.forgotten(journey)
    assert len(off) == 7  # query, key, value, out, up, down, head
    assert min(off.values()) > 1e-3, off
