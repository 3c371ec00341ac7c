"""Show the order and the cost of the phases of plans, of configs and of finished runs.

``python -m train.show CONFIG|RUN ... [--out FILE.png]``

For a config of ``configs/papers``, the command first prints every setting that differs from the
setting of the paper. Each row of the figure is a plan, and each bar is a phase. The width of a bar
is its FLOPs, relative to the total of the first row, and its height is the size of the model. For a
run, the FLOPs are the numbers in its ledger. For a config, they are expected values. They do not
include phases without training, whose cost is negligible, and imported models, whose cost is
unknown. No data are read. A config with ``epochs`` or ``seconds`` has no costs without a number of
steps: ``CONFIG:steps=100_000``.
"""

import itertools

import jax

from jaxgrow.tables import markdown_table
from jaxgrow.typed import Json, convert_json
from jaxgrow.untrusted import one_line
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say
from train.config.experiment import Experiment, load_as, load_experiment
from train.extras import run_plots as plots
from train.extras.stated import paper_report
from train.plan.lifetimes import states
from train.store.workdir import Workdir


def planned_phases(experiment: Experiment) -> list[Json]:
    """Return the phases of a plan in the form of ``result.json``, with the expected FLOPs."""
    parameters = [
        models[p.writes].params
        for p, models in zip(experiment.plan, states(experiment.plan, experiment.tx), strict=True)
    ]
    phases = []
    for p, params in zip(experiment.plan, parameters, strict=True):
        size = sum(x.size for x in jax.tree.leaves(params))
        cost = p.cost(experiment.batch, experiment.accumulate)
        phases.append({"phase": p.label, "parameters": size, "flops": cost})
    return phases


def plan_row(text: str) -> tuple[str, list[Json]]:
    """Return the name and the phases of a config, or of the run in a folder.

    Raises:
      UserError: the config does not exist or has no number of steps, or the run has not finished.
    """
    run = Workdir(text)
    if not run.folder.is_dir():
        experiment = load_experiment(text, corpus=False)
        return experiment.name, planned_phases(experiment)
    if not run.finished:
        raise UserError(
            f"there is no finished run in {text}; to show the plan before the run, give its config, FILE.py:NAME"
        )
    with one_line(UserError, f"the phases in the result.json of {run.folder} are damaged"):
        costs = {"phase": str, "parameters": int, "flops": float}
        phases = run.result["phases"]
        for phase, (key, kind) in itertools.product(phases, costs.items()):
            convert_json(phase[key], kind)
        return run.folder.name, phases


def cost_table(rows: list[tuple[str, list[Json]]]) -> str:
    """Return a Markdown table of the cost of each phase, also relative to the first plan."""
    total = sum(p["flops"] for p in rows[0][1])
    body = []
    for name, phases in rows:
        for p in phases:
            flops = p["flops"]
            costs = [f"{p['parameters']:,}", f"{flops:.3g}", f"{flops / total:.1%}"]
            body.append([name, p["phase"], *costs])
    return markdown_table(["plan", "phase", "parameters", "FLOPs", f"of {rows[0][0]}"], body)


def _settings_only(text: str) -> bool:
    """Print how the settings of a config differ from its paper. Return whether it has no plan.

    A fine-tuning (``configs/finetune.py``) has settings, but its plan depends on the model.
    """
    if Workdir(text).folder.is_dir():
        return False
    try:
        found = load_as(object, text)[1]
    except UserError:  # loaded as an Experiment, the error names the experiments of the file
        found = load_as(Experiment, text)[1]
    say(paper_report(text, found))
    return not isinstance(found, Experiment)


def _has_steps(text: str) -> bool:
    """Whether the costs of a plan can be shown; if not, say why."""
    if Workdir(text).folder.is_dir() or (found := load_as(Experiment, text)[1]).steps:
        return True
    length = (
        f"seconds={found.seconds} and the speed of the machine"
        if found.epochs is None
        else f"epochs={found.epochs:g} and the corpus, which is not read"
    )
    say(
        f"{found.name}: no costs, because the number of steps follows from {length}: show {text}:steps=100_000"
    )
    return False


def main() -> None:
    arguments = command_parser("show").parse_args()
    jax.config.update("jax_platforms", "cpu")  # only shapes are computed
    plans = [text for text in arguments.plans if not _settings_only(text)]
    rows = [plan_row(text) for text in plans if arguments.out or _has_steps(text)]
    if arguments.out is None:
        return say(f"\n{cost_table(rows)}") if rows else None
    plots.save_figure(plots.plan_timeline(rows), arguments.out)
    say(f"{cost_table(rows)}\nplot: {arguments.out}")


if __name__ == "__main__":
    exits_cleanly(main)
