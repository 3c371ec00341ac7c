"""Every error names the leaf, the axis and both numbers, and says what to do; all that is wrong is in one message."""

import re

import numpy as np
import pytest

from jaxgrow import correct, grow, interpolate, sizes
from jaxgrow.axes import leaves
from jaxgrow.maps import tile
from jaxgrow.operators import adjacent, coalesce, decoalesce, far, fpi, interleave, stack

PARAMS = {"mlp": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}, "scale": np.zeros(5)}
AXES = {"mlp": {"kernel": ("embed.in", "mlp"), "bias": ("mlp",)}, "scale": ("head",)}
LARGE = {"layers": 5, "heads": 4, "embed": 12, "mlp": 20}


def raises(*lines):
    """A `ValueError` whose message has these parts, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, lines)))


# --- axes ---


def test_an_axes_tree_names_each_axis_of_each_leaf():
    axes = {"mlp": {"kernel": ("embed.in",), "gate": ("mlp",)}, "scale": ("head",)}
    with raises(
        "the axes tree does not fit the parameters:",
        "mlp/bias: has no axis names",
        "mlp/gate: is named, but the parameters have no such leaf",
        "mlp/kernel: has shape (2, 3), but 1 axis names ('embed.in',)",
    ):
        list(leaves(PARAMS, axes))


def test_one_axis_has_one_size():
    axes = {"mlp": {"kernel": ("embed.in", "mlp"), "bias": ("mlp",)}, "scale": ("embed",)}
    with raises(
        "one axis has one size; give these axes different names:",
        "axis 'embed' has size 2 in mlp/kernel, but 5 in scale",
    ):
        sizes(PARAMS, axes)
    assert sizes(PARAMS, AXES) == {"embed": 2, "mlp": 3, "head": 5}


# --- grow ---


def test_a_growth_fits_the_sizes_of_the_model():
    with raises(
        "the growth does not fit the parameters; build it from their sizes():",
        "axis 'width': the model has no such axis, only 'embed', 'head', 'mlp'",
        "mlp/bias: axis 'mlp' has size 3, but its map takes 2 to 4",
        "mlp/kernel: axis 'mlp' has size 3, but its map takes 2 to 4",
    ):
        grow({"mlp": tile(2, 2), "width": tile(2, 2)}, PARAMS, AXES)


def test_grow_checks_the_axes_tree_first():
    with raises("scale: has no axis names"):
        grow({"mlp": tile(3, 2)}, PARAMS, {"mlp": AXES["mlp"]})


# --- operators ---


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [
        (((0, 1), (3,)), "in no group: [2]"),
        (((0, 1), (1, 2, 3)), "in two groups: [1]"),
        (((0, 1, 1), (2, 3)), "in two groups: [1]"),
        (((0, 1, 4), (2, 3, -1)), "outside 0 .. 3: [-1, 4]"),
        (((0, 1, 2, 3), ()), "an empty group"),
        (((0, 7), (0,)), "outside 0 .. 3: [7]; in no group: [1, 2, 3]; in two groups: [0]"),
    ],
)
@pytest.mark.parametrize("operator", [coalesce, decoalesce])
def test_groups_are_a_partition(operator, groups, wrong):
    with raises("axis 'heads': the groups must hold each of its 4 units exactly once, but there are units", wrong):
        operator(LARGE, heads=groups)


def test_pairs_need_an_even_size():
    with raises("axis 'layers': far pairs: 5 is not a multiple of 2; groups of two need an even size; name the groups"):
        coalesce(LARGE, layers="far")
    with raises("axis 'layers': groups are 'far', 'adjacent' or a partition, not 'near'"):
        coalesce(LARGE, layers="near")


@pytest.mark.parametrize("groups", [far, adjacent])
def test_equal_groups_need_a_multiple(groups):
    with raises(f"{groups.__name__}: 7 is not a multiple of 2; name the groups instead"):
        groups(7, 2)
    with raises("7 is not a multiple of 0"):
        groups(7, 0)


def test_far_and_adjacent_by_hand():
    assert far(6, 2) == ((0, 2, 4), (1, 3, 5))
    assert adjacent(6, 2) == ((0, 1, 2), (3, 4, 5))


def test_what_follows_the_heads_divides_into_as_many_blocks():
    with raises("axis 'embed' follows the heads in equal blocks: 13 is not a multiple of 4; give its groups yourself"):
        coalesce({**LARGE, "embed": 13}, heads="far")
    with raises("axis 'mlp' follows the heads in equal blocks: 21 is not a multiple of 4"):
        coalesce({**LARGE, "mlp": 21}, heads="far")
    assert set(coalesce({**LARGE, "mlp": 22}, heads="far", mlp="far")) == {"heads", "embed", "mlp"}


@pytest.mark.parametrize("operator", [stack, interleave])
def test_layers_are_only_added(operator):
    with raises(f"axis 'layers': {operator.__name__} cannot take 5 to 4; coalesce() makes models smaller"):
        operator(LARGE, {"layers": 4})


def test_fpi_widens_the_axes_that_it_can():
    with raises("axis 'mlp': fpi cannot take 20 to 19; coalesce() makes models smaller"):
        fpi(LARGE, {"mlp": 19})
    with raises("axis 'layers': fpi grows embed, heads, mlp"):
        fpi(LARGE, {"layers": 6})


# --- merge ---


def test_merged_models_have_one_shape():
    small = {"mlp": {"kernel": np.zeros((2, 2)), "bias": np.zeros(3)}, "gain": np.zeros(5)}
    with raises(
        "the two models differ in shape; de-coalesce the smaller one first:",
        "mlp/kernel: (2, 3) and (2, 2)",
        "scale: (5,) and absent",
        "gain: absent and (5,)",
    ):
        interpolate(PARAMS, small, 0.5)


def test_correction_compares_on_the_coarse_level():
    pairs = {"head": tile(1, 5)}
    with raises("scale: (1,) and (5,)"):
        correct(PARAMS, PARAMS, pairs, AXES)
