"""Errors name the leaf, the axis, both numbers and the remedy, and list all problems at once."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from growths import DEPTH

from jaxgrow import compose, correct, from_rules, grow, grow_optimizer, interpolate, sizes, swap
from jaxgrow import operators as ops
from jaxgrow.axes import leaves
from jaxgrow.checkpoints import Output
from jaxgrow.growth import maps
from jaxgrow.growth.maps import AxisMap, Rule, Rules, identity, new_sizes, repeat, select, tile
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.layerdrop import KeepMask, LayerDrop, Sensitivity, layer_sensitivity
from jaxgrow.layerdrop.execution import scaled
from jaxgrow.models import GPT2Config
from jaxgrow.operators.ligo import LiGO

PARAMS = {"mlp": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}, "scale": np.zeros(5)}
AXES = {"mlp": {"kernel": ("embed.in", "mlp"), "bias": ("mlp",)}, "scale": ("head",)}
LARGE = {"layers": 5, "heads": 4, "embed": 12, "mlp": 20}


def raises(*lines):
    """Expect a `ValueError` whose message has these parts, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, lines)))


NARROW = ("int8", "bool", "float8_e4m3fn", "int4")
QUANTIZED_AXES = {"up": ("embed.in", "mlp"), "down": ("mlp.in", "embed")}


def quantized(dtype, xp):
    """The output axis of "up" is copied, and the input axis of "down" is copied and scaled."""
    numbers = np.array([[3, 5, 7]]).astype(jnp.dtype(dtype))
    return {"up": xp.asarray(numbers), "down": xp.asarray(numbers.T)}


UP = {"up": QUANTIZED_AXES["up"]}
HIDDEN = {"hidden": 24, "ffn": 96}  # axis names that no operator knows
FLAT = {"embed": 12, "heads": 4, "mlp": 20}  # a model whose layers are subtrees
STACK_FIRST = "if each layer is a separate subtree, first stack the layers of the parameters and of the axes with jaxgrow."
TWICE = {"embed": 24, "heads": 8, "mlp": 40}
BIAS = Rule(({"mlp": tile(3, 2)},), "*/bias")
KERNEL, KERNEL_AXES = {"mlp": {"kernel": np.zeros((2, 3))}}, {"mlp": {"kernel": ("embed", "mlp")}}
PAIR = {"kernel": np.zeros((2, 3)), "bias": np.zeros(2)}
PAIR_AXES = {"kernel": ("embed", "mlp"), "bias": ("embed",)}
SWAPPED = AxisMap(identity(6).write, identity(6).read, ((3, 2), (3, 2)))
LARGER = AxisMap(tile(6, 2).write, tile(6, 2).read, ((4, 3), (2, 3)))
ONE = {"mlp": {"kernel": np.zeros((2, 2)), "bias": np.zeros(3)}, "gain": np.zeros(5)}
NO_LAYERS = "axis 'layers': the model has no such axis"
FOLLOWS = "follows the heads in equal blocks:"
# A wrong call, and parts of its message.
WRONG = {
    "axis names": (lambda: list(leaves(PARAMS, {"mlp": {"kernel": ("embed.in",), "gate": ("mlp",)}, "scale": ("head",)})),
        "the axes tree does not match the parameters:",
        "mlp/bias: has no axis names",
        "mlp/gate: has axis names, but the parameters have no such leaf",
        "mlp/kernel: has shape (2, 3), but 1 axis names ('embed.in',)"),
    "a name that is None": (lambda: grow({}, PARAMS, {**AXES, "mlp": {"kernel": ("embed.in", None), "bias": ("mlp",)}}),
        "mlp/kernel: the axis names ('embed.in', None) contain None, but each name must be a string"),
    "two sizes of an axis": (lambda: sizes(PARAMS, {**AXES, "scale": ("embed",)}),
        "each axis must have one size; give axes of different sizes different names:",
        "axis 'embed' has size 2 in mlp/kernel, but 5 in scale"),
    "sizes of the model": (lambda: grow({"mlp": tile(2, 2), "width": tile(2, 2)}, PARAMS, AXES),
        "the growth does not fit the parameters; build it from sizes(params, axes):",
        "axis 'width': the model has no such axis, only 'embed', 'head', 'mlp'",
        "mlp/bias: axis 'mlp' has size 3, but its map takes 2 to 4",
        "mlp/kernel: axis 'mlp' has size 3, but its map takes 2 to 4"),
    "grow checks the axes": (lambda: grow({"mlp": tile(3, 2)}, PARAMS, {"mlp": AXES["mlp"]}), "scale: has no axis names"),
    "leaves with two new sizes": (lambda: grow(Rules((BIAS,)), PARAMS, AXES),
        "axis 'mlp' becomes 6 in mlp/bias, but 3 in mlp/kernel"),
    "rules with two new sizes": (lambda: grow(Rules((BIAS, Rule(({"mlp": tile(3, 3)},)))), PARAMS, AXES),
        "axis 'mlp': one rule gives it size 6, another 9"),
    "terms with two new sizes, of which one would broadcast": (lambda: grow(
        Rules((Rule(({"a": tile(1, 3), "b": identity(2)}, {"b": identity(2)})),)), {"w": np.zeros((1, 2))}, {"w": ("a", "b")}),
        "axis 'a' becomes 3 in w, but 1 in w"),
    "a rule that does not fit its leaf": (lambda: grow(
        Rules((Rule(({"mlp": tile(2, 3)},), "*/bias"), Rule(({"mlp": tile(3, 2)},)))), PARAMS, AXES),
        "mlp/bias: axis 'mlp' has size 3, but its map takes 2 to 6"),
    "matrices of two shapes": (lambda: grow(Rules((Rule(({"mlp": AxisMap(np.ones((4, 3)), np.ones((3, 4)))},)),
        Rule(({("a", "b"): AxisMap(np.ones(3), np.ones(3))},)))), PARAMS, AXES),
        "the growth has inconsistent maps:",
        "axis 'mlp': the write map has shape (4, 3), and the read map has shape (3, 4). "
        "Both must have the same shape, [new, old].",
        "axis ('a', 'b'): the write map has shape (3,), and the read map has shape (3,)."),
    "a group of axes in another order": (lambda: grow({("embed", "mlp"): SWAPPED}, KERNEL, KERNEL_AXES),
        "mlp/kernel: axis 'embed' has size 2, but its map takes 3 to 3",
        "mlp/kernel: axis 'mlp' has size 3, but its map takes 2 to 2"),
    "an axis of a group alone": (lambda: grow({("embed", "mlp"): LARGER}, PAIR, PAIR_AXES),
        "axis 'embed' becomes 2 in bias, but 4 in kernel"),
    "a group with an unknown axis": (lambda: grow({("embed", "x"): LARGER}, PAIR, PAIR_AXES),
        "axis 'x': the model has no such axis, only 'embed', 'mlp'"),
    "a sum of terms of integers": (lambda: grow(
        Rules((Rule(({"mlp": tile(3, 2)}, {"mlp": tile(3, 2)})),)), {"up": quantized("int8", np)["up"]}, UP),
        "up: has dtype int8", "SparseMap(3 -> 6, copies), SparseMap(3 -> 6, copies)"),
    "far pairs": (lambda: ops.coalesce(LARGE, layers="far"),
        "axis 'layers': far pairs: 5 is not a multiple of 2; give the groups explicitly, or a size that divides it: far:5"),
    "adjacent groups": (lambda: ops.coalesce(LARGE, layers="adjacent:3"),
        "axis 'layers': adjacent groups of 3: 5 is not a multiple of 3; give the groups"),
    **{f"groups {groups}": (lambda groups=groups: ops.coalesce(LARGE, layers=groups),
        f"axis 'layers': groups must be 'far', 'adjacent', 'far:3', 'adjacent:3' or a partition, not '{groups}'")
       for groups in ("near", "far:", "far:0", "far:x", "far:-1", "adjacent:3:3")},
    **{f"{groups.__name__} of two": (lambda groups=groups: groups(7, 2),
        f"{groups.__name__}: 7 is not a multiple of 2; give the groups explicitly") for groups in (ops.far, ops.adjacent)},
    **{f"{groups.__name__} of none": (lambda groups=groups: groups(7, 0), "7 is not a multiple of 0")
       for groups in (ops.far, ops.adjacent)},
    "embed in groups of the heads": (lambda: ops.coalesce({**LARGE, "embed": 13}, heads="far"),
        f"axis 'embed' {FOLLOWS} 13 is not a multiple of 4; it cannot follow in groups of 2"),
    "mlp in groups of the heads": (lambda: ops.coalesce({**LARGE, "mlp": 22}, heads=((0,), (1, 2, 3))),
        f"axis 'mlp' {FOLLOWS} 22 is not a multiple of 4; it cannot follow in groups of 1 and 3"),
    **{f"{operator.__name__} without layers": (lambda operator=operator, target=target: operator(FLAT, target),
        f"{operator.__name__} needs the layer axis 'layers', but the model has only embed, heads, mlp; ")
       for operator, target in ((ops.lemon, {"mlp": 40}), (ops.aki, {"mlp": 40}), (ops.staged, TWICE))},
    "units of each layer without layers": (lambda: ops.keep_units(FLAT, {"mlp": [[0, 1], [2, 3]]}),
        "axis 'mlp': the kept units must be a list of indices, but have shape (2, 2)"),
    "average without layers": (lambda: ops.average(FLAT, {"layers": 4}), NO_LAYERS, STACK_FIRST),
    "coalesce without layers": (lambda: ops.coalesce(FLAT, heads="far", layers="far"), NO_LAYERS, STACK_FIRST),
    "prune without layers": (lambda: ops.prune(FLAT, {"layers": 1}, {"layers": [0.5, 0.2]}), NO_LAYERS, STACK_FIRST),
    "coalesce of other names": (lambda: ops.coalesce(HIDDEN, heads="far", embed="far"),
        "axis 'heads': the model has no such axis, only hidden, ffn", "axis 'embed': the model has no such axis"),
    "decoalesce of other names": (lambda: ops.decoalesce({"layers": 2, "mlp": 8}, kv_heads="far"),
        "axis 'kv_heads': the model has no such axis, only layers, mlp"),
    "lemon without the residual stream": (lambda: ops.lemon({"layers": 2, "mlp": 8}, {"mlp": 12}),
        "axis 'mlp': lemon needs the residual stream 'embed', but the model has only"),
    "merged models of two shapes": (lambda: interpolate(PARAMS, ONE, 0.5),
        "the two models differ in shape; de-coalesce the smaller one first:",
        "mlp/kernel: (2, 3) and (2, 2)", "scale: (5,) and absent", "gain: absent and (5,)"),
    "correction, which compares small models": (lambda: correct(PARAMS, PARAMS, {"head": tile(1, 5)}, AXES),
        "scale: (1,) and (5,)"),
    "integers that are not known to be the same": (
        lambda: jax.jit(lambda p: interpolate(p, p, 0.5))(quantized("int8", jnp)),
        "up: has dtype int8, and is not known to be the same"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_error_names_the_place_the_numbers_and_the_remedy(wrong):
    call, *lines = wrong
    with raises(*lines):
        call()


def test_sizes_and_groups_that_fit():
    """The control: almost the same calls."""
    assert sizes(PARAMS, AXES) == {"embed": 2, "mlp": 3, "head": 5}
    assert ops.coalesce(LARGE, layers="far:5")["layers"].new == 1
    by_itself = ops.coalesce({**LARGE, "mlp": 22}, heads="far")  # groups as large as the heads'
    assert set(by_itself) == {"heads", "embed", "mlp"} and by_itself["mlp"].new == 11
    assert ops.stack(LARGE, {"layers": np.int64(10)})["layers"].new == 10


def copies(*index):
    """Return a SparseMap whose index may be wrong."""
    return SparseMap(np.array(index)[:, None], np.ones((len(index), 1)), 3)


@pytest.mark.parametrize("outside", [3, -1])
def test_sparse_maps_have_units_that_exist(outside):
    with raises(
        f"axis 'mlp': the read map has the index {outside}, but", "Indices must be in 0 .. 2."
    ):
        grow({"mlp": AxisMap(copies(0, 1, 2, 2), copies(0, 1, 2, outside))}, PARAMS, AXES)
    last = {"mlp": AxisMap(copies(0, 1, 2, 2), copies(0, 1, 2, 2))}
    assert grow(last, PARAMS, AXES)["mlp"]["bias"].shape == (4,)
    params = jax.tree.map(np.float32, PARAMS)
    learned = jax.jit(lambda growth: grow(growth, params, AXES))(last)  # has no values to check
    assert learned["mlp"]["bias"].shape == (4,)


def test_a_prng_key_is_copied_but_not_scaled():
    keys = {"a": {"b": jax.random.split(jax.random.key(0), 3)}}
    with raises(
        "a/b: has dtype key<fry>, which cannot hold the results of SparseMap(3 -> 6, scaled"
    ):
        grow({"mlp": tile(3, 2)}, keys, {"a": {"b": ("mlp.in.bias",)}})
    with raises("a/b: has dtype key<fry>, and is not known to be the same in both models"):
        interpolate(keys, {"a": {"b": keys["a"]["b"][::-1]}}, 0.5)
    axes = {"a": {"b": ("mlp",)}}
    assert grow({}, keys, axes)["a"]["b"] is keys["a"]["b"]
    larger = partial(grow, {"mlp": tile(3, 2)}, axes=axes)
    for apply in (larger, jax.jit(larger)):
        copied = apply(keys)["a"]["b"]
        np.testing.assert_array_equal(
            jax.random.key_data(copied), np.tile(jax.random.key_data(keys["a"]["b"]), (2, 1))
        )


@pytest.mark.parametrize("xp", [np, jnp])
def test_leaves_without_elements_grow(xp):
    index = [0, 1, 0, 1, 2, 3]
    for growth in (repeat(4, 2), select(index, 4)):
        grown = grow({"mlp": growth}, {"w": xp.ones((0, 4))}, {"w": ("embed", "mlp")})
        assert grown["w"].shape == (0, growth.new)


def test_an_empty_tuple_in_the_parameters_is_no_leaf():
    """Layers without parameters are empty tuples in stax."""
    params = [(np.ones((2, 3)), np.ones(3)), (), (np.ones((3, 2)), np.ones(2))]
    rules = {"0/0": ("embed.in", "mlp"), "0/1": ("mlp.bias",), "2/0": ("mlp.in", "embed")}
    axes = from_rules(params, rules | {"2/1": ("embed.bias",)})
    assert axes[1] == ()
    growth = {"mlp": tile(3, 2)}
    grown = grow(growth, params, axes)
    assert grown[1] == () and grown[2][0].shape == (6, 2)
    tx = optax.trace(0.9)
    state = grow_optimizer(tx, tx.init(params), growth, params, axes, "exact")
    chex.assert_trees_all_equal_shapes(state, tx.init(grown))
    for wrong in ((params[:1], axes[:2]), (params, [axes[0], ("mlp",), axes[2]])):
        with raises("1: has axis names, but the parameters have no such leaf"):
            sizes(*wrong)


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("dtype", NARROW)
def test_quantized_leaves_are_copied_but_not_scaled(dtype, xp):
    params, axes = quantized(dtype, xp), QUANTIZED_AXES
    growth, up = {"mlp": tile(3, 2)}, params["up"]
    with raises(
        f"down: has dtype {dtype}, which cannot hold", "(3 -> 6, scaled copies). Dequantize"
    ):
        grow(growth, params, axes)
    copied = grow(growth, {"up": up}, UP)
    with raises("up: has dtype", "SparseMap(6 -> 3, means)"):
        grow(swap(growth), copied, UP)
    copied = copied["up"]
    assert copied.dtype == jnp.dtype(dtype) and isinstance(copied, type(up))
    np.testing.assert_array_equal(np.asarray(copied), np.tile(np.asarray(up), 2), strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_floats_are_scaled(dtype):
    grown = grow({"mlp": tile(3, 2)}, quantized(dtype, np), QUANTIZED_AXES)
    assert grown["down"][:, 0].astype(complex).tolist() == [1.5, 2.5, 3.5] * 2


# --- operators ---


@pytest.mark.parametrize(("groups", "wrong"), [
    (((0, 1), (3,)), "in no group: [2]"),
    (((0, 1), (1, 2, 3)), "in two groups: [1]"),
    (((0, 1, 1), (2, 3)), "in two groups: [1]"),
    (((0, 1, 2, 3), ()), "an empty group"),
    (((0, 7), (0, -1)), "outside 0 .. 3: [-1, 7]; in no group: [1, 2, 3]; in two groups: [0]"),
])  # fmt: skip
def test_groups_are_a_partition(groups, wrong):
    for operator in (ops.coalesce, ops.decoalesce):
        with raises("'heads': the groups must hold each of its 4 units exactly once, but", wrong):
            operator(LARGE, heads=groups)


def test_far_and_adjacent_by_hand():
    assert ops.far(6, 2) == ((0, 2, 4), (1, 3, 5))
    assert ops.adjacent(6, 2) == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize("operator", DEPTH.values(), ids=DEPTH)
def test_layers_are_only_added_and_nothing_else(operator):
    name = operator.__name__
    with raises(f"axis 'layers': {name} cannot reduce the size from 5 to 4. Use coalesce or prune"):
        operator(LARGE, {"layers": 4})
    with raises(f"axis 'mlp': {name} grows layers"):
        operator(LARGE, {"layers": 10, "mlp": 40})
    with raises(
        f"axis 'depth': {name} grows layers", "the model has no such axis, only layers, heads"
    ):
        operator(LARGE, {"depth": 10})
    with raises("axis 'layers': the model has no such axis, only embed, heads, mlp; ", STACK_FIRST):
        operator(FLAT, {"layers": 4})


@pytest.mark.parametrize("operator", ops.WIDTH.values(), ids=ops.WIDTH)
def test_widths_are_only_widened_and_nothing_else(operator):
    both = operator in (ops.aki, ops.average)  # these also add layers
    name, axes = operator.__name__, "layers, embed, heads, mlp" if both else "embed, heads, mlp"
    with raises(f"axis 'mlp': {name} cannot reduce the size from 20 to 19. Use coalesce or prune"):
        operator(LARGE, {"mlp": 19})
    with raises(
        f"axis 'vocab': {name} grows {axes}", "the model has no such axis, only layers, heads"
    ):
        operator(LARGE, {"vocab": 6})
    takes = "layers, embed" if both else "embed"
    with raises(
        f"axis 'hidden': {name} grows {takes}, heads, kv_heads, mlp, and the model has no such axis, only "
        "hidden, ffn. Rename its axes (see jaxgrow.axes)"
    ):
        operator(HIDDEN, {"hidden": 48})
    if not both:
        with raises(f"axis 'layers': {name} grows {axes}"):
            operator(LARGE, {"layers": 10})


@pytest.mark.parametrize("new", [0, 4])
def test_an_axis_without_units_cannot_grow(new):
    for operator in (ops.hypercloning, ops.lemon):
        with raises(f"axis 'mlp': has size 0, so {operator.__name__} cannot grow it to {new}."):
            operator({**LARGE, "mlp": 0}, {"mlp": new})
        assert list(operator({**LARGE, "mlp": 0}, {"embed": 24})) == ["embed"]


@pytest.mark.parametrize(("operator", "target", "wrong"), [
    (ops.hypercloning, {"heads": 6, "mlp": 30},
     "axis 'heads': hypercloning needs a multiple of 4, not 6. For example, use heads=8\n  axis 'mlp'"),
    (ops.staged, {**TWICE, "mlp": 50}, "axis 'mlp': staged needs a multiple of 20, not 50"),
    (ops.staged, {"embed": 36, "heads": 12, "mlp": 60}, "staged must double all of embed, heads, mlp, but the target is"),
    (ops.staged, {"embed": 24, "heads": 8}, "but the target is {'embed': 24, 'heads': 8}"),
    (ops.g_stack, {"layers": 8}, "axis 'layers': g_stack needs a multiple of 5, not 8"),
    (ops.midas, {"layers": 7},
     "axis 'layers': midas adds one block of layers, but 5 layers are not divisible by the block size 2."),
    (ops.midas, {"layers": 11}, "but 5 layers are not divisible by the block size 6"),
    (ops.solar, {"layers": 7},
     "axis 'layers': solar turns 5 layers into 2 (5 - m) - blend layers, and 7 cannot be reached with blend 0 and any m"),
    (ops.solar, {"layers": 12}, "12 cannot be reached with blend 0 and any m"),
    *((partial(ops.solar, blend=blend), {"layers": new}, f"{new} cannot be reached with blend {blend} and any m")
      for new, blend in ((6, 1), (9, 3), (6, -2), (5, 6))),
    *((of, {"layers": 11}, f"{of.__name__} can at most double the 5 layers, but 11 were")
      for of in (ops.mslt, ops.lidas, ops.llama_pro)),
])  # fmt: skip
def test_targets_that_an_operator_cannot_reach(operator, target, wrong):
    with raises(wrong):
        operator(LARGE, target)


# --- merge ---


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("dtype", NARROW)
def test_quantized_leaves_are_merged_only_if_they_are_equal(dtype, xp):
    mlp, zero = quantized(dtype, xp), xp.zeros((3, 1), jnp.dtype(dtype))
    axes = {"up": ("a", "b"), "down": ("c", "d")}
    for merge in (partial(interpolate, alpha=0.3), partial(correct, growth={}, axes=axes)):
        with raises(
            "be averaged; dequantize the leaves, or", f"down: has dtype {dtype}, and is not known"
        ):
            merge(mlp, {**mlp, "down": zero})
        merged = merge(mlp, mlp)
        for name, x in mlp.items():
            assert merged[name].dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(merged[name]), np.asarray(x))
    # float32 has no such number.
    large = {"up": xp.asarray(np.int32(2**24 + 1))}
    assert interpolate(large, large, 0.25)["up"] == 2**24 + 1


# --- arguments of a wrong type ---


@pytest.mark.parametrize("name", sorted({**DEPTH, **ops.WIDTH, **ops.EXPERTS}))
def test_the_size_of_an_axis_is_a_whole_number(name):
    axis = "layers" if name in DEPTH else "experts" if name in ops.EXPERTS else "mlp"
    large, operator = {**LARGE, "experts": 1}, ops.OPERATORS[name]
    says = f"{operator.name}: {{}} has '{axis}': .* the size of an axis must be an integer"
    for size in (6.0, "6", None, True, [6]):
        with pytest.raises(TypeError, match=says.format("target")):
            operator.function(large, {axis: size})
        with pytest.raises(TypeError, match=says.format("sizes")):
            operator.function({**large, axis: size}, {axis: 20})


LISTED = {"mlp": AxisMap(np.ones((4, 3)), np.ones((4, 3)).tolist())}
USES = [lambda g: grow(g, PARAMS, AXES), new_sizes, swap, lambda g: compose(g, g)]
OF_WRONG_TYPES = [
    (lambda: ops.stack(LARGE, 6), r"stack: target is 6 of type int, but must map axis names to sizes"),
    (lambda: ops.stack(GPT2Config(), {"layers": 6}),
     r"stack: sizes is GPT2Config.* config.sizes\(\)|stack: sizes is ... of type GPT2Config"),
    (lambda: ops.coalesce(3, heads="far"), "decoalesce: sizes is 3 of type int"),
    (lambda: ops.prune(LARGE, {"layers": 2.0}, {}), r"prune: target has 'layers': 2\.0 of type float"),
    (lambda: ops.keep_units(None, {}), "keep_units: sizes is None of type NoneType"),
    (lambda: maps.preserves_function({"layers": 6}), "the growth has 6 of type int for the axis 'layers'"),
    *((lambda use=use: use(LISTED), r"'mlp': the read map is of type list, .* Convert it with numpy.asarray")
      for use in USES[:3]),
    *((lambda use=use: use({"mlp": 6}), r"has 6 of type int for the axis 'mlp', but should be Rules or \{")
      for use in USES),
    *((lambda use=use: use(GPT2Config()), r"the growth is of type GPT2Config, but should be Rules or \{")
      for use in USES),
    *((lambda use=use, axes=axes: use(axes), says)
      for use in (lambda axes: grow({"mlp": tile(3, 2)}, PARAMS, axes), lambda axes: sizes(PARAMS, axes))
      for axes, says in ((GPT2Config(), r"axes is of type GPT2Config. Expected a tree .* config.axes\(\)"),
                         (PARAMS, "the leaf 'mlp/bias' of axes is of type ndarray"),
                         ({**AXES, "scale": "head"}, "the leaf 'scale' of axes is of type str"))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), OF_WRONG_TYPES, ids=[s[:20] for _, s in OF_WRONG_TYPES])
def test_arguments_of_a_wrong_type_are_told_what_they_should_be(call, says):
    with pytest.raises(TypeError, match=says):
        call()


# --- settings with a few values ---

DATA = np.ones(1)
TYPOS = [
    (lambda name: LayerDrop(time=name), "time", "pld", "linear"),
    (lambda name: LayerDrop(depth=name), "depth", "linear", "algorithm1"),
    (lambda name: LayerDrop(keep=name), "keep", "published", None),
    (lambda name: LayerDrop(scale=name), "scale", "sublayer", "none"),
    (lambda name: LayerDrop(execution=name), "execution", "cond", "gather"),
    (lambda name: LayerDrop(dropped=name), "dropped", "momentum", "freeze"),
    (lambda name: Sensitivity(kind=name), "kind", "loss_delta", "influence"),
    (lambda name: layer_sensitivity(lambda keep, x: x, 2, DATA, kind=name), "kind", "loss_delta", "loss_delta"),
    (lambda name: scaled(lambda w, x: x, KeepMask(None, DATA, name)), "scaling of KeepMask", "block", "sublayer"),
    (lambda name: Output("new", name), "format", "hf", "orbax"),
    (lambda name: LiGO(depth=name), "depth", "stack", "normalised"),
    (lambda name: LiGO(width=name), "width", "normalised", "zero"),
    (lambda name: ops.lemon(LARGE, {"mlp": 24}, norm=name), "norm", "layer", "rms"),
    (lambda name: ops.lemon(LARGE, {"mlp": 24}, norm=name), "norm", "layer", "unscaled"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "name", "first", "other"), TYPOS)
def test_a_misspelled_value_of_a_setting_is_refused(use, name, first, other):
    for right in (first, other):
        use(right)
    with pytest.raises(ValueError, match=f"^{name} must be '.*', not '{first}_'"):
        use(f"{first}_")
