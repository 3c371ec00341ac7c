"""A training run is a plan: a tuple of phases. `Train` trains a named model; the others make a model from earlier ones.

Methods differ only in the plan that they build. Models live under names between the phases.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgrow import flops
from jaxgrow.drop import LayerDrop, Sensitivity, schedule, sensitivity
from jaxgrow.grow import grow
from jaxgrow.merge import correct, interpolate
from jaxgrow.models import gpt2
from jaxgrow.models.gpt2 import GPT2Config
from jaxgrow.moments import Policy, grow_optimizer
from jaxgrow.operators import Groups, coalesce, decoalesce
from train.optim import Optim
from train.step import Model, loss

Models: TypeAlias = Mapping[str, Model]


@dataclass(frozen=True)
class Grouping:
    """Which heads, MLP units and layers of a model are one unit of the next smaller one (`jaxgrow.operators.coalesce`)."""

    heads: Groups | None = "far"
    mlp: Groups | None = None
    layers: Groups | None = "adjacent"
    tied: Literal["norm", "paper"] = "norm"  # what a tied head does with the 1/k: exact, or as in the published code

    def growth(self, large: GPT2Config, operator):
        return operator(_sizes(large), heads=self.heads, mlp=self.mlp, layers=self.layers)

    def axes(self, config: GPT2Config):
        axes = gpt2.axes(config)
        return gpt2.paper_tied_axes(axes) if self.tied == "paper" else axes

    def small(self, large: GPT2Config) -> GPT2Config:
        return gpt2.resized(large, self.growth(large, coalesce))


@dataclass(frozen=True)
class Train:
    """Trains the model ``name``; a model that does not exist yet is initialised from ``config``."""

    name: str
    steps: int  # that its schedules are made for
    optim: Optim
    config: GPT2Config
    drop: LayerDrop | None = None
    begin: int = 0  # the part of the steps that this phase runs: begin .. end - 1
    until: int | None = None

    reads = property(lambda self: (self.name,))
    writes = property(lambda self: self.name)
    end = property(lambda self: self.steps if self.until is None else self.until)

    @cached_property
    def cost(self) -> float:
        """FLOPs a token, expected: those of the layers kept on average."""
        if self.drop is None:
            return flops.train(self.config, 1)
        drop, layers = self.drop, self.config.layers
        times = np.linspace(self.begin + 1, self.end, 100)
        some = np.zeros(layers, np.float32)  # every sensitivity gives the same mean, where it can
        kept = jax.vmap(lambda t: schedule(drop, layers, t, self.steps, some).sum())(times)
        return flops.train(self.config, 1, layers=float(kept.mean()))


@dataclass(frozen=True)
class Measure:
    """How much the loss of the model ``name`` depends on each of its layers, on held-out text (`jaxgrow.drop.sensitivity`)."""

    name: str
    sensitivity: Sensitivity

    reads = property(lambda self: (self.name,))
    writes = property(lambda self: self.name)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: jax.Array) -> Model:
        model = models[self.name]

        def at(kept, tokens):
            return loss(model, tokens, kept)

        found = sensitivity(at, model.config.layers, held_out, self.sensitivity.kind)
        return replace(model, sensitivity=found)

    def cost(self, config: GPT2Config, held_out: np.ndarray) -> float:
        """FLOPs: a skipped layer costs nothing, and the slope at a layer's gate needs no gradient of weights."""
        tokens, layers = held_out[..., 1:].size, config.layers
        if self.sensitivity.kind == "taylor":
            return 2 * flops.forward(config, tokens)
        return flops.forward(config, tokens) + layers * flops.forward(config, tokens, layers=layers - 1)


def training(name: str, steps: int, optim: Optim, config: GPT2Config, drop: LayerDrop | None) -> tuple["Phase", ...]:
    """The phases of one training. With sensitivities, SBLD's Algorithm 2: all layers, measure, drop, and again if asked to."""
    if drop is None or drop.sensitivity is None:
        return (Train(name, steps, optim, config, drop),)
    s = drop.sensitivity
    cuts = [round(s.after * steps)]
    while s.every and cuts[-1] + max(1, round(s.every * steps)) < steps:
        cuts.append(cuts[-1] + max(1, round(s.every * steps)))
    phases: list[Phase] = [Train(name, steps, optim, config, None, 0, cuts[0])]
    for begin, until in itertools.pairwise([*cuts, steps]):
        phases += [Measure(name, s), Train(name, steps, optim, config, drop, begin, until)]
    return tuple(phases)


@dataclass(frozen=True)
class Coalesce:
    """``target = C(source)``."""

    source: str
    target: str
    grouping: Grouping
    moments: Policy = "drop"

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: self.target)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: jax.Array) -> Model:
        return _grown(models[self.source], self.grouping, coalesce, models[self.source].config, tx, self.moments)


@dataclass(frozen=True)
class Decoalesce:
    """``target = D(source)``, of the sizes of the model ``like``."""

    source: str
    target: str
    like: str
    grouping: Grouping
    moments: Policy = "drop"

    reads = property(lambda self: (self.source, self.like))
    writes = property(lambda self: self.target)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: jax.Array) -> Model:
        return _grown(models[self.source], self.grouping, decoalesce, models[self.like].config, tx, self.moments)


@dataclass(frozen=True)
class Interpolate:
    """``before = (1 - alpha) before + alpha up``. The optimizer state is that of ``up``, if it has one."""

    before: str
    up: str
    alpha: float

    reads = property(lambda self: (self.before, self.up))
    writes = property(lambda self: self.before)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: jax.Array) -> Model:
        before, up = models[self.before], models[self.up]
        return Model(interpolate(before.params, up.params, self.alpha), up.opt, before.config)


@dataclass(frozen=True)
class Correct:
    """``before = before + alpha D(small - C(before))``. The optimizer state is ``small``'s, grown by ``moments``."""

    before: str
    small: str
    grouping: Grouping
    alpha: float = 1.0
    moments: Policy = "drop"

    reads = property(lambda self: (self.before, self.small))
    writes = property(lambda self: self.before)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: jax.Array) -> Model:
        before, small = models[self.before], models[self.small]
        up = _grown(small, self.grouping, decoalesce, before.config, tx, self.moments)
        growth, axes = self.grouping.growth(before.config, decoalesce), self.grouping.axes(before.config)
        return Model(correct(before.params, small.params, growth, axes, self.alpha), up.opt, before.config)


Transform: TypeAlias = Measure | Coalesce | Decoalesce | Interpolate | Correct
Phase: TypeAlias = Train | Transform
Plan: TypeAlias = tuple[Phase, ...]


def describe(phase: Phase) -> str:
    """A phase's name in logs and tables."""
    if isinstance(phase, Train):
        return f"train {phase.name}"
    return f"{type(phase).__name__.lower()} {' '.join(phase.reads)}"


def live(plan: Plan, done: int) -> set[str]:
    """The models that phases after the first ``done`` still read, and the one that the plan is for."""
    names = {plan[-1].writes}
    for phase in reversed(plan[done:]):
        names.discard(phase.writes)
        names |= set(phase.reads)
    return names


def _grown(model: Model, grouping: Grouping, operator, large: GPT2Config, tx, moments: Policy) -> Model:
    growth, axes = grouping.growth(large, operator), grouping.axes(model.config)
    params = grow(growth, model.params, axes)
    opt = None
    if moments != "drop" and model.opt is not None:
        opt = grow_optimizer(tx, model.opt, growth, model.params, axes, moments)
    return Model(params, opt, gpt2.resized(model.config, growth))


def _sizes(config: GPT2Config) -> dict[str, int]:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.type is int}


# --- methods: what builds a plan ---


@dataclass(frozen=True)
class Scratch:
    """One model, trained to the end of a fully decayed schedule."""

    drop: LayerDrop | None = None

    def plan(self, model: GPT2Config, optim: Optim, steps: int) -> Plan:
        return training("large", steps, optim, model, self.drop)


@dataclass(frozen=True)
class Stage:
    """The training of one level. What is None is as in the experiment."""

    steps: float  # as a fraction of the experiment's steps
    lr: float = 1.0  # times the experiment's peak learning rate
    warmup: int | None = None
    floor: float | None = None
    schedule: Literal["cosine", "linear", "wsd"] | None = None
    drop: LayerDrop | None = None

    def optim(self, base: Optim) -> Optim:
        own = {n: getattr(self, n) for n in ("warmup", "floor", "schedule") if getattr(self, n) is not None}
        return replace(base, peak_lr=base.peak_lr * self.lr, **own)


@dataclass(frozen=True)
class VCycle:
    """Algorithm 1 of Zou et al. (ICLR 2024): down the levels, train the smallest, up again.

    ``down`` has a stage for each level that is coalesced, the large one first; ``up`` one for every level, the smallest
    first. ``correction`` replaces the interpolation by the multigrid form ``M + alpha D(s - C(M))``.
    """

    down: tuple[Stage, ...] = (Stage(0.05),)
    up: tuple[Stage, ...] = (Stage(0.5, lr=2.0), Stage(0.5))
    groupings: tuple[Grouping, ...] = (Grouping(),)  # one a level that is coalesced, or one for all
    alpha: float = 0.25  # weighs the small model's part
    correction: bool = False
    moments_down: Policy = "drop"
    moments_up: Policy = "drop"

    def __post_init__(self):
        if len(self.up) != len(self.down) + 1:
            raise ValueError(
                f"a V-cycle of {len(self.down) + 1} levels needs {len(self.down) + 1} stages up, but has {len(self.up)}"
            )
        if len(self.groupings) not in (1, len(self.down)):
            raise ValueError(
                f"groupings are one for all, or one for each of {len(self.down)} levels down, not {len(self.groupings)}"
            )

    def plan(self, model: GPT2Config, optim: Optim, steps: int) -> Plan:
        names = ["large", *(f"coarse{i}" for i in range(1, len(self.up)))]
        configs = [model]
        groupings = self.groupings * len(self.down) if len(self.groupings) == 1 else self.groupings
        for grouping in groupings:
            configs.append(grouping.small(configs[-1]))

        def train(level: int, stage: Stage) -> tuple[Phase, ...]:
            return training(names[level], round(stage.steps * steps), stage.optim(optim), configs[level], stage.drop)

        plan: list[Phase] = []
        for level, stage in enumerate(self.down):
            plan += train(level, stage)
            plan.append(Coalesce(names[level], names[level + 1], groupings[level], self.moments_down))
        plan += train(len(self.down), self.up[0])
        for level, stage in zip(reversed(range(len(self.down))), self.up[1:], strict=True):
            large, small = names[level], names[level + 1]
            if self.correction:
                plan.append(Correct(large, small, groupings[level], self.alpha, self.moments_up))
            else:
                plan.append(Decoalesce(small, "up", large, groupings[level], self.moments_up))
                plan.append(Interpolate(large, "up", self.alpha))
            plan += train(level, stage)
        return tuple(phase for phase in plan if not isinstance(phase, Train) or phase.steps or phase.name == "large")


Method: TypeAlias = Scratch | VCycle


def after(plan: Plan, i: int, models: Models, result: Model) -> dict[str, Model]:
    """The models after phase ``i``, which gave ``result``: those that are still needed.

    A transformation uses up the optimizer state of what it reads, so that a model that is kept costs its parameters only.
    """
    phase = plan[i]
    out = dict(models)
    if not isinstance(phase, Train):
        out |= {name: replace(models[name], opt=None) for name in phase.reads}
    out[phase.writes] = result
    return {name: model for name, model in out.items() if name in live(plan, i + 1)}


def shapes(plan: Plan, done: int, tx: optax.GradientTransformation) -> dict[str, Model]:
    """The models after the first ``done`` phases, as shapes: what a checkpoint of that moment holds."""
    models: dict[str, Model] = {}
    for i, phase in enumerate(plan[:done]):

        def run(models, phase=phase):
            if isinstance(phase, Train):
                return start(phase, models, tx, jax.random.key(0))
            return phase.run(models, tx, jnp.zeros((1, 1, 2), int))

        models = after(plan, i, models, jax.eval_shape(run, models))
    return models


def start(phase: Train, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> Model:
    """The model that a `Train` begins with, complete with optimizer state."""
    model = models.get(phase.name)
    params = gpt2.init(phase.config, key) if model is None else model.params
    opt = tx.init(params) if model is None or model.opt is None else model.opt
    return Model(params, opt, phase.config, None if model is None else model.sensitivity)
