"""Are levels that only wrap leaves recognised by everything that reads paths?"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxgrow
from jaxgrow.axes import axis_of, is_names
from jaxgrow.extras.other_models.naming import by_convention, from_rules, infer_rules, unwrapped
from jaxgrow.extras.other_models.rule_checks import check_rules
from jaxgrow.growth.moments import grow_optimizer
from jaxgrow.operators import hypercloning

SIZES = {"embed": 2, "mlp": 3, "heads": 5, "head_dim": 7, "vocab": 11}


def model():
    attention = {name: {"kernel": np.ones((2, 5, 7))} for name in ("query", "key", "value")}
    layer = {
        "up": {"kernel": np.ones((2, 3)), "bias": np.ones(3)},
        "down": {"kernel": np.ones((3, 2)), "bias": np.ones(2)},
        "norm": {"scale": np.ones(2), "bias": np.ones(2)},
        "attn": {**attention, "out": {"kernel": np.ones((5, 7, 2))}},
    }
    outside = {"wte": {"embedding": np.ones((11, 2))}, "head": {"kernel": np.ones((2, 11))}}
    return {"layers_0": layer, "layers_1": layer, **outside}


def boxed(x):
    return nn.Partitioned(x, (None,) * np.ndim(x))


WRAPPERS = {
    "boxes of Flax": boxed,
    "value": lambda x: {"value": x},
    "raw_value": lambda x: {"raw_value": x},
    "two levels": lambda x: {"box": {"value": x}},
    "some boxes": lambda x: {"value": x} if np.ndim(x) > 1 else x,
}


def leaves(axes):
    return jax.tree.leaves(axes, is_leaf=is_names)


@pytest.mark.parametrize("name", WRAPPERS)
def test_names_do_not_depend_on_wrappers(name):
    plain = model()
    wrapped = jax.tree.map(WRAPPERS[name], plain)
    expected = from_rules(plain, infer_rules(plain, SIZES))
    assert not any("?" in axis for names in leaves(expected) for axis in names)
    found = from_rules(wrapped, infer_rules(wrapped, SIZES))
    assert leaves(found) == leaves(expected)
    # The rules of a model without wrappers fit, too.
    assert leaves(from_rules(wrapped, infer_rules(plain, SIZES))) == leaves(expected)
    bare = jax.tree.map(lambda names: tuple(map(axis_of, names)), expected, is_leaf=is_names)
    if name != "boxes of Flax":  # they contain arrays only
        marked = by_convention(jax.tree.map(WRAPPERS[name], bare, is_leaf=is_names))
        if name != "some boxes":  # a tuple has no axes to count
            assert leaves(marked) == leaves(expected)


def test_a_module_called_value_is_no_wrapper():
    paths = ["attn/key", "attn/value", "attn/value/kernel", "a/value/bias"]
    assert unwrapped(paths) == {path: path for path in paths}
    assert unwrapped(["a/kernel", "b/kernel"]) == {"a/kernel": "a/kernel", "b/kernel": "b/kernel"}
    assert unwrapped(["value"]) == {"value": "value"}


def test_a_rule_for_a_module_called_value_does_not_match_all_boxes():
    params = {"up": {"value": np.ones((2, 3))}, "value": {"value": np.ones((2, 5))}}
    found = from_rules(params, {"*value": ("embed.in", "heads"), "*": ("embed.in", "mlp")})
    assert found["up"]["value"] == ("embed.in", "mlp")


def test_the_scale_of_a_quantised_kernel_is_uncertain():
    kernel = {"qvalue": np.ones((2, 3)), "scale": np.ones(3)}
    rules = infer_rules({"up": {"kernel": kernel, "bias": np.ones(3)}}, SIZES)
    assert rules["up/kernel/scale"] == ("mlp?",)


@pytest.mark.parametrize("name", ["boxes of Flax", "value", "two levels"])
def test_optimizers_grow_and_names_are_checked_below_wrappers(name):
    up = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    plain = {"up": up, "down": {"kernel": jnp.ones((3, 2))}}
    wrapped = jax.tree.map(WRAPPERS[name], plain)
    rules = {"up/kernel": ("tokens.in", "mlp"), "*/bias": ("mlp.bias",)}
    rules["down/kernel"] = ("mlp.in", "classes")
    axes, boxes = from_rules(plain, rules), from_rules(wrapped, rules)
    growth, tx = hypercloning({"mlp": 3}, {"mlp": 6}), optax.adam(1e-3)
    expected = grow_optimizer(tx, tx.init(plain), growth, plain, axes, "exact")
    found = grow_optimizer(tx, tx.init(wrapped), growth, wrapped, boxes, "exact")
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)

    def apply(params):
        down, bias, kernel = jax.tree.leaves(params)
        return jnp.maximum(jnp.ones((4, 2)) @ kernel + bias[None], 0) @ down

    assert check_rules(apply, wrapped, boxes)
    assert jaxgrow.grow(growth, wrapped, boxes) is not None
