"""LiGO's maps follow the paper's equations, contain known operators, and only the maps are learned.

The tolerance is 1e-12 in float64, for products of a few numbers of order one. Where a map is
one-hot, results are bitwise identical.
"""

import re
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from counting import products
from papers import layers

from jaxgrow import flops, grow
from jaxgrow.axes import axis_of, is_names
from jaxgrow.operators import fpi, interleave, stack, zero_pad
from jaxgrow.operators.ligo import LiGO, init_coefficients, learned_growth
from train.data.windows import next_tokens
from train.plan.learning import GrownByMaps
from train.state.model import TrainState, loss, parameters

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-12
VISIBLE = 1e-2
OLD = {**tiny.WIDTHS, "head_dim": 5}
BOTH = {"layers": 5, "embed": 8, "heads": 5, "mlp": 13}
LIGO = LiGO()
SMALL, LARGE = tiny.config(), tiny.config(**BOTH)


def start(ligo: LiGO = LIGO, target=BOTH, seed: int = 0):
    return jax.tree.map(np.copy, drawn(ligo, tuple(target.items()), seed))


@cache
def drawing(ligo, target):
    return jax.jit(lambda key: init_coefficients(ligo, tiny.axes(SMALL), OLD, dict(target), key))


@cache
def drawn(ligo, target, seed):
    return jax.device_get(drawing(ligo, target)(jax.random.key(seed)))


def random(ligo: LiGO = LIGO, target=BOTH, seed: int = 0):
    """Draw coefficients without structure in the shape of the learned ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape), start(ligo, target))


def grown(coefficients, params):
    return jax.device_get(
        grow(learned_growth(coefficients, tiny.axes(SMALL), OLD), params, tiny.axes(SMALL))
    )


def close(a, b):
    chex.assert_trees_all_close(a, b, rtol=0, atol=TOLERANCE)


# --- the equations ---

# The write map and read map of each matrix in y = W x. Biases and norms have the write map of their
# matrix.
TABLE = {
    "query": ("query", "embed"), "key": ("key", "embed"), "value": ("value", "embed"), "out": ("embed", "value"),
    "up": ("mlp", "embed"), "down": ("embed", "mlp"), "attention_norm": ("embed", None), "mlp_norm": ("embed", None),
}  # fmt: skip


def transcribed(coefficients, params):
    """Transcribe eq. 8 and the tying of section 3.3 of the paper.

    ``Omega_j = B_j W_j A_j.T`` for every small layer, ``W'_i = sum_j w_ij Omega_j``.
    """

    def matrix(name, kind, j):
        matrices = coefficients["width"][name]
        m = matrices.get(kind, matrices["write"])
        return m[j] if m.ndim == 3 else m

    def wide(name, x, j):
        module = name.split(" ")[0]
        out, into = TABLE[module]
        if x.ndim == 1:
            return matrix(out, "write", j) @ x
        assert into is not None
        return (matrix(out, "write", j) @ x.T @ matrix(into, "read", j).T).T

    small = layers(params)
    new: dict = {"layers": []}
    for i in range(BOTH["layers"]):
        block = {}
        for name in small[0]:
            path = f"blocks/{'attention/' if name.split(' ')[0] in ('query', 'key', 'value', 'out') else ''}"
            path += "mlp/" if name.split(" ")[0] in ("up", "down") else ""
            w = coefficients["depth"][path + name.split(" ")[0]]
            block[name] = sum(w[i, j] * wide(name, small[j][name], j) for j in range(len(small)))
        new["layers"].append(block)
    B = coefficients["width"]["embed"]
    for table in ("token_embedding", "position_embedding"):
        new[table] = params[table] @ B["write"].T
    # a tied head reads it
    new["final_norm"] = {k: B.get("read", B["write"]) @ v for k, v in params["final_norm"].items()}
    return new


@pytest.mark.parametrize("tied", [True, False], ids=["tied maps", "untied maps"])
@pytest.mark.parametrize(
    "shared", [pytest.param(True, marks=pytest.mark.extra), False], ids=["shared", "per layer"]
)
def test_growing_is_equation_8(shared, tied):
    coefficients, params = random(LiGO(shared=shared, tied=tied)), tiny.params(SMALL)
    new = grown(coefficients, params)
    matrices = {**{k: v for k, v in new.items() if k != "blocks"}, "layers": layers(new)}
    close(matrices, transcribed(coefficients, params))
    chex.assert_trees_all_equal_shapes(new, tiny.params(LARGE))


def test_shared_maps_equal_identical_per_layer_maps():
    """Therefore depth and width commute."""
    shared = random(LiGO(shared=True))
    own = {"depth": shared["depth"], "width": dict(shared["width"])}
    for name in ("query", "key", "value", "mlp"):
        own["width"][name] = {"write": np.stack([shared["width"][name]["write"]] * OLD["layers"])}
    close(grown(own, tiny.params(SMALL)), grown(shared, tiny.params(SMALL)))


def test_growing_is_linear_in_the_model_and_in_each_map_alone():
    a, b, params = random(seed=1), random(seed=2), tiny.params(SMALL)

    def mixed(name, x, y):
        return {
            "depth": a["depth"],
            "width": {**a["width"], name: jax.tree.map(lambda p, q: x * p + y * q, *both(name))},
        }

    def both(name):
        return a["width"][name], b["width"][name]

    for name in a["width"]:
        sides = [grown(mixed(name, 1, 0), params), grown(mixed(name, 0, 1), params)]
        expected = jax.tree.map(lambda p, q: 0.25 * p + 0.75 * q, *sides)
        # Affine: a leaf without the map is unchanged.
        close(grown(mixed(name, 0.25, 0.75), params), expected)
    other = tiny.params(SMALL, seed=3)
    expected = jax.tree.map(lambda p, q: 2 * p - 3 * q, grown(a, params), grown(a, other))
    close(grown(a, jax.tree.map(lambda p, q: 2 * p - 3 * q, params, other)), expected)


@pytest.mark.parametrize("embed", [6, 12])
def test_the_number_of_coefficients(embed):
    """``4 D D' + F F' + 8 L L'`` where heads times head_dim is the width; a layer has eight modules."""
    config = tiny.config(embed=embed, heads=2, head_dim=embed // 2)
    sizes = {"layers": 2, "embed": embed, "heads": 2, "mlp": 9, "head_dim": embed // 2}
    target = {"layers": 3, "embed": 2 * embed, "heads": 4, "mlp": 13}
    made = jax.eval_shape(
        lambda: init_coefficients(LiGO(), tiny.axes(config), sizes, target, jax.random.key(0))
    )
    count = sum(x.size for x in jax.tree.leaves(made))
    assert count == 4 * embed * 2 * embed + 9 * 13 + 8 * 2 * 3


# --- the start ---


@pytest.mark.parametrize(("ligo", "target", "operator"), [
    (LiGO(depth="stack", noise=0.0), {"layers": 5}, stack),
    (LiGO(depth="interleave", noise=0.0), {"layers": 5}, interleave),
    (LiGO(width="zero"), {"embed": 8, "heads": 5, "mlp": 13}, zero_pad),
], ids=["stacking", "interleaving", "zero-padding"])  # fmt: skip
def test_special_values_are_operators_to_the_bit(ligo, target, operator):
    params = tiny.params(SMALL)
    expected = grow(operator(tiny.WIDTHS, target), params, tiny.axes(SMALL))
    chex.assert_trees_all_equal(grown(start(ligo, target), params), expected)


def change_of_logits(coefficients, target):
    params, large = tiny.params(SMALL), tiny.config(**target)
    before = tiny.forward(SMALL)(params, tiny.tokens())
    after = tiny.forward(large)(grown(coefficients, params), tiny.tokens())
    return float(jnp.abs(after - before).max() / before.std())


def test_only_untied_selections_are_function_preserving():
    """``A = B diag(B.T 1)^-1`` (Proposition 1, corrected), for axes that no norm averages over.

    With tying, copies are counted twice.
    """
    target = {"heads": 5, "mlp": 13}
    maps = start(LiGO(width="selection", noise=0.0, tied=False), target)
    heads = {"heads": 5}
    # Units are drawn one by one, which splits heads. Therefore only MLP units can be exact.
    assert (
        change_of_logits(
            start(LiGO(width="selection", noise=0.0, tied=False), {"mlp": 13}), {"mlp": 13}
        )
        < 1e-10
    )
    assert (
        change_of_logits(start(LiGO(width="selection", noise=0.0), {"mlp": 13}), {"mlp": 13})
        > VISIBLE
    )
    assert (
        change_of_logits(start(LiGO(width="selection", noise=0.0, tied=False), heads), heads)
        > VISIBLE
    )
    source = maps["width"]["mlp"]["write"].argmax(1)
    same = fpi({"mlp": 9}, {"mlp": 13})
    assert source[:9].tolist() == same["mlp"].write.index[:9, 0].tolist()


@pytest.mark.parametrize("width", [
    "selection",
    "zero",
    *(pytest.param(w, marks=pytest.mark.slow) for w in ("normalised", "gaussian")),
])  # fmt: skip
def test_growth_at_the_start_does_not_keep_the_function(width):
    assert change_of_logits(start(LiGO(width=width)), BOTH) > VISIBLE


@pytest.mark.parametrize(("depth", "width"), [
    pytest.param("stack", "normalised", marks=pytest.mark.extra),
    ("interleave", "selection"),
    pytest.param("normalised", "gaussian", marks=pytest.mark.extra),
    ("stack", "zero"),
])  # fmt: skip
def test_initialisations_by_their_rows(depth, width):
    """The initialisations of depth and of width do not depend on each other."""
    ligo = LiGO(depth, width, noise=0.03)
    made = start(ligo)
    for w in made["depth"].values():
        np.testing.assert_allclose(w.sum(1), 1, rtol=1e-12)
        source = {"stack": [0, 1, 0, 1, 0], "interleave": [0, 0, 0, 1, 1]}.get(depth)
        assert (w > 0).all() and len(np.unique(w)) > 5  # the weights contain noise, or only noise
        if source:
            assert w.argmax(1).tolist() == source
            assert w.max(1).min() > 1 / 1.03
    for name, matrices in made["width"].items():
        m = matrices["write"]
        old = m.shape[1]
        new = m[old:]
        np.testing.assert_array_equal(m[:old], np.eye(old))
        if width in ("normalised", "selection"):
            np.testing.assert_allclose(new.sum(1), 1, rtol=1e-12, err_msg=name)
            assert (new > 0).all()
            assert (new.max(1) > 0.5).all() == (width == "selection"), name
        elif width == "zero":
            assert not new.any()
        else:
            assert 0.3 < new.std() * m.shape[0] ** 0.5 < 3
    other = start(ligo, seed=1)
    same = all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (made, other)), strict=True)
    )
    assert not same


@pytest.mark.parametrize(("target", "depth", "width"), [
    ({"layers": 3}, 8, set()),
    ({"embed": 8}, 0, {"embed"}),
    ({"heads": 4, "mlp": 10}, 0, {"query", "key", "value", "mlp"}),
    ({"layers": 2}, 8, set()),  # the same size, mixed
])  # fmt: skip
def test_only_the_axes_of_the_target_have_maps(target, depth, width):
    made = start(target=target)
    assert (len(made["depth"]), set(made["width"])) == (depth, width)
    new = grown(made, tiny.params(SMALL))
    chex.assert_trees_all_equal_shapes(new, tiny.params(tiny.config(**target)))


# --- learning ---


def gradients(coefficients):
    """Return the gradients of the loss for the maps and for the small model."""
    params = tiny.params(SMALL)
    batch = next_tokens(tiny.tokens(length=6))

    def value(coefficients, params):
        return loss(
            TrainState(coefficients, None, LARGE, base=params, parametrisation=GrownByMaps(SMALL)),
            batch,
        )

    return jax.jit(jax.grad(value, (0, 1)))(coefficients, params)


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_reach_every_map_and_never_the_small_model(shared):
    maps, small = gradients(start(LiGO(shared=shared)))
    for path, g in jax.tree_util.tree_leaves_with_path(maps):
        assert jnp.abs(g).max() > 1e-6, path
    chex.assert_trees_all_equal(small, jax.tree.map(jnp.zeros_like, small))


def test_zero_rows_have_zero_gradient_except_in_the_embed_map():
    maps, _ = gradients(start(LiGO(width="zero")))
    for name, old in (("query", 15), ("key", 15), ("value", 15), ("mlp", 9)):
        assert not np.any(maps["width"][name]["write"][old:]), name
    # The gradient arrives through the mean and variance of LayerNorm.
    assert np.abs(maps["width"]["embed"]["write"][6:]).max() > 1e-6


def test_what_a_model_computes_with_is_what_growing_gives():
    maps, params = start(), tiny.params(SMALL)
    close(
        parameters(TrainState(maps, None, LARGE, base=params, parametrisation=GrownByMaps(SMALL))),
        grown(maps, params),
    )


@pytest.mark.parametrize("shared", [True, False])
def test_flop_count_matches_the_program_and_bounds_learning(
    shared,
):
    maps, params, axes = start(LiGO(shared=shared)), tiny.params(SMALL), tiny.axes(SMALL)
    cost = flops.growth_flops(learned_growth(maps, axes, OLD), params, axes)

    def value(maps):
        new = grow(learned_growth(maps, axes, OLD), jax.lax.stop_gradient(params), axes)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(new))

    assert cost == products(jax.make_jaxpr(value)(maps).jaxpr)
    assert 2 * cost < products(jax.make_jaxpr(jax.value_and_grad(value))(maps).jaxpr) <= 3 * cost


# --- errors ---


def test_targets_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="axis 'vocab': ligo grows layers, embed, heads, mlp"):
        start(target={"vocab": 12})
    with pytest.raises(
        ValueError, match=re.escape("axis 'mlp': ligo cannot reduce the size from 9 to 8")
    ):
        start(target={"mlp": 8})
    with pytest.raises(
        ValueError, match=re.escape("noise must be at least 0 and below 1, but is 1.5")
    ):
        LiGO(noise=1.5)
    assert SMALL.resized(learned_growth(start(), tiny.axes(SMALL), OLD)) == LARGE


@pytest.mark.extra
@pytest.mark.parametrize(
    "target", [{"heads": 8, "kv_heads": 4}, {"heads": 8}, {"kv_heads": 4}], ids=str
)
def test_key_value_heads_grow_in_stages_and_in_blocks_outside_the_layers(target):
    """With zero rows, query kernels grow as by `zero_pad`."""
    sizes = {"layers": 2, "embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 3}
    block = {
        "out": ("heads.in", "head_dim.in", "embed"),
        "key": ("embed.in", "kv_heads", "head_dim.in"),
        "query": ("embed.in", "heads", "head_dim"),
        "value": ("embed.in", "kv_heads", "head_dim.value"),
    }
    axes = {"layers": {name: ("layers", *names) for name, names in block.items()}, "top": block}
    staged = jax.tree.map(lambda name: re.sub("^(?!head_dim)[a-z_]+", r"\g<0>.1", name), axes)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda names: rng.normal(size=[sizes[axis_of(n)] for n in names]), axes, is_leaf=is_names
    )
    found = []
    for names, stage in ((axes, ""), (staged, ".1")):
        old, new = (
            {name + stage * (name != "head_dim"): size for name, size in of.items()}
            for of in (sizes, target)
        )
        start = init_coefficients(LiGO(width="zero"), names, old, new, jax.random.key(0))
        found.append(grow(learned_growth(start, names, old), params, names))
    chex.assert_trees_all_equal(*found)
    expected = grow(zero_pad(sizes, target), params, axes)
    for block in ("layers", "top"):
        np.testing.assert_array_equal(found[0][block]["query"], expected[block]["query"])


def test_a_growth_is_a_pytree():
    """It can therefore be an argument of a compiled function, and it can be saved."""
    made, params = learned_growth(start(), tiny.axes(SMALL), OLD), tiny.params(SMALL)
    compiled = jax.jit(lambda g, p: grow(g, p, tiny.axes(SMALL)))(made, params)
    close(compiled, grown(start(), params))
