"""The ranking of operators: losses at equal FLOPs after the small model, the best first."""

import itertools
from statistics import mean

import numpy as np

from jaxgrow.tables import markdown_table
from jaxgrow.typed import Json
from train.analysis.runs import Run
from train.extras.labelled.metrics import spearman
from train.extras.report_sections import mean_and_each

# Fractions of the FLOPs at which the table has losses, in addition to the start.
MOMENTS = (0.25, 0.5, 1.0)

Curve = list[tuple[float, float]]  # (FLOPs after the small model, validation loss)


def after_growing(finished: Run) -> Curve:
    """The curve of the grown model: right after growing, then during its training."""
    *_, before, last = finished.segments
    small = finished.source("flops")
    return [(line["flops"] - small, line["val_loss"]) for line in [before[-1], *last]]


def ranked_rows(finished: dict[str, list[Run]]) -> list[Json]:
    """One row per operator, the lowest final loss first: the losses of all seeds at each moment.

    A loss is None if the operator had not yet grown the model at those FLOPs, because learning its
    maps took longer.
    """
    curves = {by: list(map(after_growing, runs)) for by, runs in finished.items()}
    budget = min(curve[-1][0] for curve in itertools.chain(*curves.values()))
    moments = [moment * budget for moment in MOMENTS]
    out = []
    for by, some in curves.items():
        # The first losses are those right after growing.
        losses: list[list[float | None]] = [[curve[0][1] for curve in some]]
        for flops in moments:
            losses.append([_at(curve, flops) for curve in some])
        out.append({"by": by, "flops": moments, "loss": losses})
    return sorted(out, key=lambda row: mean(np.inf if x is None else x for x in row["loss"][-1]))


def _at(curve: Curve, flops: float) -> float | None:
    return None if flops < curve[0][0] else float(np.interp(flops, *np.transpose(curve)))


def ranking_table(
    ranked: list[Json],
    impossible: dict[str, str],
    diverged: dict[str, str],
    seeds: list[int],
) -> str:
    """The ranking as Markdown.

    Args:
      ranked: the result of `ranked_rows`.
      impossible: operators that cannot reach the sizes -> reason.
      diverged: operators with a run that diverged -> reason.
      seeds: the seeds of the runs.
    """
    head = [
        "operators",
        "loss right after growing",
        *(f"at {flops:.3g} FLOPs" for flops in ranked[0]["flops"]),
    ]
    body = []
    for r in ranked:
        cells = ["not yet grown" if None in x else mean_and_each(x, "{:.4f}") for x in r["loss"]]
        body.append([r["by"], *cells])
    left = {"impossible": impossible, "diverged": diverged}
    empty = [""] * (len(head) - 2)
    body += [[by, f"{how}: {why}", *empty] for how, of in left.items() for by, why in of.items()]
    text = (
        f"{markdown_table(head, body)}\n\nFLOPs are counted from the end of the small model, which all operators share. "
        f"Seeds: {', '.join(map(str, seeds))}; with several seeds, the mean is followed by each seed in brackets.\n"
    )
    ends = [r for r in ranked if None not in r["loss"][-1]]
    # Operators that preserve the function start at the same loss up to rounding. The rank of losses
    # that are equal in the table has no meaning.
    first, last = (np.array([round(mean(r["loss"][i]), 4) for r in ends]) for i in (0, -1))
    if len(ends) > 2 and np.ptp(first) > 0 and np.ptp(last) > 0:
        correlation = spearman(first, last)
        text += f"Rank correlation of the losses right after growing and at the end: {correlation:.2f}\n"
    return text
