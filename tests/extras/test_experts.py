"""A mixture equals a dense computation of all experts, and upcycling preserves the function.

The tolerance is 1e-12, for float64 numbers of order one. Differences must be visible: above 1e-3.
"""

import itertools
import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrow import checkpoints, grow, sharding
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.models.mixture import Experts, expert_blocks, expert_rows
from jaxgrow.extras.models.upcycling import add_router_noise, as_mixture, redraw_units
from jaxgrow.extras.peft import lora
from jaxgrow.growth.maps import swap
from jaxgrow.models import LlamaConfig
from jaxgrow.operators import coalesce, hypercloning, upcycle, virtual_groups
from train.extras.aot import hlo
from train.extras.aot.roofline import program_kernels
from train.state.mesh import Mesh, batch_sharding
from train.step.parallel import mapped, over_mesh

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE, VISIBLE = 1e-12, 1e-3
D, F, E, X = 6, 8, 4, 2
TWICE = {"embed": 2 * D, "heads": 8, "kv_heads": 4, "mlp": 2 * F}


def config(**other) -> LlamaConfig:
    sizes = dict(layers=2, heads=4, kv_heads=2, embed=D, mlp=F, vocab=11, context=7, head_dim=4)
    return LlamaConfig(**{**sizes, "dtype": "float64", **other})


def logits(c: LlamaConfig, params) -> np.ndarray:
    return np.asarray(tiny.forward(c)(params, tiny.tokens()))


@pytest.fixture(scope="module")
def dense():
    c = config()
    params = tiny.params(c)
    with jax.enable_x64(True):
        return c, params, logits(c, params)


def module(normed=True, balance=0.0, mlp=F, capacity=0.0, z_loss=0.0, experts=E) -> Experts:
    init, silu = jax.nn.initializers.zeros, jax.nn.silu
    own = D, mlp, init, init, jnp.float64, silu, capacity, z_loss
    return Experts(experts, X, normed, balance, *own)


def weights() -> dict:
    rng = np.random.default_rng(0)
    shapes = {"router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    return {name: {"kernel": rng.normal(size=shape)} for name, shape in shapes.items()}


def every_expert(w, x, normed, balance, most=None):
    """Compute all experts, of at most ``most`` tokens each, and the load-balancing loss."""
    probs = jax.nn.softmax(x @ w["router"]["kernel"])
    least = jnp.sort(probs, -1)[..., -X, None]
    gates = jnp.where(probs >= least, probs, 0)
    share = (gates > 0).mean((0, 1)) / X
    gates = gates / gates.sum(-1, keepdims=True) if normed else gates
    if most is not None:
        number = jnp.cumsum((gates > 0).reshape(-1, E), 0).reshape(gates.shape)
        gates = jnp.where(number <= most, gates, 0)
    gate, up = (jnp.einsum("btd,edf->btef", x, w[name]["kernel"]) for name in ("gate", "up"))
    h = jax.nn.silu(gate) * up
    y = jnp.einsum("btef,efd,bte->btd", h, w["down"]["kernel"], gates)
    return y, balance * E * (share * probs.mean((0, 1))).sum()


def test_blocks_hold_any_number_of_tokens_of_each_expert():
    """Their number is that of the worst case, rounded up to a multiple of the rounds."""
    rng = np.random.default_rng(0)
    for assignments, experts in itertools.product((1, 2, 7, 32, 1000, 5000), (1, 4, 9)):
        count, size, rounds = expert_blocks(assignments, experts)
        each = min(assignments, experts)
        most = np.array([1] * each + [0] * (experts - each))
        most[0] += assignments - each
        drawn = [rng.multinomial(assignments, rng.dirichlet(np.ones(experts))) for _ in range(50)]
        needed = max((-(-counts // size)).sum() for counts in (*drawn, most))
        assert needed == (-(-most // size)).sum() <= count < needed + rounds and count % rounds == 0
        room = 1.5 * assignments + experts if rounds == 1 else 1.07 * assignments
        assert assignments <= count * size <= room


@pytest.mark.parametrize("tokens", [4096, 8192, 65536])
@pytest.mark.parametrize(("experts", "active"), [(8, 2), (128, 8)], ids=["Mixtral", "Qwen3-MoE"])
def test_padding_rows_are_below_five_percent_at_public_shapes(experts, active, tokens):
    """A round copies at most one kernel for each expert."""
    shape = expert_blocks(tokens * active, experts)
    assert 0 < 1 - tokens * active / shape.rows < 0.05
    assert shape.number / shape.rounds <= experts
    assert expert_rows(tokens * active, experts, capacity=1.0) == tokens * active


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("capacity", [0.0, 0.75, 4.0])
def test_output_and_gradient_are_those_of_the_first_tokens_of_each_expert(capacity, normed):
    """Without a capacity, or with room for all tokens, no token is dropped."""
    w, x = weights(), np.random.default_rng(1).normal(size=(2, 300, D))
    most = math.ceil(capacity * 600 * X / E) if capacity else None
    assert capacity or expert_blocks(600 * X, E).rounds > 1

    def expected(w, x):
        y, extra = every_expert(w, x, normed, 0.1, most)
        return jnp.square(y).sum() + extra, y

    def found(w, x):
        y = module(normed, 0.1, capacity=capacity).apply({"params": w}, x)
        return jnp.square(y).sum(), y

    (gradients, y), (own, own_y) = (
        jax.jit(jax.grad(f, (0, 1), has_aux=True))(w, x) for f in (found, expected)
    )
    np.testing.assert_allclose(y, own_y, rtol=0, atol=1e-10)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-8), gradients, own)
    whole, _ = every_expert(w, x, normed, 0.0)
    assert (np.abs(y - whole).max() > VISIBLE) == (0 < capacity < 2)


def test_the_z_loss_adds_its_gradient_and_leaves_the_output():
    w, x = weights(), jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, D)))

    def gradient(z_loss):
        layer = module(z_loss=z_loss)
        return jax.jit(jax.grad(lambda w: jnp.square(layer.apply({"params": w}, x)).sum()))(w)

    def z(router):
        return 0.3 * jnp.square(jax.nn.logsumexp(x @ router, -1)).mean()

    found, without = gradient(0.3), gradient(0.0)
    expected = without["router"]["kernel"] + jax.grad(z)(w["router"]["kernel"])
    np.testing.assert_allclose(found.pop("router")["kernel"], expected, rtol=1e-9, atol=1e-9)
    assert np.abs(expected - without.pop("router")["kernel"]).max() > VISIBLE
    assert tiny.distance(found, without) < TOLERANCE


def test_no_token_is_lost_if_all_choose_the_same_experts():
    w, x = weights(), np.random.default_rng(1).normal(size=(2, 9, D))
    w["router"]["kernel"][0] += [0, 90, 0, 60]
    x[..., 0] = 1
    y, _ = every_expert(w, x, True, 0.0)
    np.testing.assert_allclose(jax.jit(module().apply)({"params": w}, x), y, rtol=0, atol=1e-10)


def test_a_lora_of_an_mlp_becomes_that_of_its_expert():
    c = LlamaConfig(layers=2, embed=4, heads=1, kv_heads=1, head_dim=4, mlp=8, vocab=5, context=8)
    params = c.init(jax.random.key(0))
    for kernel in params["blocks"]["mlp"].values():
        layers, inputs, outputs = kernel["kernel"].shape
        kernel |= {"a": jnp.ones((layers, inputs, 2)), "b": jnp.ones((layers, 2, outputs))}
    one, mixture = as_mixture(c, params)
    assert set(mixture["blocks"]["mlp"]["down"]) == {"kernel", "a", "b"}
    tokens = jnp.arange(5)[None]
    expected = c.module.apply({"params": params}, tokens)
    found = one.module.apply({"params": mixture}, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_one_expert_is_the_dense_model(dense):
    c, params, expected = dense
    one, mixture = as_mixture(c, params)
    np.testing.assert_allclose(logits(one, mixture), expected, rtol=0, atol=TOLERANCE)
    assert jax.tree.map(np.shape, mixture) == jax.tree.map(np.shape, tiny.params(one))
    with pytest.raises(ValueError, match="this model has 1 experts already"):
        as_mixture(one, mixture)


def test_upcycling_keeps_the_function_whatever_the_router_says(dense):
    c, params, expected = dense
    one, mixture = as_mixture(c, params)
    axes, growth = tiny.axes(one), upcycle(one.sizes(), {"experts": E})
    large = replace(one.resized(growth), active=X)
    grown = add_router_noise(grow(growth, mixture, axes), axes, seed=1, scale=0.5)
    np.testing.assert_allclose(logits(large, grown), expected, rtol=0, atol=TOLERANCE)
    # Gates that do not add up to one lose part of the output.
    assert np.abs(logits(replace(large, gates_normed=False), grown) - expected).max() > VISIBLE
    # Redrawing part of the units makes the experts differ, and it redraws exactly that part.
    drop = redraw_units(grown, axes, 0.5, seed=2)
    assert np.abs(logits(large, drop) - expected).max() > VISIBLE
    up, new = (p["blocks"]["mlp"]["up"]["kernel"] for p in (grown, drop))
    down, less = (p["blocks"]["mlp"]["down"]["kernel"] for p in (grown, drop))
    changed = (up != new).all(2)
    assert (changed.sum(-1) == F // 2).all() and (changed == (down != less).all(3)).all()
    # The redrawn units differ between experts and layers.
    assert len({tuple(row) for row in np.asarray(changed).reshape(-1, F)}) > E


def test_finer_experts_are_exact_if_groups_stay_together(dense):
    c, params, expected = dense
    one, mixture = as_mixture(c, params)
    axes, growth = tiny.axes(one), virtual_groups(one.sizes(), {"experts": 8, "mlp": F // 2})
    grown = grow(growth, mixture, axes)
    for active in (2, 4):
        large = replace(one.resized(growth), active=active)
        assert (large.experts, large.mlp) == (8, F // 2)
        found = logits(large, add_router_noise(grown, axes, 1, 0.5, group=2))
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert large.cost(7).layer < 2.2 * c.cost(7).layer  # twice the units and a router
    assert np.abs(logits(large, add_router_noise(grown, axes, 1, 0.5)) - expected).max() > VISIBLE
    message = r"8 experts of 3 units\. For example, use mlp=4 and experts=8"
    with pytest.raises(ValueError, match=message):
        virtual_groups(one.sizes(), {"experts": 8, "mlp": 3})


def test_more_experts_are_exact_with_proportionally_more_active():
    c = config(experts=E, active=X)
    params, growth = tiny.params(c), upcycle(c.sizes(), {"experts": 2 * E})
    expected, grown = logits(c, params), grow(growth, params, tiny.axes(c))
    large = c.resized(growth)
    found = logits(replace(large, active=2 * X), grown)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(logits(large, grown) - expected).max() > VISIBLE


# --- LoRA, separate for every expert ---


BESIDE = lora.LoRA(rank=3, alpha=5.0, targets=("*/attention/query", "*/mlp/*"))


def adapted(c: LlamaConfig):
    """Return ``(parameters, a trained adapter)``."""
    axes, rng = tiny.axes(c), np.random.default_rng(3)
    fresh = jax.eval_shape(lambda: lora.init_lora(BESIDE, axes, c.sizes(), jax.random.key(0)))
    return tiny.params(c), jax.tree.map(lambda x: rng.normal(size=x.shape) / 2, fresh)


def test_lora_on_experts_and_router_equals_the_merged_model():
    c = config(experts=E)
    params, trained = adapted(c)
    up = trained["blocks"]["mlp"]["up"]
    assert up["a"].shape == (2, E, D, 3) and up["b"].shape == (2, E, 3, F)
    merged = lora.merge_lora(params, trained, BESIDE)
    product = BESIDE.scale * up["a"][1, 2] @ up["b"][1, 2]
    moved = (np.asarray(m["blocks"]["mlp"]["up"]["kernel"]) for m in (merged, params))
    np.testing.assert_allclose(np.subtract(*moved)[1, 2], product, rtol=0, atol=TOLERANCE)
    # Test one at a time, because a change of routing would hide the change of experts.
    for part in ("router", "down"):
        alone = jax.tree.map(np.zeros_like, trained)
        alone["blocks"]["mlp"][part] = trained["blocks"]["mlp"][part]
        by_two = logits(c, lora.attach_lora(params, alone, BESIDE))
        both = logits(c, lora.merge_lora(params, alone, BESIDE))
        np.testing.assert_allclose(by_two, both, rtol=0, atol=1e-10)
        assert np.abs(by_two - logits(c, params)).max() > VISIBLE


@pytest.mark.parametrize("growth_of", [
    lambda sizes: hypercloning(sizes, TWICE),
    lambda sizes: upcycle(sizes, {"experts": 2 * E}),
    lambda sizes: coalesce(sizes, layers="adjacent"),
    lambda sizes: swap(upcycle({**sizes, "experts": E // 2}, {"experts": E})),
], ids=["hypercloning", "upcycle", "coalesce, layers", "back from upcycle"])  # fmt: skip
def test_a_lora_of_experts_grows_with_them(growth_of):
    c = config(experts=E)
    (params, trained), axes, growth = adapted(c), tiny.axes(c), growth_of(c.sizes())
    own = lora.lora_growth(growth, BESIDE, axes)
    adapter = grow(own, trained, lora.lora_axes(BESIDE, axes))
    grown_first = lora.merge_lora(grow(growth, params, axes), adapter, BESIDE.resized(own))
    merged_first = grow(growth, lora.merge_lora(params, trained, BESIDE), axes)
    assert tiny.distance(grown_first, merged_first) < TOLERANCE


# --- on several devices ---

AXES = {"router": ("embed.in", "experts"), "down": ("experts", "mlp.in", "embed")}
AXES |= dict.fromkeys(("gate", "up"), ("experts", "embed.in", "mlp"))
meshes = pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(1, 2, 2)], ids=["data", "tensor"])


def mean_square(given, x, of):
    """Return the mean square of the experts' outputs of a sample, summed over its tokens."""
    return jnp.square(of.apply({"params": given}, x)).sum((1, 2)).mean()


@cache
def program(mesh: Mesh, devices=4, samples=8, length=5, rank=0, experts=E, mlp=F, **settings):
    """Compile ``(value, gradients)`` of `mean_square`, with a LoRA for each kernel if it has a rank.

    Returns the program and its inputs, sharded on the mesh.
    """
    rng, sizes = np.random.default_rng(0), dict(experts=experts, embed=D, mlp=mlp, rank=rank)
    axes = {name: {"kernel": a} for name, a in AXES.items()}
    for own in axes.values() if rank else ():
        *stacked, read, written = own["kernel"]
        own.update(a=(*stacked, read, "rank"), b=(*stacked, "rank.in", written))
    given = {
        name: {
            leaf: rng.normal(size=[sizes[a.removesuffix(".in")] for a in of]) / 2
            for leaf, of in own.items()
        }
        for name, own in axes.items()
    }
    over, x = mesh.over(jax.devices()[:devices]), rng.normal(size=(8, length, D))[:samples]
    given, x = sharding.shard_params(given, axes, over), jax.device_put(x, batch_sharding(over))
    loss = partial(mean_square, of=module(True, mlp=mlp, experts=experts, **settings))

    def make(axis):
        def of_its_part(given, x):
            found = jax.value_and_grad(loss)(given, x)
            return found if axis is None else jax.lax.pmean(found, axis)

        return of_its_part

    with jax.set_mesh(over):
        return over_mesh(make, over).lower(given, x).compile(), given, x


of_experts = partial(program, rank=3, balance=5.0)


@meshes
def test_numbers_and_gradients_are_those_of_one_device(mesh):
    """Routes, gates and the load balance use the samples of all devices, also with a LoRA."""
    (run, given, x), (one, *whole) = of_experts(mesh), of_experts(Mesh(), 1)
    expected = one(*whole)
    assert tiny.distance(run(given, x), expected) < 1e-10
    # The control: other routes give other numbers.
    router = jax.tree.map(lambda a: jax.device_put(-a, a.sharding), given["router"])
    other = {**given, "router": router}
    assert tiny.distance(run(other, x), expected) > VISIBLE


def test_balance_loss_is_not_the_mean_over_batch_parts():
    """The control: the balance loss of each device has another gradient."""
    (run, given, x), (of_half, *_) = (of_experts(Mesh(), 1, samples) for samples in (8, 4))
    halves = [of_half(given, jax.device_put(half, x.sharding)) for half in (x[:4], x[4:])]
    (value, whole), (mean, parts) = run(given, x), jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    assert tiny.distance(whole.pop("router"), parts.pop("router")) > VISIBLE
    assert tiny.distance((value, whole), (mean, parts)) < 1e-10


@meshes
def test_four_devices_split_the_work_and_samples_do_not_move(mesh):
    (run, given, x), (one, *_) = (
        of_experts(*to, length=256, mlp=32) for to in ((mesh,), (Mesh(), 1))
    )
    quarter, whole = (
        sum(k.flops * k.times for k in program_kernels(program.as_text())) for program in (run, one)
    )
    assert 0.95 * whole / 4 < quarter < 1.1 * whole / 4
    moved = hlo.program_collectives(run.as_text(), 4)
    over_fsdp = [c.size for c in moved if c.kind != "all-reduce"]
    assert 0 < max(over_fsdp) <= max(a.nbytes for a in jax.tree.leaves(given)) < x.nbytes / 8


@pytest.mark.slow
def test_pmap_gives_the_same_numbers():
    """The balance loss uses the samples of all devices here as well."""
    one, given, x = of_experts(Mesh(), 1)
    loss = partial(mean_square, of=module(balance=5.0))

    def make(axis):
        return lambda given, x: jax.lax.pmean(jax.value_and_grad(loss)(given, x), axis)

    found = mapped(make, "pmap", Mesh().over(jax.devices(), "pmap"))(given, np.asarray(x))
    assert tiny.distance(found, one(given, x)) < 1e-10


# --- expert parallelism: each device has some of the experts, and devices exchange tokens ---

in_parallel = partial(program, experts=8, balance=0.5, z_loss=0.1)


@pytest.mark.parametrize("mesh", [
    Mesh(expert=4), Mesh(fsdp=2, expert=2), Mesh(expert=2, tensor=2), Mesh(2, expert=2),
], ids=["expert", "fsdp and expert", "expert and tensor", "data and expert"])  # fmt: skip
def test_expert_parallelism_matches_one_device(mesh):
    """Tokens are exchanged there and back, and once in the backward pass."""
    run, given, x = in_parallel(mesh, capacity=8.0)
    one, *whole = in_parallel(Mesh(), 1)
    assert tiny.distance(run(given, x), one(*whole)) < 1e-10
    kernel = given["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape[0] == 8 // mesh.expert
    moved = hlo.program_collectives(run.as_text(), 4)
    assert sum(c.kind == "all-to-all" for c in moved) == 3
    gathered = [c.size for c in moved if c.kind == "all-gather"]
    # No device ever holds all experts.
    assert max(gathered, default=0) <= kernel.nbytes / mesh.expert


def test_each_device_drops_tokens_of_its_own():
    """The result equals a separate expert layer per device with that capacity for its tokens."""
    run, given, x = in_parallel(Mesh(expert=4), capacity=1.0)
    w, x = jax.tree.map(jnp.asarray, jax.device_get((given, x)))
    of = module(capacity=1.0, experts=8)
    alone = jax.jit(lambda part: jnp.square(of.apply({"params": w}, part)).sum())
    parts = [alone(part) for part in jnp.split(x, 4)]
    assert float(run(given, x)[0]) == pytest.approx(float(sum(parts)) / 8, rel=1e-12)


def test_what_expert_parallelism_needs_is_named():
    message = r"over 'expert', which needs a capacity .* set it, for example to 1.25"
    with pytest.raises(ValueError, match=message):
        in_parallel(Mesh(expert=4))
    message = "6 experts are not divisible by the 4 devices of the mesh axis 'expert'"
    with pytest.raises(ValueError, match=message):
        in_parallel(Mesh(expert=4), capacity=1.5, experts=6)


def test_a_capacity_does_not_matter_to_a_checkpoint(tmp_path):
    """The capacity is a runtime setting, so checkpoints for other software do not contain it."""
    c = config(experts=E, capacity=1.25, z_loss=0.001)
    checkpoints.save(tmp_path / "mixtral", c, tiny.params(c))
    loaded, _ = checkpoints.load(tmp_path / "mixtral")
    assert loaded.run_as(c) == c and not loaded.capacity


def test_settings_that_no_mixture_has():
    c, mine = config(experts=E), lora.LoRA(targets=("*/mlp/up",))
    factors = lora.init_lora(mine, tiny.axes(c), c.sizes(), jax.random.key(0))
    message = "blocks/mlp/up: the layers of MixtralForCausalLM do not have such a kernel"
    with pytest.raises(CheckpointError, match=message):
        peft.write_peft("nowhere", peft.PeftAdapter(c, mine, factors))
    message = "experts=1 needs gated=True, bias=False and active between 1 and experts"
    with pytest.raises(ValueError, match=message):
        config(experts=1)
    message = "only experts use capacity, clamp, but experts is 0: set experts"
    with pytest.raises(ValueError, match=message):
        config(capacity=1.25, clamp=7.0)
    assert c.sizes()["experts"] == E
