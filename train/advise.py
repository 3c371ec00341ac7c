"""Forecast whether growing saves compute for a model and its budget, and decide.

``python -m train.advise CONFIG [--budget FLOPS] [--measure] [--workdir DIR] [--write FILE.py] [--set a.b=c ...]``

CONFIG is a training from scratch, with batches of one size. For each recipe, the command prints the
saving of FLOPs and of seconds that all measurements of this project predict
(`train.extras.advice.forecast`), with its 90 % interval. The interval is wide if the model or the
budget differs from everything that was measured. The last line is one of three decisions:

- *Grow*: the interval of the seconds is above zero.
- *Do not grow*: the upper end of the interval is below 3 %, or training only the small model was
  cheaper near this setting.
- *Run the pilot*: neither of the two.

A line above it is the decision for a small model that exists already, whose cost does not count.

With ``--measure``, a pilot trains the model itself: from scratch, and with the recipe that has the
best forecast. The small model trains briefly, then grows, and then trains further at a constant
learning rate, on the same batches as a run from scratch. A short pilot finds a lag that is too
small, so its bias is corrected by the mean error of the pilots of measured models. The first pilot
costs 1 % of the FLOPs, or has `SHORTEST` steps. If the interval is then below 3 %, there is no second
one. The second pilot has the rest of 3 % of the budget, in FLOPs and in seconds. A clock stops the
pilots when they have taken 3 % of the seconds of the budget, with compilation. After a pilot, the
expected saving decides.

If CONFIG has ``seconds`` instead of steps, the steps are measured first, as in a run
(`train.extras.timing`). ``--write`` writes the advised config.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxgrow.tables import markdown_table
from train.analysis.runs import Run
from train.arguments import command_parser
from train.common.errors import Preempted, UserError, exits_cleanly
from train.common.files import write_text
from train.common.output import say
from train.config.experiment import Experiment, load_experiment, with_fitting_steps
from train.extras.advice.evidence import Case, PilotRow, method_rows
from train.extras.advice.forecast import (
    Forecast,
    forecast_rows,
    forecast_saving,
    small_slowdown,
)
from train.extras.report_sections import step_seconds
from train.plan.lifetimes import shapes
from train.plan.methods import Method, Scratch, TrainStage
from train.plan.recipes import deep_vcycle, deepened
from train.run.stop import Stop
from train.run.trainer import run_experiment
from train.state.optim import Optim

WORTH = 0.03  # smaller savings cannot be distinguished from the noise between seeds
COST = 0.03  # largest cost of the pilot, as a fraction of the budget
FIRST = 0.01  # cost of the first pilot, which may already decide
SHORTEST = 45  # minimum number of steps of the small model of a pilot
REACH = 1.5  # steps of the grown model of a pilot, relative to the steps of the small model
NEAR = 1.0  # distance within which a measurement says that the small model alone is cheaper
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


def half_first(experiment: Experiment, tau: float, narrower: int = 1) -> Method:
    """Half of the layers first, with MLPs that are narrower by a factor."""
    decay = decay_fraction(experiment)
    stable = 1 - decay - tau
    last = TrainStage(min(decay, 1 - tau), warmup=0, schedule="linear")
    stages = (
        (TrainStage(stable, warmup=0, floor=1.0), last)
        if round(stable * experiment.steps) > 0
        else (last,)
    )
    layers = max(1, experiment.model.depth // 2)
    return deepened(experiment.model, layers, tau, *stages, narrower=narrower)


def deep_cycle(experiment: Experiment, tau: float) -> Method:
    return deep_vcycle(
        TrainStage(0.4, warmup=0, floor=1.0), TrainStage(0.5, warmup=0, schedule="linear")
    )


RECIPES = (  # measured in docs/results/muon.md
    Recipe("deepen", "half of the layers first", half_first, 0.5),
    Recipe(
        "halves", "half of the layers and of each MLP first", partial(half_first, narrower=2), 0.6
    ),
    Recipe("vcycle", "V-cycle in depth, corrected", deep_cycle),
)


@dataclass(frozen=True)
class Answer:
    """The forecast of one recipe."""

    recipe: Recipe
    grown: Experiment
    case: Case
    flops: Forecast
    seconds: Forecast

    @property
    def given(self) -> Forecast:
        """The forecast if the small model exists already, so that its cost does not count."""
        return self.flops.in_seconds(self.case, (0.0, 0.0))

    @property
    def cells(self) -> list[str]:
        """The row of the table for this recipe."""
        saved = map(percentages, (self.flops, self.seconds))
        return [self.recipe.about, f"{self.case.flops:.0%}", *saved]


@dataclass(frozen=True)
class Pilot:
    """A short run from scratch and with one recipe."""

    row: PilotRow
    slowdown: float  # seconds per FLOP of the small model, relative to the large one
    flops: float  # cost, as a fraction of the budget
    seconds: float  # the same in seconds, with compilation


def percentages(saving: Forecast) -> str:
    """A saving and its interval, such as ``"17% (9% to 24%)"``."""
    low, high = saving.interval
    return f"{saving.saved:.0%} ({low:.0%} to {high:.0%})"


def recipe_answers(
    experiment: Experiment, pilot: Pilot | None = None
) -> tuple[list[Answer], list[str]]:
    """Return the forecasts of the recipes that fit, the best one first, and why the others do not.

    For example, pairs of layers need an even number of layers, and the momentum of SGD with weight
    decay cannot be copied.
    """
    answers: list[Answer] = []
    others: list[str] = []
    for recipe in RECIPES:
        try:
            grown = replace(experiment, method=recipe.method(experiment, recipe.tau or 0.0))
            shapes(grown.plan, len(grown.plan), grown.tx)
        except ValueError as error:
            why = " ".join(str(error).split()).removesuffix(".")
            others.append(f"{recipe.about}: does not fit: {why}")
        else:
            answers.append(recipe_forecast(experiment, recipe, grown, pilot))
    return sorted(answers, key=lambda answer: -answer.seconds.saved), others


def recipe_forecast(
    experiment: Experiment, recipe: Recipe, grown: Experiment, pilot: Pilot | None
) -> Answer:
    """Return the forecast of a recipe; ``grown`` is the experiment with its method."""
    size = parameter_count(experiment)
    tokens = experiment.steps * experiment.batch * experiment.model.length / size
    family = type(experiment.model).__name__.removesuffix("Config")
    setting = (family, OPTIMIZERS[experiment.optim.name], size, tokens)
    cost = grown.cost / experiment.cost
    case = Case(*setting, method=recipe.name, tau=recipe.tau, flops=cost)
    rows = forecast_rows()
    flops = forecast_saving(case, rows, pilot=pilot and pilot.row)
    slowdown, deviation = small_slowdown(rows, recipe.name)
    if pilot is not None:  # on the hardware of the pilot, the slowdowns have the same ratio
        slowdown *= pilot.slowdown / small_slowdown(rows, pilot.row.method)[0]
        deviation = 0.0
    seconds = flops.in_seconds(case, (slowdown, deviation))
    return Answer(recipe, grown, case, flops, seconds)


def decay_fraction(experiment: Experiment) -> float:
    """Return the fraction of the steps, at the end, during which the learning rate decays."""
    return {"wsd": experiment.optim.decay, "linear": 1.0, "cosine": 1.0}[experiment.optim.schedule]


def parameter_count(experiment: Experiment) -> int:
    shapes = jax.eval_shape(experiment.model.init, jax.random.key(0))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


# --- the pilot ---


class PilotLate(UserError):
    """The pilots have taken `COST` of the seconds of the budget."""


class PilotClock(Stop):
    """Also stop a run when the pilots have taken more than `COST` of the seconds of the budget.

    Args:
      steps: number of steps of the budget.
      begin: time at which the pilots began. Compilation counts from there on.
      step: seconds of a step of the full model; None: those of the run, whose model is the full one.
    """

    def __init__(self, steps: int, begin: float, step: float | None = None):
        super().__init__()
        self.steps, self.begin, self.step = steps, begin, step
        self.calls = 0
        self.first = 0.0
        self.late = False

    def asked(self) -> bool:
        now = time.monotonic()
        self.first = self.first or now
        self.calls += 1
        measured = (now - self.first) / (self.calls - 1) if self.calls > 5 else math.inf
        self.late = now - self.begin > COST * self.steps * (self.step or measured)
        return super().asked() or self.late


def measure_lag(experiment: Experiment, workdir: Path) -> Pilot | None:
    """Run one or two pilots of the recipe with the best forecast, and return the last one.

    Returns:
      The last pilot, with the cost of both; None if the forecast without a pilot is already "do not
      grow".

    Raises:
      UserError: no recipe with a pilot fits the experiment, or the budget is too small.
    """
    answers, others = recipe_answers(experiment)
    best = next((answer for answer in answers if answer.recipe.tau), None)
    if best is None:
        raise UserError(f"--measure has no recipe to measure: {'; '.join(others)}")
    if growth_refusal(answers[0]):
        return None
    most = most_steps(experiment, best)  # of the small model, if there is one pilot
    if most < SHORTEST:
        enough = 1.01 * experiment.cost * SHORTEST / most
        raise UserError(
            f"a pilot of {COST:.0%} of the budget would train the small model for {most:.0f} steps, but at least {SHORTEST} "
            f"are necessary: give --budget {enough:.3g} or more, or try the recipe itself, which is cheap with this budget"
        )
    experiment.data.sources(experiment.model)  # tokenising is not a cost of the pilots
    begin = time.monotonic()
    short = max(SHORTEST, int(most * FIRST / COST))
    first = run_pilot(experiment, best, short, workdir, begin)
    # The second pilot compiles nothing, so it takes less time than this.
    rest = min(COST - first.flops, (COST - first.seconds) * first.flops / first.seconds)
    longer = int(most * rest / COST)
    if longer <= short or growth_refusal(recipe_answers(experiment, first)[0][0]):
        return first
    try:
        second = run_pilot(experiment, best, longer, workdir, begin)
    except PilotLate:
        return replace(first, flops=COST, seconds=COST)
    flops, seconds = first.flops + second.flops, first.seconds + second.seconds
    return replace(second, flops=flops, seconds=seconds)


def most_steps(experiment: Experiment, answer: Answer) -> float:
    """Return the steps of the small model with which a pilot costs `COST` of the budget."""
    assert answer.recipe.tau
    step = answer.case.small / answer.recipe.tau  # cost of a step of the small model
    return COST * experiment.steps / (1 + 2 * REACH + step)


def run_pilot(
    experiment: Experiment, answer: Answer, small: int, workdir: Path, begin: float
) -> Pilot:
    """Train briefly at a constant learning rate, from scratch and with a recipe.

    The cost is printed before the runs start.

    Args:
      experiment: training from scratch with the budget.
      answer: forecast of the recipe.
      small: number of steps of the small model.
      workdir: folder of the runs.
      begin: time at which the pilots of this budget began.

    Raises:
      PilotLate: the pilots took too many seconds.
    """
    optim = replace(
        experiment.optim, schedule="wsd", decay=0.0, warmup=min(experiment.optim.warmup, small // 2)
    )
    name = f"{experiment.name}-pilot{small}"
    steps = small + int(REACH * small)
    base = replace(
        experiment,
        name=name,
        steps=steps,
        optim=optim,
        eval_every=steps,
        eval_batches=1,
        log_every=1,
        on_nan="stop",  # a skipped step has no loss
    )
    method = answer.recipe.method(base, small / steps)
    growing = replace(base, name=f"{name}-{answer.recipe.name}", method=method)
    flops = (base.cost + growing.cost) / experiment.cost
    say(
        f"the pilot: 2 runs of {steps:,} steps, {flops:.1%} of the FLOPs of the budget",
        file=sys.stderr,
    )

    def ran(e: Experiment, step: float | None = None) -> Run:
        folder = workdir / f"{e.name}-seed{e.seed}"
        clock = PilotClock(experiment.steps, begin, step)
        try:
            run_experiment(e, folder, stop=clock)
        except Preempted as stopped:
            if clock.late:
                raise PilotLate(
                    f"the pilot was stopped, because it took more than {COST:.0%} of the seconds of the budget, with "
                    "compilation: give a larger --budget, or try the recipe itself"
                ) from stopped
            raise
        return Run(e.name, e.seed, folder)

    def losses(of: Run) -> list[float]:
        return [line["loss"] for line in of.log if "loss" in line]

    scratch = ran(base)
    step = step_seconds(scratch, 0)
    assert step is not None  # the log has each step
    grown = ran(growing, step)
    lag = steps_behind(losses(scratch), losses(grown), small)
    row = PilotRow(**vars(answer.case), steps=small, lag=lag, page="")
    seconds = (scratch.cost("seconds") + grown.cost("seconds")) / (step * experiment.steps)
    return Pilot(row, run_slowdown(grown), flops, seconds)


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


def run_slowdown(run: Run) -> float:
    """Return the seconds per FLOP of the smallest model of a run, relative to its last model.

    Raises:
      UserError: the log has fewer than two lines of one of them.
    """
    phases = [(i, p) for i, p in enumerate(run.result["phases"]) if p["steps"]]
    small, large = min(phases, key=lambda phase: phase[1]["parameters"]), phases[-1]
    paces = []
    for i, phase in (small, large):
        time = step_seconds(run, i)
        if time is None:
            raise UserError(
                f"{run.folder} has too few lines in its log to measure the times of steps"
            )
        paces.append(time * phase["steps"] / phase["flops"])
    return paces[0] / paces[1]


# --- the advice ---


def growth_refusal(best: Answer) -> str:
    """Return why the best recipe is not advised, or an empty string."""
    near = [
        e
        for e in forecast_rows()
        if (e.family, e.optimizer) == (best.case.family, best.case.optimizer)
        and e.distance(best.case) < NEAR
    ]
    if any(e.small_alone_is_cheaper for e in near):
        return (
            "near this setting, training only the small model reached its final loss for fewer FLOPs. Train the smaller "
            "model, or this one for longer."
        )
    if best.seconds.interval[1] < WORTH:
        return f"the upper end of its interval is below {WORTH:.0%}."
    return ""


def final_decision(answers: Sequence[Answer], pilot: Pilot | None) -> str:
    """Return the decision: a sentence that begins with "Grow", "Run the pilot" or "Do not grow"."""
    if not answers:
        return "Do not grow: no recipe fits this model and its optimizer."
    best = answers[0]
    if why := growth_refusal(best):
        return f"Do not grow: {why}"
    if best.seconds.interval[0] > 0 or (pilot and best.seconds.saved > WORTH):
        return (
            f"Grow: {best.recipe.about}. It is expected to save {best.flops.saved:.0%} of the FLOPs and "
            f"{best.seconds.saved:.0%} of the seconds at an equal loss. After the same number of steps its final loss is "
            "higher than from scratch."
        )
    if pilot:
        return f"Do not grow: after the pilot, less than {WORTH:.0%} is expected."
    return "Run the pilot (--measure): the interval contains savings above and below zero."


def given_decision(answers: Sequence[Answer]) -> list[str]:
    """Return a sentence on the case that the small model exists already."""
    rows = [answer for answer in answers if answer.recipe.tau]
    if not rows:
        return []
    best = max(rows, key=lambda answer: answer.given.saved)
    low, high = best.given.interval
    word = "grow" if low > 0 else "do not grow" if high < WORTH else "run the pilot"
    text = f"saves {percentages(best.given)} of the FLOPs: {word}."
    return [f"If you already have the small model, {best.recipe.about} {text}"]


def full_report(
    experiment: Experiment, pilot: Pilot | None = None
) -> tuple[str, Experiment | None]:
    """Return the report as Markdown and the advised experiment; None if growing is not advised."""
    base = with_stable_rate(experiment)
    answers, others = recipe_answers(base, pilot)
    decision = final_decision(answers, pilot)
    lines = [f"{experiment.name}: {experiment.steps:,} steps, {experiment.cost:.3g} FLOPs", ""]
    if answers:
        case, rows = answers[0].case, forecast_rows()
        heads = ["recipe", "FLOPs of its plan", "FLOPs saved", "seconds saved"]
        nearest = min(rows, key=case.distance)
        lines = [
            f"{experiment.name}: {case.family}, {case.optimizer}, {case.parameters:,} parameters, {experiment.steps:,} "
            f"steps, {case.tokens_per_parameter:.3g} tokens per parameter, {experiment.cost:.3g} FLOPs.",
            "",
            markdown_table(heads, [answer.cells for answer in answers]),
            "",
            "Savings at an equal loss, relative to training from scratch; in brackets, the 90 % interval of one run. "
            "Seconds are those of the training steps.",
            f"Of {len(rows)} measurements, the nearest one to {answers[0].recipe.about}: {nearest.told}.",
        ]
    lines += [f"{text}." for text in others]
    if pilot is not None:
        lines.append(
            f"The pilot found a lag of {pilot.row.lag:.2f}. It cost {pilot.flops:.1%} of the FLOPs and {pilot.seconds:.1%} "
            "of the seconds of the budget."
        )
    if base is not experiment:
        lines.append(
            f"These results are for optim.schedule=wsd. With {experiment.optim.schedule}, the learning rate falls from the "
            "first step on, so there is no phase with a constant learning rate to grow in."
        )
    if experiment.optim.name == "adamw" and answers:
        muon = min(method_rows("muon"), key=answers[0].case.distance)
        lines.append(f"Muon instead of AdamW saved more than any recipe: {muon.told}.")
    text = "\n".join([*lines, *given_decision(answers), "", decision]) + "\n"
    if not decision.startswith("Grow"):
        return text, None
    return text, replace(answers[0].grown, name=f"{base.name}_grown")


def with_stable_rate(experiment: Experiment) -> Experiment:
    """Return the experiment with a schedule that has a phase of constant learning rate."""
    if decay_fraction(experiment) < 1:
        return experiment
    return replace(experiment, optim=replace(experiment.optim, schedule="wsd", decay=Optim().decay))


def with_budget(experiment: Experiment, flops: float) -> Experiment:
    """Return the experiment with the number of steps that ``flops`` allow, in place of its own length.

    Raises:
      UserError: the budget is less than one step, or more steps than can be counted.
    """
    known = replace(experiment, steps=experiment.steps or 1000, seconds=None)
    each = known.cost / known.steps
    if not each <= flops < each * MOST_STEPS:
        raise UserError(
            f"--budget must be between the FLOPs of one step, {each:.3g}, and of {MOST_STEPS:,} steps, "
            f"{each * MOST_STEPS:.3g}, but is {flops:g}"
        )
    return replace(known, steps=round(flops / each))


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
    if experiment.ramp:
        raise UserError(
            f"{experiment.name} has ramp={experiment.ramp}, but forecasts and pilots are for batches of one size: set ramp=(); "
            "docs/results/baselines.md has the savings that were measured with a ramp"
        )
    if arguments.budget is not None:
        experiment = with_budget(experiment, arguments.budget)
    experiment = with_fitting_steps(experiment, arguments.workdir)
    if arguments.write is not None:
        # An error here comes before the work.
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
    pilot = (
        measure_lag(with_stable_rate(experiment), arguments.workdir) if arguments.measure else None
    )
    text, advised = full_report(experiment, pilot)
    say(text, end="")
    if arguments.write is not None and advised is not None:
        write_text(arguments.write, config_script(arguments.config, advised))
        say(f"config: {arguments.write}")


if __name__ == "__main__":
    exits_cleanly(main)
