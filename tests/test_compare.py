"""Comparisons: costs read off logs, by hand on synthetic runs, and the script that runs what is missing."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from train import compare, pretrain
from train.errors import exits_cleanly
from train.report import Comparison, Run, frontier_budget


@pytest.fixture(autouse=True, scope="module")
def quick():
    with runs.quick():
        yield


def made(folder: Path, name: str, curve: list[tuple], seed: int = 0, **result) -> Run:
    """A finished run with validation losses ``(phase, step, cost, loss)``; its FLOPs are 10 times its seconds."""
    folder = folder / f"{name}-{seed}"
    folder.mkdir()
    lines = [{"phase": p, "step": s, "flops": 10.0 * c, "seconds": c, "val_loss": v} for p, s, c, v in curve]
    lines.insert(
        1, {"phase": curve[0][0], "step": 1, "flops": 0.0, "seconds": 0, "tokens": 1, "loss": -1.0}
    )  # no validation
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, cost, loss = curve[-1]
    phase = {"phase": "train large", "parameters": 50, "steps": 4, "tokens": 100, "flops": 10.0 * cost, "seconds": cost}
    phase["layers"] = 14.0
    values = {"tokens": 100, "flops": 10.0 * cost, "seconds": cost, "val_loss": loss, "phases": [phase]}
    values |= {"val_accuracy": 0.25, "model": {}}
    (folder / "result.json").write_text(json.dumps(values | result))
    return Run(name, seed, folder)


SCRATCH = [("train large", s, float(10 * s), v) for s, v in ((1, 6.0), (2, 5.0), (3, 4.0), (4, 3.0))]
CYCLE = [
    ("train large", 1, 2.0, 5.0),  # the first phase has the last one's name, and reached the loss before
    ("train large", 2, 4.0, 2.0),
    ("train coarse1", 1, 6.0, 1.0),
    ("train large", 1, 20.0, 4.0),
    ("train large", 2, 24.0, 3.5),
    ("train large", 3, 28.0, 2.5),
    ("train large", 4, 32.0, 2.0),
]


def test_the_cost_of_a_loss_is_read_between_two_validations_of_the_last_phase(tmp_path):
    run = made(tmp_path, "cycle", CYCLE)
    assert run.cost_to(3.0, "seconds") == 26.0  # half way from 3.5 to 2.5
    assert run.cost_to(3.0, "flops") == 260.0
    assert run.cost_to(3.5, "seconds") == 24.0
    assert run.cost_to(4.5, "seconds") == 20.0  # had it at the first validation of the phase
    assert run.cost_to(1.9, "seconds") is None  # though a small model had 1.0
    assert made(tmp_path, "scratch", SCRATCH).cost_to(3.0, "seconds") == 40.0


def test_the_first_time_counts_where_the_loss_rises_again(tmp_path):
    curve = [("train large", s, float(s), v) for s, v in ((1, 4.0), (2, 2.0), (3, 3.0), (4, 1.0))]
    assert made(tmp_path, "wavy", curve).cost_to(2.5, "seconds") == 1.75


def test_the_frontier_is_read_in_the_logarithm_of_flops(tmp_path):
    ends = [(100.0, 4.0), (10.0, 6.0), (1000.0, 3.0)]
    frontier = [made(tmp_path, f"x{c:g}", [("train large", 1, c / 10, v)]) for c, v in ends]
    assert frontier_budget(frontier, 5.0) == pytest.approx(math.sqrt(10 * 100))
    assert frontier_budget(frontier, 3.75) == pytest.approx(10**2.25)
    assert frontier_budget(frontier, 3.0) == pytest.approx(1000)
    assert frontier_budget(frontier, 2.9) == math.inf and frontier_budget(frontier, 6.1) is None


@pytest.fixture
def comparison(tmp_path) -> Comparison:
    slow = [(p, s, 2 * c, v) for p, s, c, v in SCRATCH]
    short = [("train large", 1, 10.0, 6.0), ("train large", 2, 20.0, 4.0)]
    return Comparison(
        [
            [made(tmp_path, "scratch", SCRATCH), made(tmp_path, "scratch", slow, seed=1)],
            [made(tmp_path, "cycle", CYCLE), made(tmp_path, "cycle", CYCLE, seed=1)],
        ],
        [[made(tmp_path, "scratch-x0.5", short), made(tmp_path, "scratch-x0.5", short, seed=1)]],
    )


def test_savings_by_hand(comparison):
    scratch, cycle, short = comparison.rows()
    assert scratch["saved_flops"] == [0, 0] and scratch["flops"] == 1
    assert cycle["saved_flops"] == pytest.approx([1 - 26 / 40, 1 - 26 / 80])  # each seed against its own baseline
    assert cycle["saved_seconds"] == cycle["saved_flops"]
    assert cycle["flops"] == pytest.approx((32 / 40 + 32 / 80) / 2)
    assert cycle["loss"] == [2.0, 2.0] and cycle["seeds"] == [0, 1] and cycle["tokens_per_parameter"] == 2.0
    assert cycle["below_frontier"] == [True, True]  # from scratch, more than the whole budget would be needed:
    assert cycle["saved_frontier"] == pytest.approx([1 - 32 / 40, 1 - 32 / 80])
    assert not any(scratch["below_frontier"] + short["below_frontier"])
    assert short["saved_flops"] == [None, None] and short["saved_frontier"] == pytest.approx([0, 0])


def test_the_table_says_what_was_not_reached(comparison, tmp_path):
    lines = comparison.table().splitlines()
    row = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[1:-1]] for line in lines[2:5]}
    assert row["cycle"][-3:] == ["51.2 % [35.0 %, 67.5 %]", "51.2 % [35.0 %, 67.5 %]", "> 40.0 % [20.0 %, 60.0 %]"]
    assert row["scratch-x0.5"][-3] == "not reached"
    comparison.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_of_classifiers_the_table_tells_the_accuracy(tmp_path):
    runs = [
        made(tmp_path, "vit", SCRATCH, seed=s, model={"classes": 10}, val_accuracy=a) for s, a in ((0, 0.5), (1, 0.75))
    ]
    table = [[c.strip() for c in line.split("|")[1:-1]] for line in Comparison([runs], []).table().splitlines()[:3]]
    assert dict(zip(table[0], table[2], strict=True))["final accuracy"] == "62.5 % [50.0 %, 75.0 %]"


def test_some_seeds_that_do_not_reach_a_loss_are_counted(tmp_path):
    far = [(p, s, c, v + 2) for p, s, c, v in CYCLE]
    scratch = [made(tmp_path, "scratch", SCRATCH, seed=s) for s in (0, 1)]
    table = Comparison([scratch, [made(tmp_path, "cycle", CYCLE), made(tmp_path, "cycle", far, seed=1)]], []).table()
    assert "not reached by 1 of 2 seeds" in table


def test_a_bound_is_one_only_beside_a_number(comparison):
    (_, cycle), shorter = comparison.runs, comparison.frontier
    far = made(cycle[1].folder.parent, "cycle-far", [(p, s, c, v + 9) for p, s, c, v in CYCLE], seed=1)
    table = Comparison([comparison.runs[0], [cycle[0], far]], shorter).table()
    assert "not reached by 1 of 2 seeds |" in table and "> not" not in table


GROWN = [
    ("train small", 1, 5.0, 4.0),
    ("grow small", 0, 6.0, 3.9),
    ("train large", 1, 16.0, 3.5),
    ("train large", 2, 26.0, 3.0),
]
SOURCES = (
    [("train small", 4.0), ("measure small", 1.0), ("train small", 1.0)],
    [("import small", 6.0)],
    [("learn maps", 6.0)],
)


def grown(folder: Path, name: str, source: list[tuple[str, float]], seed: int = 0) -> Run:
    """A run that ends at the loss of `SCRATCH`, in 26 seconds of its 40; the first phases took those of ``source``."""
    spent = [*source, ("train large", 20.0)]
    phases = [
        {"phase": p, "parameters": 50, "steps": 4, "tokens": 50, "flops": 10 * s, "seconds": s, "layers": 8.0}
        for p, s in spent
    ]
    return made(folder, name, GROWN, seed, phases=phases)


@pytest.mark.parametrize("source", SOURCES[:2], ids=["trained", "imported"])
def test_a_small_model_that_one_has_already_is_told_apart(tmp_path, source):
    short = made(tmp_path, "scratch-x0.5", [("train large", 1, 10.0, 6.0), ("train large", 2, 20.0, 4.0)])
    run = grown(tmp_path, "grown", source)
    assert run.source("seconds") == 6 and run.source("flops") == 60
    comparison = Comparison([[made(tmp_path, "scratch", SCRATCH)], [run]], [[short]])
    scratch, row, _ = comparison.rows()
    for column in ("saved_flops", "saved_seconds", "saved_frontier"):
        assert row[column] == pytest.approx([1 - 26 / 40])
        assert row[f"{column}_given"] == pytest.approx([1 - 20 / 40])
    assert row["source"] == 6 / 40 and scratch["source"] == 0
    head, _, *rows = [[c.strip() for c in line.split("|")[1:-1]] for line in comparison.table().splitlines()[:5]]
    saved = ["FLOPs saved to the baseline's final loss", "wall-clock saved to it", "FLOPs saved against the frontier"]
    assert head[6:] == [*saved, *(f"{column}, small model given" for column in saved)]
    assert rows[1][6:] == ["35.0 %"] * 3 + ["50.0 %"] * 3
    assert rows[0][6:] == ["0.0 %"] * 6
    assert rows[2][6:] == ["not reached", "not reached", "0.0 %"] * 2
    head = replace(comparison, frontier=[]).table().splitlines()[0]
    assert head.count("small model given") == 2 and "frontier" not in head


def test_without_a_small_model_no_column_speaks_of_one(comparison, tmp_path):
    assert "given" not in comparison.table()
    learned = grown(tmp_path, "learned", SOURCES[2])  # learning maps is a cost of the method
    assert "given" not in Comparison([[made(tmp_path, "base", SCRATCH)], [learned]], []).table()


def dropping(folder: Path, seed: int, seconds: float) -> Run:
    """A run of two phases of 4 and 20 steps; the second drops layers and takes ``seconds`` a step after a slow first line."""
    run = made(folder, "drop", SCRATCH, seed)
    phases = [
        {"phase": "train large", "steps": 4, "tokens": 40, "layers": 16.0},
        {"phase": "measure large", "steps": 0, "tokens": 0, "layers": 0.0},
        {"phase": "train large", "steps": 20, "tokens": 200, "layers": 55.0},
    ]
    result = run.result | {
        "tokens": 240,
        "phases": [p | {"parameters": 50, "flops": 9.0, "seconds": 5.0} for p in phases],
    }
    (run.folder / "result.json").write_text(json.dumps(result))
    steps = {4: 3.0, 8: 9.0, 12: 9 + 4 * seconds, 16: 9 + 8 * seconds, 24: 80.0}
    with (run.folder / "metrics.jsonl").open("a") as log:
        for step, at in steps.items():
            keep = {"keep": [1.0, 0.75, 0.5, 0.5]} if step > 4 else {}
            line = {"phase": "train large", "step": step, "tokens": 10 * step, "seconds": at, "flops": 1.0, "loss": 2.0}
            log.write(json.dumps(line | keep) + "\n")
    return Run("drop", seed, run.folder)


def test_a_phases_layers_and_the_median_time_of_its_steps(tmp_path):
    runs = [dropping(tmp_path, seed, seconds) for seed, seconds in ((0, 0.5), (1, 0.75))]
    assert [runs[0].step_seconds(i) for i in range(3)] == [1.0, None, 0.5]  # the last of 0.5, 0.5 and (80 - 13) / 8
    table = Comparison([[made(tmp_path, "scratch", SCRATCH, s) for s in (0, 1)], runs], []).table()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| drop")][1:]
    assert [row[5:7] for row in rows] == [
        ["4.00", "1000.0 [1000.0, 1000.0]"],
        ["", ""],
        ["2.75", "625.0 [500.0, 750.0]"],
    ]


def test_keep_probabilities_are_plotted_where_layers_are_dropped(tmp_path):
    scratch, path = made(tmp_path, "scratch", SCRATCH), tmp_path / "keep.png"
    assert not Comparison([[scratch]], []).plot_keep(path)
    assert not path.exists()
    assert Comparison([[scratch], [dropping(tmp_path, 0, 0.5)]], []).plot_keep(path)
    assert path.read_bytes()[:4] == b"\x89PNG"


# --- the script ---


def test_compare_runs_what_is_missing_and_nothing_twice(tmp_path, monkeypatch, capsys):
    scratch = runs.experiment(tmp_path, name="scratch")
    cycle = runs.experiment(tmp_path, name="cycle", method=runs.VCYCLE)
    configs = [runs.script(tmp_path, e) for e in (scratch, cycle)]
    folder = tmp_path / "runs"
    options = ["--seeds", "3", "--frontier", "0.5", "--workdir", str(folder), "--set", "eval_batches=1"]
    monkeypatch.setattr(sys, "argv", ["compare", *configs, *options])
    exits_cleanly(compare.main)
    assert {p.parent.name for p in folder.glob("*/result.json")} == {
        "scratch-seed3",
        "cycle-seed3",
        "scratch-x0.5-seed3",
    }
    assert json.loads((folder / "scratch-x0.5-seed3" / "result.json").read_text())["steps"] == 4
    config = json.loads((folder / "scratch-seed3" / "config.json").read_text())
    assert (config["eval_batches"], config["seed"]) == (1, 3)
    first = {name: (folder / name).read_bytes() for name in ("compare.md", "compare.json")}
    assert (folder / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert first["compare.md"].decode() in capsys.readouterr().out
    rows = {row["run"]: row for row in json.loads(first["compare.json"])}
    assert rows.keys() == {"scratch", "cycle", "scratch-x0.5"} and rows["scratch"]["saved_flops"] == [0.0]

    monkeypatch.setattr(pretrain, "train_step", None)  # would fail if anything was trained
    exits_cleanly(compare.main)
    assert {name: (folder / name).read_bytes() for name in first} == first
