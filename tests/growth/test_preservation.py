"""Growths preserve or change the function and the gradients of a GPT-2 as the literature says.

The cases are those of the preservation tables of the literature, for a pre-LN decoder, that
`test_laws` does not measure. Exact means 1e-10 of the standard deviation of the logits, in float64
through two layers. A change that is not exact must be visible: above 1e-2.
"""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxgrow import grow, grow_optimizer, preserves_function
from jaxgrow.axes import names as naming
from jaxgrow.axes import reads_axis, with_direction
from jaxgrow.growth.maps import AxisMap, Rule, Rules, blocks, select
from jaxgrow.growth.matrices import dense
from jaxgrow.growth.moments import RebiasState, rebias
from jaxgrow.growth.symmetry import break_symmetry
from jaxgrow.operators import aki, fpi, hypercloning, lemon, llama_pro, net2net, zero_pad

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
OLD = tiny.WIDTHS
RAGGED = {"embed": 8, "heads": 5, "mlp": 13}
TWICE = tiny.wider(2)
EPS = tiny.config().eps

either = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


# --- maps that no operator builds ---

HEADS, K = OLD["heads"], tiny.config().head_dim
SOURCES = [0, 1, 2, 0, 1]  # of five heads


def over_heads(m: AxisMap) -> dict:
    """Return a map over heads and their dimensions together."""
    return {("heads", "head_dim"): AxisMap(m.write, m.read, ((5, K), (HEADS, K)))}


def heads_of(query, key, value) -> Rules:
    """Select new query, key and value heads by one index each; the output reads the values."""
    of = {"query": query, "key": key, "value": value, "out": value}
    return Rules(
        tuple(Rule(({"heads": select(index, HEADS)},), f"*/{name}/*") for name, index in of.items())
    )


def longer_heads(scale: float) -> Rules:
    """Lengthen heads from 5 to 8 dimensions, with scaled queries; keys read the dimensions that queries write."""
    m = select([0, 1, 2, 3, 4, 0, 1, 3], K)
    queries = AxisMap(scale * dense(m.write), m.read)
    return Rules((Rule(({"head_dim": queries},), "*/query/*"), Rule(({"head_dim": m},))))


def padded(centred: bool) -> Rules:
    """Pad ``embed`` with zeros and scale the norms; ``centred``: no vector has a mean that the padding would change."""
    old, new = OLD["embed"], 8
    corner = np.eye(new, old)
    writes = corner @ (np.eye(old) - 1 / old) if centred else corner
    gain = (old / new) ** 0.5 * corner
    of = {"*norm/scale": (gain, gain), "*norm/bias": (corner, corner), "*": (writes, corner)}
    rules = [Rule(({"embed": AxisMap(*pair)},), path) for path, pair in of.items()]
    return Rules(tuple(rules), eps=old / new)


EVEN = select([*range(6), 4, 0, 2, 5, 3, 1], 6)
KEPT, LOST = "kept", "lost"
CASES = {
    "fpi, embed twice, all units equally often": ({"embed": EVEN}, KEPT),
    "lemon, 2 tiles and means": (lemon(OLD, {**RAGGED, "embed": 15}, seed=3), KEPT),
    "whole heads, one map": (heads_of(SOURCES, SOURCES, SOURCES), KEPT),
    "whole heads, as neurons": (over_heads(blocks(select(SOURCES, HEADS), K)), KEPT),
    "longer heads, queries scaled": (longer_heads((8 / K) ** 0.5), KEPT),
    "fpi, embed x 1.5": (fpi(OLD, {"embed": 9}, seed=1), LOST),
    "fpi, embed twice, units unequally often": (fpi(OLD, {"embed": 12}, seed=1), LOST),
    "net2net where lemon is exact": (net2net(OLD, RAGGED, seed=2), LOST),
    "aki, heads and mlp": (aki(OLD, {"heads": 5, "mlp": 13}, seed=3), LOST),
    "zero_pad, embed": (zero_pad(OLD, {"embed": 8}), LOST),
    "zero_pad, embed, norms scaled": (padded(centred=False), LOST),
    # Norms then see the same mean, zero; a tied head would read the centred embedding.
    "zero_pad, embed, norms scaled, centred": (padded(centred=True), "kept if untied"),
    "whole heads, a map for queries, keys and values each":
        (heads_of(SOURCES, [1, 2, 0, 2, 2], [2, 0, 1, 1, 0]), LOST),
    "whole heads, another map for values": (heads_of(SOURCES, SOURCES, [2, 0, 1, 1, 0]), LOST),
    "neurons across heads":
        (over_heads(select([*range(15), 3, 11, 6, 0, 14, 9, 2, 7, 5, 12], HEADS * K)), LOST),
    "longer heads": (longer_heads(1), LOST),
}  # fmt: skip


@pytest.mark.parametrize(("growth", "what"), CASES.values(), ids=CASES)
@either
def test_what_keeps_the_function_and_what_does_not(growth, what, tied):
    change = tiny.change_of_logits(growth, tied)
    kept = not tied if what == "kept if untied" else what == KEPT
    assert change < EXACT if kept else change > VISIBLE


@either
def test_lemon_needs_its_eps(tied):
    """The effect has the size of eps relative to the variances, which is 1e-5 here."""
    assert tiny.change_of_logits(lemon(OLD, RAGGED, seed=2), tied, eps=EPS) > 1e-8


@pytest.mark.parametrize("final_norm", [False, True])
def test_a_tied_head_needs_a_norm_that_takes_the_factor(final_norm):
    """Without a final norm, no parameter reads the residual stream exactly once, and logits are doubled."""
    rng = np.random.default_rng(0)
    params = {
        "table": rng.normal(size=(11, 6)),
        "up": rng.normal(size=(2, 6, 9)),
        "down": rng.normal(size=(2, 9, 6)),
        "scale": rng.normal(size=(2, 6)),
        "final": rng.normal(size=6),
    }
    axes = {
        "table": ("vocab", "embed"),
        "up": ("layers", "embed.in", "mlp"),
        "down": ("layers", "mlp.in", "embed"),
        "scale": ("layers", "embed.norm.scale"),
        "final": ("embed.in.norm.scale",),
    }
    if not final_norm:
        params, axes = ({k: x for k, x in tree.items() if k != "final"} for tree in (params, axes))

    def normed(x):
        return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)

    def logits(p):
        x = p["table"][tiny.tokens()]
        for up, down, scale in zip(p["up"], p["down"], p["scale"], strict=True):
            x = normed(x + np.maximum(x @ up, 0) @ down) * scale
        x = normed(x) * p["final"] if final_norm else x
        return x @ p["table"].T

    growth = hypercloning({"embed": 6, "mlp": 9}, {"embed": 12, "mlp": 18})
    found, times = logits(grow(growth, params, axes)), 1 if final_norm else 2
    np.testing.assert_allclose(found, times * logits(params), rtol=0, atol=1e-10)
    assert preserves_function(growth) and preserves_function(growth, axes) == final_norm
    assert preserves_function({"mlp": growth["mlp"]}, axes)


# --- blocks that start as the identity ---


@pytest.mark.parametrize("layers", [3, 4])
def test_llama_pro_is_exact_to_the_bit(layers):
    assert tiny.change_of_logits(llama_pro(OLD, {"layers": layers})) == 0


def test_llama_pro_is_bitwise_exact_in_optimized_programs():
    growth = llama_pro(OLD, {"layers": 3})
    assert tiny.change_of_logits(growth, dtype="float32", forward=tiny.optimized_forward) == 0


def test_at_first_only_what_is_zero_in_new_blocks_learns():
    config, growth = tiny.config(), llama_pro(OLD, {"layers": 3})
    large = grow(growth, tiny.params(config), tiny.axes(config))
    gradient = tiny.gradient(config.resized(growth))(large, tiny.tokens())
    for path, g, _ in tiny.pairs(gradient["blocks"], gradient["blocks"]):
        if path.split("/")[-2] in ("out", "down"):
            assert np.abs(g[2]).max() > 1e-3, path
        else:
            assert (g[2] == 0).all(), path
        if path != "attention/key/bias":  # does not change any softmax
            assert np.abs(g[:2]).max() > 1e-3, path


# --- twins ---

COPIES = {
    "hypercloning 2": hypercloning(OLD, TWICE),
    "hypercloning 3": hypercloning(OLD, tiny.wider(3)),
    # of 3 and 9 units, with unequal numbers of copies
    "fpi, heads and mlp": fpi(OLD, {"heads": 7, "mlp": 21}, seed=5),
    "lemon 2": lemon(OLD, TWICE, seed=4),
}


@cache
def grown(name: str, tied: bool = True):
    """Return ``(config, grown parameters, noise)``, where ``noise(seed, decibels)`` adds noise to the parameters."""
    config, growth = tiny.config(tied=tied), COPIES[name]
    axes = tiny.axes(config)
    noise = jax.jit(lambda p, seed, snr: break_symmetry(p, growth, axes, seed, snr))
    large = grow(growth, tiny.params(config), axes)
    return config.resized(growth), large, lambda *args: jax.device_get(noise(large, *args))


def named(axes):
    """Return ``(path, names)`` of each leaf."""
    for path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=naming.is_names):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), names


def apart(tree, axis: str) -> dict[str, float]:
    """Return for each leaf the distance of the two copies of an axis's units.

    The distance is relative to the largest weight. ``"mlp.in"`` selects the leaves that read the
    units.
    """
    axes, out = tiny.axes(tiny.config("head_kernel" not in tree)), {}
    for (path, names), x in zip(named(axes), jax.tree.leaves(tree), strict=True):
        if axis in (plain := [with_direction(naming.axis_of(n), reads_axis(n)) for n in names]):
            first, second = np.split(np.asarray(x), 2, plain.index(axis))
            out[path] = float(np.abs(first - second).max() / np.abs(x).max())
    return out


def test_twins_have_equal_gradients_until_noise_is_added():
    """Noise that cancels for the readers changes the gradients of the weights that write twins."""
    config, large, noise = grown("hypercloning 2")
    noisy = noise(0, 10.0)
    gradient = tiny.gradient(config)
    before, after = (jax.device_get(gradient(p, tiny.tokens())) for p in (large, noisy))
    for axis in ("embed", "heads", "mlp"):
        for role in (axis, axis + ".in"):
            assert max(apart(before, role).values()) < EXACT
        assert min(apart(noisy, axis + ".in").values()) > VISIBLE
        changed = apart(after, axis).items()
        assert min(d for path, d in changed if path.endswith(("kernel", "embedding"))) > VISIBLE


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("name", "snr", "tied"), [
    ("hypercloning 3", 0, True),
    pytest.param("fpi, heads and mlp", 3, False, marks=SLOW),
    ("hypercloning 2", 10, False),
    pytest.param("lemon 2", 20, True, marks=SLOW),
])  # fmt: skip
def test_noise_that_cancels_over_copies_keeps_the_function(name, snr, tied):
    config, large, noise = grown(name, tied)
    forward, tokens = tiny.forward(config), tiny.tokens()
    noisy = noise(1, float(snr))
    before = forward(large, tokens)
    assert jnp.abs(forward(noisy, tokens) - before).max() / before.std() < EXACT

    def reads(names):
        return any(reads_axis(n) and naming.axis_of(n) in COPIES[name] for n in names)

    reading = {p for p, names in named(tiny.axes(config)) if reads(names)} - {"head_kernel"}
    for path, x, y in tiny.pairs(large, noisy):
        level = np.sqrt(np.square(y - x).mean() / np.square(x).mean())
        expected = 10 ** (-snr / 20) if path in reading else 0
        np.testing.assert_allclose(level, expected, rtol=1e-9, err_msg=path)

    def shuffled(x, y):
        return x + rng.permutation((y - x).reshape(-1)).reshape(x.shape)

    rng = np.random.default_rng(0)
    uncancelled = jax.tree.map(shuffled, large, noisy)
    assert jnp.abs(forward(uncancelled, tokens) - before).max() / before.std() > VISIBLE


def test_noise_tells_copies_apart_and_nothing_else():
    """A unit with one copy has no noise, and the noise of all copies of a unit adds up to zero."""
    _, large, noise = grown("fpi, heads and mlp", tied=False)
    noisy, again, other = (noise(seed, 10.0) for seed in (1, 1, 2))
    chex.assert_trees_all_equal(noisy, again)
    x, y, z = (p["blocks"]["mlp"]["down"]["kernel"] for p in (large, noisy, other))
    source = COPIES["fpi, heads and mlp"]["mlp"].write.index[:, 0]
    copies = np.bincount(source)[source]
    assert {1, 2, 3} <= set(copies.tolist())
    assert (np.abs(y - x)[:, copies == 1] < 1e-15).all()
    assert (np.abs(y - x)[:, copies > 1] > 0).all()
    assert (y != z)[:, copies > 1].all()
    for unit in range(9):
        np.testing.assert_allclose((y - x)[:, source == unit].sum(1), 0, rtol=0, atol=1e-14)


def test_noise_keeps_structure_and_dtypes():
    axes = tiny.axes(tiny.config())
    name = "hypercloning 2"
    brain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), grown(name)[1])
    assert jax.eval_shape(lambda p: break_symmetry(p, COPIES[name], axes), brain) == brain


def test_noise_needs_one_map_per_axis():
    with pytest.raises(TypeError, match=r"only growths with one map per axis, .* of Rules"):
        break_symmetry({"w": np.ones(2)}, Rules(()), {"w": ("mlp.in.kernel",)})


@pytest.mark.extra
def test_twins_stay_equal_under_adam_unless_moments_differ():
    config, large, _ = grown("hypercloning 2")
    axes, small = tiny.axes(tiny.config()), tiny.params(tiny.config())
    tx = optax.chain(optax.scale_by_adam(), rebias(0.9, 0.999), optax.scale(-0.1))
    adam = optax.ScaleByAdamState(count=np.int32(3), mu=small, nu=jax.tree.map(np.square, small))
    state = (
        adam,
        RebiasState(np.int32(3), jax.tree.map(lambda _: np.int32(0), small)),
        optax.ScaleState(),
    )
    gradient, update = tiny.gradient(config)(large, tiny.tokens()), jax.jit(tx.update)
    for policy, stay in (("exact", True), ("asymmetric", False)):
        across = jax.jit(
            lambda s, to=policy: grow_optimizer(tx, s, COPIES["hypercloning 2"], small, axes, to)
        )
        updates, _ = update(gradient, across(state))
        trained = jax.tree.map(np.add, large, jax.device_get(updates))
        furthest = max(apart(trained, "mlp").values())
        assert furthest < EXACT if stay else furthest > VISIBLE
