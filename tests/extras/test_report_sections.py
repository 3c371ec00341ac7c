"""What do the tables of growths and of seconds of a comparison tell?"""

import json
from pathlib import Path

import pytest
from synthetic import SCRATCH, made, tables

from benchmarks.curves import logged_runs
from train.advise import run_slowdown
from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.extras.comparison_report import markdown_report, result_lines
from train.extras.report_sections import SECTIONS, tokens_to_baseline


def logged(folder: Path, name: str, points: list[tuple[str, int, float]], seed: int = 0, **result):
    """Create a run from ``(phase, tokens, validation loss)``."""
    curve = [(phase, i, float(tokens), loss) for i, (phase, tokens, loss) in enumerate(points, 1)]
    log = made(folder, name, curve, seed, **result).folder / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [line | {"tokens": line["seconds"] - line["compile_seconds"]} for line in lines]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(name, seed, log.parent)


GROWTH = {
    **{"phase": "grow small", "tokens": 20, "loss_before": 4.5, "loss_after": 4.6},
    **{"growing_seconds": 0.2, "resharding_seconds": 0.4, "recompiling_seconds": 3.0},
}
COMMON = {"parameters": 5, "steps": 4, "tokens": 50, "layers": 8.0, "compile_seconds": 0.0}
BASE = [("train large", 10, 5.0), ("train large", 20, 4.0), ("train large", 40, 3.0)]


def phase(name: str, flops: float, seconds: float) -> dict:
    return COMMON | {"phase": f"train {name}", "flops": flops, "seconds": seconds}


def growths(found: Comparison) -> dict:
    """Return the rows of the table of growths."""
    (table,) = [t for t in tables(markdown_report(found)) if "growth" in next(iter(t.values()))]
    return table


# The baseline has 3.75, 3.5 and 3.25: at 25 tokens, the gap is 0.25, and then -0.25.
@pytest.mark.parametrize(
    ("losses", "tokens"), [((4.0, 3.25), 8), ((4.0, 4.0), None), ((3.75, 3.0), 5)]
)
def test_tokens_until_the_baseline_is_reached(tmp_path, losses, tokens):
    points = [("train small", 20, 4.5), ("grow small", 20, 4.6)]
    points += [("train large", 25 + 5 * i, loss) for i, loss in enumerate(losses)]
    run, base = logged(tmp_path, "grown", points), logged(tmp_path, "base", BASE)
    assert tokens_to_baseline(run, GROWTH, base) == tokens
    assert tokens_to_baseline(run, GROWTH | {"loss_after": 3.9}, base) == 0


def test_growths_are_a_table(tmp_path):
    base = [logged(tmp_path, "base", BASE, seed) for seed in (0, 1)]
    ends = [[("train large", 25, loss)] for loss in (3.0, 4.0)]
    grown = [logged(tmp_path, "grown", e, s, growths=[GROWTH]) for s, e in enumerate(ends)]
    found = Comparison([base, grown], [])
    (row,) = SECTIONS["growths"](found)[0]
    assert row["tokens_to_baseline"] == [pytest.approx(2), None] and row["loss_after"] == [4.6] * 2
    assert growths(found)["grown"] == {
        **{"run": "grown", "growth": "grow small", "loss before": "4.5000", "after": "4.6000"},
        **{"caught up after": "never: 1 of 2 seeds"},
        **{"growing": "0.2 s", "resharding": "0.4 s", "recompiling": "3.0 s"},
    }


def test_runs_without_a_time_of_resharding_have_a_table(tmp_path):
    """They did not move any arrays on their own."""
    growth = {name: x for name, x in GROWTH.items() if name != "resharding_seconds"}
    grown = logged(tmp_path, "grown", [("train large", 25, 3.0)], growths=[growth])
    found = Comparison([[logged(tmp_path, "base", BASE)], [grown]], [])
    assert growths(found)["grown"]["resharding"] == "0.0 s"


@pytest.mark.parametrize(("seconds", "large", "reason"), [
    ((10.0, 20.0), 220.0, "small model +4.0 s, full model -2.0 s"), ((6.0, 24.0), 240.0, ""),
])  # fmt: skip
def test_a_reason_is_given_if_and_only_if_the_times_differ(tmp_path, seconds, large, reason):
    """10 FLOPs take a second from scratch, so the phases have 6 and 22 or 24 s."""
    whole = made(tmp_path, "whole", SCRATCH, uncounted={"validation": 2.0})
    phases = [phase("small", 60.0, seconds[0]), phase("large", large, seconds[1])]
    grown = made(
        tmp_path, "grown", [("train large", 4, 30.0, 3.0)], phases=phases, flops=60.0 + large,
        seconds=34.0, compile_seconds=4.0, uncounted={"validation": 9.0},
    )  # fmt: skip
    report = markdown_report(Comparison([[whole], [grown]], []))
    text = " ".join(report.split())
    assert ("The difference: " in text) == bool(reason) and reason in text
    assert ("grown took 30.0 s. At the speed of whole, its FLOPs take 28.0 s." in text) == bool(
        reason
    )
    times = tables(report)[-1]
    assert list(times["whole"].values()) == ["whole", "40.0", "3.0", "2.0", "0.0"]
    assert list(times["grown"].values()) == ["grown", "30.0", "4.0", "9.0", "0.0"]


def test_a_frontier_of_another_speed_is_a_reason(tmp_path):
    """Then the saving of seconds differs from that of FLOPs, although the run has no slow phase."""
    whole = made(tmp_path, "whole", SCRATCH)
    short = made(
        tmp_path, "short", [("train large", 4, 25.0, 3.4)], phases=[phase("large", 200.0, 25.0)],
        flops=200.0, seconds=25.0, compile_seconds=0.0,
    )  # fmt: skip
    report = " ".join(markdown_report(Comparison([[whole]], [[short]])).split())
    assert "short took 25.0 s. At the speed of whole, its FLOPs take 20.0 s." in report


def test_a_run_compared_with_itself_saves_nothing():
    """The control of the savings, in FLOPs and in seconds."""
    base, short = ([*logged_runs("m1_low", f"m1_low{name}").values()] for name in ("", "-x0.75"))
    assert len(base) == len(short) == 3
    found = Comparison([base, base], [short])
    _, row, _ = found.rows()
    for name in ("frontier", "frontier_seconds", "flops", "run_seconds", "seconds"):
        assert row[f"saved_{name}"] == pytest.approx([0.0] * 3, abs=1e-12), name
    assert (row["flops"], row["run_seconds"], row["below_frontier"]) == (1, 1, [False] * 3)
    assert SECTIONS["growths"](found) == ([], "")
    assert "m1_low took" not in " ".join(SECTIONS["times"](found)[1].split())
    (text,) = result_lines(found)
    assert "reached its loss with 0.0 % ± 0.0 fewer FLOPs than a run from scratch" in text
    assert run_slowdown(base[0]) == 1


def test_averages_of_weights_are_a_table(tmp_path):
    base = [made(tmp_path, "base", SCRATCH, seed) for seed in (0, 1)]
    losses = enumerate((2.5, 2.75))
    averaged = [made(tmp_path, "averaged", SCRATCH, s, val_loss_ema=loss) for s, loss in losses]
    found = Comparison([base, averaged], [])
    (row,) = SECTIONS["averages"](found)[0]
    assert (row["run"], row["val_loss_ema"]) == ("averaged", [2.5, 2.75])
    (table,) = [t for t in tables(markdown_report(found)) if "average" in next(iter(t.values()))]
    assert table["averaged"]["average"] == "2.6250 [2.5000, 2.7500]"
    assert SECTIONS["averages"](Comparison([base], [])) == ([], "")
