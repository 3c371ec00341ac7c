"""A training run is a plan: a tuple of phases. `Train` trains a model; those of `train.transforms` make one from earlier ones.

Methods (`train.methods`) differ only in the plan that they build. Models live under names between the phases.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgrow import flops, ligo
from jaxgrow.drop import LayerDrop, Sensitivity, TokenDrop, schedule, sensitivity
from jaxgrow.freeze import Freeze
from jaxgrow.ligo import LiGO
from jaxgrow.models import Config
from train.optim import Optim, Rewarm
from train.step import Model, Passes, loss, parameters
from train.transforms import Apply, Coalesce, Correct, Decoalesce, Grow, Import, Interpolate, Models, differing


@dataclass(frozen=True)
class Teacher:
    """Knowledge inheritance (Qin et al., NAACL 2022): what the model ``name`` says is a target too, at first the only one.

    ``(1 - r) cross-entropy + r T^2 KL(teacher || student)``, both softened by the temperature T, with r falling from 1 to 0
    in a straight line over the first ``fraction`` of the steps.
    """

    name: str
    temperature: float = 2.0
    fraction: float = 0.44  # the published example's 55 of 125 thousand steps

    def weight(self, step: int, steps: int) -> float:
        return max(0.0, 1 - step / max(1, round(self.fraction * steps)))


@dataclass(frozen=True)
class Train:
    """Trains the model ``name``; a model that does not exist yet is initialised from ``config``."""

    name: str
    steps: int  # that its schedules are made for
    optim: Optim
    config: Config
    drop: LayerDrop | None = None
    begin: int = 0  # the part of the steps that this phase runs: begin .. end - 1
    until: int | None = None
    tokens: TokenDrop | None = None
    freeze: Freeze | None = None
    teacher: Teacher | None = None
    rewarm: Rewarm | None = None

    def __post_init__(self):
        if self.drop is not None and (self.tokens is not None or self.frozen):
            raise ValueError("layers are dropped from a whole stack: not together with token dropping or frozen layers")
        if self.rewarm is not None and self.optim.warmup:
            raise ValueError(f"what is new warms up again by itself: set warmup to 0, not {self.optim.warmup}")
        if self.freeze is not None:
            self.freeze.mask(self.config.layers)
        if self.tokens is not None:
            self.tokens.middle(self.config.layers)

    once = 0.0  # FLOPs of a step besides, whatever its batch
    reads = property(lambda self: (self.name, *((self.teacher.name,) if self.teacher else ())))
    writes = property(lambda self: self.name)
    end = property(lambda self: self.steps if self.until is None else self.until)

    @cached_property  # every step asks
    def frozen(self) -> int:
        """Layers from the bottom that no backward pass reaches."""
        return self.freeze.bottom(self.config.axes()) if self.freeze else 0

    @property
    def passes(self) -> Passes:
        hold = self.drop is not None and self.drop.dropped == "freeze"
        return Passes(hold, self.freeze, self.tokens, self.teacher.temperature if self.teacher else 1.0)

    def flops(self, tokens: int, layers: float | None = None) -> float:
        """Of a step, without a teacher's pass."""
        return flops.train(self.config, tokens, layers=layers, frozen=self.frozen, drop=self.tokens)

    @cached_property
    def cost(self) -> float:
        """FLOPs a token, expected: those of the layers kept on average."""
        if self.drop is None:
            return self.flops(1)
        return self.flops(1, _kept(self.drop, self.config.layers, self.begin, self.end, self.steps))

    def start(self, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> Model:
        """The model that the phase begins with, complete with optimizer state."""
        model = models.get(self.name)
        params = self.config.init(key) if model is None else model.params
        opt = tx.init(params) if model is None or model.opt is None else model.opt
        return Model(params, opt, self.config, None if model is None else model.sensitivity)


@cache  # or a copy of a run would compile this again
def _kept(drop: LayerDrop, layers: int, begin: int, end: int, steps: int) -> float:
    """How many of ``layers`` are kept on average."""
    times = np.linspace(begin + 1, end, 100)
    some = np.zeros(layers, np.float32)  # every sensitivity gives the same mean, where it can
    kept = jax.vmap(lambda t: schedule(drop, layers, t, steps, some).sum())(times)
    return float(kept.mean())


@dataclass(frozen=True)
class Learn(Train):
    """Learns the maps that take the model ``source`` to ``config``, with it standing still (`jaxgrow.ligo`)."""

    source: str = "small"
    small: Config = field(default_factory=Config)  # the config of ``source``
    ligo: LiGO = field(default_factory=LiGO)

    reads = property(lambda self: (self.source,))

    @property
    def target(self) -> dict[str, int]:
        """The axes that differ: those that have maps."""
        return differing(self.small, self.config)

    @cached_property
    def once(self) -> float:  # type: ignore[override]
        """FLOPs of growing the model and of the gradient of its maps, at most."""
        axes, sizes = self.small.axes(), self.small.sizes()
        small = jax.eval_shape(lambda: self.small.init(jax.random.key(0)))
        maps = jax.eval_shape(lambda: ligo.init(self.ligo, axes, sizes, self.target, jax.random.key(0)))
        # Shapes do for counting, but the maps must be arrays to be sliced by the layer.
        maps = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), maps)
        return 3 * flops.grow(ligo.growth(maps, axes, sizes), small, axes)

    def start(self, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> Model:
        small = models[self.source]
        maps = ligo.init(self.ligo, self.small.axes(), self.small.sizes(), self.target, key)
        return Model(maps, tx.init(maps), self.config, None, parameters(small), self.small)


@dataclass(frozen=True)
class Measure:
    """How much the loss of the model ``name`` depends on each of its layers, on held-out text (`jaxgrow.drop.sensitivity`)."""

    name: str
    sensitivity: Sensitivity

    reads = property(lambda self: (self.name,))
    writes = property(lambda self: self.name)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        model = models[self.name]

        def at(kept, batch):
            return loss(model, batch, kept)

        found = sensitivity(at, model.config.layers, held_out, self.sensitivity.kind)
        return replace(model, sensitivity=found)

    def cost(self, config: Config, samples: int) -> float:
        """FLOPs: a skipped layer costs nothing, and the slope at a layer's gate needs no gradient of weights."""
        tokens, layers = samples * config.length, config.layers
        if self.sensitivity.kind == "taylor":
            return 2 * flops.forward(config, tokens)
        return flops.forward(config, tokens) + layers * flops.forward(config, tokens, layers=layers - 1)


def training(
    name: str, steps: int, optim: Optim, config: Config, drop: LayerDrop | None, **options: Any
) -> tuple["Phase", ...]:
    """The phases of one training; ``options`` are fields of `Train`.

    With sensitivities, SBLD's Algorithm 2: all layers, measure, drop, and again if asked to.
    """
    if drop is None or drop.sensitivity is None:
        return (Train(name, steps, optim, config, drop, **options),)
    s = drop.sensitivity
    cuts = [round(s.after * steps)]
    while s.every and cuts[-1] + max(1, round(s.every * steps)) < steps:
        cuts.append(cuts[-1] + max(1, round(s.every * steps)))
    phases: list[Phase] = [Train(name, steps, optim, config, None, 0, cuts[0], **options)]
    for begin, until in itertools.pairwise([*cuts, steps]):
        phases += [Measure(name, s), Train(name, steps, optim, config, drop, begin, until, **options)]
    return tuple(phases)


Transform: TypeAlias = Measure | Coalesce | Decoalesce | Interpolate | Correct | Import | Grow | Apply
Phase: TypeAlias = Train | Transform
Plan: TypeAlias = tuple[Phase, ...]

SOURCE = "small"  # the model that a growth begins from, which one may have already: reports tell its cost apart


def describe(phase: Phase) -> str:
    """A phase's name in logs and tables."""
    if isinstance(phase, Train):
        return f"{'learn' if isinstance(phase, Learn) else 'train'} {phase.name}"
    return f"{type(phase).__name__.lower()} {' '.join(phase.reads or (phase.writes,))}"


def live(plan: Plan, done: int) -> set[str]:
    """The models that phases after the first ``done`` still read, and the one that the plan is for."""
    names = {plan[-1].writes}
    for phase in reversed(plan[done:]):
        names.discard(phase.writes)
        names |= set(phase.reads)
    return names


def after(plan: Plan, i: int, models: Models, result: Model) -> dict[str, Model]:
    """The models after phase ``i``, which gave ``result``: those that are still needed.

    A phase uses up the optimizer state of what it reads, so that a model that is kept costs its parameters only. A teacher is
    kept, too: this is also what a checkpoint in the middle of its lessons holds.
    """
    phase = plan[i]
    kept = live(plan, i + 1)
    if isinstance(phase, Train) and phase.teacher:
        kept = kept | {phase.teacher.name}
    out = {**models, **{name: replace(models[name], opt=None) for name in phase.reads if name in models}}
    out[phase.writes] = result
    return {name: model for name, model in out.items() if name in kept}


def shapes(plan: Plan, done: int, tx: optax.GradientTransformation) -> dict[str, Model]:
    """The models after the first ``done`` phases, as shapes: what a checkpoint of that moment holds."""
    models: dict[str, Model] = {}
    for i, phase in enumerate(plan[:done]):

        def run(models, phase=phase):
            if isinstance(phase, Train):
                return phase.start(models, tx, jax.random.key(0))
            if isinstance(phase, Import):
                return phase.shapes()
            if isinstance(phase, Measure):
                return replace(models[phase.name], sensitivity=jnp.zeros(models[phase.name].config.layers))
            return phase.run(models, tx, None)

        models = after(plan, i, models, jax.eval_shape(run, models))
    return models
