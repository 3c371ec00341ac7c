"""What a sweep showed: the settings that were tried, the best first, and a warning where the best lies at an edge."""

import math
from dataclasses import dataclass
from statistics import mean

from train.analysis.runs import Run, markdown, spread


@dataclass(frozen=True)
class Tried:
    """One combination of settings, and its runs, one a seed; None for one whose loss ceased to be a number."""

    settings: dict[str, str]
    runs: list[Run | None]
    fraction: float | None = None  # of the steps, where halving has tried it with fewer

    @property
    def loss(self) -> float:
        return mean(math.inf if r is None else r.loss for r in self.runs)


def edges(best: dict[str, str], swept: dict[str, list[str]]) -> list[str]:
    """A warning for every number of ``best`` that is the least or the greatest of those tried."""
    warnings = []
    for name, texts in swept.items():
        try:
            values, value = [float(t) for t in texts], float(best[name])
        except ValueError:
            continue  # no number, so no edge
        if len(values) > 1 and value in (min(values), max(values)):
            which, beyond = ("lowest", "below") if value == min(values) else ("highest", "above")
            warnings.append(
                f"WARNING: the best {name}, {best[name]}, is the {which} tried: sweep {beyond} it, too"
            )
    return warnings


def table(tried: list[Tried], swept: dict[str, list[str]]) -> str:
    """Markdown of what was tried, best first; what halving has tried with fewer steps comes last."""
    body, halving = [], any(t.fraction for t in tried)
    for i, t in enumerate(tried):
        known = [r for r in t.runs if r is not None]
        cost = [
            f"{sum(r.cost('flops') for r in known):.3g}",
            f"{sum(r.cost('seconds') for r in known):.0f}",
        ]
        loss = (
            spread([r.loss for r in known], "{:.4f}") if len(known) == len(t.runs) else "diverged"
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
    every = [r for t in tried for r in t.runs if r is not None]
    text = markdown(
        [*swept, *(["of the steps"] if halving else []), "final loss", "FLOPs", "seconds", ""], body
    )
    text += (
        f"\n\nAll {len(every)} runs that ended: {sum(r.cost('flops') for r in every):.3g} FLOPs, "
        f"{sum(r.cost('seconds') for r in every):.0f} s, {sum(r.result['compile_seconds'] for r in every):.0f} s of them "
        "compiling.\n"
    )
    warnings = (
        edges(tried[0].settings, swept)
        if tried[0].loss < math.inf
        else [f"WARNING: every run {'of all steps ' if halving else ''}diverged"]
    )
    return text + "".join(f"{line}\n" for line in warnings)
