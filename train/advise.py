"""Recommend a growing recipe for a model and its compute budget.

``python -m train.advise CONFIG [--budget FLOPS] [--measure] [--workdir DIR] [--write FILE.py] [--set a.b=c ...]``

CONFIG is a training from scratch. The command prints the measurements that are comparable to it: the
model family and the optimizer must be the same, and parameters and tokens per parameter must agree
up to a factor of two. If no measurement is comparable, the command names the nearest one and recommends
nothing. If several sizes or budgets were measured, the expected saving comes from a regression over
them, with a 95 % interval.

With ``--measure``, a pilot trains the given model briefly, so that there is an answer for every
setting. A recipe that trains a smaller model for a fraction tau of the steps saves ``tau (1 - c)`` of
the FLOPs, where c is the cost of a step of the small model relative to a step of the large model.
However, the grown model is behind a run from scratch: for each step of the small model, it loses b
steps of the run from scratch. At an equal loss the recipe therefore saves::

    1 - (1 - tau (1 - c)) / (1 - tau b sqrt(tau / (1 - tau)))

where b is measured for a growth after half of the steps. The square root was fitted to recipes that
start with half of the layers, with and without half of each MLP, for tau between 0.4 and 0.7
(docs/results/lag.md). It does not hold for recipes that start with one layer, so the pilot leaves
these out. The pilot prints its cost before it runs. Each small model trains for 0.5 % of the steps,
but at least 180 steps, then grows, and then trains further at a constant learning rate, on the same
batches as a run from scratch. The pilot sees only the beginning of training, where b is smaller
than later. Therefore b is assumed to be at least 0.2. ``--write`` writes the advised config.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxgrow.tables import markdown_table
from train.analysis.runs import Run
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import write_text
from train.common.output import say
from train.config.experiment import Experiment, load_experiment
from train.extras.advice.evidence import (
    Estimate,
    Setting,
    estimate_saving,
    method_rows,
    nearest_row,
)
from train.plan.lifetimes import shapes
from train.plan.methods import Method, Scratch, TrainStage
from train.plan.recipes import deep_vcycle, deepened
from train.run.trainer import run_experiment
from train.state.optim import Optim

WORTH = 0.03  # smaller savings cannot be distinguished from the noise between seeds
PILOT = 0.005  # fraction of the steps for which the small model of a pilot trains
SHORTEST = 180  # minimum number of steps of the small model of a pilot
REACH = 1.5  # steps of the grown model of a pilot, relative to the steps of the small model
# fractions of the steps for which the equation was measured
PARTS = (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)
LEAST = 0.2  # minimum of b: short pilots measure smaller values than longer runs
MOST_STEPS = 2**31  # maximum number of steps: optimizers count steps in 32 bits
# config name: name in `train.extras.advice.evidence`
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}


@dataclass(frozen=True)
class Recipe:
    """A way to save FLOPs that applies to any model that is trained from scratch."""

    name: str  # name of the method in `train.extras.advice.evidence`
    about: str
    # Builds the method from the experiment and the fraction of the steps of the small model.
    method: Callable[[Experiment, float], Method]
    tau: float | None = None  # this fraction, as measured; None: the recipe has fixed fractions
    piloted: bool = False  # whether the equation holds for the recipe, so that a pilot can find b


def one_layer(experiment: Experiment, tau: float) -> Method:
    return _deepened(experiment, tau, 1)


def half_deep(experiment: Experiment, tau: float) -> Method:
    return _deepened(experiment, tau, max(1, experiment.model.depth // 2))


def half_and_narrow(experiment: Experiment, tau: float) -> Method:
    return _deepened(experiment, tau, max(1, experiment.model.depth // 2), narrower=2)


def _deepened(experiment: Experiment, tau: float, layers: int, narrower: int = 1) -> Method:
    decay = decay_fraction(experiment)
    stable = 1 - decay - tau
    last = TrainStage(min(decay, 1 - tau), warmup=0, schedule="linear")
    stages = (
        (TrainStage(stable, warmup=0, floor=1.0), last)
        if round(stable * experiment.steps) > 0
        else (last,)
    )
    return deepened(experiment.model, layers, tau, *stages, narrower=narrower)


def deep_cycle(experiment: Experiment, tau: float) -> Method:
    return deep_vcycle(
        TrainStage(0.4, warmup=0, floor=1.0), TrainStage(0.5, warmup=0, schedule="linear")
    )


RECIPES = (  # measured in docs/results/muon.md
    Recipe("deepen", "half of the layers first", half_deep, 0.5, piloted=True),
    Recipe(
        "halves", "half of the layers and of each MLP first", half_and_narrow, 0.6, piloted=True
    ),
    Recipe("one_layer", "one layer first", one_layer, 0.7),
    Recipe("vcycle", "V-cycle in depth, corrected", deep_cycle),
)


def fitting_recipes(experiment: Experiment) -> tuple[list[Recipe], list[str]]:
    """Return the recipes that the experiment can run, and a sentence for each of the others.

    For example, pairs of layers need an even number of layers, and the momentum of SGD with weight
    decay cannot be copied.
    """
    recipes: list[Recipe] = []
    others: list[str] = []
    for recipe in RECIPES:
        try:
            grown = replace(experiment, method=recipe.method(experiment, recipe.tau or 0.0))
            shapes(grown.plan, len(grown.plan), grown.tx)
        except ValueError as error:
            why = " ".join(str(error).split()).removesuffix(".")
            others.append(f"{recipe.about}: does not fit: {why}")
        else:
            recipes.append(recipe)
    return recipes, others


def decay_fraction(experiment: Experiment) -> float:
    """Return the fraction of the steps, at the end, during which the learning rate decays."""
    return {"wsd": experiment.optim.decay, "linear": 1.0, "cosine": 1.0}[experiment.optim.schedule]


def parameter_count(experiment: Experiment) -> int:
    shapes = jax.eval_shape(experiment.model.init, jax.random.key(0))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def setting_of(experiment: Experiment) -> Setting:
    """Return the properties that decide which measurements are comparable."""
    size = parameter_count(experiment)
    family = type(experiment.model).__name__.removesuffix("Config")
    tokens = experiment.steps * experiment.batch * experiment.model.length / size
    return Setting(family, OPTIMIZERS[experiment.optim.name], size, tokens)


def plan_saving(experiment: Experiment, recipe: Recipe, tau: float | None) -> float:
    """Return the fraction of the FLOPs by which the plan of the recipe is cheaper."""
    if tau is not None and not round(tau * experiment.steps):
        return 0.0
    grown = replace(experiment, method=recipe.method(experiment, tau or 0.0))
    return 1 - grown.cost / experiment.cost


def expected_saving(experiment: Experiment, recipe: Recipe, tau: float, behind: float) -> float:
    """Return the fraction of the FLOPs that a piloted recipe saves at an equal loss.

    This is the equation of the module docstring.
    """
    worth = 1 - tau * behind * math.sqrt(tau / (1 - tau))  # in steps of a run from scratch
    return 1 - (1 - plan_saving(experiment, recipe, tau)) / worth if worth > 0 else -math.inf


def best_moment(experiment: Experiment, recipe: Recipe, behind: float) -> tuple[float, float]:
    """Return the largest expected saving and the fraction of the steps after which the model grows.

    The model grows before its learning rate decays.
    """
    stable = 1 - decay_fraction(experiment)
    fractions = {min(tau, stable) for tau in PARTS}
    return max((expected_saving(experiment, recipe, tau, behind), tau) for tau in fractions)


# --- the pilot ---


@dataclass(frozen=True)
class Pilot:
    """How far grown models are behind a model that is trained from scratch."""

    behind: dict[str, float]  # recipe: b, the steps behind for each step of the small model
    flops: float  # cost of all runs of the pilot


def run_pilot(experiment: Experiment, workdir: Path) -> Pilot:
    """Train briefly at a constant learning rate, from scratch and with each piloted recipe.

    The cost is printed before the runs start.

    Raises:
      UserError: no piloted recipe fits the experiment.
    """
    recipes, others = fitting_recipes(experiment)
    recipes = [r for r in recipes if r.piloted]
    if not recipes:
        raise UserError(f"--measure has no recipe to measure: {'; '.join(others)}")
    small = max(round(PILOT * experiment.steps), SHORTEST)
    optim = replace(
        experiment.optim, schedule="wsd", decay=0.0, warmup=min(experiment.optim.warmup, small // 2)
    )
    name = f"{experiment.name}-pilot"
    steps = round((1 + REACH) * small)
    base = replace(experiment, name=name, steps=steps, optim=optim, eval_every=steps, log_every=1)
    growing = {
        r.name: replace(
            base, name=f"{name}-{r.name.replace(' ', '_')}", method=r.method(base, small / steps)
        )
        for r in recipes
    }
    share = sum(e.cost for e in (base, *growing.values())) / experiment.cost
    say(
        f"the pilot: {1 + len(growing)} runs of {steps:,} steps, {share:.1%} of the budget",
        file=sys.stderr,
    )

    def ran(e: Experiment) -> Run:
        folder = workdir / f"{e.name}-seed{e.seed}"
        run_experiment(e, folder)
        return Run(e.name, e.seed, folder)

    def losses(of: Run) -> list[float]:
        return [line["loss"] for line in of.log if "loss" in line]

    scratch = ran(base)
    grown = {recipe: ran(e) for recipe, e in growing.items()}
    found = {recipe: steps_behind(losses(scratch), losses(r), small) for recipe, r in grown.items()}
    return Pilot(found, sum(r.cost("flops") for r in (scratch, *grown.values())))


def steps_behind(scratch: Sequence[float], grown: Sequence[float], small: int) -> float:
    """Return the lag of a grown model in steps, divided by the steps of the small model.

    Both runs have the same batch at each step, so there is little noise in the gap between their
    losses. The gap is averaged from ``small / 2`` steps after the growth on, when the disturbance
    by the growth has settled. With ``L ~ t^-p``, fitted to the run from scratch, a gap g of the
    logarithms is ``t (1 - exp(-g / p))`` steps. The result is negative if the grown model is ahead.

    Args:
      scratch: loss of each step of the run from scratch.
      grown: loss of each step of the run that grows.
      small: number of steps before the growth.

    Raises:
      UserError: the loss of the run from scratch does not fall.
    """
    step = 1 + np.arange(len(scratch))
    late = step > small
    settled = step > 1.5 * small
    p = -np.polyfit(np.log(step[late]), np.log(np.array(scratch)[late]), 1)[0]
    if not p > 0:
        first, last = (part.mean() for part in np.array_split(np.array(scratch)[late], 2))
        raise UserError(
            "the loss of the pilot's run from scratch does not fall, so the pilot cannot measure how far a grown model is "
            f"behind: {first:.4f} after step {small}, {last:.4f} at the end; check whether the learning rate is too high"
        )
    gap = np.mean(np.log(np.array(grown)[settled] / np.array(scratch)[settled]))
    return float(step[settled].mean() / small * (1 - np.exp(-gap / p)))


# --- the advice ---


@dataclass(frozen=True)
class Answer:
    """The results of the measurements and of the pilot for one recipe."""

    recipe: Recipe
    most: float  # fraction of the FLOPs that the plan of the recipe leaves out
    measured: Estimate | None  # None: no measurement is comparable
    nearest: str  # the nearest measurement of any kind
    piloted: tuple[float, float, float] | None = None  # saving, tau and b

    @property
    def tau(self) -> float:
        """The fraction of the steps after which the model grows, by the pilot or as measured."""
        return self.piloted[1] if self.piloted else self.recipe.tau or 0.0

    @property
    def gain(self) -> float:
        """The saving that is safe to expect, or 0.

        It is the smaller of two savings: the saving that the pilot predicts, and the saving in
        comparable measurements. Without a pilot, measurements count only if their complete interval
        is above zero. The gain is 0 if training only the small model was cheaper in these
        measurements.
        """
        if self.measured is not None and self.measured.small_alone_is_cheaper:
            return 0.0
        if self.piloted is not None:
            return min(self.piloted[0], math.inf if self.measured is None else self.measured.saved)
        return self.measured.saved if self.measured is not None and self.measured.lower > 0 else 0.0

    @property
    def cells(self) -> list[str]:
        """The row of the table for this recipe."""
        known = "unknown" if self.measured is None else self.measured.told
        found = ""
        if self.piloted is not None:
            gain, tau, behind = self.piloted
            found = f"{gain:.0%}: grown after {tau:.0%} of the steps, b = {behind:.2f}"
        return [self.recipe.about, f"{self.most:.0%}", known, found]

    @property
    def source(self) -> str:
        """The evidence for the expected saving."""
        if self.measured is None:
            return f"{self.recipe.about}: no comparable measurement; the nearest one is {self.nearest}."
        cheaper = (
            "; training only the small model was cheaper there"
            * self.measured.small_alone_is_cheaper
        )
        return f"{self.recipe.about}: {self.measured.source}{cheaper}."


def recipe_answers(
    experiment: Experiment, recipes: Sequence[Recipe], pilot: Pilot | None
) -> list[Answer]:
    """Return one answer for each recipe."""
    here = setting_of(experiment)
    found = []
    for recipe in recipes:
        rows = method_rows(recipe.name, recipe.tau)
        piloted = None
        if pilot is not None and recipe.piloted:
            behind = max(pilot.behind[recipe.name], LEAST)
            piloted = (*best_moment(experiment, recipe, behind), behind)
        most = plan_saving(experiment, recipe, recipe.tau)
        near = nearest_row(method_rows(recipe.name), here).told
        found.append(Answer(recipe, most, estimate_saving(rows, here), near, piloted))
    return found


def switch_to_muon(experiment: Experiment) -> tuple[Experiment, str]:
    """Switch an AdamW experiment to Muon if comparable measurements show a saving.

    Returns:
      The experiment to advise on, and a sentence about Muon (empty for other optimizers).
    """
    if experiment.optim.name != "adamw":
        return experiment, ""
    rows = method_rows("muon")
    here = setting_of(experiment)
    found = estimate_saving(rows, here)
    if found is None:
        near = nearest_row(rows, here).told
        return (
            experiment,
            f"Muon instead of AdamW: no comparable measurement; the nearest one is {near}.\n",
        )
    muon = replace(
        experiment, name=f"{experiment.name}_muon", optim=replace(experiment.optim, name="muon")
    )
    note = f"First use Muon (optim.name=muon) and sweep its learning rate: {found.near[0].told}."
    return muon, f"{note} The rest of this report is for Muon.\n"


def full_report(
    experiment: Experiment, pilot: Pilot | None = None
) -> tuple[str, Experiment | None]:
    """Return the report as Markdown and the advised experiment; None if no recipe is advised."""
    base = with_stable_rate(experiment)
    here = setting_of(experiment)
    recipes, others = fitting_recipes(base)
    found = recipe_answers(base, recipes, pilot)
    lines = [
        f"{experiment.name}: {here.family}, {here.optimizer}, {here.parameters:,} parameters, {experiment.steps:,} steps, "
        f"{here.tokens_per_parameter:.3g} tokens per parameter, {experiment.cost:.3g} FLOPs.",
        "",
        *_recipe_table(found, pilot),
        *(f"- {answer.source}" for answer in found),
        *(f"- {text}." for text in others),
        "",
    ]
    if pilot is not None:
        lines.append(
            "b: how many steps a grown model is behind a run from scratch, for each step of the small model "
            f"(at least {LEAST} is assumed). The pilot cost {pilot.flops / experiment.cost:.1%} of the budget."
        )
    if base is not experiment:
        lines.append(
            f"These results are for optim.schedule=wsd. With {experiment.optim.schedule}, the learning rate falls from the "
            "first step on, so there is no phase with a constant learning rate to grow in."
        )
    best = max(found, key=lambda answer: answer.gain, default=None)
    if best is None or best.gain <= WORTH:
        lines.append(_nothing(found, pilot))
        return "\n".join(lines) + "\n", None
    lines.append(
        f"Try {best.recipe.about}: about {best.gain:.0%} of the FLOPs at an equal loss. After the same number of steps its "
        "final loss is higher than from scratch."
    )
    method = best.recipe.method(base, best.tau)
    return "\n".join(lines) + "\n", replace(base, name=f"{base.name}_grown", method=method)


def _recipe_table(found: Sequence[Answer], pilot: Pilot | None) -> list[str]:
    """Return the table of the recipes and an empty line, or nothing without recipes."""
    heads = ["recipe", "FLOPs left out at most", "saving at an equal loss, measured"]
    if pilot is not None:
        heads.append("saving by the pilot")
    rows = [answer.cells[: len(heads)] for answer in found]
    return [markdown_table(heads, rows), ""] if rows else []


def _nothing(found: Sequence[Answer], pilot: Pilot | None) -> str:
    """Explain why no recipe is advised."""
    if not found:
        return "No advice: no recipe fits this model and its optimizer."
    if any(a.measured is not None and a.measured.small_alone_is_cheaper for a in found):
        return (
            "Growing is not advised: near this setting, training only the small model reached its final loss for fewer FLOPs. "
            "Train the smaller model, or this one for longer."
        )
    if pilot is not None:
        return "Growing is not advised: it saves nothing at this budget."
    if all(a.measured is None for a in found):
        return "No advice: there are no measurements near this setting. --measure runs a pilot on the model itself."
    return (
        "Growing is not advised: no measured saving has an interval that is completely above zero."
    )


def with_stable_rate(experiment: Experiment) -> Experiment:
    """Return the experiment with a schedule that has a phase of constant learning rate."""
    if decay_fraction(experiment) < 1:
        return experiment
    return replace(experiment, optim=replace(experiment.optim, schedule="wsd", decay=Optim().decay))


def with_budget(experiment: Experiment, flops: float) -> Experiment:
    """Return the experiment with the number of steps that ``flops`` allow.

    Raises:
      UserError: the budget is less than one step, or more steps than can be counted.
    """
    each = experiment.cost / experiment.steps
    if not each <= flops < each * MOST_STEPS:
        raise UserError(
            f"--budget must be between the FLOPs of one step, {each:.3g}, and of {MOST_STEPS:,} steps, "
            f"{each * MOST_STEPS:.3g}, but is {flops:g}"
        )
    return replace(experiment, steps=round(flops / each))


def config_script(config: str, advised: Experiment) -> str:
    """Return a config file for ``advised`` that contains the changes to ``config``."""
    base = load_experiment(config)
    imports = {Experiment, load_experiment}
    settings = [f for f in fields(advised) if getattr(advised, f.name) != getattr(base, f.name)]
    changes = "".join(
        f"        {f.name}={as_code(getattr(advised, f.name), imports)},\n" for f in settings
    )
    lines = sorted(f"from {of.__module__} import {of.__name__}\n" for of in imports)
    return (
        f"from dataclasses import replace\n\n{''.join(lines)}\n\n"
        f"def config() -> Experiment:\n    return replace(\n        load_experiment({config!r}),\n{changes}    )\n"
    )


def as_code(value: object, classes: set) -> str:
    """Write a value of a config as Python code, without fields that have their default values.

    The classes that the code names are added to ``classes``.
    """
    if isinstance(value, tuple):
        return f"({', '.join(as_code(v, classes) for v in value)}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    classes.add(type(value))
    own = [f for f in fields(value) if f.default is MISSING or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={as_code(getattr(value, f.name), classes)}' for f in own)})"


def main() -> None:
    arguments = command_parser("advise").parse_args()
    experiment = load_experiment(arguments.config, arguments.set)
    if not isinstance(experiment.method, Scratch):
        raise UserError(
            f"{experiment.name} is not a training from scratch (its method is {type(experiment.method).__name__}); "
            "give its baseline"
        )
    if modifiers := experiment.method.modifiers:
        raise UserError(
            f"{experiment.name} trains with {', '.join(type(m).__name__ for m in modifiers)}, which the recipes would leave "
            "out; give a training from scratch without modifiers"
        )
    if arguments.budget is not None:
        experiment = with_budget(experiment, arguments.budget)
    if arguments.write is not None:
        # An error here comes before the work.
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
    base, note = switch_to_muon(experiment)
    text, advised = full_report(
        base, run_pilot(base, arguments.workdir) if arguments.measure else None
    )
    say(f"{note}{text}", end="")
    advised = advised or (base if base is not experiment else None)
    if arguments.write is not None and advised is not None:
        write_text(arguments.write, config_script(arguments.config, advised))
        say(f"config: {arguments.write}")


if __name__ == "__main__":
    exits_cleanly(main)
