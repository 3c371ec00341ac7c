"""The training step, by pmap or on a mesh, equals plain full-batch training on one device."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import LlamaConfig, modules, norms
from train import pretrain
from train.data.windows import next_tokens
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.state.mesh import AXIS, Mesh, put, rows
from train.state.model import TrainState, logits, loss, scores, shardings
from train.state.optim import Optim, transformation
from train.state.packing import packed
from train.step import programs, step
from train.step.parallel import mapped, over_mesh
from train.step.step import StepInputs, eval_step, packed_step, train_step

LR = np.float32(0.5)
TOKENS = np.random.default_rng(0).integers(0, 256, (16, 9)).astype(np.int32)
BATCH = next_tokens(TOKENS)
LLAMA = LlamaConfig(
    vocab=256, context=8, layers=2, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=24
)
# The loss that balances experts is computed for each micro-batch, so it has no full-batch value.
MIXTURE = replace(LLAMA, experts=2, active=1, balance=0.0)


@partial(jax.jit, static_argnums=2)
@jax.value_and_grad
def first(params, tokens, model):
    return loss(TrainState(params, None, model), tokens)


@cache
def reference(tx, steps: int, model=runs.MODEL):
    """Train with full batches on one device; only the loss comes from `train.step.step`."""
    params = runs.fresh(model)
    tx, state = optax.with_extra_args_support(tx), tx.init(params)
    update = jax.jit(partial(tx.update, axes=model.axes()))
    for _ in range(steps):
        value, grads = first(params, BATCH, model)
        updates, state = update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - LR * u, params, jax.device_get(updates))
    squares = [np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(jax.device_get(grads))]
    return params, state, {"loss": float(value), "grad_norm": np.sqrt(sum(squares))}


def assert_three_steps(run, at, model=runs.MODEL):
    """Check three steps of plain gradient descent against `reference`; return the model.

    Plain gradient descent depends on the scale of the gradient, Adam does not. So this finds a sum
    over 4 devices in place of a mean.
    """
    params, _, expected = reference(optax.identity(), 3, model)
    for _ in range(3):
        at, metrics = run(at, BATCH, StepInputs(LR))
    # The tolerance covers float32 sums in a different order. A gradient wrong by a factor of 4
    # differs in the first digit.
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(expected, rel=1e-5)
    found, params = jax.device_get((at.params, params))
    chex.assert_trees_all_close(found, params, rtol=1e-4, atol=1e-6)
    return at


@pytest.mark.parametrize(("how", "accumulate"), [
    pytest.param("pmap", 1, marks=pytest.mark.extra),
    pytest.param("pmap", 4, marks=pytest.mark.slow),
    pytest.param("mesh", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_devices_and_micro_batches_equal_one_batch(how, accumulate):
    tx = optax.identity()
    run = mapped(partial(train_step, tx, accumulate), how, runs.mesh())
    assert_three_steps(run, runs.model(runs.MODEL, tx))


@pytest.mark.parametrize(("mesh", "model", "options"), [
    pytest.param(Mesh(context=4), runs.MODEL, {}, id="context"),
    pytest.param(Mesh(fsdp=4), runs.MODEL, {"once": True}, id="added once"),
    pytest.param(Mesh(context=4), MIXTURE, {}, id="mixture", marks=pytest.mark.extra),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (Mesh(2, 2), runs.MODEL, {"once": True}),
            (Mesh(1, 2, context=2), MIXTURE, {}),
            (Mesh(replica=2, fsdp=2), runs.MODEL, {}),
        )
    ),
], ids=str)  # fmt: skip
def test_every_axis_of_a_mesh_equals_one_full_batch(mesh, model, options):
    """Train three steps; gradients are added once, sequences sharded, or models replicated."""
    tx, devices = optax.identity(), mesh.over(jax.devices())
    run, at = mapped(partial(train_step, tx, 2, **options), "mesh", devices), runs.model(model, tx)
    found = assert_three_steps(run, jax.device_put(at, shardings(at, devices)), model)
    if options:
        kernel = found.params["blocks"]["mlp"]["up"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape)[1] == kernel.shape[1] // mesh.fsdp


@pytest.mark.parametrize(("model", "mesh", "platform"), [
    pytest.param(runs.MODEL, Mesh(context=4), "cpu", id="gpt2-cpu"),
    pytest.param(LLAMA, Mesh(fsdp=2, context=2), "gpu", id="llama-gpu-fsdp", marks=pytest.mark.extra),
    pytest.param(MIXTURE, Mesh(context=4), "gpu", id="mixture-gpu", marks=pytest.mark.slow),
])  # fmt: skip
def test_sharded_sequences_are_never_gathered(monkeypatch, model, mesh, platform):
    """Look at the compiled step: if it gathered them, each device would compute all positions.

    The code for GPUs is compiled for CPUs here.
    """
    for module in (modules, norms):
        monkeypatch.setattr(module, "current_platform", lambda: platform)
    devices, at = mesh.over(jax.devices()), runs.model(model, optax.identity())
    at = jax.device_put(at, shardings(at, devices))
    program = over_mesh(partial(train_step, optax.identity(), 1), devices)
    with jax.set_mesh(devices):
        compiled = program.lower(at, put(BATCH, devices), StepInputs(LR)).compile().as_text()
    samples, positions = jax.tree.leaves(BATCH)[0].shape
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", compiled)
    whole = f"{samples // mesh.fsdp},{positions}"
    assert not [size for size in gathered if size.startswith(whole)]
    assert "collective-permute" in compiled  # ring attention


def test_replicas_are_whole_hosts(monkeypatch):
    # two devices on each of four hosts
    devices = [SimpleNamespace(id=i, process_index=i % 4, platform="gpu") for i in range(8)]
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, names, **_: devices)
    found: Any = Mesh(replica=2, fsdp=4).over(devices)
    assert [sorted({d.process_index for d in g.flat}) for g in found] == [[0, 1], [2, 3]]
    says = r"mesh\.replica=8 would split the devices of a host: the number of hosts \(4\)"
    with pytest.raises(ValueError, match=says):
        Mesh(replica=8).over(devices)


def _chip(at: tuple[int, int, int], number: int = 0) -> SimpleNamespace:
    """Return a device of a TPU v5p at the coordinates ``at`` of the slice ``number``."""
    process = 32 * number + at[2] * 4 + at[1] // 2 * 2 + at[0] // 2
    kind = {"platform": "tpu", "device_kind": "TPU v5p", "core_on_chip": 0}
    return SimpleNamespace(**kind, coords=at, slice_index=number, process_index=process)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("mesh", [Mesh(fsdp=16, tensor=4), Mesh(fsdp=4, tensor=4), Mesh(fsdp=4)])
def test_axes_follow_the_torus_of_each_tpu_slice(monkeypatch, mesh, slices):
    """Neighbours along an inner axis are of one slice and, for a side of the torus, linked.

    In the order of `jax.devices`, in which the four chips of a host are adjacent, neighbours along
    ``tensor`` or ``fsdp`` are up to five links apart.
    """
    torus = sorted(itertools.product(range(4), repeat=3), key=lambda at: _chip(at).process_index)
    devices = [_chip(at, number) for number in range(slices) for at in torus]
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, names, **_: devices)
    found: Any = mesh.over(devices)
    of = [{(*d.coords, d.slice_index) for d in some} for some in (found.flat, devices)]
    assert of[0] == of[1]
    for axis, size in ((1, mesh.fsdp), (2, mesh.tensor)):
        for group in np.moveaxis(found, axis, -1).reshape(-1, size):
            assert len({d.slice_index for d in group}) == 1
            places = np.array([d.coords for d in group])
            apart = np.abs(places - np.roll(places, -1, axis=0))
            links = np.minimum(apart, 4 - apart).sum(-1)
            # 16 devices are a square, which has more links than a line.
            assert links.max() <= {1: 0, 4: 1, 16: 2}[size]


def test_gradients_are_added_once_in_float32_or_per_layer():
    """Test two layers and two micro-batches in bfloat16."""
    tx, mesh, text = optax.identity(), Mesh(fsdp=4).over(jax.devices()), {}
    at = runs.model(replace(runs.MODEL, dtype="bfloat16"), tx)
    at = jax.device_put(at, shardings(at, mesh))
    for once in (True, False):
        program = over_mesh(partial(train_step, tx, 2, once=once), mesh)
        with jax.set_mesh(mesh):
            text[once] = str(program.trace(at, put(BATCH, mesh), StepInputs(LR)).jaxpr)
    # Without ``once``, XLA inserts the reduction, so the jaxpr does not contain it.
    assert "reduce_scatter" in text[True] and "reduce_scatter" not in text[False]
    assert not re.search(r"bf16\[[^]]*\] = reduce_scatter", text[True])


@pytest.mark.parametrize("how", ["mesh", pytest.param("pmap", marks=pytest.mark.slow)])
def test_adam_clips_the_gradient_of_the_full_batch(how):
    # large eps, because Adam amplifies rounding where gradients vanish
    tx = transformation(Optim(clip=0.1, eps=1e-3))
    params, state, _ = reference(tx, steps=3)
    run = mapped(partial(train_step, tx, 2), how, runs.mesh(), donate=True)
    found = runs.model(runs.MODEL, tx)
    for _ in range(3):
        found, _ = run(found, BATCH, StepInputs(LR))
    found, expected = jax.device_get(((found.params, found.opt), (params, state)))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [pytest.param("pmap", marks=pytest.mark.slow), "mesh"])
def test_validation_is_the_mean_over_the_whole_batch(how):
    at = replace(runs.model(runs.MODEL, optax.identity()), opt=None)
    said = jax.jit(logits)(at, BATCH[0]).argmax(-1)
    # the model selects three of eight
    targets = np.where(np.arange(8) % 3 == 0, said, (said + 1) % 256).astype(np.int32)
    batch = BATCH[0], targets
    found = mapped(partial(eval_step, 1), how, runs.mesh())(at, batch)
    assert float(found["val_loss"]) == pytest.approx(float(jax.jit(loss)(at, batch)), rel=1e-6)
    assert float(found["val_accuracy"]) == pytest.approx(3 / 8)


def test_the_loss_is_the_cross_entropy_of_the_next_token():
    at = replace(runs.model(runs.MODEL, optax.identity()), opt=None)
    found = np.asarray(jax.jit(logits)(at, BATCH[0]), np.float64)
    p = np.exp(found) / np.exp(found).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, TOKENS[:, 1:, None], -1)).mean()
    assert float(jax.jit(loss)(at, BATCH)) == pytest.approx(expected, rel=1e-6)


def test_a_batch_that_devices_cannot_share_is_refused():
    assert rows(8, runs.mesh()).tolist() == list(range(8))
    says = "a batch of 6 is not divisible by 4 devices; use a multiple of 4"
    with pytest.raises(ValueError, match=says):
        rows(6, runs.mesh())


def test_the_step_is_pure_and_never_calls_the_host():
    tx = transformation(Optim())
    step = jax.make_jaxpr(train_step(tx, 2, axis=AXIS), axis_env=[(AXIS, 4)])
    jaxpr = step(runs.model(runs.MODEL, tx), next_tokens(TOKENS[:4]), StepInputs(LR))
    # the mean over devices
    assert {type(effect).__name__ for effect in jaxpr.effects} == {"NamedAxisEffect"}
    assert "callback" not in str(jaxpr)


def test_steps_pack_all_scalars_of_the_optimizer_state():
    tx = transformation(Optim())
    at = jax.device_get(runs.model(runs.MODEL, tx))
    state, scalars = packed(at), [x for x in jax.tree.leaves(at) if not x.shape]
    assert len(scalars) == 22  # two counters, and the start step of each of the 20 parameters
    assert {name: x.shape for name, x in state.scalars.items()} == {"int32": (22,)}
    jaxpr = jax.make_jaxpr(packed_step(tx, 1))(state, BATCH, StepInputs(LR))
    assert sum(not x.shape for x in jaxpr.in_avals) == 3  # learning rate, number and seed
    assert sum(not x.shape for x in jaxpr.out_avals) == 2  # loss and norm of the gradient
    plain, run = jax.jit(train_step(tx, 1)), jax.jit(packed_step(tx, 1))
    for _ in range(2):
        at, metrics = plain(at, BATCH, StepInputs(LR))
        state, also = run(state, BATCH, StepInputs(LR))
    chex.assert_trees_all_equal(*jax.device_get(((at, metrics), (state.model, also))))


# --- in the loop ---


@pytest.mark.parametrize("how", ["mesh", pytest.param("pmap", marks=pytest.mark.slow)])
def test_one_trace_and_one_compilation_for_each_shape_of_model(tmp_path, monkeypatch, caplog, how):
    traces, compiled = Counter(), []

    def counted(model, batch, **passes):
        traces[model.config.layers, model.opt is None] += 1
        return scores(model, batch, **passes)

    def noting(function, how, mesh, *, donate=False):
        run = mapped(function, how, mesh, donate=donate)

        def train(*arguments):
            caplog.clear()
            with jax.log_compiles():
                result = run(*arguments)
            compiled.append(sum(r.message.startswith("Compiling") for r in caplog.records))
            return result

        return train if donate else run

    monkeypatch.setattr(step, "scores", counted)
    monkeypatch.setattr(programs, "mapped", noting)
    with runs.compiling("step", "evaluation"):  # other tests must not use the patched programs
        pretrain.run_experiment(
            runs.experiment(tmp_path, method=runs.VCYCLE, parallel=how), tmp_path / "run"
        )
    # 2 steps of the large model, 4 of the small model, then 4 of the large model, whose compiled
    # programs are still cached.
    assert compiled == [1, 0, *[1, 0, 0, 0], *[0, 0, 0, 0]]
    assert traces == {(layers, validated): 1 for layers in (1, 2) for validated in (False, True)}


class Watched:
    """Wrap a device metric and record when the host reads it."""

    def __init__(self, value, note):
        self.value, self.note = value, note

    def __float__(self):
        self.note()
        return float(self.value)


def test_the_host_reads_metrics_after_later_dispatches(tmp_path, monkeypatch):
    events, step = [], programs.step

    def watching(*of):
        run = step(*of)

        def train(*arguments):
            number = sum(kind == "sent" for kind, _ in events) + 1
            events.append(("sent", number))
            result, metrics = run(*arguments)
            return result, {
                k: Watched(v, lambda: events.append(("read", number))) for k, v in metrics.items()
            }

        return train

    monkeypatch.setattr(programs, "step", watching)
    changes = {"steps": 8, "log_every": 2, "eval_every": 8, "checkpoint_every": 8}
    pretrain.run_experiment(runs.experiment(tmp_path, **changes), tmp_path / "run")
    found = [f"{kind} {number}" for kind, number in dict.fromkeys(events)]
    sent = [f"sent {number}" for number in range(1, 9)]
    assert found == [*sent[:4], "read 2", *sent[4:6], "read 4", *sent[6:], "read 6", "read 8"]


# --- shared by runs ---


def compilations(experiment, folder) -> int:
    """Count the programs that XLA compiles during a run."""
    seen = []

    def note(event, seconds, **_):
        seen.append(event) if event.endswith("backend_compile_duration") else None

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        pretrain.run_experiment(experiment, folder)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return len(seen)


@pytest.mark.slow
def test_a_copy_of_a_run_in_the_same_process_compiles_nothing(tmp_path):
    """The run uses layer dropping, so it needs every kind of program.

    These are initialisation, dense steps, steps with dropped layers, sampling, measurement of the
    layer sensitivities, and evaluation.
    """
    drop = LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2))
    once = runs.experiment(tmp_path, method=Scratch((DropLayers(drop),)))
    with runs.compiling():
        assert compilations(once, tmp_path / "one") > 10  # control: the counter works
        assert compilations(replace(once, name="again"), tmp_path / "two") == 0
    runs.assert_same_end(tmp_path / "two", tmp_path / "one")
    results = (tmp_path / name / "result.json" for name in ("one", "two"))
    one, two = (json.loads(path.read_text())["compile_seconds"] for path in results)
    assert one > 10 * two


def test_runs_that_differ_in_numbers_share_programs(tmp_path):
    once = runs.experiment(tmp_path)
    pretrain.run_experiment(once, tmp_path / "one")
    optim = replace(once.optim, peak_lr=2e-2, warmup=1, schedule="linear")
    for i, change in enumerate(({"seed": 1}, {"optim": optim}, {"steps": 6})):
        assert compilations(replace(once, **change), tmp_path / str(i)) == 0, change
        assert runs.log(tmp_path / str(i))[-1] != runs.log(tmp_path / "one")[-1]
    with runs.compiling("evaluation"):  # control: new programs are counted
        assert compilations(replace(once, name="again"), tmp_path / "again") > 0


@pytest.mark.slow
def test_what_is_in_the_program_is_compiled_anew(tmp_path):
    once = runs.experiment(tmp_path)
    pretrain.run_experiment(once, tmp_path / "one")
    decayed = replace(once, optim=replace(once.optim, weight_decay=0.5))
    assert compilations(decayed, tmp_path / "decayed") > 0
