"""Sharded leaves grow bitwise as on one device and keep their sharding."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded_memory
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgrow.extras.integrations.nnx as of_nnx
from jaxgrow import AxisMap, from_rules, grow, grow_optimizer, operators, sharding, swap
from jaxgrow.growth import _sharded, apply
from jaxgrow.growth.maps import Rule, Rules, repeat, select, tile
from jaxgrow.growth.moments import rebias

AXES = {"w": ("layers", "a.in", "b"), "v": ("a",), "u": ("b", "c"), "free": ("c",)}
SPECS = {"w": P(None, "x", "y"), "v": P(("x", "y")), "u": P("y"), "free": P()}
SIZES = {"layers": 2, "a": 4, "b": 6, "c": 5}
GROWTH = {"layers": select([0, 1, 0], 2), "a": select([0, 1, 2, 3, 1, 3, 3, 0], 4), "b": tile(6, 2)}
TWO = select([*range(30), 3, 4], 30)
HALF = AxisMap(GROWTH["b"].write, repeat(6, 2).read)
GROWTHS = {
    "copies": GROWTH,
    "means and sums": {"a": tile(4, 2), **swap({"b": select([0, 1, 1, 0, 1, 1], 2)})},
    "rules of two terms": Rules((Rule(({"b": HALF}, {"b": GROWTH["b"]}), axes=("b",)),)),
    "a map over two axes": {("b", "c"): AxisMap(TWO.write, TWO.read, ((4, 8), (6, 5)))},
}
modes = pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=str)
growths = pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)


def host(names=("w", "v", "u", "free")):
    rng = np.random.default_rng(0)
    axes = {name: AXES[name] for name in names}
    shapes = {name: [SIZES[n.removesuffix(".in")] for n in axes[name]] for name in names}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, axes


def placed(params, mode):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(mode,) * 2)
    return {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params.items()}


def assert_same(found, expected, like):
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(expected))
    for name, x in found.items():
        assert isinstance(x.sharding, NamedSharding)
        assert x.sharding.is_equivalent_to(like[name].sharding, x.ndim), name
        assert x.sharding.mesh == like[name].sharding.mesh


@modes
@growths
def test_sharded_leaves_grow_to_the_bit_and_keep_their_sharding(mode, growth):
    alone = isinstance(growth, dict) and ("b", "c") in growth
    params, axes = host(("u",) if alone else AXES)
    there = placed(params, mode)
    assert_same(grow(growth, there, axes), grow(growth, params, axes), there)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y")], ids=["none", "a", "b"])
def test_a_sharded_leaf_without_elements_grows(spec):
    where = NamedSharding(jax.make_mesh((2, 2), ("x", "y")), spec)
    there = {"w": jax.device_put(jnp.zeros((0, 6)), where)}
    found = grow({"b": tile(6, 2)}, there, {"w": ("layers", "b")})["w"]
    assert found.shape == (0, 12)
    assert found.sharding.is_equivalent_to(there["w"].sharding, 2)


@modes
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", "int8", "bool"])
def test_values_that_can_only_be_copied_are_sharded_too(mode, dtype):
    params, axes = host(("u", "free"))
    params = {name: (x > 0).astype(jnp.dtype(dtype)) for name, x in params.items()}
    there = placed(params, mode)
    growth = {"b": tile(6, 2), "c": select([0, 1, 2, 3, 4, 1], 5)}
    found, expected = grow(growth, there, axes), grow(growth, params, axes)
    wide = [{name: x.astype(np.float32) for name, x in of.items()} for of in (found, expected)]
    assert_same(*wide, there)
    assert {x.dtype for x in found.values()} == {jnp.dtype(dtype)}


def test_in_a_compiled_function_on_an_explicit_mesh_too():
    params, axes = host()
    there = placed(params, AxisType.Explicit)
    assert_same(jax.jit(lambda p: grow(GROWTH, p, axes))(there), grow(GROWTH, params, axes), there)


@pytest.fixture
def in_small_pieces(monkeypatch):
    """Make `grow` compute results row by row."""
    monkeypatch.setattr(_sharded, "LEAST_BUDGET", 1)
    apply._program.clear_cache()
    yield
    apply._program.clear_cache()


@pytest.mark.usefixtures("in_small_pieces")
@growths
def test_a_result_of_many_pieces_is_the_same(growth):
    test_sharded_leaves_grow_to_the_bit_and_keep_their_sharding(AxisType.Auto, growth)


@pytest.mark.usefixtures("in_small_pieces")
def test_sharded_products_with_many_terms_match_one_device(monkeypatch):
    """A product adds in another order: in float32, up to 1e-5 for numbers of order one."""
    monkeypatch.setattr(_sharded, "MOST_TERMS", 2)
    rng, (params, axes) = np.random.default_rng(2), host()
    shapes = {axis: (2, 2 * SIZES[axis], SIZES[axis]) for axis in "ab"}
    growth = {axis: AxisMap(*rng.normal(size=shape) / 2) for axis, shape in shapes.items()}
    there = placed(params, AxisType.Auto)
    found, expected = jax.device_get((grow(growth, there, axes), grow(growth, params, axes)))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, x in grow(growth, there, axes).items():
        assert x.sharding.is_equivalent_to(there[name].sharding, x.ndim)


def compilations(function) -> int:
    """Count the programs that are compiled while the function runs."""
    seen: list[str] = []

    def note(event, *_, **__):
        seen.append(event) if event.endswith("backend_compile_duration") else None

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return len(seen)


@modes
def test_each_kind_of_leaf_is_compiled_once_and_never_again(mode):
    """Another growth of the same sizes, for example from another seed, compiles nothing new."""
    params, axes = host(("u", "v"))
    params = {name: x[:4, :5] if x.ndim == 2 else x for name, x in params.items()}
    two = {f"{name} {j}": x for name, x in placed(params, mode).items() for j in "pq"}
    every = {f"layer {i}": {name: x + i for name, x in two.items()} for i in range(6)}
    names = {layer: {leaf: axes[leaf[0]] for leaf in leaves} for layer, leaves in every.items()}
    growth = {"a": select([0, 1, 2, 3, 1, 3, 3, 0], 4), "b": tile(4, 2)}
    other = {"a": select([0, 1, 2, 3, 0, 0, 1, 2], 4), "b": repeat(4, 2)}
    tx = optax.scale_by_adam()
    state = tx.init(every)

    def optimizer(growth):
        return grow_optimizer(tx, state, growth, every, names, "exact")

    assert 0 < compilations(partial(grow, growth, every, names)) <= 2
    assert [compilations(partial(grow, g, every, names)) for g in (growth, other)] == [0, 0]
    optimizer(growth)
    assert [compilations(partial(optimizer, g)) for g in (growth, other)] == [0, 0]


@pytest.mark.extra
def test_a_model_of_nnx_and_its_optimizer_compile_once():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def make(size):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(*of, use_bias=False, rngs=rngs) for of in ((4, size), (size, 4))]
        return nnx.Sequential(layers[0], nnx.Dropout(0.1, rngs=rngs), layers[1])

    model, larger = make(6), partial(make, 12)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    rules = {"layers/0/kernel": ("embed.in", "mlp"), "layers/2/kernel": ("mlp.in", "embed")}
    names = from_rules(params, rules)
    nnx.update(model, sharding.shard_params(params, names, mesh, {"mlp": "x", "embed": "y"}))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def both(growth):
        wider = of_nnx.grow_nnx(model, growth, names, larger)
        of_nnx.grow_nnx_optimizer(optimizer, model, growth, names, wider, "exact")

    growths = [operators.fpi({"mlp": 6}, {"mlp": 12}, seed) for seed in (0, 0, 1)]
    assert [compilations(partial(both, growth)) for growth in growths][1:] == [0, 0]


@pytest.mark.extra
@pytest.mark.parametrize(
    "which",
    [("hypercloning", "average"), pytest.param((), marks=pytest.mark.slow, id="every operator")],
)
def test_device_memory_is_bounded_by_one_slice_of_the_source(which):
    """No device holds a complete kernel. Earlier versions took up to 2.5 GB for leaves of 64 MB."""
    run, root = [sys.executable, sharded_memory.__file__, *which], Path(__file__).parents[2]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=root)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(which or sharded_memory.cases())
    for name, leaves in found.items():
        assert all(taken <= allowed for taken, allowed in leaves.values()), (name, leaves)


@modes
def test_learned_maps_act_there_and_have_gradients(mode):
    """Devices sum in another order: in float32, results differ by up to 1e-5 for numbers of order one."""
    params, axes = host(("w", "u"))
    there = placed(params, mode)
    dense = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)

    def total(m, p):
        grown = grow({"b": AxisMap(m, m)}, p, axes)
        return sum(jnp.square(x).sum() for x in jax.tree.leaves(grown))

    both = jax.jit(jax.value_and_grad(total))
    alone = both(jnp.asarray(dense), params)
    found = both(jax.device_put(dense, NamedSharding(there["u"].sharding.mesh, P())), there)
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [pytest.param("exact", marks=pytest.mark.extra), "asymmetric"])
def test_moments_stay_with_their_parameters(policy):
    params, axes = host(("w", "v"))
    there = placed(params, AxisType.Explicit)
    tx = optax.chain(optax.scale_by_adam(), rebias(0.9, 0.99))

    def moments(p):
        adam, clock = tx.init(p)
        adam = adam._replace(mu=p, nu=jax.tree.map(jnp.square, p))
        state = (adam, clock._replace(count=jnp.int32(3)))
        return grow_optimizer(tx, state, GROWTH, p, axes, policy)[0]

    found, expected = moments(there), moments(params)
    assert_same(found.mu, expected.mu, there)
    assert_same(found.nu, expected.nu, there)


@modes
def test_indivisible_sizes_are_reported_with_their_leaf(mode):
    params, axes = host()
    says = (
        r"v: axis 'a' becomes 7, which is not divisible by the 4 devices of its mesh axes x, y.*\n"
        r".*w: axis 'a' becomes 7, which is not divisible by the 2 devices of its mesh axes x"
    )
    with pytest.raises(ValueError, match=says):
        grow({"a": select([0, 1, 2, 3, 1, 2, 0], 4)}, placed(params, mode), axes)


def test_custom_rules_shard_custom_axes_before_and_after_growth():
    """For custom axis names, axes without a rule and indivisible axes are replicated."""
    params, axes = host()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rules = {"a": "x", "b": "y", "c": "x"}  # c has size 5, which is not divisible
    there = sharding.shard_params(params, axes, mesh, rules)
    expected = {"w": P(None, "x", "y"), "v": P("x"), "u": P("y", None), "free": P(None)}
    assert {name: x.sharding.spec for name, x in there.items()} == expected
    assert_same(grow(GROWTH, there, axes), grow(GROWTH, params, axes), there)
    # The control: the rules of the families contain none of these names.
    known = sharding.shard_params(params, axes, mesh)
    assert all(x.sharding.is_fully_replicated for x in known.values())


def test_an_optimizer_state_lies_as_its_parameters_do():
    params, axes = host()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rules = {"a": "x", "b": "y"}
    where = sharding.partition_specs(params, axes, mesh, rules)
    adam = sharding.optimizer_specs(optax.adam(1e-3).init(params), params, axes, mesh, rules)[0]
    assert adam.mu == where and adam.nu == where and adam.count == P()
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    rows = sharding.optimizer_specs(factored.init(params), params, axes, mesh, rules)
    assert set(jax.tree.leaves((rows.v_row, rows.v_col))) == {P()}  # unlike any parameter's shape
    assert rows.v["v"] == where["v"]
