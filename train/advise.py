"""What can be saved on a model and its budget? The caps that arithmetic sets, what was measured near it, and a config to try:

``python -m train.advise CONFIG [--budget FLOPS] [--measure] [--workdir DIR] [--write FILE.py] [--set a.b=c ...]``

CONFIG is a training from scratch. A recipe trains something smaller for a part tau of the steps, each of which costs c of a
large one's, which leaves out ``tau (1 - c)`` of the cost. But its loss is then that of a run from scratch some steps before:
b of them for each of the small model's. So, at an equal loss, it saves::

    1 - (1 - tau (1 - c)) / (1 - tau b sqrt(tau / (1 - tau)))

where b is of a growth after half of the steps, and the root fits those after 0.4 to 0.7 of them (docs/results/muon.md). Between
these the model grows where that is most, but before the rate decays. With ``--measure``, a pilot finds b, and says what it
costs: each small model trains for 0.5 % of the steps, 180 at least, grows, and trains on at a constant rate, on the batches of
a run from scratch. That is of the beginning of training, where b is less than later: b of less than 0.2 counts as 0.2.
``--write`` writes the config that is advised.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.errors import UserError, exits_cleanly
from train.experiment import Experiment, load
from train.loop.trainer import run
from train.plan.methods import Method, Scratch, Stage
from train.plan.recipes import deep_vcycle, deepened
from train.results.evidence import nearest
from train.results.runs import Run, markdown
from train.state.optim import Optim

WORTH = 0.03  # less than this is lost in the noise of seeds
PILOT = 0.005  # of the steps: how long the small model of a pilot trains
SHORTEST = 180  # steps of it at least
REACH = 1.5  # what has grown trains so many times as long
PARTS = (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)  # of the steps: where the equation was measured
LEAST = 0.2  # steps behind that count; short pilots say less, longer runs do not


@dataclass(frozen=True)
class Recipe:
    """A way to save, for any model from scratch."""

    name: str  # as `train.results.evidence` has it
    about: str
    method: Callable[[Experiment, float], Method]  # of the part of the steps that the small model has
    # Steps that what has grown is behind for each of the small model's, where no pilot tells; None: the recipe is of one piece,
    # and takes no part of the steps.
    behind: float | None = None


def one_layer(experiment: Experiment, tau: float) -> Method:
    return _deepened(experiment, tau, 1)


def half(experiment: Experiment, tau: float) -> Method:
    return _deepened(experiment, tau, max(1, experiment.model.depth // 2))


def halves(experiment: Experiment, tau: float) -> Method:
    return _deepened(experiment, tau, max(1, experiment.model.depth // 2), narrower=2)


def _deepened(experiment: Experiment, tau: float, layers: int, narrower: int = 1) -> Method:
    decay = decaying(experiment)
    stable, last = 1 - decay - tau, Stage(min(decay, 1 - tau), warmup=0, schedule="linear")
    stages = (Stage(stable, warmup=0, floor=1.0), last) if round(stable * experiment.steps) > 0 else (last,)
    return deepened(experiment.model, layers, tau, *stages, narrower=narrower)


def vcycle(experiment: Experiment, tau: float) -> Method:
    return deep_vcycle(Stage(0.4, floor=1.0), Stage(0.5, warmup=0, schedule="linear"))


RECIPES = (  # as measured (docs/results/muon.md)
    Recipe("deepen", "half of the layers first", half, behind=0.22),
    Recipe("halves", "half of the layers and of each MLP first", halves, behind=0.28),
    Recipe("one layer", "one layer first", one_layer, behind=0.9),
    Recipe("vcycle", "V-cycle in depth, corrected", vcycle),
)


def decaying(experiment: Experiment) -> float:
    """The last part of the steps, in which the rate falls."""
    return {"wsd": experiment.optim.decay, "linear": 1.0, "cosine": 1.0}[experiment.optim.schedule]


def cost(experiment: Experiment) -> float:
    return sum(phase.cost(experiment.batch) for phase in experiment.plan)


def parameters(experiment: Experiment) -> int:
    shapes = jax.eval_shape(experiment.model.init, jax.random.key(0))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def saved(experiment: Experiment, recipe: Recipe, tau: float) -> float:
    """The part of the FLOPs that the recipe does without, by its own plan."""
    if recipe.behind is not None and not round(tau * experiment.steps):
        return 0.0
    return 1 - cost(replace(experiment, method=recipe.method(experiment, tau))) / cost(experiment)


def expected(experiment: Experiment, recipe: Recipe, tau: float, behind: float) -> float:
    """The part of the FLOPs that it saves at an equal loss: the equation above."""
    worth = 1 - tau * behind * math.sqrt(tau / (1 - tau))  # of a run from scratch's steps
    return 1 - (1 - saved(experiment, recipe, tau)) / worth if worth > 0 else -math.inf


def placed(experiment: Experiment, recipe: Recipe, behind: float) -> tuple[float, float]:
    """What is saved most, and the part of the steps after which the model grows for that: before its rate decays."""
    stable = 1 - decaying(experiment)
    return max((expected(experiment, recipe, tau, behind), tau) for tau in {min(tau, stable) for tau in PARTS})


# --- the pilot ---


@dataclass(frozen=True)
class Pilot:
    """How far grown models are behind one from scratch."""

    behind: dict[str, float]  # steps for each of the small model's, by recipe
    flops: float  # what all of it cost


def piloted(experiment: Experiment) -> tuple[Experiment, dict[str, Experiment]]:
    """What a pilot runs, at a constant rate: one from scratch, and one of each recipe that grows."""
    small = max(round(PILOT * experiment.steps), SHORTEST)
    optim = replace(experiment.optim, schedule="wsd", decay=0.0, warmup=min(experiment.optim.warmup, small // 2))
    name, steps = f"{experiment.name}-pilot", round((1 + REACH) * small)
    base = replace(experiment, name=name, steps=steps, optim=optim, eval_every=steps, log_every=1)
    growing = [recipe for recipe in RECIPES if recipe.behind is not None]
    return base, {
        r.name: replace(base, name=f"{name}-{r.name.replace(' ', '_')}", method=r.method(base, small / steps))
        for r in growing
    }


def pilot(experiment: Experiment, workdir: Path) -> Pilot:
    """Runs `piloted`, in folders of their own in ``workdir``."""

    def ran(e: Experiment) -> Run:
        folder = workdir / f"{e.name}-seed{e.seed}"
        run(e, folder)
        return Run(e.name, e.seed, folder)

    def losses(of: Run) -> list[float]:
        return [line["loss"] for line in of.log if "loss" in line]

    base, growing = piloted(experiment)
    scratch, grown = ran(base), {name: ran(e) for name, e in growing.items()}
    small = round(base.steps / (1 + REACH))
    found = {name: steps_behind(losses(scratch), losses(r), small) for name, r in grown.items()}
    return Pilot(found, sum(r.cost("flops") for r in (scratch, *grown.values())))


def steps_behind(scratch: Sequence[float], grown: Sequence[float], small: int) -> float:
    """How many steps a model that grew after ``small`` of them is behind one from scratch, for each of those.

    The losses are of every step. Each step's batch is the same for both, which leaves little noise in the gap between them; it
    is averaged from half of ``small`` after the growth on, when what it upset has settled. By ``L ~ t^-p``, fitted to the run
    from scratch, a gap g of the logarithms is ``t (1 - exp(-g / p))`` steps. Below 0 where the grown one is ahead.
    """
    step = 1 + np.arange(len(scratch))
    late, settled = step > small, step > 1.5 * small
    p = -np.polyfit(np.log(step[late]), np.log(np.array(scratch)[late]), 1)[0]
    if not p > 0:
        first, last = (part.mean() for part in np.array_split(np.array(scratch)[late], 2))
        raise UserError(
            "the pilot's loss from scratch does not fall, so nothing tells how far a grown model is behind: "
            f"{first:.4f} after step {small}, {last:.4f} in the end; is the rate too high?"
        )
    gap = np.mean(np.log(np.array(grown)[settled] / np.array(scratch)[settled]))
    return float(step[settled].mean() / small * (1 - np.exp(-gap / p)))


# --- the advice ---


def advice(experiment: Experiment, pilot: Pilot | None = None) -> tuple[str, Experiment | None]:
    """Markdown, and the experiment that is advised; None where nothing is to be gained."""
    size, base = parameters(experiment), stable(experiment)
    each = experiment.steps * experiment.batch * experiment.model.length / size
    rate = 1 - decaying(base)
    body, gains = [], []
    for recipe in RECIPES:
        near, counted = nearest(recipe.name, size, each), "not known"
        if recipe.behind is not None:
            behind = recipe.behind if pilot is None else max(pilot.behind[recipe.name], LEAST)
            gain, tau = placed(base, recipe, behind)
            counted = f"{gain:.0%}: grown at {tau:.0%} of the steps, b = {behind:.2f}"
            gains.append((min(gain, near[0].saved), tau, recipe))
        body.append([recipe.about, f"{saved(base, recipe, rate):.0%}", counted, "; ".join(e.told for e in near)])
    lines = [
        f"{experiment.name}: {size:,} parameters, {experiment.steps:,} steps, {each:.3g} tokens a parameter, "
        f"{cost(experiment):.3g} FLOPs.",
        "",
        markdown(["recipe", "saves at most", "at an equal loss", "measured, nearest first"], body),
        "",
        f"The rate is stable for {rate:.0%} of the steps. "
        + (
            "b, the steps that a grown model is behind for each of the small one's, is assumed: --measure finds out."
            if pilot is None
            else "The pilot, which found b (the steps that a grown model is behind for each of the small one's; less than "
            f"{LEAST} counts as {LEAST}), cost {pilot.flops / cost(experiment):.1%} of the budget."
        ),
    ]
    if base is not experiment:
        own = experiment.optim.schedule
        lines.append(
            f"All this with optim.schedule=wsd: {own} falls from the first step on, and leaves no time to grow in."
        )
    advised = experiment
    if experiment.optim.name == "adamw":
        near = "; ".join(e.told for e in nearest("muon", size, each))
        lines.append(f"First of all Muon (optim.name=muon; sweep its rate): {near}.")
        advised = replace(advised, name=f"{advised.name}_muon", optim=replace(advised.optim, name="muon"))
    gain, tau, best = max(gains, key=lambda g: g[0], default=(0.0, 0.0, RECIPES[0]))
    if gain > WORTH:
        lines.append(
            f"Growing, {best.about}: {gain:.0%}, the less of what was measured nearest and what is expected. After as many "
            "steps its loss ends higher."
        )
        grown = stable(advised)
        advised = replace(grown, name=f"{advised.name}_grown", method=best.method(grown, tau))
    else:
        lines.append("Growing: nothing to gain at this budget.")
    return "\n".join(lines) + "\n", None if advised is experiment else advised


def stable(experiment: Experiment) -> Experiment:
    """The same, if its rate is stable for a part of the steps; else with a schedule that is."""
    if decaying(experiment) < 1:
        return experiment
    return replace(experiment, optim=replace(experiment.optim, schedule="wsd", decay=Optim().decay))


def script(config: str, advised: Experiment) -> str:
    """A config file of ``advised``: what it changes in ``config``."""
    base, imports = load(config), {Experiment, load}
    settings = [f for f in fields(advised) if getattr(advised, f.name) != getattr(base, f.name)]
    changes = "".join(f"        {f.name}={written(getattr(advised, f.name), imports)},\n" for f in settings)
    lines = sorted(f"from {of.__module__} import {of.__name__}\n" for of in imports)
    return (
        f"from dataclasses import replace\n\n{''.join(lines)}\n\n"
        f"def config() -> Experiment:\n    return replace(\n        load({config!r}),\n{changes}    )\n"
    )


def written(value: Any, classes: set) -> str:
    """A value of a config in Python, without what is as by default; the classes that it names join ``classes``."""
    if isinstance(value, tuple):
        return f"({', '.join(written(v, classes) for v in value)}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    classes.add(type(value))
    own = [f for f in fields(value) if f.default is MISSING or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={written(getattr(value, f.name), classes)}' for f in own)})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.advise", description=__doc__)
    parser.add_argument("config", help="a training from scratch: FILE.py:NAME, or FILE.py")
    parser.add_argument("--budget", type=float, metavar="FLOPS", help="in place of the config's own steps")
    parser.add_argument(
        "--measure", action="store_true", help="run a pilot: how long does a grown model take to catch up?"
    )
    parser.add_argument("--workdir", type=Path, default=Path("runs/advise"), help="of the pilot (default: runs/advise)")
    parser.add_argument("--write", type=Path, metavar="FILE.py", help="where to write the config that is advised")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the config")
    arguments = parser.parse_args()
    experiment = load(arguments.config, arguments.set)
    if not isinstance(experiment.method, Scratch):
        raise UserError(
            f"{experiment.name} is no training from scratch, but {type(experiment.method).__name__}: name its baseline"
        )
    if arguments.budget is not None:
        steps = round(experiment.steps * arguments.budget / cost(experiment))
        if steps < 1:
            raise UserError(
                f"--budget {arguments.budget:g} is less than a step, {cost(experiment) / experiment.steps:.3g} FLOPs"
            )
        experiment = replace(experiment, steps=steps)
    found = None
    if arguments.measure:
        base, growing = piloted(experiment)
        flops = cost(base) + sum(map(cost, growing.values()))
        print(
            f"the pilot: {1 + len(growing)} runs of {base.steps:,} steps, {flops / cost(experiment):.1%} of the budget",
            file=sys.stderr,
        )
        found = pilot(experiment, arguments.workdir)
    text, advised = advice(experiment, found)
    print(text, end="")
    if arguments.write is not None and advised is not None:
        arguments.write.write_text(script(arguments.config, advised))
        print(f"config: {arguments.write}")


if __name__ == "__main__":
    exits_cleanly(main)
