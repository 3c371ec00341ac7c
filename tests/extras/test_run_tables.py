"""The tables and numbers of docs/results/baselines.md and forms.md come from the logs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import run_tables
from benchmarks.run_tables import seeds_of
from train.analysis.runs import frontier_budget, half_width
from train.extras.advice.evidence import Evidence, all_evidence, all_frontiers, method_rows
from train.extras.report_sections import mean_and_each

PAGE, FORMS = (
    " ".join((Path(__file__).parents[2] / f"docs/results/{name}.md").read_text().split())
    for name in ("baselines", "forms")
)
BEST = "wiki12_muon"


TABLES = {"baselines": (PAGE, run_tables.BASELINES), "forms": (FORMS, run_tables.FORMS)}


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in TABLES for i in range(len(TABLES[page][1]))]
)
def test_a_table_is_that_of_the_logs(page, number):
    text, tables = TABLES[page]
    assert " ".join(tables[number]().split()) in text, "python docs/tables.py writes it again"


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


def test_the_numbers_of_loops_are_those_of_the_logs():
    measured = {(e.method, e.tau, e.tokens_per_parameter): e for e in on_forms()}
    saved = {key: f"{e.mean} % ± {e.interval}" for key, e in measured.items()}
    lost = measured["loop", 0.35, 19.5]
    assert lost.mean is not None
    assert (
        f"copies save {saved['copies', 0.35, 19.5]}, but the loop needs {-lost.mean} % ± {lost.interval} more"
        in FORMS
    )
    copies, loops, own = (
        [mean(losses("loops", f"muon_{kind}{at}")) for at in (35, 50)]
        for kind in ("interleave", "loop", "unloop")
    )
    above = [loop - copy for loop, copy in zip(loops, copies, strict=True)]
    assert (
        "ends {:.3f} (after 0.35) and {:.3f} (after 0.5) above the copies".format(*above) in FORMS
    )
    recovered = [
        100 * (loop - unlooped) / gap for loop, unlooped, gap in zip(loops, own, above, strict=True)
    ]
    assert "recover {:.0f} and {:.0f} % of that distance".format(*recovered) in FORMS
    early = losses("loops", "muon_loop35"), losses("loops", "muon_loop50")
    assert f"the two losses differ by {difference(*early, '{:.4f}')}" in FORMS
    each = [measured["copies", 0.35, tokens].mean for tokens in (7.8, 19.5, 48.8)]
    assert "saved {}, {} and {} %**".format(*each) in FORMS
    short = [mean(losses("loops8", f"muon_{kind}35")) for kind in ("loop", "unloop", "interleave")]
    assert f"end {short[0] - short[2]:.3f} below the loop" in FORMS
    assert f"{short[1] - short[2]:.3f} below the loop with own weights" in FORMS
    assert f"**: {saved['loop', 0.35, 7.8]}, and {saved['unloop', 0.35, 7.8]} if each pass" in FORMS
    assert f"a loop saves {saved['loop', 0.35, 7.8]} of the FLOPs" in FORMS
    assert f"copies save {saved['copies', 0.35, 7.8]}." in FORMS
    longest = measured["unloop", 0.35, 48.8]
    assert longest.mean is not None
    assert f"needs {-longest.mean} % ± {longest.interval} more FLOPs" in FORMS
    shortest = losses("loops49", "wiki12_muon-x0.55")
    above = [x > y for x, y in zip(losses("loops49", "muon_loop35"), shortest, strict=True)]
    assert above == [True, False, True]  # "two of three seeds end above"
    *others, low = losses("loops49", "wiki12_muon")
    *lower, high = losses("loops49", "muon_interleave35")
    text = f"ends {mean(others) - low:.3f} below the mean of the other two, and its copies {high - mean(lower):.3f} above"
    assert text in FORMS


def on_forms() -> list[Evidence]:
    return [e for e in all_evidence() if e.page == "docs/results/forms.md"]


def test_the_differences_of_heads_and_experts_are_those_of_the_logs():
    tied, untied, late = (
        losses("heads", name) for name in ("wiki12_muon", "muon_untied", "muon_untie")
    )
    assert f"from the first step on lowers the loss by {difference(tied, untied)}" in FORMS
    assert f"after two thirds of the steps by {difference(tied, late)}" in FORMS
    assert all(a < b for a, b in zip(untied, late, strict=True))
    four, even, chosen, eight = (
        losses("copies", f"experts_{name}") for name in ("four", "even", "utility", "eight")
    )
    assert f"Even copies end {difference(four, even)} below four experts" in FORMS
    assert f"by utility {difference(even, chosen)} below even copies" in FORMS
    assert f"first step on end {difference(four, eight)} below four" in FORMS
    assert all(a < b for a, b in zip(eight, four, strict=True))
    looped, own = (
        mean(losses("loops_higher", name)) - mean(losses("loops", name))
        for name in ("muon_loop35", "muon_unloop35")
    )
    text = f"the loop ends {looped:.4f} higher than with 2e-2, and the loop with own weights {-own:.4f} lower"
    assert text in FORMS
