"""The ledger records the cost of every phase; a run stops at the first number that is not finite."""

import json
import math
from dataclasses import replace
from itertools import accumulate, pairwise

import jax
import pytest
import runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxgrow import flops
from train import pretrain
from train.common.errors import UserError
from train.extras.run_params import load_params
from train.plan import ledger
from train.plan.methods import Growing, GrowTo, TrainStage
from train.plan.record import Account, CostRecord, growth_records
from train.plan.training import PhaseStart, Train
from train.state.mesh import Mesh
from train.state.optim import Optim
from train.step import inputs, programs
from train.store.recorder import Recorder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a V-cycle; return its experiment, its folder and its result.

    It compiles its programs again, regardless of earlier tests.
    """
    folder = tmp_path_factory.mktemp("finished")
    experiment = runs.experiment(folder, method=runs.VCYCLE, log_every=3, checkpoint_every=5)
    with runs.compiling("made"):
        return experiment, folder / "run", pretrain.run_experiment(experiment, folder / "run")


# --- the cost of a step ---


def test_the_cost_of_equal_steps_is_computed_once(monkeypatch):
    asked, flops_of = [], Train.flops
    monkeypatch.setattr(Train, "flops", lambda *about: asked.append(about) or flops_of(*about))
    phase = Train("large", 8, Optim(), runs.MODEL)
    plans = inputs.step_plans(phase, None, PhaseStart({}, 0, 8, 1, 0))
    costs = [plans(step, step).flops for step in range(3)]
    assert costs == [flops.train_flops(runs.MODEL, 8 * 8)] * 3 and len(asked) == 1


# --- the ledger of a run ---


def test_totals_are_the_sums_over_phases(finished):
    _, folder, result = finished
    assert [p["phase"] for p in result["phases"]] == [
        "train large", "coalesce large", "train coarse1", "decoalesce coarse1 large", "interpolate large up", "train large",
    ]  # fmt: skip
    for unit in ("tokens", "flops", "seconds", "steps", "compile_seconds"):
        assert sum(p[unit] for p in result["phases"]) == pytest.approx(result[unit], rel=1e-9), unit
    assert json.loads((folder / "result.json").read_text()) == result
    assert 0 < result["compile_seconds"] < result["seconds"]
    assert all(0 <= p["compile_seconds"] <= p["seconds"] for p in result["phases"])


def test_every_phase_is_charged_for_its_own_work(finished):
    experiment, folder, result = finished
    per_step = experiment.batch * experiment.model.context
    for phase, cost in zip(experiment.plan, result["phases"], strict=True):
        assert cost["seconds"] > 0 and cost["flops"] > 0
        steps = phase.steps if isinstance(phase, Train) else 0
        assert (cost["steps"], cost["tokens"]) == (steps, steps * per_step)
        if isinstance(phase, Train):
            expected = steps * flops.train_flops(phase.config, per_step)
            assert cost["flops"] == pytest.approx(expected)
        else:
            assert cost["flops"] < 0.1 * result["flops"]
    large = sum(x.size for x in jax.tree.leaves(load_params(folder)))
    whole = [p["parameters"] == large for p in result["phases"]]
    assert whole == [True, False, False, True, True, True]


def test_every_line_tells_the_cost_at_its_own_step(finished):
    experiment, folder, result = finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    phases = [p["phase"] for p in result["phases"]]
    # In a phase of 4 steps, steps 3 and 4 are logged, and step 4 is validated.
    steps = (2, 2), (0,), (3, 4, 4), (0,), (0,), (3, 4, 4)
    expected = [(i, phase, s) for i, phase in enumerate(phases) for s in steps[i]]
    assert [(line["phase"], line["step"]) for line in lines] == [(p, s) for _, p, s in expected]
    before = [0, *accumulate(p["steps"] for p in result["phases"])]
    per_step = experiment.batch * experiment.model.context
    for line, (i, _, step) in zip(lines, expected, strict=True):
        assert line["tokens"] == (before[i] + step) * per_step
        own = result["phases"][i]
        spent = own["flops"] * (step / own["steps"] if own["steps"] else 1)
        spent += sum(p["flops"] for p in result["phases"][:i])
        assert line["flops"] == pytest.approx(spent)
        assert ("loss" in line) != ("val_loss" in line)
    for time in ("seconds", "compile_seconds"):
        assert all(a[time] <= b[time] for a, b in pairwise(lines))
    assert lines[-1]["seconds"] <= result["seconds"]
    assert lines[-1]["val_loss"] == result["val_loss"]
    losses = [line for line in lines if "loss" in line]
    assert all({"loss", "grad_norm", "lr"} <= line.keys() for line in losses)
    # Steps 3 and 4 of 4, at twice the peak learning rate of 0.01. After a warm-up of 2 steps, these
    # are the top and the middle of a cosine.
    rates = [line["lr"] for line in losses if line["phase"] == "train coarse1"]
    assert rates == pytest.approx([0.02, 0.01])
    assert 0 < losses[-1]["loss"] < math.log(256)  # The model has learned something.


def stored(book) -> CostRecord:
    """Return the record of a recorder after a checkpoint has stored it as JSON."""
    return CostRecord.from_json(json.loads(json.dumps(book.record().as_json())))


def points(folder) -> dict[str, list[tuple[int, float]]]:
    """Return the values that TensorBoard shows for a run: ``{tag: [(step, value), ..]}``."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_the_same_numbers(finished):
    _, folder, _ = finished
    shown, expected, before, last = points(folder), {}, 0, None
    models = {"train large": "large", "coalesce large": "coarse1", "train coarse1": "coarse1"}
    models |= {"decoalesce coarse1 large": "up", "interpolate large up": "large"}
    for line in runs.log(folder):
        if last is not None and line["phase"] != last["phase"]:
            before += last["step"]
        last, step = line, before + line["step"]
        for name in line.keys() - {"phase", "step"}:
            tag = name if name in ("tokens", "flops") else f"{models[line['phase']]}/{name}"
            expected.setdefault(tag, []).append((step, pytest.approx(line[name], rel=1e-6)))
    assert {tag: shown[tag] for tag in expected} == expected
    # They differ from run to run.
    assert shown.keys() - expected.keys() == {"seconds", "compile_seconds"}
    tags = {"large/loss", "coarse1/loss", "large/val_loss", "large/lr", "coarse1/grad_norm"}
    assert tags <= shown.keys()


# --- the ledger alone ---


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(ledger.time, "monotonic", lambda: Clock.now)
    return Clock


def opened(folder, *record):
    """Return a recorder whose phase has begun."""
    book = Recorder(folder, *record)
    if not record:
        book.ledger.begin("one", "train", "large", 1)
    return book


def test_time_belongs_to_the_open_phase(tmp_path, clock):
    book = opened(tmp_path)
    clock.now += 3
    with book.ledger.paused("validation"):
        clock.now += 50
    clock.now += 1
    book.ledger.begin("two", "train", "large", 1)
    clock.now += 2
    record = book.record()
    book.close()
    assert record.uncounted == {"validation": 50}
    assert [p.seconds for p in record.phases] == [4, 2] and record.seconds == 6
    clock.now += 1000  # time between two processes
    book = opened(tmp_path, record)
    clock.now += 5
    record = book.record()
    book.close()
    assert [p.seconds for p in record.phases] == [4, 7] and record.seconds == 11


def test_what_was_logged_after_a_checkpoint_is_cut_off(tmp_path):
    book = opened(tmp_path)
    book.log(1, loss=1.0)
    record = stored(book)
    book.log(2, loss=2.0)
    book.close()
    # The second time resumes from a checkpoint that was saved before the first log line.
    for _ in range(2):
        book = opened(tmp_path, record)
        record = stored(book)
        book.log(2, loss=3.0)
        book.close()
    assert [line["loss"] for line in runs.log(tmp_path)] == [1.0, 3.0]
    assert points(tmp_path)["large/loss"] == [(0, 1.0), (0, 3.0)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3  # one file per process


def test_a_new_run_shows_nothing_of_an_earlier_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("what was logged before the first checkpoint\n")
    for _ in range(2):
        book = opened(tmp_path)
        book.log(1, loss=1.0)
        record = book.record()
        book.close()
    assert [line["step"] for line in runs.log(tmp_path)] == [1]
    assert points(tmp_path)["large/loss"] == [(0, 1.0)]
    for path in (tmp_path / "tensorboard").iterdir():
        path.unlink()
    book = opened(tmp_path, record)
    book.log(2, loss=2.0)
    book.close()
    assert points(tmp_path)["large/loss"] == [(0, 2.0)]


def test_other_files_in_the_folder_of_tensorboard_remain(tmp_path):
    """The profiler of TensorBoard, for example, writes into this folder."""
    profile = tmp_path / "tensorboard" / "plugins" / "profile"
    profile.mkdir(parents=True)
    for _ in range(2):
        book = opened(tmp_path)
        events = (tmp_path / "tensorboard").glob("events*")
        assert list(book.record().events) == [path.name for path in events]
        book.close()
    assert profile.is_dir()


def test_a_log_that_lost_lines_is_an_error(tmp_path):
    """A lost log line is an error if the checkpoints have no copy of the log.

    Otherwise, they restore it.
    """
    book = opened(tmp_path)
    book.log(1, loss=0.5)
    record = book.record()
    book.close()
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-1])
    says = rf"metrics.jsonl is damaged: it has {record.bytes - 1} bytes, but the .* backup"
    with pytest.raises(UserError, match=says):
        Recorder(tmp_path, record)


# --- numbers that are not finite ---


@pytest.mark.parametrize(("every", "at", "says", "last"), [  # steps between log lines, validations and checkpoints
    # The update of step 3 is infinite, so its checkpoint would contain a broken model.
    ((8, 8, 1), 3, "parameter_norm is .* at step 3 of train large", 2),
    # The loss of step 4 shows the error at the next log line or checkpoint.
    ((1, 8, 2), 3, "loss is nan at step 4 of train large", 2),
    ((8, 1, 8), 1, "val_loss is nan at step 1 of train large", None),
    # the last update of the run, which a later training loss cannot show
    ((2, 8, 2), 8, "val_loss is nan at step 8 of train large", 6),
])  # fmt: skip
def test_a_nan_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path, monkeypatch, every, at, says, last
):
    changes = dict(zip(("log_every", "eval_every", "checkpoint_every"), every, strict=True))
    monkeypatch.setattr(inputs, "learning_rate", lambda _, __, i: 3e38 if i + 1 == at else 0.01)
    run = tmp_path / "run"
    back = (
        f"the last good checkpoint is kept in .*/{last}; to continue from it, add --from .*@{last}"
    )
    # Other commands, such as train.compare, have no --from.
    back += ", a new --workdir, and a lower optim.peak_lr to python -m train.pretrain CONFIG"
    back = "no checkpoint was saved before it" if last is None else back
    with pytest.raises(UserError, match=f"{says}.*; {back}"):
        pretrain.run_experiment(runs.experiment(tmp_path, **changes), run)
    kept = sorted(int(p.name) for p in (run / "checkpoints").iterdir())
    assert kept[-1:] == ([] if last is None else [last])
    if last is not None:
        assert all(bool(abs(x).max() < 1e3) for x in jax.tree.leaves(load_params(run)))
    assert not (run / "result.json").exists()
    for line in runs.log(run):
        assert all(math.isfinite(v) for k, v in line.items() if k != "phase")


# --- growths ---


def test_a_growth_is_described_by_its_phases(finished):
    """A V-cycle grows once, when the small model becomes the large one again."""
    _, folder, result = finished
    (growth,) = result["growths"]
    lines = [line for line in runs.log(folder) if line["tokens"] == growth["tokens"]]
    *_, small, first, grown = [line["val_loss"] for line in lines if "val_loss" in line]
    assert growth["phase"] == "decoalesce coarse1 large, interpolate large up"
    assert (growth["loss_before"], growth["loss_after"]) == (small, grown) and first != grown
    growing, training = result["phases"][3:5], result["phases"][5]
    assert growth["tokens"] == result["tokens"] - training["tokens"]
    spent = sum(p["seconds"] - p["compile_seconds"] for p in growing)
    assert growth["growing_seconds"] == pytest.approx(spent)
    assert growth["resharding_seconds"] == 0, "every device has the complete models"
    seconds = ("compile_seconds", "shared_compile_seconds")
    compiled = sum(p[name] for p in [*growing, training] for name in seconds)
    assert growth["recompiling_seconds"] == pytest.approx(compiled)


def test_more_parameters_and_more_passes_are_growths():
    """A loop adds passes, but no parameters; coalescing is not a growth."""

    def trained(model: str, parameters: int, layers: int) -> Account:
        passes = {"layers": 4 * layers, "val_loss": 2.0}
        return Account(f"train {model}", "train", model, parameters, 4, **passes)

    def changed(model: str, parameters: int) -> Account:
        return Account(f"to {model}", "grow", model, parameters, val_loss=3.0)

    phases = [trained("large", 20, 4), changed("small", 10), trained("small", 10, 2)]
    phases += [changed("looped", 10), trained("looped", 10, 4)]
    phases += [changed("unlooped", 20), trained("unlooped", 20, 4), changed("same", 20)]
    found = growth_records([*phases, trained("same", 20, 4)])
    assert [growth["phase"] for growth in found] == ["to looped", "to unlooped"]
    assert {(growth["loss_before"], growth["loss_after"]) for growth in found} == {(2.0, 3.0)}


@pytest.mark.extra
@pytest.mark.parametrize(("mesh", "moves"), [
    pytest.param(Mesh(tensor=2), True, id="heads"),
    pytest.param(Mesh(fsdp=4), False, id="embed", marks=pytest.mark.slow),
])  # fmt: skip
def test_arrays_of_other_shardings_are_moved_on_their_own(tmp_path, mesh, moves):
    """One head becomes two, which are divisible by two devices; 4 and 8 features are, by four."""
    to = GrowTo(by=runs.DOUBLED, moments="exact")
    grown = runs.growing(tmp_path, to, source=TrainStage(0.5), mesh=mesh)
    result = pretrain.run_experiment(grown, tmp_path / "run")
    (growth,) = result["growths"]
    (account,) = [p for p in result["phases"] if p["resharding_seconds"]] or [None]
    assert (growth["resharding_seconds"] > 0) == (account is not None) == moves
    assert growth["growing_seconds"] > 0
    if account:
        spent = growth["growing_seconds"] + growth["resharding_seconds"]
        assert spent == pytest.approx(account["seconds"] - account["compile_seconds"])


def test_what_another_run_compiled_is_part_of_the_growth(tmp_path):
    """`train.compare` trains the baseline first, so the grown model's step is compiled already."""
    own = {"optim": Optim(eps=3e-7), "steps": 2}  # no other test has compiled this step
    method = Growing(replace(runs.MODEL, layers=1), TrainStage(0.5), (GrowTo(),))
    with runs.compiling("step"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_USED", {})
        whole, result = (
            pretrain.run_experiment(
                runs.experiment(tmp_path, name=name, **own, **changes), tmp_path / name
            )
            for name, changes in (("base", {}), ("grown", {"method": method}))
        )
    assert [p["shared_compile_seconds"] for p in whole["phases"]] == [0.0]
    (growth,) = result["growths"]
    assert growth["recompiling_seconds"] > 0.5 * whole["compile_seconds"]


# --- compiling ---


def test_compilation_is_counted_separately_in_every_phase(tmp_path, clock):
    def compiles(seconds, event="/jax/core/compile/backend_compile_duration"):
        jax.monitoring.record_event_duration_secs(event, seconds)

    book = opened(tmp_path)
    clock.now += 3
    compiles(2.0)
    with book.ledger.paused("validation"):
        clock.now += 50
        compiles(40.0)
    assert book.ledger.totals()["compile_seconds"] == 2
    book.ledger.begin("two", "train", "large", 1)
    clock.now += 2
    compiles(1.0)
    compiles(1.0, "/of/another/kind")
    book.ledger.charge(30.0, 10.0)  # cost of an earlier run
    record = book.record()
    book.close()
    assert [p.compile_seconds for p in record.phases] == [2, 11] and record.compile_seconds == 13
    assert [p.seconds for p in record.phases] == [3, 32]
    compiles(5.0)  # outside the run
    book = opened(tmp_path, record)
    assert book.ledger.totals()["compile_seconds"] == 13
    book.close()


def test_what_is_traced_within_a_trace_counts_once(clock):
    counter, inner = ledger.Compiling(), "/jax/core/compile/jaxpr_trace_duration"
    clock.now += 2
    # two traces within the following one, which began before both
    for seconds, later in ((1.0, 3), (2.0, 1)):
        jax.monitoring.record_event_duration_secs(inner, seconds)
        clock.now += later
    jax.monitoring.record_event_duration_secs(inner, 5.5)
    assert counter.seconds == 5.5
    clock.now += 4
    jax.monitoring.record_event_duration_secs(inner, 4.0)  # directly after the previous one
    assert counter.seconds == 9.5
    counter.close()


def test_jax_says_when_it_compiles():
    """The names of JAX's compilation events are not a public interface."""
    counter = ledger.Compiling()
    jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(3)).block_until_ready()
    assert 0 < counter.seconds < 60
    counter.close()
