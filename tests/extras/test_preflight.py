"""Estimates of memory, communication and time from programs compiled for an absent machine."""

import json
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import runs
from advice import command, refused
from jax.experimental import topologies

from jaxgrow import flops
from jaxgrow.axes import names
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train import preflight
from train.common.errors import UserError
from train.config.experiment import load_experiment
from train.extras.aot import estimate, hlo, machines
from train.extras.aot.compilation import AotRun, Program
from train.extras.aot.estimate import Bound, find_fitting, memory_fits, time_bound
from train.extras.aot.machines import CHIPS, Machine, describe_machine
from train.extras.aot.roofline import (
    Roofline,
    flops_beside,
    program_kernels,
    step_part,
    sum_kernels,
)
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.plan.training import Train
from train.state.mesh import Mesh
from train.state.model import TrainState

NAMES = jax.tree.leaves(runs.MODEL.axes(), is_leaf=names.is_names)
FOLDER = Path(tempfile.mkdtemp(prefix="preflight"))
SBLD = Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2))),))


class Steps(AotRun):
    """AOT compilation of the training steps only; other programs are traced."""

    def _compiled(self, program, arguments, what, *rest, **more):
        if what.startswith("step"):
            return super()._compiled(program, arguments, what, *rest, **more)
        with jax.set_mesh(self.mesh):
            made = program.eval_shape(*arguments)
        return (self._placed(made) if isinstance(made, TrainState) else made), 0.0


class Beginnings(AotRun):
    """AOT compilation of all programs except the steps and evaluations, which are skipped."""

    def compile_steps(self, phase, model):
        return model


@cache
def programs_of(kind=AotRun, devices=4, **changes):
    """Compile the programs of an experiment once for all tests; no data are read."""
    return kind(experiment(**changes), describe_machine(f"cpu:{devices}")).run()


def step_of(kind=Steps, **changes):
    """Return the training step of the large model."""
    return by_name(programs_of(kind, **changes))["train large", "step"]


def experiment(**changes):
    return runs.experiment(FOLDER, **changes)


def by_name(programs):
    return {(p.phase, p.what): p for p in programs}


@pytest.fixture
def traced(monkeypatch):
    """Trace the programs of a test without compiling them."""
    sizes = {f"{n}_size_in_bytes": 0 for n in ("argument", "output", "alias", "temp")}
    nothing = SimpleNamespace(**sizes)
    monkeypatch.setattr(AotRun, "_compiled_once", lambda self, lowered: (nothing, ""))


def test_a_phase_needs_the_memory_of_its_model_only_once():
    """The measurement, and the training after it, reuse the memory of model and optimizer state."""
    found = programs_of(Beginnings, 2, method=SBLD)
    assert [p.what for p in found] == ["initialisation", "measure", "initialisation"]
    first, _, second = found
    held = second.parameters + second.moments
    assert first.parameters == 0 and first.temporary > 0.9 * held
    assert second.temporary < 0.1 * held


def test_every_program_of_a_plan_is_compiled_and_nothing_is_run(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "__call__", None)
    found = by_name(programs_of(method=runs.VCYCLE))
    steps = {phase: p for (phase, what), p in found.items() if what == "step"}
    assert steps.keys() == {"train large", "train coarse1"}
    assert all(p.tokens == 8 * 8 and p.flops > 0 and p.temporary > 0 for p in steps.values())
    assert ("coalesce large", "coalesce") in found and ("coalesce large", "evaluation") in found


def test_sizes_of_parameters_and_moments_are_exact():
    params = jax.tree.leaves(runs.fresh(runs.MODEL))
    size = sum(x.nbytes for x in params)
    whole = step_of(AotRun, method=runs.VCYCLE)
    assert whole.parameters == size
    assert 2 * size <= whole.moments < 2 * size + 200  # the rest is counters
    divided = step_of(mesh=Mesh(fsdp=4))
    each = zip(params, NAMES, strict=True)
    narrow = sum(x.nbytes for x, names in each if not any("embed" in n for n in names))
    assert divided.parameters == (size - narrow) / 4 + narrow
    assert {c.kind for c in whole.collectives} == {"all-reduce"}
    assert "all-gather" in {c.kind for c in divided.collectives}


def test_what_devices_add_in_a_step_is_every_gradient_once():
    """Without model sharding, gradients are reduced once per step, with or without micro-batches."""
    size = sum(x.nbytes for x in jax.tree.leaves(runs.fresh(runs.MODEL)))
    for step in (step_of(AotRun, method=runs.VCYCLE), step_of(accumulate=2)):
        assert size <= sum(c.times * c.size for c in step.collectives) <= size + 64
    assert step_of(devices=1).collectives == ()  # the control


@pytest.mark.parametrize("execution", ["cond", pytest.param("gather", marks=pytest.mark.slow)])
def test_every_step_of_a_plan_is_counted_once(traced, execution):
    """`gather` compiles one program for each number of layers."""
    drop = LayerDrop(sensitivity=Sensitivity(after=0.25, batches=2), execution=execution)
    model = replace(runs.MODEL, layers=6)
    e = experiment(method=Scratch((DropLayers(drop),)), model=model, steps=100)
    found = [p for p in AotRun(e, describe_machine("cpu:4")).run() if p.what.startswith("step")]
    assert sum(p.steps for p in found) == 100
    dense, dropping = next(p for p in found if p.what == "step"), found[-1]
    names = {p.what for p in found if p.what != "step"}
    if execution == "cond":
        assert names == {"step, dropping"}
    else:
        assert len(names) > 1
        assert all(re.fullmatch(r"step, [1-6] of 6 layers", name) for name in names)
        assert all(p.steps for p in found) and len({p.flops for p in found}) == len(found)
    assert dense.steps >= 25 and dropping.flops < dense.flops
    flops = sum(p.steps * p.flops for p in found)
    assert flops == pytest.approx(e.cost, rel=0.05), "sampled against expected cost"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", re.findall(r"^def (?!_)(\w+)\(", Path("configs/demo.py").read_text(), re.M)
)
def test_every_experiment_of_the_demo_is_rehearsed(traced, name):
    e = load_experiment(f"configs/demo.py:{name}")
    found = AotRun(e, describe_machine("cpu:4")).run()
    planned = sum(phase.end - phase.begin for phase in e.plan if isinstance(phase, Train))
    assert sum(p.steps for p in found if p.what.startswith("step")) == planned


def test_the_bound_is_the_longest_of_kernels_products_and_links():
    step = replace(PROGRAM, flops=4 * 989.4e12, roofline=Roofline({"MLP": 2.0, "head": 1.0}))
    machine = Machine("four", CHIPS["h100"], (None,) * 4)
    found = time_bound(step, machine)
    assert found is not None and found.products == 1.0 and found.links == 0.0
    assert (found.seconds, found.by, found.utilisation) == (3.0, "MLP", 1 / 3)
    sending = replace(step, collectives=(hlo.Collective("all-gather", 450e9 * 8, 8, 1),))
    assert time_bound(sending, machine) == Bound(step.roofline.parts, 1.0, 7.0)
    assert Bound({}, 1.0, 7.0).by == "links" and Bound({"MLP": 2.0}, 3.0, 1.0).seconds == 3.0
    assert time_bound(step, describe_machine("cpu:4")) is None


@pytest.mark.parametrize(("devices", "local", "slower"), [
    (8, 0, 1),  # one host
    # four hosts; eight adapters of 50 GB/s share the data of each device
    (32, 8, 450 / 400),
    (4, 1, 9),  # one device on each of four hosts uses one adapter
])  # fmt: skip
def test_exchanges_between_hosts_use_adapter_speed(devices, local, slower):
    size = 450e9 * devices / (devices - 1)
    exchange = hlo.Collective("all-gather", size, devices, 1, local=local)
    machine = Machine("h100", CHIPS["h100"], (None,) * 32, 4)
    found = time_bound(replace(PROGRAM, collectives=(exchange,)), machine)
    assert found is not None and found.links == pytest.approx(slower)


def entry(line: str) -> str:
    """Return the text of a program of one instruction."""
    return f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"


@pytest.mark.parametrize(("groups", "size", "local"), [
    ("all-reduce(%p), to_apply=%add, replica_groups={{0,1},{2,3}}", 2, 0),
    ("all-reduce(%p), to_apply=%add, replica_groups={{0,2},{1,3}}", 2, 1),
    ("all-reduce(%p), to_apply=%add, replica_groups={{0,1,2,3}}", 4, 2),
    ("all-reduce(%p), to_apply=%add, replica_groups=[2,2]<=[2,2]T(1,0)", 2, 1),
    ("collective-permute(%p), source_target_pairs={{0,1},{1,0}}", 4, 0),
    ("collective-permute(%p), source_target_pairs={{0,2},{2,0}}", 4, 1),
])  # fmt: skip
def test_how_many_of_a_group_one_of_two_hosts_has(groups, size, local):
    text = f"%r = f32[8]{{0}} {groups}"
    (found,) = hlo.program_collectives(entry(text), 4, 2)
    assert (found.devices, found.local) == (size, local)


def test_the_first_changes_that_fit_are_the_cheapest(monkeypatch):
    """The mesh divides the state; micro-batches and rematerialisation divide the activations."""

    class Said:
        def __init__(self, e, machine):
            saved = {"products": 1, "projections": 2, "full": 4}[e.model.remat]
            self.memory = 32 / e.mesh.fsdp + 64 / e.accumulate / saved

        def run(self):
            return [replace(PROGRAM, parameters=self.memory)]

    monkeypatch.setattr(estimate, "AotRun", Said)
    e, four = experiment(batch=64), describe_machine("cpu:4")
    fsdp, some, full = "mesh.data=1 mesh.fsdp=4", "model.remat=projections", "model.remat=full"
    for memory, changes in [
        (95, ["accumulate=4"]),
        (47, ["accumulate=16"]),
        (35, [some, "accumulate=16"]),
        (32, [fsdp, "accumulate=4"]),
        (10, [fsdp, some, "accumulate=16"]),
        (9, [fsdp, full, "accumulate=16"]),
        (8, None),
    ]:
        machine = replace(four, chip=replace(four.chip, memory=memory))
        assert find_fitting(e, machine, lambda _: None) == changes, memory
    fits = [memory_fits([replace(PROGRAM, parameters=x)], machine) for x in (8.0, 9.0)]
    assert fits == [True, False]
    # The devices of tensor share all samples of a micro-batch.
    shared = experiment(batch=4, mesh=Mesh(tensor=4))
    machine = replace(four, chip=replace(four.chip, memory=48))
    assert find_fitting(shared, machine, lambda _: None) == ["accumulate=4"]


def test_a_config_that_cannot_run_is_refused_before_another_one_is_compiled(tmp_path, monkeypatch):
    good = runs.script(tmp_path, runs.experiment(tmp_path))
    config = f"preflight {good} {good}:mesh.fsdp=3 --on cpu:4"
    monkeypatch.setattr("sys.argv", config.split())
    monkeypatch.setattr(preflight, "_checked_programs", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match="fsdp=3 x tensor=1 does not fit 4 devices"):
        preflight.main()


def test_free_memory_is_used_if_that_lowers_the_bound(monkeypatch):
    seconds = {"none": 1.0, "products": 2.0, "projections": 3.0, "full": 4.0}

    class Simulated:
        def __init__(self, e, machine):
            takes = seconds[e.model.remat]
            memory, takes = 64e9 / e.accumulate / takes, takes if usable else 9.0
            self.made = replace(PROGRAM, parameters=memory, roofline=Roofline({"MLP": takes}))

        def run(self):
            return [self.made]

    monkeypatch.setattr(estimate, "AotRun", Simulated)
    machine = replace(Machine("h100:1", CHIPS["h100"], (None,)), limit=80e9)
    small = replace(runs.MODEL, remat="full")
    e, tried, usable = experiment(batch=64, model=small, accumulate=4), [], True
    better = estimate.find_faster(e, Simulated(e, machine).run(), machine, tried.append)
    found = "model.remat=none accumulate=1 uses the free memory and lowers the time bound from"
    assert better is not None and better.startswith(found)
    assert tried == ["h100:1 has free memory: trying model.remat=none accumulate=1"]
    full = [replace(PROGRAM, parameters=41e9, roofline=Roofline({"MLP": 9.0}))]
    assert estimate.find_faster(e, full, machine, tried.append) is None and len(tried) == 1
    programs, usable = Simulated(e, machine).run(), False
    assert estimate.find_faster(e, programs, machine, tried.append) is None and len(tried) == 4


PROGRAM = Program("train large", "step", 1, 1, 1.0, 0.0, 0.0, 0.0, 0.0, (), 0, (), Roofline())


def test_auto_takes_the_first_choice_that_fits(monkeypatch):
    memory = {"none": 40, "products": 20, "projections": 18, "full": 10}

    def compiled(e, *_):
        once = 15 if e.mesh.gradients == "step" else 0
        taken = memory[e.model.remat] + once - e.model.scan_layers
        return SimpleNamespace(run=lambda: [SimpleNamespace(memory=taken, once=once)])

    def chosen(has, faster="step", **changes):
        slow = faster == "layer"
        monkeypatch.setattr(estimate, "plan_days", lambda p, _: float((p[0].once > 0) == slow))
        monkeypatch.setattr(estimate, "AotRun", compiled)
        model = replace(runs.MODEL, remat="auto", dtype="bfloat16")
        e, machine = {"model": model} | changes, Machine("m", CHIPS["h100"], (), limit=has)
        found, _ = estimate.resolve_auto(experiment(**e), machine, (lines := []).append)
        choice = found.model.remat, found.model.scan_layers, found.mesh.gradients
        return choice, "\n".join(lines)

    # There is no gradient reduction between fsdp devices.
    assert chosen(40)[0] == ("none", False, "layer")
    assert chosen(39)[0] == ("products", False, "layer")
    assert chosen(19)[0] == ("products", True, "layer")
    assert chosen(1)[0] == ("full", True, "layer")
    monkeypatch.setattr(estimate, "UNROLLED_LAYERS", 1)  # deeper models are not unrolled
    assert chosen(40)[0] == ("products", True, "layer")
    monkeypatch.undo()
    assert chosen(55, mesh=Mesh(fsdp=4))[0] == ("none", False, "step")
    given = Mesh(fsdp=4, gradients="layer")
    for has, mesh, faster, says in (
        (41, Mesh(fsdp=4), "step", "mesh.gradients=step does not fit"),
        (55, Mesh(fsdp=4), "layer", "mesh.gradients=step has a higher time bound"),
        (55, given, "step", "because the settings contain mesh.gradients=layer"),
    ):
        (remat, _, gradients), said = chosen(has, faster, mesh=mesh)
        assert (remat, gradients) == ("none", "layer") and says in said
        assert "add gradients in bfloat16, for each layer and micro-batch" in said
    for dtype in ("bfloat16", "float32"):
        fixed = replace(runs.MODEL, dtype=dtype)
        said = chosen(55, mesh=Mesh(fsdp=2, tensor=2), model=fixed)[1]
        supported = "mesh.gradients=step supports only the axes replica, data and fsdp"
        assert supported in said if dtype == "bfloat16" else not said


def test_auto_is_products_on_a_machine_without_a_limit():
    e = experiment(model=replace(runs.MODEL, remat="auto"), mesh=Mesh(fsdp=4))
    lines = []
    found, programs = estimate.resolve_auto(e, describe_machine("cpu:4"), lines.append)
    choice = found.model.remat, found.model.scan_layers, found.mesh.gradients
    assert choice == ("products", True, "layer")
    assert not programs and not lines
    narrow = replace(e, model=replace(e.model, dtype="bfloat16"))
    estimate.resolve_auto(narrow, describe_machine("cpu:4"), lines.append)
    assert len(lines) == 1 and "because the memory of the devices is not known" in lines[0]


def test_the_command_prints_a_table_and_writes_all_of_it(tmp_path):
    script = runs.script(tmp_path, runs.experiment(tmp_path, steps=4))
    options = f"--on cpu:4 --json {tmp_path}/new/all.json --plot {tmp_path}/plots/memory.png"
    out = command("train.preflight", script, *options.split())
    assert "the manufacturer does not publish figures for this machine" in out
    assert "train large, evaluation" in out and "1 devices" not in out
    everything = json.loads((tmp_path / "new" / "all.json").read_text())
    (programs,) = everything["configs"].values()
    assert {p["what"] for p in programs} == {"initialisation", "step", "evaluation"}
    assert everything["devices"] == 4
    assert everything["xla"]["options"] == {}  # only GPUs have them
    assert (tmp_path / "plots" / "memory.png").stat().st_size > 1000


def test_more_cpus_than_this_process_has_are_refused(tmp_path):
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    said = refused(lambda: command("train.preflight", script, "--on", "cpu:64"))
    assert "this process already has 4 CPU devices and cannot create 64" in said


@pytest.mark.parametrize(("variables", "fraction"), [
    ({}, 0.75),
    ({"XLA_CLIENT_MEM_FRACTION": ".9"}, 0.9),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".6"}, 0.6),
], ids=str)  # fmt: skip
def test_programs_may_use_the_memory_that_jax_allocates(monkeypatch, variables, fraction):
    """The run on this machine reads the same limit from its devices."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machines, "_NO_TPU", {})
    absent = SimpleNamespace(devices=[None] * 8)
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: absent)
    for kind in ("h200", "v5p"):
        memory = CHIPS[kind].memory * (fraction if kind == "h200" else 1)
        assert describe_machine(f"{kind}:8").memory == pytest.approx(memory)


def test_a_mesh_that_does_not_fit_the_machine_is_refused():
    message = "cpu:4: a mesh of data=any x fsdp=3 x tensor=1 does not fit 4 devices"
    with pytest.raises(UserError, match=message):
        programs_of(mesh=Mesh(fsdp=3))


@pytest.mark.parametrize(("settings", "says"), [
    ("batch=6", "a micro-batch of 6 (batch=6, accumulate=1) is not divisible by 4 devices"),
    # The complete batch is divisible, but the run refuses these settings.
    ("accumulate=4:mesh.data=1:mesh.fsdp=4", "a micro-batch of 2 (batch=8, accumulate=4) is not divisible by 4 devices"),
    ("ramp=0.2,0.4:mesh.data=1:mesh.fsdp=4", "a micro-batch of 2 (batch=8, accumulate=1, ramp=(0.2, 0.4)) is not divisible"),
])  # fmt: skip
def test_a_batch_that_the_devices_cannot_share_is_refused_as_by_the_run(tmp_path, settings, says):
    script = runs.script(tmp_path, runs.experiment(tmp_path))
    assert says in refused(
        lambda: command("train.preflight", f"{script}:{settings}", "--on", "cpu:4")
    )


# --- XLA's text ---


TEXT = """HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %g = ((bf16[2,4]{1,0}, f32[1]), (bf16[8,4]{1,0}, f32[4])) all-gather-start(%a, %b), replica_groups=[2,4]<=[8], dimensions={0}
  %gd = (bf16[8,4]{1,0}, f32[4]) all-gather-done(%g)
}

ENTRY %main (p: f32[100]) -> f32[100] {
  %w = (s32[], bf16[8,4]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %r = f32[100]{0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %s = bf16[10]{0} reduce-scatter(%q), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}
"""


# XLA for GPUs runs one iteration before the loop, and the loop condition is a fusion.
PIPELINED = """
%compared (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %end = s32[] constant(128)
  ROOT %less = pred[] compare(%p, %end), direction=LT
}

%condition (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %fused = pred[] fusion(%i), kind=kLoop, calls=%compared
}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[], f32[4]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%b), index=1
  %sum = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[], f32[4]) fusion(%b), kind=kLoop, calls=%grown
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %one = s32[] constant(1)
  %first = s32[] copy(%one)
  %begin = (s32[], f32[4]) tuple(%first, %x)
  %loop = (s32[], f32[4]) while(%begin), condition=%condition, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


# The text of a program for a TPU.
TPU = """HloModule jit_step

%cond (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(6), metadata={op_name="scan"}
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="scan"}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %two = s32[]{:T(128)} constant(2)
  %p = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %next = s32[]{:T(128)} add(%i, %two), metadata={op_name="scan"}
  %s = (bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[2,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a)
  %g = f32[8]{0} all-gather(%b), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  ROOT %out = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%next, %g)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, metadata={op_name="scan"}
  %r = f32[8]{0} all-reduce(%p), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1':(1)2}, to_apply=%add
}
"""


@pytest.mark.parametrize(("text", "expected"), [
    (TEXT, [("all-gather", 8 * 4 * 2 + 16, 4, 12, True), ("all-reduce", 400, 8, 1), ("reduce-scatter", 40, 2, 1)]),
    (TPU, [("all-gather", 32, 4, 3), ("all-reduce", 32, 4, 1), ("collective-permute", 16, 8, 3, True)]),
    (PIPELINED, [("all-reduce", 16, 2, 127)]),
], ids=["GPU", "TPU", "pipelined"])  # fmt: skip
def test_collectives_are_read_with_sizes_and_trip_counts(text, expected):
    found = sorted(hlo.program_collectives(text, 8))
    assert found == [hlo.Collective(*values) for values in expected]


def test_what_a_device_sends_and_its_kernels_are_read():
    found = sorted(hlo.program_collectives(TEXT, 8))
    assert [c.sent for c in found] == [12 * 80 * 3 / 4, 2 * 400 * 7 / 8, 20]
    text = 'x = f32[] custom-call(y), custom_call_target="b"\nz = (f32[]) custom-call(), custom_call_target="a", x={}\n'
    assert hlo.foreign_kernels(text + text) == ("a", "b")


@pytest.mark.parametrize("kind", [
    "(f32[100]{0}, f32[4])",  # the outputs
    "((f32[100]{0}, f32[4]), (f32[100]{0}, f32[4]))",  # the inputs and the outputs, JAX 0.12
])  # fmt: skip
def test_an_asynchronous_all_reduce_counts_each_array_once(kind):
    text = f"%r = {kind} all-reduce-start(%p, %q), replica_groups={{{{0,1}}}}, to_apply=%add"
    (found,) = hlo.program_collectives(entry(text), 2)
    assert (found.kind, found.size) == ("all-reduce", 416)


# A scheduled program: a matrix product runs during the gather, and only a copy during the reduction.
SCHEDULED = """HloModule jit_step, is_scheduled=true

%scaled (a: bf16[4,8], b: bf16[8,16]) -> bf16[4,16] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  ROOT %y = bf16[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}
}

ENTRY %main (x: bf16[4,8], w: bf16[8,16]) -> bf16[4,16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,16]{1,0} parameter(1)
  %g = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}
  %y = bf16[4,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%scaled
  %gd = bf16[16,16]{1,0} all-gather-done(%g)
  %r = bf16[4,16]{1,0} all-reduce-start(%y), replica_groups={{0,1}}, to_apply=%add
  %c = bf16[16,16]{1,0} copy(%gd)
  %rd = bf16[4,16]{1,0} all-reduce-done(%r)
  %s = f32[3]{0} all-reduce-start(%z), replica_groups={{0,1}}, to_apply=%add, backend_config={"is_sync":true}
  ROOT %sd = f32[3]{0} all-reduce-done(%s)
}
"""


def test_matrix_products_during_exchanges_are_counted():
    found = hlo.program_collectives(SCHEDULED, 2, beside=flops_beside(SCHEDULED))
    expected = [(True, 2.0 * 4 * 8 * 16), (True, 0.0), (False, 0.0)]
    assert [(c.asynchronous, c.products) for c in found] == expected
    many = tuple(c._replace(times=10**7) for c in found)
    said = preflight.exchanged_data(replace(PROGRAM, collectives=many))
    assert "2.56 GB in 10,000,000 all-gather (100% during matrix products)" in said
    assert "all-reduce (0% during matrix products)" in said


# The kernels of a program: a loop of three iterations with a matrix product and an in-place update,
# and a fusion that slices.
KERNELS = """HloModule jit_step

%sliced (a: f32[3,100], i: s32[]) -> f32[100] {
  %a = f32[3,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,100]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,100}
  ROOT %b = f32[100]{0} bitcast(%s)
}

%updated (c: f32[3,100], u: f32[1,100], j: s32[]) -> f32[3,100] {
  %c = f32[3,100]{1,0} parameter(0)
  %u = f32[1,100]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %d = f32[3,100]{1,0} dynamic-update-slice(%c, %u, %j, %j)
}

%body (p: (s32[], bf16[4,8], bf16[8,16])) -> (s32[], bf16[4,8], bf16[8,16]) {
  %p = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %w = bf16[8,16]{1,0} get-tuple-element(%p), index=2
  %y = bf16[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="jit(step)/Block/mlp/up/dot"}
  ROOT %t = (s32[], bf16[4,8]{1,0}, bf16[8,16]{1,0}) tuple(%n, %x, %w)
}

ENTRY %main (q: f32[3,100]) -> f32[3,100] {
  %q = f32[3,100]{1,0} parameter(0)
  %n = s32[] constant(1)
  %v = (s32[], bf16[4,8], bf16[8,16]) while(%z), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %f = f32[100]{0} fusion(%q, %n), kind=kLoop, calls=%sliced, metadata={op_name="jit(step)/optimizer/mul"}
  %r = f32[1,100]{1,0} reshape(%f)
  ROOT %g = f32[3,100]{1,0} fusion(%q, %r, %n), kind=kLoop, calls=%updated, metadata={op_name="while/dynamic_update_slice"}
}
"""


def test_kernels_have_their_bytes_and_flops():
    product, sliced, reshaped, updated = program_kernels(KERNELS)
    moved = 2 * (4 * 8 + 8 * 16 + 4 * 16)
    assert (product.flops, product.moved, product.times) == (2 * 4 * 8 * 16, moved, 3)
    assert product.narrow and step_part(product.path) == "MLP"
    assert (sliced.flops, sliced.moved, sliced.times) == (0, 4 + 400 + 400, 1)
    assert step_part(sliced.path) == "optimizer"
    assert reshaped.moved == 800
    # excluding the array that it updates
    assert updated.moved == 400 + 4 + 400 and step_part(updated.path) == "copies of scans"


# A program for TPUs: products are convolutions, S(1) is the fast memory, and copies run beside other
# kernels. The slice of %stack is within a fusion of a fusion.
ON_A_TPU = """HloModule step

%sliced (s: f32[4,100], n: s32[]) -> f32[1,100] {
  %s = f32[4,100]{1,0:T(8,128)} parameter(0)
  %n = s32[]{:T(128)} parameter(1)
  ROOT %d = f32[1,100]{1,0:T(8,128)} dynamic-slice(%s, %n, %n), dynamic_slice_sizes={1,100}
}

%outer (s: f32[4,100], n: s32[]) -> f32[100] {
  %s = f32[4,100]{1,0:T(8,128)} parameter(0)
  %n = s32[]{:T(128)} parameter(1)
  %inner = f32[1,100]{1,0:T(8,128)} fusion(%s, %n), kind=kLoop, calls=%sliced
  ROOT %e = f32[100]{0:T(128)} reshape(%inner)
}

ENTRY %main (x: bf16[16,8,3], w: bf16[16,4,8], stack: f32[4,100], n: s32[]) -> f32[100] {
  %x = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %stack = f32[4,100]{1,0:T(8,128)} parameter(2)
  %n = s32[]{:T(128)S(1)} parameter(3)
  %start = (bf16[16,8]{1,0:T(8,128)(2,1)S(1)}, bf16[16,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %near = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %y = bf16[16,4]{1,0:T(8,128)(2,1)} convolution(%near, %w), dim_labels=bf_io->bf
  %heads = bf16[12,4,8]{2,1,0:T(8,128)(2,1)S(1)} custom-call(%w), custom_call_target="ConcatBitcast"
  %v = bf16[16,8,1]{2,1,0:T(8,128)(2,1)S(1)} bitcast(%near)
  %z = bf16[16,4,12]{2,1,0:T(8)S(1)} convolution(%v, %heads), window={size=12 pad=11_11 rhs_reversal=1}, dim_labels=bf0_0oi->bf0
  ROOT %f = f32[100]{0:T(128)S(1)} fusion(%stack, %n), kind=kLoop, calls=%outer
}
"""


def test_kernels_of_a_tpu_have_the_bytes_of_its_main_memory():
    copied, product, batched, sliced = program_kernels(ON_A_TPU)
    assert (copied.moved, copied.asynchronous) == (16 * 8 * 2, True)
    assert (product.flops, product.moved) == (2 * 16 * 8 * 4, 16 * 4 * 2) and product.narrow
    # Twelve products: at each position, one element of the padded window is inside of the operand.
    assert (batched.flops, batched.moved) == (12 * 2 * 16 * 8 * 4, 0)
    assert sliced.moved == 400


def test_asynchronous_copies_lengthen_a_roofline_by_the_bytes_that_have_no_other_time():
    found = program_kernels(ON_A_TPU)
    at_once = sum_kernels(found, peak=1024.0, bandwidth=1e9)
    assert at_once.parts["other"] == pytest.approx(13.0) and len(at_once.parts) == 1
    later = sum_kernels(found, peak=1e12, bandwidth=8.0)
    assert later.parts == pytest.approx({"other": 16 + 50, "asynchronous copies": 32}, rel=1e-3)
    assert later.moved == 128 + 256 + 400


def test_a_roofline_adds_the_slower_part_of_every_kernel():
    found = sum_kernels(program_kernels(KERNELS), peak=1024.0, bandwidth=800.0)
    parts = {"MLP": 3 * 1.0, "optimizer": 804 / 800, "other": 1.0, "copies of scans": 804 / 800}
    assert found.parts == pytest.approx(parts)
    assert found.seconds == pytest.approx(sum(found.parts.values())) and found.compute == 3.0


def test_the_kernels_of_a_compiled_step_have_all_its_products():
    """The count equals the count of the traced program, so each product is counted once."""

    def step(x, w):
        return jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), x, w)[0].sum()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 64), (5, 64, 64))]
    traced = jax.jit(jax.grad(step, 1)).trace(*shapes)
    found = program_kernels(traced.lower().compile().as_text())
    assert sum(k.times * k.flops for k in found) == flops.counted(traced.jaxpr.jaxpr).products


def test_processes_choose_their_settings_by_the_smallest_memory(monkeypatch):
    monkeypatch.setattr("train.common.hosts.gather_values", lambda limit: [None, 3.0, 2.0])
    assert machines.common_machine().limit == 2.0
    monkeypatch.setattr("train.common.hosts.gather_values", lambda limit: [limit])
    assert machines.common_machine() == machines.present_machine()
