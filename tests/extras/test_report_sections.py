"""What do the tables of growths and of seconds of a comparison tell?"""

import json
from pathlib import Path

import pytest
from synthetic import SCRATCH, made, tables

from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.extras.report_sections import tokens_to_baseline


def logged(folder: Path, name: str, points: list[tuple[str, int, float]], seed: int = 0, **result):
    """Create a run from ``(phase, tokens, validation loss)``."""
    curve = [(phase, i, float(tokens), loss) for i, (phase, tokens, loss) in enumerate(points, 1)]
    run = made(folder, name, curve, seed, **result)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["tokens"] = line["seconds"] - line["compile_seconds"]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return Run(name, seed, run.folder)


GROWTH = {
    **{"phase": "grow small", "tokens": 20, "loss_before": 4.5, "loss_after": 4.6},
    **{"growing_seconds": 0.2, "recompiling_seconds": 3.0},
}
BASE = [("train large", 10, 5.0), ("train large", 20, 4.0), ("train large", 40, 3.0)]


@pytest.mark.parametrize(
    ("losses", "tokens"),
    [
        # The baseline has 3.75, 3.5 and 3.25: at 25 tokens, the gap is 0.25, and then -0.25.
        ((4.0, 3.25), 5 + 2.5),
        ((4.0, 4.0), None),
        ((3.75, 3.0), 5),
    ],
)
def test_tokens_until_the_baseline_is_reached(tmp_path, losses, tokens):
    points = [("train small", 20, 4.5), ("grow small", 20, 4.6)]
    points += [("train large", 25 + 5 * i, loss) for i, loss in enumerate(losses)]
    run, base = logged(tmp_path, "grown", points), logged(tmp_path, "base", BASE)
    found = tokens_to_baseline(run, GROWTH, base)
    assert found == (None if tokens is None else round(tokens))
    assert tokens_to_baseline(run, GROWTH | {"loss_after": 3.9}, base) == 0


def test_growths_are_a_table(tmp_path):
    base = [logged(tmp_path, "base", BASE, seed) for seed in (0, 1)]
    grown = [
        logged(tmp_path, "grown", [("train large", 25, loss)], seed, growths=[GROWTH])
        for seed, loss in ((0, 3.0), (1, 4.0))
    ]
    found = Comparison([base, grown], [])
    (row,) = found.sections["growths"][0]
    assert row["tokens_to_baseline"] == [pytest.approx(2), None] and row["loss_after"] == [4.6] * 2
    (table,) = [t for t in tables(found.report()) if "growth" in next(iter(t.values()))]
    assert table["grown"] == {
        **{"run": "grown", "growth": "grow small", "loss before": "4.5000", "after": "4.6000"},
        **{"caught up after": "never: 1 of 2 seeds", "growing": "0.2 s", "compiling": "3.0 s"},
    }


def test_the_seconds_of_slower_flops_are_explained(tmp_path):
    """The small model has 10 of 40 s, but a fifth of the FLOPs."""
    whole = made(tmp_path, "whole", SCRATCH, uncounted={"validation": 2.0})
    common = {"parameters": 5, "steps": 4, "tokens": 50, "layers": 8.0, "compile_seconds": 0.0}
    phases = [
        common | {"phase": "train small", "flops": 50.0, "seconds": 10.0},
        common | {"phase": "train large", "flops": 200.0, "seconds": 20.0},
    ]
    grown = made(
        tmp_path, "grown", [("train large", 4, 30.0, 3.0)], phases=phases, flops=250.0,
        seconds=34.0, compile_seconds=4.0,
    )  # fmt: skip
    report = Comparison([[whole], [grown]], []).report()
    assert "grown took 30.0 s. At the speed of whole, its FLOPs take 25.0 s." in report
    assert "The difference: small model +5.0 s." in " ".join(report.split())
    times = tables(report)[-1]
    assert list(times["whole"].values()) == ["whole", "40.0", "3.0", "2.0", "0.0"]
    assert list(times["grown"].values()) == ["grown", "30.0", "4.0", "0.0", "0.0"]
