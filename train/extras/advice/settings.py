"""The result of a sweep: the tried settings, the best first.

A warning is added if the best setting is at an edge of the tried values.
"""

import math
from dataclasses import dataclass
from statistics import mean

from jaxgrow.tables import markdown_table
from train.analysis.runs import Run
from train.extras.report_sections import mean_and_each

AVERAGE = "val_loss_ema"  # the loss of the averaged weights in the result of a run


@dataclass(frozen=True)
class Tried:
    """One combination of settings and its runs, one per seed; None for a run that diverged."""

    settings: dict[str, str]
    runs: list[Run | None]
    # The fraction of the steps, if successive halving tried the settings with fewer steps.
    fraction: float | None = None

    @property
    def loss(self) -> float:
        """The mean final loss, of the averaged weights if the runs average them."""
        return mean(math.inf if r is None else r.result.get(AVERAGE, r.loss) for r in self.runs)


def edge_warnings(best: dict[str, str], swept: dict[str, list[str]]) -> list[str]:
    """A warning for every numeric setting of ``best`` that is the lowest or highest one tried.

    Zero is not an edge, because settings are not negative.
    """
    warnings = []
    for name, texts in swept.items():
        try:
            values = [float(t) for t in texts]
            value = float(best[name])
        except ValueError:
            continue  # only numbers have edges
        if len(values) > 1 and value in {min(values), max(values)} - {0.0}:
            which, beyond = ("lowest", "below") if value == min(values) else ("highest", "above")
            warnings.append(
                f"WARNING: the best {name}, {best[name]}, is the {which} value tried: also sweep values {beyond} it"
            )
    return warnings


def settings_table(tried: list[Tried], swept: dict[str, list[str]]) -> str:
    """The tried settings as Markdown, the best first.

    Settings that successive halving tried with fewer steps come last.
    """
    every = [r for t in tried for r in t.runs if r is not None]
    halving = any(t.fraction for t in tried)
    averages = any(AVERAGE in r.result for r in every)
    body = []
    for i, t in enumerate(tried):
        known = [r for r in t.runs if r is not None]
        body.append(
            [
                *t.settings.values(),
                *([f"{t.fraction or 1:g}"] if halving else []),
                _losses_cell(t, "val_loss"),
                *([_losses_cell(t, AVERAGE)] if averages else []),
                f"{sum(r.cost('flops') for r in known):.3g}",
                f"{sum(r.cost('seconds') for r in known):.0f}",
                "best" if i == 0 and t.loss < math.inf else "",
            ]
        )
    steps, average = ["of the steps"] * halving, ["loss of the average"] * averages
    text = markdown_table([*swept, *steps, "final loss", *average, "FLOPs", "seconds", ""], body)
    text += (
        f"\n\nAll {len(every)} completed runs: {sum(r.cost('flops') for r in every):.3g} FLOPs, "
        f"{sum(r.cost('seconds') for r in every):.0f} s, {sum(r.result['compile_seconds'] for r in every):.0f} s of them "
        "compiling.\n"
    )
    warnings = (
        edge_warnings(tried[0].settings, swept)
        if tried[0].loss < math.inf
        else [f"WARNING: every run {'of all steps ' if halving else ''}diverged"]
    )
    return text + "".join(f"{line}\n" for line in warnings)


def _losses_cell(tried: Tried, name: str) -> str:
    """One loss of each seed; empty if the runs did not measure it."""
    if None in tried.runs:
        return "diverged"
    losses = [r.result[name] for r in tried.runs if r is not None and name in r.result]
    return mean_and_each(losses, "{:.4f}") if losses else ""
