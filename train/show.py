"""Show when each phase of a plan runs and what it costs, for configs before they run and for finished runs.

``python -m train.show CONFIG|RUN ... --out FILE.png``

Each row of the figure is a plan, and each bar is a phase. The width of a bar is its FLOPs, relative
to the total of the first row, and its height is the size of the model. For a run, the FLOPs are the
numbers in its ledger. For a config, they are expected values. They do not include phases without
training, whose cost is negligible, and imported models, whose cost is unknown.
"""

from pathlib import Path
from typing import Any

import jax

from jaxgrow.tables import markdown
from train.analysis import plots
from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say
from train.config.experiment import Experiment, load
from train.engine.run.workdir import Workdir
from train.plan.lifetimes import states


def planned(experiment: Experiment) -> list[dict[str, Any]]:
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


def row(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the name and the phases of a config, or of the run in a folder.

    Raises:
      UserError: the config does not exist, or the run has not finished.
    """
    run = Workdir(text)
    if not run.folder.is_dir():
        experiment = load(text, corpus=False)
        return experiment.name, planned(experiment)
    if not run.finished:
        raise UserError(
            f"there is no finished run in {text}; to show the plan before the run, give its config, FILE.py:NAME"
        )
    return run.folder.name, run.result["phases"]


def table(rows: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """Return a Markdown table of the cost of each phase, also relative to the first plan."""
    total = sum(p["flops"] for p in rows[0][1])
    body = []
    for name, phases in rows:
        for p in phases:
            flops = p["flops"]
            costs = [f"{p['parameters']:,}", f"{flops:.3g}", f"{flops / total:.1%}"]
            body.append([name, p["phase"], *costs])
    return markdown(["plan", "phase", "parameters", "FLOPs", f"of {rows[0][0]}"], body)


def main() -> None:
    parser = Parser("show", __doc__)
    parser.add_argument(
        "plans",
        nargs="+",
        metavar="CONFIG|RUN",
        help="FILE.py:NAME, or the folder of a finished run",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file for the figure: .png, .svg or .pdf",
    )
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # only shapes are computed
    rows = [row(text) for text in arguments.plans]
    plots.saved(plots.timeline(rows), arguments.out)
    say(f"{table(rows)}\nplot: {arguments.out}")


if __name__ == "__main__":
    exits_cleanly(main)
