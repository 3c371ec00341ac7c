"""`check_rules` accepts correct axis names and reports each wrong name with its correction."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import third_party

from jaxgrow import check_rules, from_rules, sizes, stack_layers
from jaxgrow.axes import is_names

SIZES = {"layers": 2, "vocab": 13, "context": 7, "embed": 6, "heads": 3, "head_dim": 5, "mlp": 9}
AXES = {
    "tokens": ("vocab", "embed"),
    "layers": {
        "norm": ("layers", "embed.norm.scale"),
        "query": ("layers", "embed.in", "heads", "head_dim"),
        "query_bias": ("layers", "heads", "head_dim.bias"),
        "key": ("layers", "embed.in", "heads", "head_dim.in"),
        "value": ("layers", "embed.in", "heads", "head_dim.value"),
        "value_bias": ("layers", "heads", "head_dim.value.bias"),
        "out": ("layers", "heads.in", "head_dim.in", "embed"),
        "mlp_norm": ("layers", "embed.norm.scale"),
        "up": ("layers", "embed.in", "mlp"),
        "up_bias": ("layers", "mlp.bias"),
        "down": ("layers", "mlp.in", "embed"),
        "down_bias": ("layers", "embed.bias"),
    },
    "final": ("embed.in.norm.scale",),
}


@pytest.fixture(scope="module", autouse=True)
def plain_broadcasting():
    with jax.numpy_rank_promotion("allow"):
        yield


def shapes(axes, sizes):
    def leaf(names):
        shape = tuple(sizes[name.partition(".")[0]] for name in names)
        return jax.ShapeDtypeStruct(shape, np.float32)

    return jax.tree.map(leaf, axes, is_leaf=is_names)


def normed(x, scale):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


@jax.jit
def logits(p):
    """Compute the logits of a pre-LN language model with a tied head, for any parameter sizes."""
    x = p["tokens"][third_party.tokens()]
    mask = np.tril(np.ones((x.shape[1],) * 2, bool))

    def layer(x, w):
        h = normed(x, w["norm"])
        q = jnp.einsum("btd,dhk->bthk", h, w["query"]) + w["query_bias"]
        k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in ("key", "value"))
        scores = jnp.where(mask, jnp.einsum("bthk,bshk->bhts", q, k), -1e9)
        y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v + w["value_bias"])
        x = x + jnp.einsum("bthk,hkd->btd", y, w["out"])
        h = jax.nn.gelu(normed(x, w["mlp_norm"]) @ w["up"] + w["up_bias"])
        return x + h @ w["down"] + w["down_bias"], None

    x, _ = jax.lax.scan(layer, x, p["layers"])
    return normed(x, p["final"]) @ p["tokens"].T


def with_names(**names):
    return {**AXES, "layers": {**AXES["layers"], **names}}


def says(axes, *lines, apply: Callable[[Any], Any] = logits, params=None):
    found = check_rules(apply, shapes(AXES, SIZES) if params is None else params, axes)
    assert not found and len(found.wrong) == len(lines), found
    for wrong, line in zip(found.wrong, lines, strict=True):
        assert wrong.startswith(line), wrong
    return found


def test_right_names_are_found_right_and_every_mark_is_proven():
    found = check_rules(logits, shapes(AXES, SIZES), AXES)
    assert found and found.change < 1e-4 and not found.unproven, found
    assert str(found).startswith("doubling all widths changes the outputs by ")


def test_products_are_not_rounded_on_accelerators():
    """With TF32, a correct GPT-2 with six layers changes its outputs by 2e-3."""
    programs = []

    def run(p):
        return jax.nn.relu(p["up"]) @ p["down"]

    def outputs(p):
        programs.append(str(jax.make_jaxpr(run)(p)))
        return run(p)

    params = {"up": np.ones((2, 3), np.float32), "down": np.ones((3, 2), np.float32)}
    check_rules(outputs, params, {"up": ("tokens.in", "mlp"), "down": ("mlp.in", "classes")})
    exact = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert programs and all(exact in program for program in programs)


@pytest.mark.parametrize("leaf", ["query", "key", "value", "out", "up", "down"])
def test_a_missing_in_is_named(leaf):
    """The kernel belongs to each layer, the residual stream, the heads, or the MLP units."""
    right = AXES["layers"][leaf]
    names = tuple(n.removesuffix(".in") if n != "head_dim.in" else n for n in right)
    says(
        with_names(**{leaf: names}),
        f"layers/{leaf}: the names {names} are wrong; with {right}, the outputs do not change",
    )


def test_several_faults_are_named_each():
    out = ("layers", "heads", "head_dim.in", "embed")
    both = with_names(up=("layers", "embed", "mlp"), out=out)
    found = check_rules(logits, shapes(AXES, SIZES), both)
    assert {line.partition(":")[0] for line in found.wrong} == {"layers/up", "layers/out"}


PLAIN = ("layers", "embed.in", "heads", "head_dim")
VALUE = (*PLAIN[:3], "head_dim.value")


@pytest.mark.parametrize(("axes", "line"), [
    ({**AXES, "final": ("embed.norm.scale",)},
     "final: the names ('embed.norm.scale',) are wrong; with ('embed.in.norm.scale',)"),
    (with_names(up_bias=("layers", "mlp.in.bias")),
     "layers/up_bias: the names ('layers', 'mlp.in.bias') are wrong; with ('layers', 'mlp.bias')"),
    (with_names(value=PLAIN),
     f"layers/value: the names {PLAIN} are wrong; it belongs to the values of attention: 'head_dim.value'"),
    (with_names(query=VALUE),
     f"layers/query: the names {VALUE} are wrong; it does not belong to the values of attention: 'head_dim'"),
    (with_names(key=PLAIN), "no parameter is marked as the keys of attention, 'head_dim.in'"),
], ids=["no .in", "superfluous .in", "no value", "superfluous value", "no keys"])  # fmt: skip
def test_missing_and_superfluous_marks_are_reported(axes, line):
    says(axes, line)


def test_layers_on_another_dimension_are_found():
    """As in MaxText. Their number equals the size of the residual stream."""
    moved = {**AXES, "layers": {leaf: (n[1], n[0], *n[2:]) for leaf, n in AXES["layers"].items()}}

    def apply(p):
        return logits({**p, "layers": jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), p["layers"])})

    params = shapes(moved, {**SIZES, "layers": 6})
    assert check_rules(apply, params, moved)
    with_layers = (
        "layers/down: the names ('layers', 'mlp.in', 'embed') are wrong; with "
        "('mlp.in', 'layers', 'embed'), and the same order in all stacked parameters"
    )
    says(AXES, with_layers, apply=apply, params=params)


def test_a_mark_that_a_norm_makes_up_for_is_not_proven():
    """Norms of queries and keys cancel the factor by which their kernels are too large."""
    axes = {"table": ("vocab", "embed"), "up": ("embed.in", "mlp"), "head": ("mlp.in", "classes")}

    def apply(p):
        return normed(p["table"] @ p["up"], 1) @ p["head"]

    found = check_rules(apply, shapes(axes, {**SIZES, "classes": 4}), axes)
    unproven = [line.partition(" in ")[0] for line in found.unproven]
    assert unproven == ["up: without the mark 'embed.in'"], found


@pytest.mark.parametrize("mid", [("inner", "mlp"), ("inner.in", "mlp")])
def test_axes_that_are_not_doubled_are_not_verified(mid):
    """The first names lack an ``.in`` that nothing checks, because ``inner`` is not doubled."""
    axes = {"table": ("vocab", "embed"), "first": ("embed.in", "inner"), "mid": mid}
    axes |= {"last": ("mlp.in", "embed"), "head": ("embed.in", "vocab"), "bias": ("vocab.bias",)}

    def apply(p):
        x = p["table"]
        h = jnp.tanh(jnp.tanh(x @ p["first"]) @ p["mid"])
        return (x + h @ p["last"]) @ p["head"] + p["bias"]

    params = {"table": (13, 6), "first": (6, 5), "mid": (5, 9), "last": (9, 6), "head": (6, 13)}
    params = {p: np.zeros(shape, np.float32) for p, shape in {**params, "bias": (13,)}.items()}
    found = check_rules(apply, params, axes)
    assert found, found
    assert found.unproven == ("axis 'inner' is not doubled, so its marks are not verified",)


@pytest.mark.parametrize(("names", "says"), [
    (("vocab", "embed"), "the outputs have shapes [(13, 6)], but [(13, 12)] when all widths"),
    (("vocab", "hidden"), "no axis of this model can be widened: its axes are vocab, hidden"),
])  # fmt: skip
def test_growing_outputs_and_models_without_widths_are_refused(names, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_rules(lambda p: p["a"], {"a": np.ones((13, 6))}, {"a": names})


def test_outputs_that_are_not_finite_are_refused():
    """They would compare as unchanged. If only the wider model has them, its names are wrong."""
    params = {"up": np.ones((6, 4)), "down": np.ones((4, 13))}
    axes = {"up": ("tokens", "mlp"), "down": ("mlp.in", "vocab")}

    def masked(p):
        return np.where(np.arange(13) < 11, p["up"] @ p["down"], -np.inf)

    with pytest.raises(ValueError, match="12 of the 78 outputs of the model are not finite"):
        check_rules(masked, params, axes)

    def overflowing(p):
        return p["up"] @ p["down"] + (np.nan if p["up"].shape[1] > 4 else 0.0)

    found = check_rules(overflowing, params, axes)
    assert not found and found.change == np.inf


@pytest.mark.slow
def test_a_model_of_linen_with_its_layers_in_subtrees():
    """The model is built from the sizes of the parameters that it receives."""
    params = third_party.drawn(third_party.linen_shapes(third_party.SMALL), np.float32)

    def check(rules):
        axes = from_rules(params, rules)
        stacked = stack_layers(axes, "layers_{}")

        @jax.jit
        def apply(p):
            known = sizes(stack_layers(p, "layers_{}"), stacked)
            return third_party.linen_apply(known)(p, third_party.tokens())

        return check_rules(apply, params, axes)

    assert check(third_party.LINEN.rules)
    (wrong,) = check({**third_party.LINEN.rules, "*/down/kernel": ("mlp", "embed")}).wrong
    assert "down/kernel: the names ('mlp', 'embed') are wrong; with ('mlp.in', 'embed')" in wrong
