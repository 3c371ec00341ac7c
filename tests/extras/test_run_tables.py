"""The tables and numbers of docs/results/baselines.md come from the logs."""

from pathlib import Path
from statistics import mean

import pytest

from benchmarks import run_tables
from benchmarks.run_tables import seeds_of
from train.analysis.runs import frontier_budget
from train.extras.advice.evidence import all_evidence, all_frontiers
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
    assert f"saves {mean_and_each(saved, '{:.1f}').replace(' ', ' % ', 1)} of the FLOPs" in PAGE
    half = [
        [line[key] for run in muon for line in run.curve if line["step"] == 900]
        for key in ("val_loss_ema", "val_loss")
    ]
    assert "{:.4f} instead of {:.4f} after half".format(*map(mean, half)) in PAGE

    def loss(folder, name):
        return mean(run.loss for run in seeds_of(folder, name))

    base = mean(run.loss for run in muon)
    ramp = loss("baselines", "muon_ramp-optim.peak_lr=1.4e-2")
    cautious = loss("baselines", "muon_cautious-optim.peak_lr=2e-2-optim.weight_decay=0.1")
    both = loss("baselines_best", BEST)
    assert f"lowers the loss most**: by {base - ramp:.3f}" in PAGE
    assert f"lowers the loss by {base - cautious:.3f}** without" in PAGE
    assert f"it lowers the loss by {base - both:.3f}" in PAGE
    row = next(e for e in all_evidence() if (e.method, e.optimizer) == ("deepen", "Muon"))
    plain = mean(row.losses) - mean(all_frontiers()[0].losses[-1])
    above = loss("baselines_best", "muon_deepen") - both
    assert f"{above:.3f} instead of {plain:.3f} for half of the layers first" in PAGE
    low, *others = (run.loss for run in best)
    assert f"ends {mean(others) - low:.3f} below the other two" in PAGE
