"""What a plan does when, and for what cost: of configs, before they run, and of runs that have ended.

``python -m train.show CONFIG|RUN ... --out FILE.png``

A row is a plan: bars are phases, as wide as their FLOPs, in parts of those of the first row, and as
high as their models are large. Of a run they are what its ledger counted; of a config what is
expected, without what phases that train nothing cost, nor an imported model, which are next to
nothing and not known.
"""

from pathlib import Path
from typing import Any

import jax

from train.analysis import plots
from train.analysis.runs import markdown
from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly
from train.config.experiment import Experiment, load
from train.engine.run.workdir import Workdir
from train.plan.lifetimes import states


def planned(experiment: Experiment) -> list[dict[str, Any]]:
    """The phases of a plan as a run's ``result.json`` would have them, with the FLOPs that are expected."""
    made = [
        models[p.writes].params
        for p, models in zip(experiment.plan, states(experiment.plan, experiment.tx), strict=True)
    ]
    return [
        {
            "phase": p.label,
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "flops": p.cost(experiment.batch),
        }
        for p, params in zip(experiment.plan, made, strict=True)
    ]


def row(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The name and the phases of a config, or of the run in a folder.

    Raises:
      UserError: there is no such config, or the run has not ended.
    """
    run = Workdir(text)
    if not run.folder.is_dir():
        experiment = load(text)
        return experiment.name, planned(experiment)
    if not run.finished:
        raise UserError(
            f"there is no finished run in {text}: its config, FILE.py:NAME, is shown without one"
        )
    return run.folder.name, run.result["phases"]


def table(rows: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """Markdown: what each phase costs, and what part that is of the first row's whole."""
    whole = sum(p["flops"] for p in rows[0][1])
    body = [
        [name, p["phase"], f"{p['parameters']:,}", f"{p['flops']:.3g}", f"{p['flops'] / whole:.1%}"]
        for name, phases in rows
        for p in phases
    ]
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
        "--out", type=Path, required=True, metavar="FILE", help="the picture: .png, .svg, .pdf"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # shapes alone are asked for
    rows = [row(text) for text in arguments.plans]
    plots.saved(plots.timeline(rows), arguments.out)
    print(f"{table(rows)}\nplot: {arguments.out}")


if __name__ == "__main__":
    exits_cleanly(main)
