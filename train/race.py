"""Compare operators: grow one checkpoint by each of them, and train each grown model for some steps:

``python -m train.race CONFIG RUN [--by stack,fpi+stack,ligo] [--steps 200] [--seeds 0,1] [--workdir DIR] [--set a.b=c ...]``

The loss directly after growing predicts little about the loss after training, so the operators are
compared after training. CONFIG is the config of the large model, and RUN is the folder of a
finished run of the small model. A plus sign applies several operators in sequence. ``ligo`` first
learns its maps in 100 steps, whose cost is included.

After the warm-up, the learning rate stays at its peak, so that no schedule favours a certain number
of steps. Losses are compared at equal FLOPs, namely the total FLOPs of the cheapest operator.

The work directory (``--workdir``, default: runs/race) contains one folder for each run, and the
results: ``race.md``, ``race.json`` and ``race.png``.
"""

import itertools
from dataclasses import replace
from pathlib import Path

from jaxgrow.axes import is_layers
from jaxgrow.models import from_json
from jaxgrow.operators import OPERATORS
from jaxgrow.operators.targets import width_axes
from jaxgrow.typed import did_you_mean
from train.analysis.comparing import check_devices
from train.analysis.runs import Run
from train.arguments import command_parser
from train.common.errors import Diverged, UserError, exits_cleanly
from train.common.files import write_record, write_text
from train.common.output import say
from train.config.experiment import Experiment, load_experiment
from train.extras import plots
from train.extras.advice.operator_ranking import after_growing, ranked_rows, ranking_table
from train.plan.lifetimes import shapes
from train.plan.methods import Growing, GrowTo, Learned, TrainStage
from train.plan.transforms import differing
from train.run.trainer import run_experiment
from train.store.workdir import Workdir

# if both depth and width grow: all pairs
DEFAULTS = {"depth": ("stack", "interleave"), "width": ("fpi", "aki")}


def default_operators(base: Experiment, source: Path) -> list[str]:
    """Return the default operators for the axes in which the small and the large model differ.

    Args:
      base: experiment of the large model.
      source: folder of the run of the small model.

    Raises:
      UserError: there is no finished run, or its model is of another family, or has the same depth
        and width.
    """
    small = _small(source)
    try:
        axes = differing(small, base.model)
    except ValueError as error:
        raise UserError(f"race: {error}") from error
    deeper = DEFAULTS["depth"] if any(map(is_layers, axes)) else ("",)
    wider = DEFAULTS["width"] if axes.keys() & width_axes(small.sizes()) else ("",)
    if deeper == wider == ("",):
        raise UserError(
            f"race: the small model in {source} and the large model have the same depth and width, so no "
            f"operator is the default (sizes that differ: {', '.join(axes) or 'none'}); give a larger config, or --by"
        )
    return [by for pair in itertools.product(wider, deeper) if (by := "+".join(filter(None, pair)))]


def _small(source: Path):
    run = Workdir(source)
    if not run.finished:
        raise UserError(
            f"there is no finished run in {source}; give the folder of a finished run of the small model"
        )
    return from_json(run.result["model"])


def operator_experiment(base: Experiment, source: Path, by: str, steps: int) -> Experiment:
    """Return the experiment of one operator.

    Raises:
      UserError: the run or the operator does not exist.
      ValueError: the operator cannot reach the sizes of the large model.
    """
    if by != "ligo" and (unknown := [name for name in by.split("+") if name not in OPERATORS]):
        raise UserError(
            f"race: there is no operator {unknown[0]!r}; the operators are {', '.join(sorted(OPERATORS))}, ligo"
            f"{did_you_mean(unknown[0], [*OPERATORS, 'ligo'])}"
        )
    how = Learned() if by == "ligo" else tuple(by.split("+"))
    stage = TrainStage(1.0, warmup=min(base.optim.warmup, steps // 10), floor=1.0)
    method = Growing(_small(source), str(source.resolve()), (GrowTo((stage,), by=how),))
    experiment = replace(
        base,
        name=f"race_{by}",
        steps=steps,
        seconds=None,
        method=method,
        eval_every=max(1, steps // 20),
    )
    shapes(experiment.plan, len(experiment.plan), experiment.tx)
    return experiment


def all_entrants(
    base: Experiment, source: Path, chosen: list[str], steps: int
) -> tuple[dict[str, Experiment], dict[str, str]]:
    """Return the experiments of the operators that can reach the sizes, and why the others cannot.

    Raises:
      UserError: no operator can reach the sizes.
    """
    fit: dict[str, Experiment] = {}
    impossible: dict[str, str] = {}
    for by in chosen:
        try:
            fit[by] = operator_experiment(base, source, by, steps)
        except ValueError as error:
            impossible[by] = " ".join(str(error).split())
    if not fit:
        raise UserError(
            "race: no operator reaches the sizes of the large model: "
            f"{'; '.join(f'{by}: {why}' for by, why in impossible.items())}"
        )
    return fit, impossible


def run_race(
    fit: dict[str, Experiment], seeds: list[int], workdir: Path
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Return the finished runs of each operator, and why the other operators diverged.

    An operator with which one seed diverges leaves the race.

    Raises:
      UserError: all operators diverged.
    """
    finished: dict[str, list[Run]] = {}
    diverged: dict[str, str] = {}
    for by, experiment in fit.items():
        name = experiment.name
        runs = [Run(name, seed, workdir / f"{name}-seed{seed}") for seed in seeds]
        try:
            for each in runs:
                run_experiment(replace(experiment, seed=each.seed), each.folder)
        except Diverged as error:
            diverged[by] = str(error)
        else:
            finished[by] = runs
    if not finished:
        raise UserError(
            "race: all operators diverged; lower optim.peak_lr: "
            f"{'; '.join(f'{by}: {why}' for by, why in diverged.items())}"
        )
    return finished, diverged


def main() -> None:
    arguments = command_parser("race").parse_args()
    base = load_experiment(arguments.config, arguments.set)
    seeds = arguments.seeds
    chosen = default_operators(base, arguments.run) if arguments.by is None else arguments.by
    fit, impossible = all_entrants(base, arguments.run, chosen, arguments.steps)
    check_devices(fit.values(), seeds, arguments.workdir)
    finished, diverged = run_race(fit, seeds, arguments.workdir)
    ranked = ranked_rows(finished)
    text = ranking_table(ranked, impossible, diverged, seeds)
    plot = arguments.workdir / "race.png"
    write_text(arguments.workdir / "race.md", text)
    everything = {
        "ranked": ranked,
        "impossible": impossible,
        "diverged": diverged,
        "seeds": seeds,
    }
    write_record(arguments.workdir / "race.json", everything)
    curves = {by: [(r, after_growing(r)) for r in runs] for by, runs in finished.items()}
    plots.plot_race(curves, plot)
    say(f"\n{text}\nplot: {plot}")


if __name__ == "__main__":
    exits_cleanly(main)
