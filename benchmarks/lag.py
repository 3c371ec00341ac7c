"""Is the lag of a grown model constant if time is the integral of the learning rate? From the logs.

    python -m benchmarks.lag

The command reads the training logs in ``benchmarks/results/runs.tar.xz`` and trains nothing. It
prints the two tables of docs/results/lag.md.

*Intrinsic time* is the integral of the learning rate over the steps (functional scaling laws,
arXiv 2509.19189). The lag at the end of a run is the difference between its own time and the time
of a run from scratch, with a fully decayed learning rate, that ends at the same loss. It is computed
with time in steps and with intrinsic time, and divided by the time of the small model. The loss from
scratch is interpolated over the logarithm of the time, between the runs of the frontier.

The gap is the validation loss of a model that was grown from half of its layers, minus the loss of
the run from scratch at the same step. Their learning rates are nearly the same: the grown model begins to
decay at half of the steps, and the run from scratch after half of the steps that follow its warm-up.
``a + b u^-c`` is fitted to the gap, where u is the time since the growth, divided by the time before
it. The last gap of each run is predicted by a fit to the other runs, and by a fit to its own first
gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, TypeAlias

import numpy as np
from scipy.optimize import curve_fit

from benchmarks.curves import logged_runs
from jaxgrow.tables import markdown_table
from train.analysis.runs import Run

Clock: TypeAlias = Literal["steps", "intrinsic time"]
# Gaps at earlier times u are left out, because the loss still falls steeply there.
SOON = 0.1
# A run is predicted from its own gaps at earlier times u than this one.
EARLY = 0.7


@dataclass(frozen=True)
class Group:
    """Logged runs of one setting.

    Attributes:
      model: text for the tables.
      scratch: folder and name of the runs from scratch, the longest one first.
      grown: folder of the grown runs, and their names by method.
      tokens: tokens per parameter.
    """

    model: str
    tokens: int
    scratch: tuple[tuple[str, str], ...]
    folder: str
    grown: dict[str, str]


DEEPEN, HALVES, VCYCLE = "half of the layers", "half of the layers and MLPs", "V-cycle"


def _group(
    model: str, tokens: int, folder: str, base: str, shorter: Sequence[str], methods: str
) -> Group:
    """Name the runs; a shorter run without a folder is in ``folder`` and begins with ``base``."""
    names = {"d": (DEEPEN, "deepen"), "h": (HALVES, "halves"), "v": (VCYCLE, "vcycle")}
    every = [base, *shorter]
    scratch = (s.split("/") if "/" in s else (folder, base + s * (s != base)) for s in every)
    grown = {label: f"{base}_{name}" for label, name in (names[m] for m in methods)}
    return Group(model, tokens, tuple((f, name) for f, name in scratch), folder, grown)


GPT = "GPT, 1.4 M, Muon"
GROUPS = (
    Group(
        "GPT, 94 K, Muon", 20, (("vcycle_once", "wiki12_muon"), ("vcycle_once", "wiki12_muon-x0.75")),
        "vcycle_once", {VCYCLE: "vc_a", f"{VCYCLE}, one warm-up": "vc_b"},
    ),
    _group(GPT, 6, "m1_6", "m1_6", ["-x0.75"], "dv"),
    _group(GPT, 6, "m1_6_low", "m1_6_low", ["-x0.75"], "d"),
    _group(GPT, 20, "m1", "wiki_m1", ["-x0.75"], "d"),
    _group(GPT, 20, "m1_low", "m1_low", ["-x0.75", "-x0.55"], "dhv"),
    _group("GPT, 1.4 M, batches of 64, Muon", 20, "m1_64", "wiki_m1_64", ["-x0.75"], "dv"),
    _group("GPT, 1.4 M, AdamW", 6, "m1_adamw_sweep", "m1_adamw_5e-3", ["-x0.75", "-x0.55"], "dv"),
    _group("GPT, 1.4 M, AdamW", 20, "m1_adamw", "wiki_m1_adamw", ["m1_adamw_sweep/m1_adamw_5e-3"], "v"),
    _group("GPT, 3.1 M, Muon", 20, "m3", "wiki_m3", ["-x0.75", "m3_sweep/m3_sweep_2.5e-3"], "dhv"),
    _group("GPT, 9.7 M, Muon", 20, "one_gpu/NVIDIA-H200/E1", "m10", ["-x0.75", "-x0.55"], "dv"),
    _group("ViT, 1.1 M, Muon", 6, "vit_long", "cifar10_vit_long", ["-x0.75", "-x0.55"], "dhv"),
    _group("ModernBERT, 1.1 M, Muon", 20, "encoder_long", "encoder_long", ["-x0.75"], "dv"),
)  # fmt: skip


def elapsed(run: Run, clock: Clock, small: bool = False) -> float:
    """The time of a run, or only of the phases of its small model.

    The learning rate is linear between two lines of the log, and begins at zero.
    """
    total = 0.0
    for part in [lines for lines in _phases(run) if not small or lines[0]["small"]]:
        steps = np.array([0, *(line["step"] for line in part)])
        rates = np.array([part[0]["start"], *(line["lr"] for line in part)])
        total += steps[-1] if clock == "steps" else float(np.trapezoid(rates, steps))
    return total


def _phases(run: Run) -> list[list[dict]]:
    """The training lines of each phase, with the learning rate at the start of the phase."""
    phases = [p for p in run.result["phases"] if p["kind"] == "train"]
    lines = [line for line in run.log if "lr" in line]
    parts, done = [], 0
    for number, phase in enumerate(phases):
        of = [x for x in lines if done < x["tokens"] <= done + phase["tokens"]]
        done += phase["tokens"]
        # A warm-up begins at zero; a later phase without one begins where it stays or falls.
        warm = number == 0 or (len(of) > 1 and of[0]["lr"] < of[1]["lr"])
        about = {
            "small": phase["parameters"] < run.parameters,
            "start": 0.0 if warm else of[0]["lr"],
        }
        parts.append([x | about for x in of])
    return parts


def behind(run: Run, scratch: Sequence[Run], clock: Clock) -> float | None:
    """The time by which a run ends behind a run from scratch with the same loss.

    None if all runs from scratch end above its loss, or all end below it.
    """
    times = sorted((elapsed(r, clock), r.loss) for r in scratch)
    x, y = np.log([t for t, _ in times]), np.array([loss for _, loss in times])
    if not y.min() <= run.loss <= y.max():
        return None
    return elapsed(run, clock) - float(np.exp(np.interp(-run.loss, -y, x)))


def lags() -> list[tuple[Group, str, float, dict[Clock, list[float]]]]:
    """The relative lags at the end of the runs: group, method, learning rate, values by clock."""
    rows = []
    for group in GROUPS:
        scratch = [logged_runs(*name) for name in group.scratch]
        for method, name in group.grown.items():
            found: dict[Clock, list[float]] = {"steps": [], "intrinsic time": []}
            runs = logged_runs(group.folder, name)
            for seed, run in runs.items():
                frontier = [runs[seed] for runs in scratch if seed in runs]
                for clock, values in found.items():
                    late = behind(run, frontier, clock)
                    if late is not None:
                        values.append(late / elapsed(run, clock, small=True))
            rows.append(
                (group, method, next(iter(runs.values())).config["optim"]["peak_lr"], found)
            )
    return rows


def gaps() -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """The gap of each GPT that was grown from half of its layers: times u, and gaps.

    Only the runs with at least six validations after the growth are included.
    """
    found = {}
    for group in GROUPS:
        if DEEPEN not in group.grown or "Muon" not in group.model or "GPT" not in group.model:
            continue
        scratch = logged_runs(*group.scratch[0])
        for seed, run in logged_runs(group.folder, group.grown[DEEPEN]).items():
            steps, losses = (np.array(x) for x in zip(*_curve(scratch[seed]).items(), strict=True))
            grown = _curve(run)
            half = steps[-1] / 2
            at = np.array([t for t in grown if t > half * (1 + SOON)])
            gap = np.array([grown[t] for t in at]) - np.interp(at, steps, losses)
            if len(at) >= 6:
                found[f"{group.model}, {run.config['optim']['peak_lr']:g}", seed] = (
                    at / half - 1,
                    gap,
                )
    return found


def _curve(run: Run) -> dict[float, float]:
    """The validation losses by the total number of steps."""
    each = run.result["tokens"] / run.result["steps"]
    return {round(line["tokens"] / each): line["val_loss"] for line in run.curve if line["step"]}


def power(u: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    return a + b * u**-c


def fitted(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Fit ``a + b u^-c`` to all points of several gaps."""
    u, gap = (np.concatenate(x) for x in zip(*curves, strict=True))
    found, *_ = curve_fit(power, u, gap, (0.0, 0.005, 0.5), bounds=((-1, 0, 0.05), (1, 1, 5)))
    return found


def table_of_lags() -> str:
    heads = ["model", "tokens per parameter", "learning rate", "trained first", "seeds"]
    heads += ["lag in steps", "lag in intrinsic time"]
    body = []
    for group, method, rate, found in lags():
        cells = [group.model, str(group.tokens), f"{rate:g}", method, str(len(found["steps"]))]
        body.append(cells + [", ".join(f"{x:.2f}" for x in values) for values in found.values()])
    return markdown_table(heads, body)


def spread(clock: Clock, method: str = "") -> float:
    """The standard deviation of the relative lag over the runs, divided by its mean.

    Args:
      clock: how time is measured.
      method: only runs of this method; empty: all runs.
    """
    every = [x for _, m, _, found in lags() for x in found[clock] if method in ("", m)]
    return stdev(every) / mean(every)


def table_of_gaps() -> str:
    curves = gaps()
    body = []
    for (name, seed), (u, gap) in curves.items():
        others = [curve for key, curve in curves.items() if key != (name, seed)]
        a, b, c = fitted([(u, gap)])
        told = power(u, *fitted(others))
        early = u < EARLY
        alone = power(u, *fitted([(u[early], gap[early])]))
        cells = [name, str(seed), f"{gap[0]:.4f}", f"{gap[-1]:.4f}"]
        cells += [f"{a:.4f} + {b:.4f} u^-{c:.2f}", f"{told[-1]:.4f}", f"{alone[-1]:.4f}"]
        body.append(cells)
    heads = ["model, learning rate", "seed", "first gap", "last gap", "fit"]
    heads += [
        "last gap, predicted from the other runs",
        "last gap, predicted from its first four gaps",
    ]
    return markdown_table(heads, body)


def main() -> None:
    print(table_of_lags(), end="\n\n")
    for clock in ("steps", "intrinsic time"):
        each = f"{spread(clock):.2f} (all runs), {spread(clock, DEEPEN):.2f} ({DEEPEN})"
        print(f"standard deviation / mean of the lag in {clock}: {each}")
    print("\n" + table_of_gaps())


if __name__ == "__main__":
    main()
