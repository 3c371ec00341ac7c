"""What a growth does to the function of a GPT-2, and to its gradients.

The tables of preservation in the literature, as far as they concern a pre-LN decoder. Exact: 1e-10 of the standard deviation
of the logits, in float64 through two layers. What is not exact must be seen not to be: above 1e-2.
"""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxgrow import grow, grow_optimizer
from jaxgrow import testing as assertions
from jaxgrow.maps import AxisMap, Rule, Rules, blocks, dense, select
from jaxgrow.models.gpt2 import resized
from jaxgrow.moments import rebias
from jaxgrow.operators import (
    aki,
    fpi,
    hypercloning,
    interleave,
    lemon,
    lidas,
    llama_pro,
    midas,
    mslt,
    net2net,
    solar,
    sparkling,
    stack,
    staged,
    zero_pad,
)
from jaxgrow.symmetry import break_symmetry

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
OLD = tiny.WIDTHS
RAGGED = {"embed": 8, "heads": 5, "mlp": 13}
TWICE = tiny.wider(2)
EPS = tiny.config().eps

either = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def growths(table):
    return pytest.mark.parametrize("growth", table.values(), ids=table)


# --- maps that no operator makes ---

HEADS, K = OLD["heads"], tiny.config().head_dim
SOURCES = [0, 1, 2, 0, 1]  # of five heads


def over_heads(m: AxisMap) -> dict:
    """A map over heads and their dimensions at once."""
    return {("heads", "head_dim"): AxisMap(m.write, m.read, ((5, K), (HEADS, K)))}


def heads_of(query, key, value) -> Rules:
    """New heads of queries, keys and values by an index each; the output reads the values."""
    of = {"query": query, "key": key, "value": value, "out": value}
    return Rules(tuple(Rule(({"heads": select(index, HEADS)},), f"*/{name}/*") for name, index in of.items()))


def longer_heads(scale: float) -> Rules:
    """Heads of 5 dimensions become ones of 8; queries are scaled, keys read what queries write."""
    m = select([0, 1, 2, 3, 4, 0, 1, 3], K)
    return Rules(
        (Rule(({"head_dim": AxisMap(scale * dense(m.write), m.read)},), "*/query/*"), Rule(({"head_dim": m},)))
    )


def padded(centred: bool) -> Rules:
    """``embed`` padded with zeros, norms scaled for it; ``centred``: nothing that is written has a mean that would move."""
    old, new = OLD["embed"], 8
    corner = np.eye(new, old)
    writes = corner @ (np.eye(old) - 1 / old) if centred else corner
    gain = (old / new) ** 0.5 * corner
    norms = (
        Rule(({"embed": AxisMap(gain, gain)},), "*norm/scale"),
        Rule(({"embed": AxisMap(corner, corner)},), "*norm/bias"),
    )
    return Rules((*norms, Rule(({"embed": AxisMap(writes, corner)},))), eps=old / new)


KEPT = {
    "fpi, heads and mlp": fpi(OLD, {"heads": 5, "mlp": 13}, seed=1),
    "fpi, embed twice, all units equally often": {"embed": select([*range(6), 4, 0, 2, 5, 3, 1], 6)},
    "hypercloning": hypercloning(OLD, TWICE),
    "staged": staged(OLD, TWICE),
    "lemon, 1 tile and means": lemon(OLD, RAGGED, seed=2),
    "lemon, 2 tiles and means": lemon(OLD, {**RAGGED, "embed": 15}, seed=3),
    "lemon, 2 tiles": lemon(OLD, TWICE, seed=4),
    "zero_pad, heads and mlp": zero_pad(OLD, {"heads": 5, "mlp": 13}),
    "llama_pro": llama_pro(OLD, {"layers": 3}),
    "whole heads, one map": heads_of(SOURCES, SOURCES, SOURCES),
    "whole heads, as neurons": over_heads(blocks(select(SOURCES, HEADS), K)),
    "longer heads, queries scaled": longer_heads((8 / K) ** 0.5),
}
LOST = {
    "fpi, embed x 1.5": fpi(OLD, {"embed": 9}, seed=1),
    "fpi, embed twice, units unequally often": fpi(OLD, {"embed": 12}, seed=1),
    "net2net where lemon is exact": net2net(OLD, RAGGED, seed=2),
    "aki": aki(OLD, RAGGED, seed=3),
    "aki, heads and mlp": aki(OLD, {"heads": 5, "mlp": 13}, seed=3),
    "sparkling": sparkling(OLD, RAGGED),
    "zero_pad, embed": zero_pad(OLD, {"embed": 8}),
    "zero_pad, embed, norms scaled": padded(centred=False),
    "stack": stack(OLD, {"layers": 4}),
    "interleave": interleave(OLD, {"layers": 4}),
    "mslt": mslt(OLD, {"layers": 3}),
    "midas": midas(OLD, {"layers": 3}),
    "lidas": lidas(OLD, {"layers": 3}),
    "solar": solar(OLD, {"layers": 4}),
    "solar, blended": solar(OLD, {"layers": 3}, blend=1),
    "whole heads, a map for queries, keys and values each": heads_of(SOURCES, [1, 2, 0, 2, 2], [2, 0, 1, 1, 0]),
    "whole heads, another map for values": heads_of(SOURCES, SOURCES, [2, 0, 1, 1, 0]),
    "neurons across heads": over_heads(select([*range(15), 3, 11, 6, 0, 14, 9, 2, 7, 5, 12], HEADS * K)),
    "longer heads": longer_heads(1),
}


@growths(KEPT)
@either
def test_what_keeps_the_function(growth, tied):
    assert tiny.change_of_logits(growth, tied) < EXACT


@growths(LOST)
@either
def test_what_does_not(growth, tied):
    assert tiny.change_of_logits(growth, tied) > VISIBLE


def test_zeros_keep_the_function_where_nothing_has_a_mean_and_no_table_is_read():
    """Norms then see the same mean, zero; a tied head would read the centred table."""
    assert tiny.change_of_logits(padded(centred=True), tied=False) < EXACT
    assert tiny.change_of_logits(padded(centred=True), tied=True) > VISIBLE


@either
def test_lemon_needs_its_eps(tied):
    """Only as much as eps is of the variances, here of order one."""
    assert tiny.change_of_logits(KEPT["lemon, 1 tile and means"], tied, eps=EPS) > 1e-8


# --- blocks that begin as the identity ---


@either
@pytest.mark.parametrize("layers", [3, 4])
def test_llama_pro_is_exact_to_the_bit(layers, tied):
    assert tiny.change_of_logits(llama_pro(OLD, {"layers": layers}), tied) == 0


def test_at_first_only_what_is_zero_in_new_blocks_learns():
    config, growth = tiny.config(), llama_pro(OLD, {"layers": 3})
    large = grow(growth, tiny.params(config), tiny.axes(config))
    gradient = tiny.gradient(resized(config, growth))(large, tiny.tokens())
    for path, g, _ in tiny.pairs(gradient["blocks"], gradient["blocks"]):
        learns = np.abs(g[2]).max() > 0
        assert learns == (path.split("/")[-2] in ("out", "down")), path
        assert np.abs(g[:2]).max() > 0, path
    assert all(
        np.abs(gradient["blocks"][part][name]["kernel"][2]).max() > 1e-3
        for part, name in (("attention", "out"), ("mlp", "down"))
    )


# --- twins ---

HEADS_AND_MLP = fpi(OLD, {"heads": 7, "mlp": 21}, seed=5)  # of 3 and 9 units, unequally often


def noised(params, growth, seed=0, snr=10.0):
    noise = tiny.quick_jit(
        lambda p: break_symmetry(p, growth, tiny.axes(tiny.config("head_kernel" not in p)), seed, snr)
    )
    return jax.device_get(noise(params))


@cache
def twins(tied: bool = True):
    """``(config, grown parameters, their axes)`` of a GPT-2 twice as wide."""
    config, growth = tiny.config(tied=tied), hypercloning(OLD, TWICE)
    return resized(config, growth), grow(growth, tiny.params(config), tiny.axes(config)), tiny.axes(config)


def apart(tree, axes, axis="mlp"):
    """How far the two copies of the units of an axis are apart, of the largest number: by writing leaves, by reading ones."""
    out = {}
    for (path, x, _), names in zip(
        tiny.pairs(tree, tree), jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple)), strict=True
    ):
        for role in (axis, axis + ".in"):
            if role in names:
                first, second = np.split(x, 2, names.index(role))
                out[path] = np.abs(first - second).max() / np.abs(x).max()
    return out


@either
def test_twins_have_equal_gradients_until_noise_tells_them_apart(tied):
    """Noise that readers cancel reaches the gradient of what twins write; what reads twins still receives the same."""
    config, large, axes = twins(tied)
    noisy = noised(large, hypercloning(OLD, TWICE))
    before, after = (jax.device_get(tiny.gradient(config)(p, tiny.tokens())) for p in (large, noisy))
    for axis in ("embed", "heads", "mlp"):
        assert max(apart(before, axes, axis).values()) < EXACT
        assert max(apart(noisy, axes, axis).values()) > VISIBLE
    distances = apart(after, axes, "mlp")
    assert distances["blocks/mlp/up/kernel"] > VISIBLE
    assert distances["blocks/mlp/up/bias"] > VISIBLE
    assert apart(after, axes, "heads")["blocks/attention/value/kernel"] > VISIBLE
    assert apart(after, axes, "embed")["token_embedding"] > VISIBLE


@pytest.mark.parametrize(
    ("growth", "snr"),
    [
        (hypercloning(OLD, TWICE), 10),
        (hypercloning(OLD, tiny.wider(3)), 0),
        (HEADS_AND_MLP, 3),
        (lemon(OLD, TWICE, seed=4), 20),
    ],
    ids=["hypercloning 2", "hypercloning 3", "fpi, heads and mlp", "lemon 2"],
)
@either
def test_noise_that_cancels_over_copies_keeps_the_function(growth, snr, tied):
    config = tiny.config(tied=tied)
    large, axes = grow(growth, tiny.params(config), tiny.axes(config)), tiny.axes(config)
    forward, tokens = tiny.forward(resized(config, growth)), tiny.tokens()
    noisy = noised(large, growth, seed=1, snr=snr)
    before, after = forward(large, tokens), forward(noisy, tokens)
    assert jnp.abs(after - before).max() / before.std() < EXACT
    reading = {name for _, name in readers(axes, growth)}
    for path, x, y in tiny.pairs(large, noisy):
        noise = np.sqrt(np.square(y - x).mean() / np.square(x).mean())
        np.testing.assert_allclose(noise, 10 ** (-snr / 20) if path in reading else 0, rtol=1e-9, err_msg=path)
    # What is not alike but for the copies would change the function.
    rng = np.random.default_rng(0)
    other = jax.tree.map(lambda x, y: x + rng.permutation((y - x).reshape(-1)).reshape(x.shape), large, noisy)
    assert jnp.abs(forward(other, tokens) - before).max() / before.std() > VISIBLE


def readers(axes, growth):
    for path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda a: isinstance(a, tuple)):
        if any(name.removesuffix(".in") in growth and name.endswith(".in") for name in names):
            yield names, jax.tree_util.keystr(path, simple=True, separator="/")


def test_noise_tells_copies_apart_and_no_others():
    """Of 9 units with 21 copies, a unit with one copy has no noise; seeds differ, and repeat."""
    config, growth = tiny.config(), HEADS_AND_MLP
    large, axes = grow(growth, tiny.params(config), tiny.axes(config)), tiny.axes(config)
    noisy, again, other = (noised(large, growth, seed) for seed in (1, 1, 2))
    chex.assert_trees_all_equal(noisy, again)
    x, y, z = (np.asarray(p["blocks"]["mlp"]["down"]["kernel"]) for p in (large, noisy, other))
    source = growth["mlp"].write.index[:, 0]
    copies = np.bincount(source)[source]
    assert set(copies) > {1, 2}
    assert (np.abs(y - x)[:, copies == 1] < 1e-15).all()
    assert (np.abs(y - x)[:, copies > 1] > 0).all()
    assert (y != z)[:, copies > 1].all()
    for unit in range(9):
        np.testing.assert_allclose((y - x)[:, source == unit].sum(1), 0, rtol=0, atol=1e-14)


def test_noise_keeps_structure_and_dtypes():
    _, large, _ = twins()
    brain = jax.tree.map(lambda x: x.astype(jnp.bfloat16), large)
    assertions.assert_structure_kept(lambda p: noised(p, hypercloning(OLD, TWICE)), brain)


@pytest.mark.parametrize("policy", ["copy", "exact", "asymmetric"])
def test_twins_stay_twins_under_adam_unless_their_moments_differ(policy):
    config, large, axes = twins()
    tx = optax.chain(optax.scale_by_adam(), rebias(0.9, 0.999), optax.scale(-0.1))
    small, update = tiny.params(tiny.config()), tiny.quick_jit(tx.update)
    _, state = update(tiny.gradient(tiny.config())(small, tiny.tokens()), tx.init(small))
    state = grow_optimizer(tx, jax.device_get(state), hypercloning(OLD, TWICE), small, axes, policy)
    updates, _ = update(tiny.gradient(config)(large, tiny.tokens(seed=1)), state)
    furthest = max(apart(jax.tree.map(np.add, large, jax.device_get(updates)), axes).values())
    assert furthest > VISIBLE if policy == "asymmetric" else furthest < EXACT
