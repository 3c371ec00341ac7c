"""The result of a sweep: the tried settings, the best first.

A warning is added if the best setting is at an edge of the tried values.
"""

import math
from dataclasses import dataclass
from statistics import mean

from jaxgrow.tables import markdown_table
from train.analysis.runs import Run, mean_and_each


@dataclass(frozen=True)
class Tried:
    """One combination of settings and its runs, one per seed; None for a run that diverged."""

    settings: dict[str, str]
    runs: list[Run | None]
    # The fraction of the steps, if successive halving tried the settings with fewer steps.
    fraction: float | None = None

    @property
    def loss(self) -> float:
        return mean(math.inf if r is None else r.loss for r in self.runs)


def edge_warnings(best: dict[str, str], swept: dict[str, list[str]]) -> list[str]:
    """A warning for every numeric setting of ``best`` that is the lowest or highest one tried."""
    warnings = []
    for name, texts in swept.items():
        try:
            values = [float(t) for t in texts]
            value = float(best[name])
        except ValueError:
            continue  # only numbers have edges
        if len(values) > 1 and value in (min(values), max(values)):
            which, beyond = ("lowest", "below") if value == min(values) else ("highest", "above")
            warnings.append(
                f"WARNING: the best {name}, {best[name]}, is the {which} value tried: also sweep values {beyond} it"
            )
    return warnings


def settings_table(tried: list[Tried], swept: dict[str, list[str]]) -> str:
    """The tried settings as Markdown, the best first.

    Settings that successive halving tried with fewer steps come last.
    """
    body = []
    every: list[Run] = []
    halving = any(t.fraction for t in tried)
    for i, t in enumerate(tried):
        known = [r for r in t.runs if r is not None]
        every += known
        cost = [
            f"{sum(r.cost('flops') for r in known):.3g}",
            f"{sum(r.cost('seconds') for r in known):.0f}",
        ]
        loss = (
            mean_and_each([r.loss for r in known], "{:.4f}")
            if len(known) == len(t.runs)
            else "diverged"
        )
        steps = [f"{t.fraction or 1:g}"] if halving else []
        body.append(
            [
                *t.settings.values(),
                *steps,
                loss,
                *cost,
                "best" if i == 0 and t.loss < math.inf else "",
            ]
        )
    text = markdown_table(
        [*swept, *(["of the steps"] if halving else []), "final loss", "FLOPs", "seconds", ""], body
    )
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
