"""What can be saved on a model and its budget? The caps that arithmetic sets, what was measured near it, and a config to try:

``python -m train.advise CONFIG [--budget FLOPS] [--measure] [--workdir DIR] [--write FILE.py] [--set a.b=c ...]``

CONFIG is a training from scratch. A recipe that trains something smaller for a part tau of the steps, each of which costs c of
a large one's, saves at most ``tau (1 - c)``, if what has grown needed no time to catch up. It needs some, the more the longer
the small model trained: r steps for each of its. So a growth comes in the stable phase of the schedule, and after
``1 / (1 + r)`` of the steps at the latest. Half of the layers were within about half a per cent at r = 1 wherever it was
measured (docs/results/muon.md). With ``--measure``, a pilot finds out, and says what it costs: each small model trains for
0.5 % of the steps, grows and trains on at a constant rate, beside a run from scratch. It is of the beginning of training,
where catching up takes less than later, so it can warn, but makes no growth later than r = 1 does. ``--write`` writes the
config that is advised.
"""

import argparse
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
SHORTEST = 180  # steps of it at least: one of 90 found nothing that a longer one did (docs/results/muon.md)
NEAR = 0.005  # above the loss from scratch: has caught up
LEAST = 1.0  # r of half of the layers, where it was measured in longer runs; that of a short pilot is lower
REACH = 2  # what has grown trains so many times as long


@dataclass(frozen=True)
class Recipe:
    """A way to save, for any model from scratch."""

    name: str  # as `train.results.evidence` has it
    about: str
    method: Callable[[Experiment, float], Method]  # of the part of the steps that the small model has
    # Steps that what has grown needs to catch up for each of the small model's, where no pilot tells; None: the recipe is of
    # one piece, and takes no part of the steps.
    catching: float | None = None


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


RECIPES = (  # as measured (docs/results/muon.md); one layer had not caught up after five times its steps
    Recipe("deepen", "half of the layers first", half, catching=LEAST),
    Recipe("halves", "half of the layers and of each MLP first", halves, catching=LEAST),
    Recipe("one layer", "one layer first", one_layer, catching=5.0),
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


def latest(experiment: Experiment, catching: float) -> float:
    """The part of the steps after which a model grows at the latest: before the rate decays, and in time to catch up."""
    return min(1 - decaying(experiment), 1 / (1 + catching))


def saved(experiment: Experiment, recipe: Recipe, tau: float) -> float:
    """The part of the FLOPs that the recipe does without, by its own plan."""
    if recipe.catching is not None and not round(tau * experiment.steps):
        return 0.0
    return 1 - cost(replace(experiment, method=recipe.method(experiment, tau))) / cost(experiment)


# --- the pilot ---


@dataclass(frozen=True)
class Pilot:
    """How long grown models take to catch up with one from scratch."""

    catching: dict[str, float | None]  # steps for each of the small model's, by recipe; None: more than `REACH`
    flops: float  # what all of it cost


def piloted(experiment: Experiment) -> tuple[Experiment, dict[str, Experiment]]:
    """What a pilot runs, at a constant rate: one from scratch, and one of each recipe that grows."""
    small = max(round(PILOT * experiment.steps), SHORTEST)
    optim = replace(experiment.optim, schedule="wsd", decay=0.0, warmup=min(experiment.optim.warmup, small // 2))
    name, steps = f"{experiment.name}-pilot", (1 + REACH) * small
    base = replace(experiment, name=name, steps=steps, optim=optim, eval_every=steps, log_every=1)
    growing = [recipe for recipe in RECIPES if recipe.catching is not None]
    return base, {
        r.name: replace(base, name=f"{name}-{r.name.replace(' ', '_')}", method=r.method(base, 1 / (1 + REACH)))
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
    small = base.steps // (1 + REACH)
    met = {name: caught_up(losses(scratch), losses(r), small) for name, r in grown.items()}
    return Pilot(met, sum(r.cost("flops") for r in (scratch, *grown.values())))


def caught_up(scratch: Sequence[float], grown: Sequence[float], small: int) -> float | None:
    """r: the steps that a model grown after ``small`` of them needs to catch up, for each of those; None: more than it had.

    The losses are of every step. Each step's batch is the same for both, which leaves little noise in the gap between them. It
    is averaged over a quarter of ``small`` steps each; r is the end of the last quarter in which it is above half a per cent:
    0 for what is never behind.
    """
    gap = np.array(grown[small:]) / np.array(scratch[small : len(grown)]) - 1
    quarters = np.array_split(gap, round(4 * len(gap) / small))
    behind = [number for number, quarter in enumerate(quarters, 1) if np.mean(quarter) > NEAR]
    last = behind[-1] if behind else 0
    return last / 4 if last < len(quarters) else None


# --- the advice ---


def advice(experiment: Experiment, pilot: Pilot | None = None) -> tuple[str, Experiment | None]:
    """Markdown, and the experiment that is advised; None where nothing is to be gained."""
    size, base = parameters(experiment), stable(experiment)
    each = experiment.steps * experiment.batch * experiment.model.length / size
    rate = 1 - decaying(base)
    body, gains = [], []
    for recipe in RECIPES:
        catching = recipe.catching
        if pilot is not None and catching is not None:
            met = pilot.catching[recipe.name]
            catching = None if met is None else max(met, LEAST)
        tau = 0.0 if catching is None else latest(base, catching)
        most, found = (saved(base, recipe, t) for t in (rate, tau))
        near = nearest(recipe.name, size, each)
        if recipe.catching is None:
            counted = "not known"
        elif catching is None:
            counted = f"nothing: r > {REACH}"
        else:
            counted = f"{found:.0%}: grown at {tau:.0%} of the steps, r = {catching:.2g}"
            gains.append((min(found, near[0].saved), tau, recipe))
        body.append([recipe.about, f"{most:.0%}", counted, "; ".join(e.told for e in near)])
    lines = [
        f"{experiment.name}: {size:,} parameters, {experiment.steps:,} steps, {each:.3g} tokens a parameter, "
        f"{cost(experiment):.3g} FLOPs.",
        "",
        markdown(["recipe", "saves at most", "catching up counted", "measured, nearest first"], body),
        "",
        f"The rate is stable for {rate:.0%} of the steps. "
        + (
            "r, the steps that a grown model needs to catch up for each of the small one's, is assumed: --measure finds out."
            if pilot is None
            else "The pilot, which found r (steps to catch up for each of the small model's; less than "
            f"{LEAST:.0f} counts as {LEAST:.0f}), cost {pilot.flops / cost(experiment):.1%} of the budget."
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
            f"Growing, {best.about}: {gain:.0%}, the less of what was measured nearest and what the plan leaves out. Its loss "
            "ends higher, so compare at equal loss."
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
