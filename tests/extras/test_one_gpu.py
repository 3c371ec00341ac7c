"""The experiments for a GPU: their plan, results, forecasts and tables, and a rehearsal of all of them."""

import hashlib
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import carried, gpu_plan, gpu_tables, one_gpu
from benchmarks.curves import logged_runs
from benchmarks.gpu_plan import EXPERIMENTS, Store, Training
from train.analysis.runs import frontier_budget
from train.common.errors import UserError
from train.extras.advice.forecast import forecast_rows, seed_variance
from train.extras.report_sections import step_seconds

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results/gpu.md").read_text()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def session(store: Store, rehearse: bool = True) -> one_gpu.Session:
    return one_gpu.Session(store, time.time() + 60, rehearse)


def test_the_tables_on_the_page_come_from_the_files():
    for table in gpu_tables.TABLES:
        assert table() in PAGE, "python docs/tables.py writes it again"


def test_the_sentences_of_the_page_come_from_the_files():
    page = " ".join(PAGE.split())
    names = ("m10", "m10_deepen", "m10_vcycle", "m10-x0.75", "m10-x0.55")
    full, deepen, vcycle, *shorter = (logged_runs("one_gpu/NVIDIA-H200/E1", n)[0] for n in names)
    scratch = [full, *shorter]
    late, later = (100 * gpu_tables.saved_seconds(run, scratch) for run in (deepen, vcycle))
    # The control: a run from scratch saves nothing against itself.
    assert [gpu_tables.saved_seconds(run, scratch) for run in scratch] == pytest.approx([0, 0, 0])
    assert gpu_tables.saved_seconds(deepen, scratch[1:]) < 1
    assert f"it saves {late:.1f} % with compilation" in page
    assert f"({late:.1f} % with compilation)" in page and f"{-later:.1f} % with compilation" in page
    assert f"{deepen.loss - full.loss:.3f} above the full run" in page
    assert f"ends {vcycle.loss - shorter[0].loss:.3f} above the run from scratch" in page
    assert f"and {vcycle.loss - full.loss:.3f} above the full run" in page
    steps = [step_seconds(run, part) for run, part in ((full, 0), (deepen, 0), (deepen, -1))]
    assert steps[0] == pytest.approx(steps[2], rel=1e-3)
    text = f"A step takes {1e3 * steps[0]:.1f} ms, and {1e3 * steps[1]:.1f} ms with half"
    assert f"{text} of the layers" in page
    first = vcycle.result["phases"][0]
    waited = first["seconds"] - first["compile_seconds"] - first["steps"] * steps[0]
    assert f"first {first['steps']} steps took {waited:.0f} s longer" in page
    row = frontier_budget(scratch, vcycle.loss, "run_seconds")
    lost = [100 * ((vcycle.cost("run_seconds") - s) / row - 1) for s in (0, waited)]
    assert f"it loses {lost[0]:.1f} % of the time of the steps" in page
    assert f"Without these seconds, it loses {lost[1]:.1f} % of the time" in page
    assert (
        f"({first['steps']} steps) ends during its warm-up ({vcycle.config['optim']['warmup']} steps)"
        in page
    )
    for run in (deepen, vcycle):
        near, far = (frontier_budget(scratch, run.loss + d, "flops") for d in (0, 1e-3))
        assert f"{100 * run.cost('flops') * (1 / far - 1 / near):.1f} points" in page
    deviation = 100 * math.sqrt(seed_variance(forecast_rows(), "Muon"))
    assert f"differ by {deviation:.0f} points (standard deviation)" in page
    peak = full.result["flops"] / full.config["steps"] / steps[0] / 989.4e12
    assert f"{100 * peak:.0f} % of the peak" in page
    rates = np.log2([1.25e-3, 2.5e-3, 5e-3])
    swept = [f"m10-x0.3-rate{r}" for r in ("0.00125", "0.0025", "0.005")]
    losses = [logged_runs("one_gpu/NVIDIA-H200/E1", name)[0].loss for name in swept]
    square, line, _ = np.polyfit(rates, losses, 2)
    assert f"has its minimum at {2 ** (-line / square / 2):.1e}".replace("e-03", "e-3") in page


def test_the_forecasts_stay_as_they_were_before_the_first_run():
    digest = hashlib.sha256(gpu_tables.FORECASTS.read_bytes()).hexdigest()
    assert digest == "0a898a3f9ac5cd68c5016f783b3fecc02c045a15f312c484dd338f61374c27be"


def test_every_run_is_planned_once_and_has_steps_and_a_price(capsys):
    every = [(name, t.name) for name, runs in EXPERIMENTS.items() for t in runs]
    assert len(set(every)) == len(every) == 31
    nothing = Path("nothing")
    text = one_gpu.planned(Store(nothing, nothing))
    assert all(re.search(rf"{name} +{re.escape(run)} ", text) for name, run in every)
    base = gpu_plan.experiment(Training("m10"), 5e-3, [])
    assert base.optim.peak_lr == 5e-3 and base.model.dtype == "bfloat16"
    swept = gpu_plan.experiment(Training("m10", 0, 0.3, 1e-3), 5e-3, [])
    assert (swept.optim.peak_lr, swept.steps) == (1e-3, round(0.3 * base.steps))
    assert swept.optim.warmup == round(0.3 * base.optim.warmup)
    shorter = Training("m10", 0, 0.75)
    e = gpu_plan.experiment(shorter, 5e-3, [])
    skipped = gpu_plan.shared(shorter, e, base)
    assert 0.35 < skipped / base.steps < 0.45  # it trains only its decay
    cost = gpu_plan.Cost(1e14, 0.0, 0.0)
    assert cost.seconds(e, skipped) < 0.6 * cost.seconds(e)


def test_runs_of_equal_time_have_the_steps_that_fit():
    training = Training("m10_deepen", seconds=120.0)
    e = gpu_plan.experiment(training, None, [])
    made = gpu_plan.timed(training, e, [(10.0, 0.005), (20.0, 0.01)])
    small, large = gpu_plan.phases(made)
    assert (small.steps, large.steps) == (10_000, 4_000)  # (60 - 10) / 0.005, (60 - 20) / 0.01
    e = gpu_plan.experiment(Training("m10"), None, [])
    (alone,) = gpu_plan.phases(gpu_plan.timed(replace(training, row="m10"), e, [(20.0, 0.01)]))
    assert alone.steps == 10_000 and e.steps != 10_000


def test_a_result_counts_from_the_moment_it_is_written_and_travels_in_an_archive(tmp_path):
    store = Store(tmp_path / "results", tmp_path / "work", tmp_path / "out")
    runs = one_gpu.runs_of("E5")
    for run in runs:
        assert not store.finished("E5", runs)
        store.keep("card", "E5", run, {"loss": 1.0})
    assert store.finished("E5", runs) and store.has("card", "E5", runs[0])
    assert not store.has("other", "E5", runs[0])  # a table has the times of one card
    there = Store(tmp_path / "results", tmp_path / "again")
    assert not there.finished("E5", runs)
    one_gpu.collect(tmp_path / "out" / gpu_plan.ARCHIVE, tmp_path / "results")
    assert there.finished("E5", runs)
    with pytest.raises(UserError, match=r"there is no archive .*; give the one_gpu.tar of --out"):
        one_gpu.collect(tmp_path / "missing.tar", tmp_path)


def test_a_run_that_does_not_fit_into_the_time_is_not_started(tmp_path, monkeypatch):
    store = Store(tmp_path / "results", tmp_path / "work")
    monkeypatch.setattr(one_gpu, "timed_speed", lambda e: 1.0)
    monkeypatch.setattr(one_gpu.Session, "left", 60.0)
    why = one_gpu.train_all("E1", session(store))
    first = EXPERIMENTS["E1"][0].name
    assert re.fullmatch(rf"{first} takes about \d+ s, and 60 s are left", why)
    assert not store.finished("E1", (first,))


def test_other_experiments_wait_for_the_sweep(tmp_path, monkeypatch):
    store = Store(tmp_path / "results", tmp_path / "work")
    monkeypatch.setattr(one_gpu, "timed_speed", lambda e: 1e15)
    monkeypatch.setenv("XLA_FLAGS", "")
    why = one_gpu.train_all("E2", session(store, rehearse=False))
    assert why == "m10-seed1 needs the learning rate of a finished sweep (E1)"


def test_what_is_missing_on_the_machine_is_listed_and_priced():
    names = [text.partition("==")[0].lower() for text in carried.missing()]
    assert {"grain", "tensorboardx"} <= set(names) and not {"jax", "numpy", "jaxgrow"} & set(names)
    assert re.search(r"the working tree +\d+\.\d\n", carried.carried(Path("nothing")))


def test_a_missing_corpus_is_reported_with_the_way_out(monkeypatch, tmp_path):
    missing = replace(carried.DATA, path=str(tmp_path / "train.txt.xz"))
    for module in (carried, one_gpu):
        monkeypatch.setattr(module, "DATA", missing)
    for arguments in (["--prepare", str(tmp_path / "gpu")], []):
        monkeypatch.setattr(sys, "argv", ["one_gpu", *arguments])
        with pytest.raises(UserError, match=r"there is no corpus at .*WIKIPEDIA_2013"):
            one_gpu.main()


@pytest.mark.slow
def test_all_experiments_are_rehearsed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_gpu", "--rehearse", "--out", str(tmp_path)])
    one_gpu.main()
    text = capsys.readouterr().out
    results = tmp_path / "results"
    one_gpu.collect(tmp_path / gpu_plan.ARCHIVE, results)
    store = Store(results, results)
    for name in EXPERIMENTS:
        there = {run.name for run in (results / "cpu/E3").glob("*torch*")}
        runs = one_gpu.runs_of(name, rehearse=True)
        runs = tuple(run for run in runs if "torch" not in run or run in there)
        assert store.finished(name, runs), name
        assert f"{name}: all of its results exist" in text or name == "E3"
    # The second call of the rehearsal finds all results of the first one.
    assert text.count("E1: all of its results exist") == 2
    assert store.best_rate("m10") in gpu_plan.RATES["m10"]
    table = gpu_tables.forecast_table(results)
    assert gpu_tables.NOTHING not in gpu_tables.summary(results) and table in text
    about = json.loads((results / "cpu/E1/m10_deepen-seed0/about.json").read_text())
    assert math.isfinite(about["loss"]) and about["seconds"] > 0 and about["card"] == "cpu"
