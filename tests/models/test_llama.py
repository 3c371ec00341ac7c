"""Llama and Qwen2 match Hugging Face in names and function, and grow correctly under GQA.

Exact means 1e-10 of the standard deviation of the logits, in float64 through three layers. A change
must be visible: above 1e-2.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import cases

from jaxgrow import dual, grow, swap
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.growth.maps import select
from jaxgrow.growth.matrices import dense
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import LlamaConfig
from jaxgrow.models.llama import LlamaBlock, Reading, rotary_angles
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import (
    aki,
    coalesce,
    decoalesce,
    fpi,
    hypercloning,
    interleave,
    lemon,
    llama_pro,
    sparkling,
    stack,
    staged,
    zero_pad,
)
from jaxgrow.operators.ligo import LiGO, init_coefficients, learned_growth
from train.plan.transforms import Grow

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
OLD = {"layers": 3, "heads": 4, "kv_heads": 2, "embed": 12, "mlp": 20}
ONE_KEY = {**OLD, "kv_heads": 1}

either = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def config(tied=False, dtype="float64", **other) -> LlamaConfig:
    return LlamaConfig(
        **{"vocab": 11, "context": 7, "head_dim": 6, **OLD, **other}, tied=tied, dtype=dtype
    )


def change(growth, tied=False, **other) -> float:
    """Return ``max |difference of logits| / standard deviation of the logits``."""
    small = config(tied, qkv_bias=True, **other)
    params = tiny.params(small)
    before = tiny.forward(small)(params, tiny.tokens())
    after = tiny.forward(small.resized(growth))(
        grow(growth, params, tiny.axes(small)), tiny.tokens()
    )
    return float(np.abs(after - before).max() / np.std(before))


def growths(table):
    return pytest.mark.parametrize("growth", table.values(), ids=table)


# --- names ---


def test_config_errors():
    with pytest.raises(ValueError, match="4 query heads are not divisible by 3 key/value heads"):
        config(kv_heads=3)
    with pytest.raises(
        ValueError,
        match="rotary positions need an even number of dimensions, but rotary=1 of head_dim=5 is 5",
    ):
        config(head_dim=5)
    with pytest.raises(ValueError, match="kv_heads is 0, less than 1"):
        config(kv_heads=0)


# --- `test_interop_core` compares the function with transformers ---


def test_what_config_json_may_leave_out_and_what_is_refused():
    family = FAMILIES["LlamaForCausalLM"]
    found = family.inferred({"num_attention_heads": 4, "hidden_size": 12})
    assert found == {
        "head_dim": 3,
        "kv_heads": 4,
        "rope_theta": 10000.0,
        "rotary": 1.0,
        "qkv_bias": False,
        "out_bias": False,
    }
    with pytest.raises(
        ValueError,
        match='rope_type is "axial", but only default, linear, dynamic, llama3, yarn, longrope',
    ):
        family.inferred(
            {"num_attention_heads": 4, "hidden_size": 12, "rope_scaling": {"type": "axial"}}
        )


# --- forward passes ---


def test_masks_and_dropped_layers_exclude_each_other():
    c = config()
    params, tokens = tiny.params(c), tiny.tokens()
    mask = np.ones(tokens.shape, bool)
    with pytest.raises(ValueError, match="mask_BS cannot be combined with layer dropping"):
        c.module.apply({"params": params}, tokens, mask, keep_mask=KeepMask(np.ones(3, bool)))
    with pytest.raises(ValueError, match="a sequence of 8 tokens is longer than the context of 7"):
        c.module.apply({"params": params}, tiny.tokens(1, 8))


@pytest.mark.extra
def test_tokens_that_skip_layers_do_not_shift_other_positions():
    c = config()
    params, tokens = tiny.params(c), tiny.tokens(2, 7)
    positions = np.array([[0, 2, 3, 6], [1, 2, 4, 5]], np.int32)
    run = jax.jit(
        lambda p, t, positions: c.module.apply(
            {"params": p}, t, kept_tokens=KeptTokens(positions, 1, 2)
        )
    )
    found = run(params, tokens, positions)
    whole = run(params, tokens, np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7)))
    np.testing.assert_allclose(whole, tiny.forward(c)(params, tokens), rtol=0, atol=1e-12)

    block, turn = LlamaBlock(c, jnp.float64, parent=None), rotary_angles(c, 7)
    apply = jax.jit(lambda w, x, turn: block.apply({"params": w}, x, Reading(turn)))
    for row, at, logits in zip(tokens, positions, found, strict=True):
        x = params["token_embedding"][row]
        for i in range(3):
            w = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
            inside = at if i == 1 else np.arange(7)
            x[inside] = apply(w, x[None, inside], [a[None, inside] for a in turn])[0]
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.eps) * params["final_norm"]["scale"]
        np.testing.assert_allclose(logits, x @ params["head_kernel"], rtol=0, atol=1e-12)


# --- operators ---


def to(**new: int) -> dict[str, int]:
    return {**OLD, **new}


# These lists use few sizes because each size compiles one program.
TWICE = {"embed": 24, "heads": 8, "kv_heads": 4, "mlp": 40}
RAGGED = {"embed": 17, "heads": 6, "kv_heads": 3, "mlp": 25}
MORE, FEWER, KEYS, SAME_KEYS = (
    {"heads": 12, "kv_heads": 4},
    {"heads": 8, "kv_heads": 8},
    {"kv_heads": 4},
    {"heads": 6},
)
UNITS = {"heads": 6, "kv_heads": 3, "mlp": 25}
KEPT = {
    "hypercloning": hypercloning(OLD, TWICE),
    "hypercloning, the same keys": hypercloning(OLD, {"embed": 24, "heads": 8, "mlp": 40}),
    "hypercloning, more queries to a key": hypercloning(OLD, MORE),
    "hypercloning, fewer queries to a key": hypercloning(OLD, FEWER),
    "hypercloning, keys alone": hypercloning(OLD, KEYS),
    "fpi": fpi(OLD, UNITS, seed=1),
    "fpi, the same keys": fpi(OLD, SAME_KEYS, seed=2),
    "fpi, more queries to a key": fpi(OLD, MORE, seed=3),
    "fpi, keys alone": fpi(OLD, KEYS, seed=4),
    "staged": staged(OLD, TWICE),
    "lemon, twice": lemon(OLD, TWICE, seed=5),
    "lemon, ragged": lemon(OLD, RAGGED, seed=6, norm="rms"),
    "lemon, ragged, two tiles": lemon(OLD, {**RAGGED, "embed": 29}, seed=7, norm="rms"),
    "zero_pad": zero_pad(OLD, UNITS),
    "zero_pad, the same keys": zero_pad(OLD, SAME_KEYS),
    "zero_pad, fewer queries to a key": zero_pad(OLD, FEWER),
    "zero_pad, keys alone": zero_pad(OLD, KEYS),
    "llama_pro": llama_pro(OLD, {"layers": 5}),
    "decoalesce, far": decoalesce(to(**TWICE), heads="far"),
    "decoalesce, adjacent": decoalesce(to(**TWICE), heads="adjacent"),
    "decoalesce, by query heads": decoalesce(to(**TWICE), heads=((0, 7), (1, 6), (3, 4), (2, 5))),
    "decoalesce, the same keys": decoalesce(
        to(heads=8, embed=24, mlp=40), heads=((0, 2), (1, 3), (4, 5), (6, 7))
    ),
}
LOST = {
    "lemon, ragged, for LayerNorm": lemon(OLD, RAGGED, seed=6),
    "fpi, embed": fpi(OLD, RAGGED, seed=1),
    "aki": aki(OLD, RAGGED, seed=2),
    "sparkling": sparkling(OLD, RAGGED),
    "stack": stack(OLD, {"layers": 5}),
    "queries without their keys": {"heads": select([0, 1, 2, 3, 0, 1], 4)},
}


@growths(KEPT)
def test_what_keeps_the_function(growth):
    assert change(growth) < EXACT


@pytest.mark.parametrize("name", ["hypercloning", "staged", "lemon, ragged"])
def test_what_keeps_the_function_of_a_tied_model(name):
    assert change(KEPT[name], tied=True) < EXACT


@growths(LOST)
def test_what_does_not(growth):
    assert change(growth) > VISIBLE


@pytest.mark.extra
def test_where_all_queries_share_one_key():
    wide = {"heads": 8, "embed": 24, "mlp": 40}
    up = decoalesce({**ONE_KEY, **wide}, heads="far")
    assert (up["heads"].old, up["kv_heads"].old, up["kv_heads"].new) == (4, 1, 1)
    for g in (up, hypercloning(ONE_KEY, wide), fpi(ONE_KEY, {"heads": 6, "kv_heads": 3}, seed=1)):
        assert change(g, kv_heads=1) < EXACT


def test_where_every_query_has_its_own_key_both_grow_alike():
    plain, own = {k: v for k, v in OLD.items() if k != "kv_heads"}, {**OLD, "kv_heads": 4}
    target = {"embed": 17, "heads": 7, "mlp": 25}
    for operator in (zero_pad, fpi, sparkling):
        expected, found = operator(plain, target), operator(own, {**target, "kv_heads": 7})
        np.testing.assert_array_equal(dense(found["kv_heads"].write), dense(found["heads"].write))
        if operator is not fpi:  # The random choices of FPI come in another order.
            chex.assert_trees_all_equal(
                {k: m for k, m in found.items() if k != "kv_heads"}, expected
            )
    expected, found = (coalesce(s, heads="far") for s in (plain, own))
    chex.assert_trees_all_equal({k: m for k, m in found.items() if k != "kv_heads"}, expected)


def test_by_hand():
    """Check which old head is copied, for six query heads on three key/value heads."""
    six = {"heads": 6, "kv_heads": 3, "embed": 12, "mlp": 6}

    def source(growth, axis="heads"):
        return dense(growth[axis].write).argmax(1).tolist()

    wide = hypercloning(six, {"heads": 12, "kv_heads": 6})
    assert source(wide) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert source(wide, "kv_heads") == [0, 1, 2, 0, 1, 2]
    assert source(hypercloning(six, {"heads": 12})) == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    narrow = hypercloning(six, {"kv_heads": 6})
    assert set(narrow) == {"kv_heads"} and source(narrow, "kv_heads") == [0, 0, 1, 1, 2, 2]
    mixed = hypercloning(six, {"heads": 12, "kv_heads": 12})
    assert source(mixed) == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert source(mixed, "kv_heads") == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    pairs = decoalesce({"heads": 8, "kv_heads": 4, "embed": 16, "mlp": 8}, heads="far")
    assert (source(pairs), source(pairs, "kv_heads")) == ([0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1])
    assert source(pairs, "embed")[:4] == [0, 1, 2, 3] and source(pairs, "embed")[8:12] == [
        0,
        1,
        2,
        3,
    ]
    padded = zero_pad(six, {"heads": 9})["heads"].write
    assert dense(padded).any(1).tolist() == [True, True, False] * 3


INVERTED = [name for name in KEPT if name not in ("lemon, ragged", "lemon, ragged, two tiles")]


@pytest.mark.parametrize("name", INVERTED)
def test_coalescing_inverts(name):
    c, g = config(), KEPT[name]
    small = tiny.params(c)
    chex.assert_trees_all_close(
        grow(swap(g), grow(g, small, tiny.axes(c)), tiny.axes(c)), small, rtol=0, atol=1e-14
    )


DUAL = {
    "hypercloning": True,
    "hypercloning, the same keys": True,
    "hypercloning, keys alone": False,
    "fpi": True,
    "staged": True,
    "zero_pad": True,
    "decoalesce, far": True,
    "decoalesce, the same keys": True,
}


@pytest.mark.parametrize(
    "name",
    cases(
        DUAL.keys(),
        ["hypercloning"],
        # The maps of the others are also those of another operator.
        ["hypercloning, keys alone", "zero_pad", "decoalesce, the same keys"],
    ),
)
def test_gradients_grow_by_the_dual_if_keys_keep_their_queries(name):
    c, g = config(), KEPT[name]
    params, axes = tiny.params(c), tiny.axes(c)
    gradient = jax.device_get(tiny.gradient(c)(params, tiny.tokens()))
    large = tiny.gradient(c.resized(g))(grow(g, params, axes), tiny.tokens())
    apart = tiny.distance(large, grow(dual(g), gradient, axes))
    assert apart < EXACT if DUAL[name] else apart > 1e-4


@pytest.mark.parametrize(("operator", "target", "message"), [
    (fpi, {"heads": 5}, "axis 'heads': fpi cannot divide 5 query heads among 2 key/value heads"),
    (lemon, {"heads": 6, "kv_heads": 4},
     "6 query heads among 4 key/value heads; kv_heads=3 keeps 2 query heads per key/value head"),
    (zero_pad, {"kv_heads": 3}, "cannot divide 4 query heads among 3 key/value heads"),
    (sparkling, {"heads": 6, "kv_heads": 6, "embed": 1}, "cannot reduce the size from 12 to 1"),
    (hypercloning, {"heads": 8, "kv_heads": 3}, "axis 'kv_heads': hypercloning needs a multiple of 2, not 3"),
    (staged, {"embed": 24, "heads": 8, "mlp": 40}, "staged must double all of embed, heads, kv_heads, mlp"),
    (fpi, {"vocab": 12}, "axis 'vocab': fpi grows embed, heads, kv_heads, mlp"),
])  # fmt: skip
def test_targets_that_cannot_be_are_refused(operator, target, message):
    with pytest.raises(ValueError, match=message):
        operator(OLD, target)


def test_a_query_head_that_would_have_no_place_is_named():
    # One key has two copies and the other one, and the single copy does not have enough slots.
    six = {
        **OLD,
        "heads": 12,
        "kv_heads": 2,
    }
    with pytest.raises(
        ValueError,
        match=r"12 query heads on 3 key/value heads, fpi would lose the query heads \[10, 11\]",
    ):
        fpi(six, {"kv_heads": 3})


@pytest.mark.parametrize(("groups", "message"), [
    ("far:2", "axis 'kv_heads': far:2 pairs: 3 is not a multiple of 2"),
    (((0, 2), (1, 3), (4,)), "in no group: [5]"),
    # The merged keys and the other key have two new heads each, but these are not adjacent.
    (((0, 2), (4,), (1, 3), (5,)),
     "into [(0, 1), (2,)]. In order, the new query heads read the merged heads [0, 1, 0, 1], but"),
    (((0, 2), (1, 3), (4, 5)), "into [(0, 1), (2,)]. In order, the new query heads read the merged heads [0, 0, 1], but"),
])  # fmt: skip
def test_groups_of_query_heads_must_share_the_merged_keys_alike(groups, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        decoalesce({"heads": 6, "kv_heads": 3, "embed": 12, "mlp": 6}, heads=groups)


def test_a_plan_s_growth_knows_key_heads_and_norms():
    """Check that each operator of a chain gets its axes.

    LEMON is also informed that the norms are RMSNorms.
    """
    small, large = config(qkv_bias=True), config(qkv_bias=True, layers=4, **RAGGED)
    phase = Grow("a", "b", small, large, ("lemon", "llama_pro"))
    params, before = tiny.params(small), tiny.forward(small)(tiny.params(small), tiny.tokens())
    for step in phase.growths:
        params = grow(step, params, tiny.axes(small))
    chex.assert_trees_all_equal_shapes(params, tiny.params(large))
    after = tiny.forward(phase.config)(params, tiny.tokens())
    assert np.abs(after - before).max() / np.std(before) < EXACT


# --- learned maps ---


def maps(ligo, target, seed=0):
    c = config()
    return jax.device_get(
        jax.jit(lambda k: init_coefficients(ligo, tiny.axes(c), c.sizes(), target, k))(
            jax.random.key(seed)
        )
    )


def grown(coefficients, params):
    c = config()
    return jax.device_get(
        grow(learned_growth(coefficients, tiny.axes(c), c.sizes()), params, tiny.axes(c))
    )


@pytest.mark.parametrize(("ligo", "target", "operator"), [
    (LiGO(depth="stack", noise=0.0), {"layers": 5}, stack),
    (LiGO(depth="interleave", noise=0.0), {"layers": 5}, interleave),
    (LiGO(width="zero"), {"embed": 17, "heads": 6, "kv_heads": 3, "mlp": 25}, zero_pad),
    (LiGO(width="zero"), {"heads": 6}, zero_pad),
], ids=["stacking", "interleaving", "zero-padding", "zero-padding, the same keys"])  # fmt: skip
def test_special_values_of_ligo_are_operators_to_the_bit(ligo, target, operator):
    c, params = config(), tiny.params(config())
    chex.assert_trees_all_equal(
        grown(maps(ligo, target), params), grow(operator(OLD, target), params, tiny.axes(c))
    )


@pytest.mark.parametrize(("target", "width"), [
    ({"heads": 6, "kv_heads": 3}, {"query": (36, 24), "key": (18, 12), "value": (18, 12)}),
    ({"kv_heads": 4}, {"query": (24, 24), "key": (24, 12), "value": (24, 12), "out": (24, 24)}),
    *(
        pytest.param(*more, marks=pytest.mark.slow)
        for more in (
            ({"heads": 6}, {"query": (36, 24), "out": (36, 24)}),
            ({"heads": 4}, {"query": (24, 24)}),
        )
    ),
])  # fmt: skip
@pytest.mark.parametrize("ligo", [
    pytest.param(LiGO(), id="shared", marks=pytest.mark.slow),
    pytest.param(LiGO(shared=False, tied=False), id="own"),
])  # fmt: skip
def test_which_maps_grouped_queries_have(target, width, ligo):
    made = maps(ligo, target)
    assert {name: m["write"].shape[-2:] for name, m in made["width"].items()} == width
    chex.assert_trees_all_equal_shapes(
        grown(made, tiny.params(config())), tiny.params(config(**target))
    )


def test_what_reads_attention_reads_what_the_values_write():
    """Check that rotated value heads preserve the function.

    The rotation also applies to the kernels that read each value head, for every query head that
    shares it.
    """
    c = config()
    made, params = maps(LiGO(), {"heads": 4, "kv_heads": 2}), tiny.params(c)
    turn = [np.linalg.qr(np.random.default_rng(i).normal(size=(6, 6)))[0] for i in range(2)]
    made["width"] = {
        name: {"write": np.eye(*m["write"].shape)} for name, m in made["width"].items()
    }
    made["width"]["value"] = {
        "write": np.block([[turn[0], np.zeros((6, 6))], [np.zeros((6, 6)), turn[1]]])
    }
    before, after = (tiny.forward(c)(p, tiny.tokens()) for p in (params, grown(made, params)))
    assert tiny.distance(params, grown(made, params)) > VISIBLE
    assert np.abs(after - before).max() / np.std(before) < EXACT
