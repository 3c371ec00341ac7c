"""Which phases train a model, and which phase measures its layers in between?

Modifiers change the steps of a training: they drop layers or tokens, freeze parameters, add a
teacher, or warm up again. Each modifier is one class with two parts. On the host,
`Modifier.step_inputs` provides the inputs of every step and their cost. Within the step, which is a
pure function on each device, the other methods change the call of the model, the objective, the
gradients, the learning rates, or the parameters that the update may change. By default, each method
changes nothing. A new modifier is a class in `train.plan.modifiers`, or one in `train.extras` with a
key in its table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.layerdrop import Sensitivity, layer_sensitivity
from jaxgrow.models import Config
from jaxgrow.optim import muon
from jaxgrow.optim.scaling import MULTIPLIERS
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.plan.phase import Context, LogValue, Models, Phase
from train.state.model import TrainState, initial, loss, parameters, placed
from train.state.optim import Optim


class PhaseStart(NamedTuple):
    """The state of a run when a phase of training begins or continues."""

    models: Mapping[str, TrainState]
    first: int  # number of the first step
    samples: int  # number of samples in a batch
    accumulate: int  # number of micro-batches in a step
    seed: int
    devices: int = 1  # number of devices that the tokens of a batch are sharded over

    def at_once(self, tokens: int) -> int:
        """Return how many of the tokens of a batch a device computes at once."""
        return tokens // (self.accumulate * self.devices)


@dataclass(frozen=True)
class ModifierInput:
    """What a modifier provides to one step, on the host."""

    # arrays, the same on all devices; None: the modifier is inactive in the step
    inputs: Tree = None
    layers: float | None = None  # number of layers that the step runs; None: all
    flops: float = 0.0  # FLOPs of the modifier itself, in addition to the step of the model
    log: dict[str, LogValue] = field(default_factory=dict)  # logged in addition to the loss


NOTHING = ModifierInput()


class Micro(NamedTuple):
    """A micro-batch, or the part of it on one device."""

    number: int | jax.Array
    key: jax.Array  # random key of the step
    rows: jax.Array  # indices of its samples in the batch of the step


class SavedFlops(TypedDict, total=False):
    """Options of `jaxgrow.flops.train_flops` that describe the computation saved in every step."""

    frozen: int
    drop: flops.TokenSkips


# The modifiers that have a key, by key.
MODIFIERS: "Registry[type[Modifier]]" = Registry("modifier", "train.extras")


@dataclass(frozen=True)
class Modifier:
    """Base class that changes nothing.

    The argument ``given`` of the methods below is the attribute ``inputs`` of the `ModifierInput` that
    `step_inputs` provided for the step.

    A class with a ``key`` may be used in the ``modifiers`` of a method or stage. The key is its
    name in ``--set`` and in ``config.json``: ``class Ramp(Modifier, key="ramp")``.
    """

    key: ClassVar[str]
    # Whether the modifier finds the entries that a growth made by Adam's step counts.
    by_counts: ClassVar[bool] = False

    def __init_subclass__(cls, key: str | None = None):
        if key is not None:
            cls.key = key
            MODIFIERS.add(key, cls)

    # --- on the host ---

    @property
    def reads(self) -> tuple[str, ...]:
        """Other models that the modifier needs in every step."""
        return ()

    def check(self, phase: "Train") -> None:
        """Check that the modifier fits the phase.

        Raises:
          ValueError: it does not fit.
        """

    def warnings(self, phase: "Train") -> list[str]:
        """Warnings about settings that are allowed but probably not intended."""
        return []

    def savings(self, config: Config) -> SavedFlops:
        """Options of `jaxgrow.flops.train_flops` that describe the computation saved in every step."""
        return {}

    def layers(self, phase: "Train") -> float | None:
        """Average number of layers that a step runs; None: all."""
        return None

    def flops(self, phase: "Train", samples: int) -> float:
        """FLOPs of the modifier itself in the phase, in addition to the steps of the model."""
        return 0.0

    @property
    def windows(self) -> int:
        """Number of windows into which every sample is cut."""
        return 1

    def notes(self, model: TrainState) -> Json:
        """JSON values that checkpoints record about the modifier."""
        return {}

    def step_inputs(
        self, phase: "Train", model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        """Return a function from the number of a step to the `ModifierInput` of this step."""
        return lambda step: NOTHING

    def program(self) -> "Modifier":
        """Return the modifier without the settings that affect only its inputs.

        Phases whose modifiers have equal programs share one compiled step.
        """
        return self

    # --- within the step ---

    # Whether `objective` reads the logits, which must then be computed completely.
    reads_logits: ClassVar[bool] = False

    def options(self, given: Tree, micro: Micro, config: Config) -> Mapping[str, object]:
        """Options for the call of the model."""
        return {}

    def objective(
        self, value: jax.Array, output: jax.Array, inputs: Tree, given: Tree
    ) -> jax.Array:
        """Return the objective to minimise.

        This method is called only if `reads_logits` is True.

        Args:
          value: the objective without this modifier.
          output: the logits of the model.
          inputs: the inputs of the model.
          given: the inputs of the step.
        """
        return value

    def gradients(self, grads: Tree, model: TrainState, given: Tree) -> Tree:
        """Return the gradients that the optimizer gets, with zeros for frozen parameters."""
        return grads

    def learning_rates(self, learning_rates: Tree, opt: Tree, given: Tree) -> Tree:
        """Return the learning rate of every parameter."""
        return learning_rates

    def hold(self, before: TrainState, after: TrainState, given: Tree) -> TrainState:
        """Return ``after``, with the values of ``before`` where the update must not change them."""
        return after


def keep_trained(context: Context, model: TrainState) -> None:
    """Write the trained parameters of a model with a parametrisation to a file of the run."""
    if model.parametrisation is not None:
        context.keep(*model.parametrisation.kept_file(model))


@dataclass(frozen=True)
class Train(Phase, writes="name"):
    """Trains the model ``name``. A model that does not exist yet is initialised from ``config``."""

    name: str
    steps: int  # total steps of the schedules
    optim: Optim
    config: Config
    modifiers: tuple[Modifier, ...] = ()  # changes of the training steps
    begin: int = 0  # this phase runs the steps begin .. end - 1
    until: int | None = None
    positions: int | None = None  # of a sample; None: the context length of the model
    shrink: int = 1  # the batch of the run is divided by it (`train.extras.ramp`)

    def __post_init__(self):
        if self.optim.base is not None:  # raises an error if the multipliers do not exist
            MULTIPLIERS["completep"](
                self.config.axes(), self.config.sizes(), self.optim.base.sizes()
            )
        kinds = [type(modifier) for modifier in self.modifiers]
        if twice := [kind.__name__ for kind in set(kinds) if kinds.count(kind) > 1]:
            raise ValueError(f"modifiers has {twice[0]} more than once: keep one of them")
        for modifier in self.modifiers:
            modifier.check(self)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name, *self.needs)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for m in self.modifiers for name in m.reads)

    @property
    def end(self) -> int:
        return self.steps if self.until is None else self.until

    def samples(self, batch: int) -> int:
        """Number of samples in a batch of the phase, if the largest batch of the run has ``batch``."""
        return batch // self.shrink

    @property
    def length(self) -> int:
        """Number of positions of a sample."""
        return self.positions or self.config.length

    @property
    def window(self) -> int:
        """Number of positions that attention covers."""
        return self.length // math.prod(m.windows for m in self.modifiers)

    @cached_property  # every step reads it
    def _savings(self) -> SavedFlops:
        savings: SavedFlops = {}
        for m in self.modifiers:
            savings |= m.savings(self.config)
        return savings

    def fixed_flops(self, accumulate: int = 1) -> float:
        """FLOPs of each step that do not depend on the batch: Muon's matrix products, or 0.

        Args:
          accumulate: number of micro-batches in a step.
        """
        if self.optim.name == "muon":
            return muon.muon_flops(self.config.axes(), self.config.sizes())
        return 0.0

    def flops(self, tokens: int, layers: float | None = None, at_once: int | None = None) -> float:
        """FLOPs of a step, without the additional computations of modifiers.

        Args:
          tokens: number of tokens in the batch.
          layers: number of layers that run; None: all.
          at_once: as for `jaxgrow.flops.forward_flops`.
        """
        return flops.train_flops(
            self.config, tokens, self.window, layers, at_once=at_once, **self._savings
        )

    @cached_property
    def token_cost(self) -> float:
        """Expected FLOPs for each token, with the average number of layers that are kept."""
        layers = [n for m in self.modifiers if (n := m.layers(self)) is not None]
        return self.flops(1, layers[0] if layers else None)

    def cost(self, samples: int, accumulate: int = 1) -> float:
        samples = self.samples(samples)
        step = samples * self.length * self.token_cost + self.fixed_flops(accumulate)
        own = sum(modifier.flops(self, samples) for modifier in self.modifiers)
        return (self.end - self.begin) * step + own

    def warnings(self) -> list[str]:
        steps = self.steps
        warmup = self.optim.warmup
        found = [text for modifier in self.modifiers for text in modifier.warnings(self)]
        if 0 < steps < warmup:
            found.append(
                f"{self.label} has {steps} steps, but a warm-up of {warmup} steps: its learning rate never reaches the peak"
            )
        return found

    def start(self, models: Models, tx: optax.GradientTransformation, key: jax.Array) -> TrainState:
        """Return the model at the start of the phase, with its optimizer state."""
        model = models.get(self.name)
        params = initial(self.config, key, self.optim.base) if model is None else model.params
        opt = tx.init(params) if model is None or model.opt is None else model.opt
        return TrainState(params, opt, self.config, None if model is None else model.sensitivity)

    def averaged(
        self, models: Models, tx: optax.GradientTransformation, key: jax.Array, *given: Tree
    ) -> TrainState:
        """Return the model of `start` with the average of its weights, if the run keeps one.

        The average of a model that has none begins with its weights.
        """
        model = self.start(models, tx, key, *given)
        if not self.optim.ema:
            return model
        before = models[self.name].average if self.name in models else None
        return replace(model, average=model.params if before is None else before)

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        return self.averaged(models, tx, jax.random.key(0))

    def run(self, context: Context) -> TrainState:
        model = context.train(self)
        keep_trained(context, model)
        return model

    def init(self, context: Context) -> TrainState:
        """Return the model before the first step, by a compiled program."""
        # The initial model does not depend on the steps, so that phases with the same start share a
        # program.
        initial_phase = replace(
            self,
            steps=0,
            optim=Optim(base=self.optim.base, ema=self.optim.ema),
            modifiers=(),
            begin=0,
            until=None,
            positions=None,
            shrink=1,
        )
        own = {name: model for name, model in context.models.items() if name == self.name}
        others = {name: model for name, model in context.models.items() if name != self.name}
        # The phase replaces its own model, so that a large model does not need its memory twice.
        return context.compute(
            initial_phase, _init, own, others, context.key, *self.given(context), donate=True
        )[0]

    def given(self, context: Context) -> tuple[Tree, ...]:
        """Additional arguments of `start`."""
        return ()


def _init(
    phase: Train,
    tx: optax.GradientTransformation,
    own: Models,
    others: Models,
    key: jax.Array,
    *given: Tree,
) -> TrainState:
    """Return a model that shares no memory with ``others``, because the step donates its input."""
    return placed(jax.tree.map(jnp.copy, phase.averaged({**own, **others}, tx, key, *given)))


# Measures other than the effect on the loss: functions of a config, parameters and micro-batches.
MEASURES: Registry[Callable[[Config, Tree, Tree], jax.Array]] = Registry("measure", "train.extras")


@dataclass(frozen=True)
class Measure(Phase, reads=("name",), writes="name"):
    """Measures the importance of each layer of the model ``name`` on validation data.

    The measure is the effect on the loss (`jaxgrow.layerdrop.layer_sensitivity`), or on the residual
    stream (`jaxgrow.extras.importance.block_influence`).
    """

    name: str
    sensitivity: Sensitivity
    positions: int | None = None  # of a sample; None: the context length of the model

    @property
    def probes(self) -> int:  # type: ignore[override]
        return self.sensitivity.batches

    def measure(self, model: TrainState, batches: Tree) -> TrainState:
        """Return ``model`` with the sensitivities of its layers on micro-batches of validation data."""

        def at(keep_mask, batch):
            return loss(model, batch, keep_mask)

        if (kind := self.sensitivity.kind) == "influence":
            found = MEASURES[kind](model.config, parameters(model), batches)
            return replace(model, sensitivity=found)
        return replace(model, sensitivity=layer_sensitivity(at, model.config.depth, batches, kind))

    def flops(self, config: Config, samples: int) -> float:
        """FLOPs of the measurement of ``samples`` samples.

        A skipped layer costs nothing, and the gradient for the keep mask of a layer does not need
        the gradients of the weights.
        """
        length = self.positions or config.length
        layers = config.depth
        whole = flops.forward_flops(config, samples * length, length)
        if self.sensitivity.kind == "influence":
            return whole
        if self.sensitivity.kind == "taylor":
            return 2 * whole
        return whole + layers * flops.forward_flops(
            config, samples * length, length, layers=layers - 1
        )

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        model = models[self.name]
        return replace(model, sensitivity=jnp.zeros(model.config.depth))

    def run(self, context: Context) -> TrainState:
        probe = context.validation_batches(self.probes)
        model, _ = context.compute(
            self, _run_measure, context.models[self.name], probe, donate=True
        )
        rows = jax.tree.leaves(probe)[0]
        context.ledger.add(flops=self.flops(model.config, rows.shape[0] * rows.shape[1]))
        measured = {
            f"sensitivity of layer {', '.join(map(str, at))}": s
            for at, s in np.ndenumerate(model.sensitivity)
        }
        context.log(0, sensitivity=list(context.finite(0, measured).values()))
        return model


def _run_measure(
    phase: Measure, tx: optax.GradientTransformation, model: TrainState, batches: Tree
) -> TrainState:
    return placed(phase.measure(model, batches))
