"""The tables and numbers of docs/results/baselines.md come from the logs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import run_tables
from benchmarks.run_tables import seeds_of
from train.analysis.runs import frontier_budget, half_width
from train.extras.advice.evidence import Evidence, all_frontiers, method_rows
from train.extras.report_sections import mean_and_each

PAGE = " ".join((Path(__file__).parents[2] / "docs/results/baselines.md").read_text().split())
BEST = "wiki12_muon"


@pytest.mark.parametrize("table", range(len(run_tables.BASELINES)))
def test_a_table_is_that_of_the_logs(table):
    found = " ".join(run_tables.BASELINES[table]().split())
    assert found in PAGE, "python docs/tables.py writes it again"


def test_the_sentences_are_those_of_the_logs():
    muon, best = seeds_of("baselines", "muon_ema-optim.ema=0.97"), seeds_of("baselines_best", BEST)
    shorter = [seeds_of("baselines_best", f"{BEST}-x{x}") for x in (0.75, 0.55)]
    saved = []
    for seed, run in enumerate(muon):
        frontier = [runs[seed] for runs in (best, *shorter)]
        budget = frontier_budget(frontier, run.loss)
        assert budget is not None
        saved.append(100 * (1 - budget / run.cost("flops")))
    found = mean_and_each(saved, "{:.1f}").replace(" ", " % ", 1)
    half = f"{half_width(saved):.1f} points on each side"
    assert f"saves {found} of the FLOPs of plain Muon**, with a 95 % interval of {half}" in PAGE
    halfway = [
        [line[key] for run in muon for line in run.curve if line["step"] == 900]
        for key in ("val_loss_ema", "val_loss")
    ]
    assert "{:.4f} instead of {:.4f} after half".format(*map(mean, halfway)) in PAGE

    averages = [seeds_of("baselines", f"muon_ema-optim.ema={d}") for d in ("0.9", "0.97", "0.99")]
    changes = [mean(r.result["val_loss_ema"] - r.loss for r in runs) for runs in averages]
    assert f"by at most {max(map(abs, changes)):.4f}**" in PAGE
    low, *others = (run.loss for run in best)
    assert f"ends {mean(others) - low:.3f} below the other two" in PAGE


def losses(folder: str, name: str) -> list[float]:
    return [run.loss for run in seeds_of(folder, name)]


def difference(more: Sequence[float], less: Sequence[float], form: str = "{:.3f}") -> str:
    """Return the mean of the differences of the seeds, and half of its 95 % interval."""
    each = [a - b for a, b in zip(more, less, strict=True)]
    return f"{form} ± {form}".format(mean(each), half_width(each))


def test_the_differences_of_losses_are_those_of_the_logs():
    muon, best = losses("baselines", "muon_ema-optim.ema=0.97"), losses("baselines_best", BEST)
    ramp = losses("baselines", "muon_ramp-optim.peak_lr=1.4e-2")
    cautious = losses("baselines", "muon_cautious-optim.peak_lr=2e-2-optim.weight_decay=0.1")
    lower, own = (losses("baselines", f"wiki12_muon-optim.peak_lr={x}") for x in ("1.4e-2", "2e-2"))
    assert own == muon  # the training does not depend on the average
    assert f"ends {difference(lower, own)} higher than at 2e-2" in PAGE
    assert f"The ramp lowers the loss by {difference(muon, ramp)}**" in PAGE
    same = mean(muon) - mean(losses("baselines", "muon_ramp-optim.peak_lr=2e-2"))
    assert f"by {same:.3f} at the learning rate of plain Muon" in PAGE
    assert f"It lowers the loss by {difference(muon, cautious)} without" in PAGE
    assert f"in addition to the ramp by {difference(ramp, best)}." in PAGE
    assert f"lowest mean, {difference(muon, best)} below plain Muon" in PAGE


def measured(method: str, tau: float | None) -> Evidence:
    """Return the row of a method under Muon, of the first page that has it."""
    return next(e for e in method_rows(method, tau) if (e.optimizer, e.family) == ("Muon", "GPT2"))


def test_the_comparisons_with_plain_muon_are_those_of_the_logs():
    ways = [("deepen", 0.5), ("halves", 0.6), ("vcycle", None)]
    plain = [measured(*way) for way in ways]
    ramped = [measured(f"{method}_ramp", tau) for method, tau in ways]
    assert {e.page for e in ramped} == {"docs/results/baselines.md"}
    for old, new in zip(plain, ramped, strict=True):
        savings = [f"{e.mean} % ± {e.interval}" for e in (new, old)]
        of = " of the FLOPs" * (new is ramped[0])
        assert f"{savings[0]}{of} instead of {savings[1]}" in PAGE
        assert all(a > b for a, b in zip(old.each, new.each, strict=True))
        assert min(new.each) == new.each[0]
    first, second, third = (
        difference(old.each, new.each, "{:.1f}") for old, new in zip(plain, ramped, strict=True)
    )
    assert f"{first}, {second} and {third} points" in PAGE
    avoided = [100 * (1 - e.flops) for e in (ramped[0], plain[0], measured("deepen_ramp", 0.6))]
    assert "avoid {:.0f} % of the FLOPs instead of {:.0f} %".format(*avoided) in PAGE
    assert f"it avoids {avoided[2]:.0f} %" in PAGE
    scratch = mean(all_frontiers()[0].losses[-1])
    now = losses("baselines", "muon_ema-optim.ema=0.97")
    assert f"plain Muon ended at {scratch:.4f} instead of {mean(now):.4f}" in PAGE
    above = mean(losses("baselines_best", "muon_deepen")) - mean(losses("baselines_best", BEST))
    behind = mean(plain[0].losses) - scratch
    assert f"{above:.3f} instead of {behind:.3f} for half of the layers first" in PAGE
