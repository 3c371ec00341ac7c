"""The experiments for a GPU: their plan, results, forecasts and tables, and a rehearsal of all of them."""

import json
import math
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import carried, gpu_plan, gpu_tables, one_gpu
from benchmarks.gpu_plan import EXPERIMENTS, Store, Training
from train.common.errors import UserError
from train.extras.advice.fits import Measured, fit_savings

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


def test_the_forecasts_are_those_of_the_law_and_stay(tmp_path, monkeypatch):
    written = json.loads(gpu_plan.FORECASTS.read_text())
    assert written == json.loads(json.dumps([asdict(f) for f in gpu_plan.forecasts()]))
    assert {row["experiment"] for row in written} == {"E1", "E2", "E4", "E7"}
    monkeypatch.setattr(gpu_plan, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_plan, "FORECASTS", tmp_path / "forecasts.json")
    one_gpu.write_forecasts()
    assert json.loads((tmp_path / "forecasts.json").read_text()) == written
    Store(tmp_path, tmp_path).keep("card", "E1", "m10-seed0", {})
    with pytest.raises(UserError, match="has results, so this would not be a forecast"):
        one_gpu.write_forecasts()


def test_the_interval_of_a_new_measurement_is_wider_than_that_of_the_line():
    points = [Measured((2.0**i, 20.0), (0.1 + 0.01 * (-1) ** i, 0.12), 0) for i in range(4, 9)]
    line = fit_savings(points)
    at = (2.0**10, 20.0)
    (_, mean), (_, one), (_, two) = (line.expected(at, seeds) for seeds in (None, 1, 2))
    assert mean < two < one
    # The variance of a seed is added to that of the line.
    assert one**2 - mean**2 == pytest.approx(2 * (two**2 - mean**2))
    assert line.expected(at, 10**12)[1] == pytest.approx(mean)


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
    why = one_gpu.train_all("E1", session(store))
    first = EXPERIMENTS["E1"][0].name
    assert re.fullmatch(rf"{first} takes about \d+ s, and (59|60) s are left", why)
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
