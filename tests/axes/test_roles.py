"""Operators use only axis names: a model under three naming schemes gives bitwise equal numbers."""

import chex
import jax
import numpy as np
import optax
import pytest
import tiny
from flax import linen as nn

from jaxgrow import grow, grow_optimizer, swap
from jaxgrow.axes import (
    Axis,
    is_names,
    named_init,
    reads_axis,
    role_of,
    sizes,
    split_boxed,
    split_kernel,
    state_owners,
    with_direction,
)
from jaxgrow.axes.names import by_path, layer_kernels
from jaxgrow.extras.freeze import Freeze, hold_frozen
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.growth.maps import Rule, Rules
from jaxgrow.growth.moments import RebiasState, rebias
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig
from jaxgrow.operators import aki, coalesce, lemon, ligo, llama_pro, staged
from train.state.optim import decays

SIZES = dict(layers=2, embed=8, heads=4, head_dim=2, mlp=5)
TEXT = dict(vocab=11, context=7)
FAMILIES = {
    "GPT-2": GPT2Config(**SIZES, **TEXT),
    "Llama": LlamaConfig(**SIZES, **TEXT, kv_heads=2, qkv_bias=True),
    "BERT, pre-LN": BERTConfig(**SIZES, **TEXT, norm="pre"),
    "CaiT": CaiTConfig(**SIZES, image=10, patch=5, channels=3, classes=11, class_layers=4),
}
families = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)

HUGGING_FACE = {
    "blocks": "h", "attention": "self_attn", "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj",
    "mlp": "ffn", "up": "w1", "gate": "w3", "down": "w2", "attention_norm": "ln_1", "mlp_norm": "ln_2",
    "final_norm": "ln_f", "embedding_norm": "LayerNorm", "head_norm": "ln_head", "token_embedding": "wte",
    "position_embedding": "wpe", "type_embedding": "wse", "patch_embedding": "patches", "class_embedding": "cls_token",
    "class_blocks": "token_only", "head_kernel": "lm_head", "head_bias": "lm_bias", "kernel": "weight", "scale": "gamma",
    "bias": "beta", "attention_scale": "gamma_1", "mlp_scale": "gamma_2",
}  # fmt: skip


def reversed_names(tree) -> dict[str, str]:
    """Return names without meaning that sort in the opposite order."""
    ours = {part for path, _, _ in tiny.pairs(tree, tree) for part in path.split("/")}
    return {name: f"m{i:02}" for i, name in enumerate(sorted(ours, reverse=True))}


def renamed(tree, names):
    is_dict = isinstance(tree, dict)
    return {names.get(k, k): renamed(v, names) for k, v in tree.items()} if is_dict else tree


def model(config):
    """Return ``(parameters, axes)``."""
    return tiny.params(config, dtype="float32"), tiny.axes(config)


def assert_names_do_not_matter(model, apply):
    """Assert that the tree ``apply(params, axes)``, by the model's names, ignores the scheme."""
    params, axes = model
    ours = apply(params, axes)
    for names in (HUGGING_FACE, reversed_names(params)):
        theirs = apply(renamed(params, names), renamed(axes, names))
        chex.assert_trees_all_equal(theirs, renamed(ours, names))


def widths(sizes):
    return {
        axis: 2 * n for axis, n in sizes.items() if axis in ("embed", "heads", "kv_heads", "mlp")
    }


def ragged(sizes):
    return {**widths(sizes), "embed": sizes["embed"] + 3, "mlp": sizes["mlp"] + 2}


# Growths of one map for each axis, and the growths that are rules for leaves of a role.
OPERATORS = {
    "coalesce": lambda s: coalesce(s, heads="far", mlp=((0, 2), (1,), (3, 4)), layers="adjacent"),
    "aki": lambda s: aki(s, {**ragged(s), "layers": 3}, seed=2),
    "llama_pro": lambda s: llama_pro(s, {"layers": 3}),
    "llama_pro, swapped": lambda s: swap(llama_pro({**s, "layers": 1}, {"layers": 2})),
    "staged": lambda s: staged(s, widths(s)),
    "lemon, ragged": lambda s: lemon(s, ragged(s), seed=4),
}


@families
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operators(config, operator):
    growth = operator(config.sizes())
    assert_names_do_not_matter(model(config), lambda params, axes: grow(growth, params, axes))


@families
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_learned_maps(config, shared):
    sizes = config.sizes()
    target = {**ragged(sizes), "layers": 3}

    def learned(params, axes):
        how = ligo.LiGO(shared=shared)
        maps = ligo.init_coefficients(how, axes, sizes, target, jax.random.key(0))
        return grow(ligo.learned_growth(jax.device_get(maps), axes, sizes), params, axes)

    assert_names_do_not_matter(model(config), learned)


@pytest.mark.parametrize("policy", ["copy", "asymmetric"])
def test_moments(policy):
    """Only for this operator could the moments grow differently from the weights."""
    growth, tx = (
        OPERATORS["llama_pro"](SIZES),
        optax.chain(optax.scale_by_adam(), rebias(0.9, 0.99)),
    )

    def moments(params, axes):
        clock = RebiasState(np.int32(3), jax.tree.map(lambda _: np.int32(1), params))
        adam = optax.ScaleByAdamState(np.int32(3), params, jax.tree.map(np.square, params))
        state = adam, clock
        adam, clock = grow_optimizer(tx, state, growth, params, axes, policy)
        return jax.tree.map(lambda *leaf: leaf, adam.mu, adam.nu, clock.start_count)

    def of_mlp(tree):
        return {"blocks": {part: tree["blocks"][part] for part in ("mlp", "mlp_norm")}}

    assert_names_do_not_matter(tuple(map(of_mlp, model(FAMILIES["GPT-2"]))), moments)


@families
def test_weight_decay(config):
    """The control: the decayed parameters are those with the corresponding endings in our names."""
    assert_names_do_not_matter(model(config), lambda params, axes: decays(axes))
    for path, x, _ in tiny.pairs(decays(tiny.axes(config)), tiny.params(config)):
        assert x == path.endswith(("kernel", "embedding")), path


@families
def test_freezing(config):
    freeze = Freeze((0,))
    bottoms = []

    def held(params, axes):
        bottoms.append(freeze.bottom(axes))
        after, mask = jax.tree.map(lambda x: x + 1, params), freeze.mask(2)
        found = hold_frozen(params, after, mask, params, axes, freeze.paths, freeze.below)
        return jax.device_get(found)

    assert_names_do_not_matter(model(config), held)
    assert bottoms == [1, 1, 1]


# --- missing marks ---


def without(axes, mark: str):
    return jax.tree.map(
        lambda names: tuple(n.replace(mark, "") for n in names), axes, is_leaf=is_names
    )


def test_a_leaf_that_may_be_anything_is_named():
    params, axes = model(FAMILIES["GPT-2"])
    of_layers, of_norms = (OPERATORS[name](SIZES) for name in ("llama_pro", "lemon, ragged"))
    says = r"blocks/attention/out/bias: \('layers', 'embed'\) declares no role, .* Add exactly one of \.bias, "
    with pytest.raises(ValueError, match=says):
        grow(of_layers, params, without(axes, ".bias"))
    with pytest.raises(
        ValueError, match=r"final_norm/scale: \('embed\.in\.norm',\) declares no role"
    ):
        grow(of_norms, params, without(axes, ".scale"))
    with pytest.raises(ValueError, match=r"blocks/attention_norm/scale: .* declares no role"):
        decays(without(axes, ".norm.scale"))
    with pytest.raises(ValueError, match=r"declares bias and embedding"):
        role_of("x", ("embed.embedding.bias",))


@pytest.mark.parametrize(("operator", "says"), [
    ("lemon, ragged", "axes embed, that are norm scale matches no leaf of this"),
    ("staged", "axes layers, heads.in, embed.out, that are kernel matches"),
])  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_that_names_it(operator, says):
    """A rule for all leaves is exempt."""
    params, axes = model(FAMILIES["GPT-2"])
    no_norms = {"tower": params["blocks"]["mlp"]}, {"tower": axes["blocks"]["mlp"]}
    with pytest.raises(ValueError, match=f"a rule for leaves of {says}"):
        grow(OPERATORS[operator](SIZES), *no_norms)
    assert grow(Rules((Rule(({},)),)), {}, {}) == {}


def test_values_that_are_not_marked_are_missed_by_learned_maps():
    c = FAMILIES["CaiT"]
    axes = without(tiny.axes(c), ".value")
    says = "blocks/attention/out/kernel, class_blocks/attention/out/kernel: reads attention, but no leaf is marked"
    with pytest.raises(ValueError, match=says):
        ligo.init_coefficients(ligo.LiGO(), axes, c.sizes(), {"heads": 5}, jax.random.key(0))


def test_muon_refuses_kernels_with_layers_not_stacked_first():
    assert split_kernel(("layers", "embed.in", "heads", "head_dim")).stacked == ("layers",)
    says = r"\('embed.in', 'layers', 'mlp'\) stacks its layers on dimension 1. Move this"
    with pytest.raises(ValueError, match=says):
        split_kernel(("embed.in", "layers", "mlp"))


@pytest.mark.parametrize(("names", "rows", "columns"), [
    (("layers", "embed.in", "mlp"), (1,), (2,)),
    (("layers", "mlp", "embed.in"), (2,), (1,)),
    (("layers", "experts", "embed", "mlp.in"), (3,), (2,)),
    (("layers", "gates", "mlp", "embed.in"), (3,), (2,)),
    (("layers", "experts", "embed.in"), (2,), (1,)),
    (("layers", "heads", "head_dim", "embed.in"), (3,), (1, 2)),
    (("layers", "kv_heads", "head_dim.in", "embed.in"), (3,), (1, 2)),
    (("layers", "kv_heads", "q_heads_per_group", "head_dim", "embed.in"), (4,), (1, 2, 3)),
    (("layers", "embed", "heads.in", "head_dim.in"), (2, 3), (1,)),
])  # fmt: skip
def test_matrices_of_layers_in_both_orders(names, rows, columns):
    kernel = layer_kernels({"w": names})["w"]
    assert (kernel.read_dims, kernel.written_dims) == (rows, columns)
    assert kernel.names == names


@pytest.mark.parametrize(
    "names", [("vocab", "embed.in"), ("embed", "channels.in"), ("layers", "embed.in.kernel")]
)
def test_heads_and_vectors_are_no_matrices_of_layers(names):
    assert layer_kernels({"w": names}) == {}


def test_freezing_what_is_not_there_is_an_error():
    params, axes = model(FAMILIES["BERT, pre-LN"])
    says = r"no parameter of this model is marked '\.below'\. Mark the parameters that compute"
    with pytest.raises(ValueError, match=says):
        Freeze((0,)).bottom(without(axes, ".below"))
    says = r"freeze selects the paths \['\*embeddings'\], but no parameter .* matches\. Its parameters are blocks/"
    with pytest.raises(ValueError, match=says):
        hold_frozen(params, params, [False, False], params, axes, ("*embeddings",))


def test_marks_are_read_off_a_name_and_other_dots_belong_to_it():
    class Key(nn.Module):
        @nn.compact
        def __call__(self):
            init = named_init(nn.initializers.zeros, "heads", "img.rows.in", role="norm bias")
            self.param("b", init, (2, 3))

    params, axes = split_boxed(Key().init(jax.random.key(0))["params"])
    assert axes == {"b": ("heads", "img.rows.in.norm.bias")}
    assert sizes(params, axes) == {"heads": 2, "img.rows": 3}
    assert reads_axis(axes["b"][1]) and role_of("b", axes["b"]) == "norm bias"
    assert with_direction("embed.below", True) == "embed.in.below"
    assert with_direction("embed.in.below", False) == "embed.below"


@pytest.mark.parametrize("name, parsed", [
    ("embed", Axis("embed")),
    ("layers.2", Axis("layers.2")),
    ("embed.0.in.norm.scale", Axis("embed.0", "in", ("norm", "scale"))),
    ("head_dim.in.bias", Axis("head_dim", "in", ("bias",))),
    ("in", Axis("in")),
])  # fmt: skip
def test_a_name_is_parsed_and_written(name, parsed):
    assert Axis.parse(name) == parsed
    assert str(parsed) == name
    # The order of suffixes is free.
    assert Axis.parse("head_dim.bias.in") == Axis.parse("head_dim.in.bias")


VAE = {"w": np.zeros((2, 2)), "mu": {"w": np.zeros((2, 2))}, "nu": {"w": np.zeros((2, 2))}}


def test_the_state_of_a_parameter_is_found_whatever_its_module_is_called():
    """The path ``mu/w`` of a leaf of Adam's state is also the path of a parameter."""
    adam = optax.scale_by_adam()
    shapes = by_path(VAE)
    moments = {f"{m}/{p}": p for m in ("mu", "nu") for p in shapes}
    assert state_owners(adam.init(VAE), shapes) == moments
    # Next to the parameters, in a tuple.
    both = state_owners((VAE, (adam.init(VAE),)), shapes)
    assert both == {f"0/{p}": p for p in shapes} | {f"1/0/{m}": p for m, p in moments.items()}
    # With a mask, the parameters without a state still have a place in it.
    for mask in ({"w": False}, False):
        masked = optax.masked(adam, {"w": True, "mu": mask, "nu": mask})
        owners = {f"inner_state/{m}/w": "w" for m in ("mu", "nu")}
        assert state_owners(masked.init(VAE), shapes) == owners
    # A state without the tree of the parameters has only suffixes.
    assert state_owners({"0/mu/w": 1, "0/count": 0}, shapes) == {"0/mu/w": "mu/w"}


def test_freezing_finds_the_state_of_such_modules():
    axes = {"w": ("layers", "mlp.scale"), "mu": {"w": ("embed.in", "mlp")}}
    before = {name: VAE[name] for name in axes}
    state = optax.scale_by_adam().init(before)
    after = jax.tree.map(lambda x: x + 1, state)
    held = hold_frozen(state, after, [True, False], before, axes)
    np.testing.assert_array_equal(held.mu["w"], [[0, 0], [1, 1]])
    np.testing.assert_array_equal(held.mu["mu"]["w"], np.ones((2, 2)))


@pytest.mark.parametrize("embed", [2, 3])  # 2: as many units as layers
def test_frozen_layers_may_be_stacked_along_any_dimension(embed):
    before = {"w": np.zeros((embed, 2, 4)), "b": np.zeros((2, 4))}
    axes = {"w": ("embed.in", "layers", "mlp"), "b": ("layers", "mlp.bias")}
    held = hold_frozen(before, jax.tree.map(lambda x: x + 1, before), [True, False], before, axes)
    np.testing.assert_array_equal(held["w"], np.broadcast_to([[0], [1]], (embed, 2, 4)))
    np.testing.assert_array_equal(held["b"], [[0] * 4, [1] * 4])
