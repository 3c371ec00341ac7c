"""Phases that train a model, and the one that measures its layers in between."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgrow import flops
from jaxgrow.layerdrop import LayerDrop, Sensitivity, sensitivity
from jaxgrow.models import Config
from jaxgrow.models.importance import influence, streams
from jaxgrow.optim import muon
from jaxgrow.optim.completep import multipliers
from train.engine.state.model import Model, initial, loss, parameters
from train.engine.state.optim import Optim
from train.plan.modifiers import DropLayers, Modifier
from train.plan.phase import Context, Models, Phase


@dataclass(frozen=True)
class Train(Phase):
    """Trains the model ``name``; a model that does not exist yet is initialised from ``config``."""

    name: str
    steps: int  # that its schedules are made for
    optim: Optim
    config: Config
    modifiers: tuple[Modifier, ...] = ()  # what it adds to plain training
    begin: int = 0  # the part of the steps that this phase runs: begin .. end - 1
    until: int | None = None
    positions: int | None = None  # of a sample; None: as many as the model has

    def __post_init__(self):
        if self.optim.base is not None:  # the multipliers must exist
            multipliers(self.config.axes(), self.config.sizes(), self.optim.base.sizes())
        for modifier in self.modifiers:
            modifier.check(self)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name, *self.needs)

    @property
    def writes(self) -> str:
        return self.name

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for m in self.modifiers for name in m.reads)

    @property
    def end(self) -> int:
        return self.steps if self.until is None else self.until

    @property
    def length(self) -> int:
        """Positions of a sample."""
        return self.positions or self.config.length

    @property
    def window(self) -> int:
        """Positions that attention is over."""
        return self.length // math.prod(m.windows for m in self.modifiers)

    @cached_property  # every step asks
    def _savings(self) -> dict[str, Any]:
        return {
            name: value for m in self.modifiers for name, value in m.savings(self.config).items()
        }

    @cached_property
    def fixed_flops(self) -> float:
        """Of a step besides, whatever its batch: Muon's products. AdamW's update has none."""
        return (
            muon.flops(self.config.axes(), self.config.sizes())
            if self.optim.name == "muon"
            else 0.0
        )

    def flops(self, tokens: int, layers: float | None = None, at_once: int | None = None) -> float:
        """Of a step, without what modifiers compute besides; ``at_once``: as of `jaxgrow.flops.forward`."""
        return flops.train(
            self.config, tokens, self.window, layers, at_once=at_once, **self._savings
        )

    @cached_property
    def token_cost(self) -> float:
        """FLOPs a token, expected: those of the layers kept on average."""
        layers = [n for m in self.modifiers if (n := m.layers(self)) is not None]
        return self.flops(1, layers[0] if layers else None)

    def cost(self, samples: int) -> float:
        return (self.end - self.begin) * (
            samples * self.length * self.token_cost + self.fixed_flops
        )

    def warnings(self) -> list[str]:
        steps, warmup = self.steps, self.optim.warmup
        if 0 < steps < warmup:
            return [
                f"{self.label} has {steps} steps, but a warm-up of {warmup}: its rate never comes to its peak"
            ]
        return []

    def start(self, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> Model:
        """The model that the phase begins with, complete with optimizer state."""
        model = models.get(self.name)
        params = initial(self.config, key, self.optim.base) if model is None else model.params
        opt = tx.init(params) if model is None or model.opt is None else model.opt
        return Model(params, opt, self.config, None if model is None else model.sensitivity)

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        return self.start(models, tx, jax.random.key(0))

    def born(self, context: Context) -> Model:
        """The model before the first step."""
        # What the steps are is no matter before them: phases that start alike share a program.
        alike = replace(
            self,
            steps=0,
            optim=Optim(base=self.optim.base),
            modifiers=(),
            begin=0,
            until=None,
            positions=None,
        )
        return context.compute(alike, _born, context.models, context.key, *self.given(context))[0]

    def given(self, context: Context) -> tuple[Any, ...]:
        """What `start` takes besides."""
        return ()

    def run(self, context: Context) -> Model:
        model = context.models[self.name] if context.resumed else self.born(context)
        return context.train(self, model)


def _born(
    phase: Train, tx: optax.GradientTransformation, models: Models, key: jax.Array, *given: Any
) -> Model:
    """Shares no memory with ``models``, for the step takes its own."""
    return jax.tree.map(jnp.copy, phase.start(models, tx, key, *given))


@dataclass(frozen=True)
class Measure(Phase):
    """How much each layer of the model ``name`` matters, on held-out text: to the loss
    (`jaxgrow.layerdrop.sensitivity`), or to the residual stream
    (`jaxgrow.models.importance.influence`).
    """

    name: str
    sensitivity: Sensitivity
    positions: int | None = None  # of a sample; None: as many as the model has

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def writes(self) -> str:
        return self.name

    @property
    def probes(self) -> int:  # type: ignore[override]
        return self.sensitivity.batches

    def measure(self, model: Model, held_out: Any) -> Model:
        """``model``, with its layers' sensitivities on the micro-batches ``held_out``."""

        def at(kept, batch):
            return loss(model, batch, kept)

        def one(batch):
            found = streams(model.config, parameters(model), batch[0])
            return jnp.concatenate([influence(stream) for stream in found.values()])

        if (kind := self.sensitivity.kind) == "influence":
            return replace(model, sensitivity=jax.lax.map(one, held_out).mean(0))
        return replace(model, sensitivity=sensitivity(at, model.config.depth, held_out, kind))

    def flops(self, config: Config, samples: int) -> float:
        """A skipped layer costs nothing, and the slope at a layer's gate needs no gradient of weights."""
        length, layers = self.positions or config.length, config.depth
        whole = flops.forward(config, samples * length, length)
        if self.sensitivity.kind == "influence":
            return whole
        if self.sensitivity.kind == "taylor":
            return 2 * whole
        return whole + layers * flops.forward(config, samples * length, length, layers=layers - 1)

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        model = models[self.name]
        return replace(model, sensitivity=jnp.zeros(model.config.depth))

    def run(self, context: Context) -> Model:
        probe = context.held_out(self.probes)
        model, _ = context.compute(self, _measured, context.models[self.name], probe)
        rows = jax.tree.leaves(probe)[0]
        context.ledger.add(flops=self.flops(model.config, rows.shape[0] * rows.shape[1]))
        measured = {
            f"sensitivity of layer {i}": s for i, s in enumerate(np.asarray(model.sensitivity))
        }
        context.log(0, sensitivity=list(context.finite(0, measured).values()))
        return model


def _measured(
    phase: Measure, tx: optax.GradientTransformation, model: Model, held_out: Any
) -> Model:
    return phase.measure(model, held_out)


def training(
    name: str,
    steps: int,
    optim: Optim,
    config: Config,
    drop: LayerDrop | None = None,
    modifiers: tuple[Modifier, ...] = (),
    positions: int | None = None,
    kind: Callable[..., Train] = Train,
) -> tuple[Phase, ...]:
    """The phases of one training, each a ``kind`` of `Train`.

    With sensitivities, SBLD's Algorithm 2: all layers, measure, drop, and again if asked to.
    """

    def train(*modifiers: Modifier, begin: int = 0, until: int | None = None) -> Train:
        return kind(name, steps, optim, config, modifiers, begin, until, positions)

    if drop is None:
        return (train(*modifiers),)
    dropping = (*modifiers, DropLayers(drop))
    if drop.sensitivity is None:
        return (train(*dropping),)
    s = drop.sensitivity
    cuts = [round(s.after * steps)]
    while s.every and cuts[-1] + max(1, round(s.every * steps)) < steps:
        cuts.append(cuts[-1] + max(1, round(s.every * steps)))
    phases: list[Phase] = [train(*modifiers, until=cuts[0])]
    for begin, until in itertools.pairwise([*cuts, steps]):
        phases += [Measure(name, s, positions), train(*dropping, begin=begin, until=until)]
    return tuple(phases)
