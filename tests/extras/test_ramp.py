"""The ramp of the batch: its phases, samples, costs and programs, and runs that are resumed."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train import pretrain
from train.common.errors import UserError
from train.config.experiment import load_experiment, with_steps
from train.data.batches import training_batches
from train.data.windows import Windows
from train.extras.ramp import ramped_plan
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.training import Train
from train.state.optim import learning_rate
from train.step import programs
from train.step.parallel import mapped

HALVED = Growing(
    replace(runs.MODEL, layers=1), TrainStage(0.5), (GrowTo((TrainStage(0.5),), ("stack",)),)
)
LEARNED = Growing(
    runs.SMALL, TrainStage(0.5), (GrowTo((TrainStage(0.5),), Learned(steps=10, warmup=2)),)
)
MEASURED = Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(after=0.5))),))


@pytest.mark.parametrize(("method", "ramp", "parts"), [
    (Scratch(), (0.1, 0.5), "large 0-2 /4; large 2-10 /2; large 10-20 /1"),
    (HALVED, (0.25, 0.75), "small 0-5 /4; small 5-10 /2; large 0-5 /2; large 5-10 /1"),
    (HALVED, (0.5,), "small 0-10 /2; large 0-10 /1"),
    (MEASURED, (0.75,), "large 0-10 /2; large 10-15 /2; large 15-20 /1"),
    # Learned maps keep the batch of their first step: 30 steps, of which 10 learn maps.
    (LEARNED, (0.5,), "small 0-10 /2; maps 0-10 /2; large 0-10 /1"),
])  # fmt: skip
def test_phases_of_training_are_divided_where_the_batch_doubles(tmp_path, method, ramp, parts):
    base = runs.Optim(warmup=2)
    plan = method.plan(runs.MODEL, base, 20)
    found = ramped_plan(plan, ramp)
    trained = [phase for phase in found if isinstance(phase, Train)]
    assert "; ".join(f"{p.name} {p.begin}-{p.end} /{p.shrink}" for p in trained) == parts
    others = [[p for p in phases if not isinstance(p, Train)] for phases in (plan, found)]
    assert others[0] == others[1]

    def rates(phases):
        each = [(p, i) for p in phases if isinstance(p, Train) for i in range(p.begin, p.end)]
        return [learning_rate(p.optim, p.steps, i) for p, i in each]

    assert rates(found) == rates(plan)
    samples = sum((p.end - p.begin) * p.samples(16) for p in trained)
    assert sum(p.cost(16) for p in trained) < sum(p.cost(16) for p in plan)
    if method == Scratch():
        mean = runs.experiment(tmp_path, batch=16, ramp=ramp).mean_batch
        assert samples == pytest.approx(20 * mean)
        costs = [sum(p.cost(16) for p in phases) for phases in (found, plan)]
        assert costs[0] == pytest.approx(mean / 16 * costs[1])


def test_a_stream_of_other_batches_reads_the_same_samples():
    windows = Windows(np.arange(161), 4)
    whole, stream = (training_batches(windows, 8, seed=1) for _ in range(2))
    expected = np.concatenate([next(whole)[0] for _ in range(8)])
    found = []
    for batch, count in ((2, 3), (4, 2), (8, 4), (2, 5)):
        stream.resize(batch, np.arange(batch))
        found += [next(stream)[0] for _ in range(count)]
        again = training_batches(windows, batch, seed=1)
        again.set_state(stream.get_state())
        begin = stream.get_state()["next_index"]
        np.testing.assert_array_equal(next(again)[0], expected[begin : begin + batch])
    np.testing.assert_array_equal(np.concatenate(found), expected[: 6 + 8 + 32 + 10])


def ramped(folder, **changes):
    values = {"ramp": (0.25, 0.5), "method": HALVED, "log_every": 1, "checkpoint_every": 1}
    return runs.experiment(folder, batch=16, **values | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ramp")
    with pytest.MonkeyPatch.context() as patch:
        batches = runs.recorded_inputs(patch)
        pretrain.run_experiment(ramped(folder), folder / "run")
    return folder / "run", batches


def test_a_run_counts_the_tokens_of_each_batch(whole):
    run, batches = whole
    assert [len(x) for x in batches] == [4, 4, 8, 8, 16, 16, 16, 16]
    tokens = [line["tokens"] for line in runs.log(run) if "loss" in line]
    assert tokens == [8 * n for n in np.cumsum([len(x) for x in batches])]
    result = json.loads((run / "result.json").read_text())
    trained = [p for p in result["phases"] if p["kind"] == "train"]
    assert [p["tokens"] for p in trained] == [8 * 8, 8 * 16, 8 * 64]
    assert result["steps"] == 8 and result["order"]["last"] == 88
    cost = ramped(run.parent).cost
    assert sum(p["flops"] for p in trained) == pytest.approx(cost, rel=1e-6)


def test_the_samples_are_those_of_a_run_without_a_ramp(tmp_path, monkeypatch, whole):
    found = runs.recorded_inputs(monkeypatch)
    pretrain.run_experiment(ramped(tmp_path, ramp=()), tmp_path / "run")
    samples = np.concatenate(whole[1])
    np.testing.assert_array_equal(samples, np.concatenate(found)[: len(samples)])


def test_a_run_that_was_killed_continues_with_its_batch(tmp_path, whole):
    """Each of the three batches is once the one that a new process begins with."""
    runs.stopped(ramped(tmp_path), tmp_path / "run", 1, 3, 5)
    runs.assert_same_end(tmp_path / "run", whole[0])


def test_devices_share_each_batch(tmp_path, whole):
    with runs.only(2):
        pretrain.run_experiment(ramped(tmp_path), tmp_path / "run")
    runs.assert_close(tmp_path / "run", whole[0])
    with pytest.raises(UserError) as error:
        pretrain.run_experiment(replace(ramped(tmp_path), batch=8), tmp_path / "many")
    assert "a micro-batch of 2 (batch=8, accumulate=1, ramp=(0.25, 0.5)) is not" in str(error.value)
    assert "use a batch that is a multiple of 16" in str(error.value)


def test_one_program_for_each_size_of_the_batch(tmp_path, monkeypatch, caplog):
    compiled = []

    def noting(function, how, mesh, *, donate=False):
        run = mapped(function, how, mesh, donate=donate)

        def train(held, batch, *rest):
            caplog.clear()
            with jax.log_compiles():
                result = run(held, batch, *rest)
            compiles = sum(r.message.startswith("Compiling") for r in caplog.records)
            compiled.append((len(batch[1]), compiles))
            return result

        return train if donate else run

    monkeypatch.setattr(programs, "mapped", noting)
    with runs.compiling("step"):  # other tests must not use the patched program
        pretrain.run_experiment(ramped(tmp_path, method=Scratch()), tmp_path / "run")
    assert compiled == [(4, 1), (4, 0), (8, 1), (8, 0), (16, 1), *[(16, 0)] * 3]


def test_epochs_count_the_samples_of_smaller_batches(tmp_path):
    plain = runs.experiment(tmp_path, steps=0, epochs=20.0)
    whole, ramped = (with_steps(replace(plain, ramp=ramp)).steps for ramp in ((), (0.5,)))
    assert ramped == pytest.approx(whole / 0.75, abs=1)


def test_messages(tmp_path):
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    for ramp in ("0.5,0.25", "0.5,0.5", "0.0", "1.5"):
        with pytest.raises(UserError, match="ramp must be fractions of the steps between 0 and 1"):
            load_experiment(config, [f"ramp={ramp}"])
    assert load_experiment(config, ["ramp=0.5"]).ramp == (0.5,)
