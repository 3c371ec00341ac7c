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

from jaxgrow import dual, grow, swap
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.growth.maps import select
from jaxgrow.growth.matrices import dense
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import LlamaConfig
from jaxgrow.models.llama import LlamaBlock, Reading, rotary_angles
from jaxgrow.models.stack import KeptTokens
from jaxgrow.operators import (
    coalesce,
    decoalesce,
    fpi,
    hypercloning,
    lemon,
    llama_pro,
    sparkling,
    staged,
    zero_pad,
)
from jaxgrow.operators.ligo import LiGO, init_coefficients, learned_growth
from train.plan.transforms import Grow

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
OLD = {"layers": 3, "heads": 4, "kv_heads": 2, "embed": 12, "mlp": 20}
ONE_KEY = {**OLD, "kv_heads": 1}


def config(tied=False, dtype="float64", **other) -> LlamaConfig:
    return LlamaConfig(
        **{"vocab": 11, "context": 7, "head_dim": 6, **OLD, **other}, tied=tied, dtype=dtype
    )


def change(growth, tied=False, **other) -> float:
    """Return ``max |difference of logits| / standard deviation of the logits``."""
    small = config(tied, qkv_bias=True, **other)
    params = tiny.params(small)
    before = tiny.forward(small)(params, tiny.tokens())
    grown = grow(growth, params, tiny.axes(small))
    after = tiny.forward(small.resized(growth))(grown, tiny.tokens())
    return float(np.abs(after - before).max() / np.std(before))


# --- names ---


# --- `test_interop_core` compares the function with transformers ---


def test_what_config_json_may_leave_out_and_what_is_refused():
    family = FAMILIES["LlamaForCausalLM"]
    said = {"num_attention_heads": 4, "hidden_size": 12}
    sizes = dict(head_dim=3, kv_heads=4, rope_theta=10000.0, rotary=1.0)
    assert family.inferred(said) == sizes | {"qkv_bias": False, "out_bias": False}
    message = 'rope_type is "axial", but only default, linear, dynamic, llama3, yarn, longrope'
    with pytest.raises(ValueError, match=message):
        family.inferred(said | {"rope_scaling": {"type": "axial"}})


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

    @jax.jit
    def run(p, t, positions):
        return c.module.apply({"params": p}, t, kept_tokens=KeptTokens(positions, 1, 2))

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
MORE, FEWER = {"heads": 12, "kv_heads": 4}, {"heads": 8, "kv_heads": 8}
KEYS, SAME_KEYS = {"kv_heads": 4}, {"heads": 6}
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
    "queries without their keys": {"heads": select([0, 1, 2, 3, 0, 1], 4)},
}


@pytest.mark.parametrize(
    ("name", "tied"), [*((n, False) for n in KEPT), *((n, True) for n in ("hypercloning", "staged", "lemon, ragged"))]
)  # fmt: skip
def test_what_keeps_the_function(name, tied):
    assert change(KEPT[name], tied) < EXACT


@pytest.mark.parametrize("growth", LOST.values(), ids=LOST)
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
        keys = found.pop("kv_heads")
        np.testing.assert_array_equal(dense(keys.write), dense(found["heads"].write))
        if operator is not fpi:  # The random choices of FPI come in another order.
            chex.assert_trees_all_equal(found, expected)
    expected, found = (coalesce(s, heads="far") for s in (plain, own))
    found.pop("kv_heads")
    chex.assert_trees_all_equal(found, expected)


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
    embed = source(pairs, "embed")
    assert embed[:4] == embed[8:12] == [0, 1, 2, 3]
    padded = zero_pad(six, {"heads": 9})["heads"].write
    assert dense(padded).any(1).tolist() == [True, True, False] * 3


@pytest.mark.parametrize("name", [name for name in KEPT if not name.startswith("lemon, ragged")])
def test_coalescing_inverts(name):
    c, g = config(), KEPT[name]
    small, axes = tiny.params(c), tiny.axes(c)
    back = grow(swap(g), grow(g, small, axes), axes)
    chex.assert_trees_all_close(back, small, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "dual_grows"),
    [
        ("hypercloning", True),
        *(
            pytest.param(*row, marks=pytest.mark.extra)
            for row in (("hypercloning, keys alone", False), ("zero_pad", True), ("decoalesce, the same keys", True))
        ),
    ],
)  # fmt: skip
def test_gradients_grow_by_the_dual_if_keys_keep_their_queries(name, dual_grows):
    c, g = config(), KEPT[name]
    params, axes = tiny.params(c), tiny.axes(c)
    gradient = jax.device_get(tiny.gradient(c)(params, tiny.tokens()))
    large = tiny.gradient(c.resized(g))(grow(g, params, axes), tiny.tokens())
    apart = tiny.distance(large, grow(dual(g), gradient, axes))
    assert apart < EXACT if dual_grows else apart > 1e-4


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
    six = {**OLD, "heads": 12, "kv_heads": 2}
    says = r"12 query heads on 3 key/value heads, fpi would lose the query heads \[10, 11\]"
    with pytest.raises(ValueError, match=says):
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
    """Each operator of a chain gets its axes, and LEMON also the kind of the norms."""
    small, large = config(qkv_bias=True), config(qkv_bias=True, layers=4, **RAGGED)
    phase = Grow("a", "b", small, large, ("lemon", "llama_pro"))
    params, before = tiny.params(small), tiny.forward(small)(tiny.params(small), tiny.tokens())
    for step in phase.growths:
        params = grow(step, params, tiny.axes(small))
    chex.assert_trees_all_equal_shapes(params, tiny.params(large))
    after = tiny.forward(phase.config)(params, tiny.tokens())
    assert np.abs(after - before).max() / np.std(before) < EXACT


# --- learned maps ---


def maps(ligo, target):
    c = config()
    make = jax.jit(lambda key: init_coefficients(ligo, tiny.axes(c), c.sizes(), target, key))
    return jax.device_get(make(jax.random.key(0)))


def grown(coefficients, params):
    axes, sizes = tiny.axes(config()), config().sizes()
    return jax.device_get(grow(learned_growth(coefficients, axes, sizes), params, axes))


@pytest.mark.parametrize("target", [RAGGED, SAME_KEYS], ids=["more keys", "the same keys"])
def test_ligo_without_noise_is_zero_padding_to_the_bit(target):
    params = tiny.params(config())
    expected = grow(zero_pad(OLD, target), params, tiny.axes(config()))
    chex.assert_trees_all_equal(grown(maps(LiGO(width="zero"), target), params), expected)


@pytest.mark.parametrize(("target", "width"), [
    ({"heads": 6, "kv_heads": 3}, {"query": (36, 24), "key": (18, 12), "value": (18, 12)}),
    ({"kv_heads": 4}, {"query": (24, 24), "key": (24, 12), "value": (24, 12), "out": (24, 24)}),
    pytest.param({"heads": 6}, {"query": (36, 24), "out": (36, 24)}, marks=pytest.mark.slow),
])  # fmt: skip
def test_which_maps_grouped_queries_have(target, width):
    made = maps(LiGO(shared=False, tied=False), target)
    assert {name: m["write"].shape[-2:] for name, m in made["width"].items()} == width
    large = grown(made, tiny.params(config()))
    chex.assert_trees_all_equal_shapes(large, tiny.params(config(**target)))


def test_what_reads_attention_reads_what_the_values_write():
    """Rotated value heads also rotate the kernels that read them, for every query head."""
    c = config()
    made, params = maps(LiGO(), {"heads": 4, "kv_heads": 2}), tiny.params(c)
    turn = [np.linalg.qr(np.random.default_rng(i).normal(size=(6, 6)))[0] for i in range(2)]
    made["width"] = {n: {"write": np.eye(*m["write"].shape)} for n, m in made["width"].items()}
    zero = np.zeros((6, 6))
    made["width"]["value"] = {"write": np.block([[turn[0], zero], [zero, turn[1]]])}
    before, after = (tiny.forward(c)(p, tiny.tokens()) for p in (params, grown(made, params)))
    assert tiny.distance(params, grown(made, params)) > VISIBLE
    assert np.abs(after - before).max() / np.std(before) < EXACT
