"""How does a phase change its training steps?

Modifiers drop layers or tokens, freeze parameters, add a teacher, or warm up again. Each modifier
is one class with two parts. On the host, `Modifier.step_inputs` provides the inputs of every step and
their cost. Within the step, which is a pure function on each device, the other methods change the
call of the model, the objective, the gradients, the learning rates, or the parameters that the
update may change. By default, each method changes nothing. A new modifier is a class in this file,
or in the file of the method that needs it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.growth.moments import clock
from jaxgrow.layerdrop import (
    KeepMask,
    LayerDrop,
    TokenDrop,
    block_list,
    program_counts,
    program_odds,
    sample_tokens,
    schedule,
)
from jaxgrow.layerdrop.schedules import whole_steps
from jaxgrow.models import Config
from jaxgrow.models.loss import weighted_mean
from jaxgrow.models.stack import KeptTokens
from jaxgrow.optim.freeze import Freeze, hold_frozen
from train.plan.keep_masks import KeepMasks
from train.state.model import TrainState, logits, target_weights
from train.state.optim import Optim, learning_rate


def less_than_one(name: str, fraction: float, steps: int) -> list[str]:
    """A warning if a fraction of the steps is not even one step, so that it takes one step."""
    if not fraction or not steps or round(fraction * steps):
        return []
    return [
        f"{name}={fraction:g} of {steps} steps is less than one step, and takes one: the costs differ from those of a "
        f"longer run, which has at least {math.floor(0.5 / fraction) + 1} steps"
    ]


class TrainedPhase(Protocol):
    """The properties of a `train.plan.training.Train` that its modifiers may read."""

    @property
    def config(self) -> Config: ...
    @property
    def optim(self) -> Optim: ...
    @property
    def modifiers(self) -> "tuple[Modifier, ...]": ...
    @property
    def steps(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def window(self) -> int: ...


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
    inputs: Any = None
    layers: float | None = None  # number of layers that the step runs; None: all
    flops: float = 0.0  # FLOPs of the modifier itself, in addition to the step of the model
    log: dict[str, Any] = field(default_factory=dict)  # logged in addition to the loss


NOTHING = ModifierInput()


class Micro(NamedTuple):
    """A micro-batch, or the part of it on one device."""

    number: Any
    key: jax.Array  # random key of the step
    rows: jax.Array  # indices of its samples in the batch of the step


@dataclass(frozen=True)
class Modifier:
    """Base class that changes nothing.

    The argument ``given`` of the methods below is the attribute ``inputs`` of the `ModifierInput` that
    `step_inputs` provided for the step.

    A class with a ``key`` may be used in the ``modifiers`` of a method or stage. The key is its
    name in ``--set`` and in ``config.json``: ``class Ramp(Modifier, key="ramp")``.
    """

    # The classes that have a key, by key.
    keys: ClassVar[dict[str, type["Modifier"]]] = {}

    def __init_subclass__(cls, key: str | None = None):
        if key is not None:
            Modifier.keys[key] = cls

    # --- on the host ---

    @property
    def reads(self) -> tuple[str, ...]:
        """Other models that the modifier needs in every step."""
        return ()

    def check(self, phase: TrainedPhase) -> None:
        """Check that the modifier fits the phase.

        Raises:
          ValueError: it does not fit.
        """

    def warnings(self, phase: TrainedPhase) -> list[str]:
        """Warnings about settings that are allowed but probably not intended."""
        return []

    def savings(self, config: Config) -> dict[str, Any]:
        """Options of `jaxgrow.flops.train_flops` that describe the computation saved in every step."""
        return {}

    def layers(self, phase: TrainedPhase) -> float | None:
        """Average number of layers that a step runs; None: all."""
        return None

    def flops(self, phase: TrainedPhase, samples: int) -> float:
        """FLOPs of the modifier itself in the phase, in addition to the steps of the model."""
        return 0.0

    @property
    def windows(self) -> int:
        """Number of windows into which every sample is cut."""
        return 1

    def notes(self, model: TrainState) -> dict[str, Any]:
        """JSON values that checkpoints record about the modifier."""
        return {}

    def step_inputs(
        self, phase: TrainedPhase, model: TrainState, setting: PhaseStart
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

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        """Options for the call of the model."""
        return {}

    def objective(self, value: jax.Array, output: jax.Array, inputs: Any, given: Any) -> jax.Array:
        """Return the objective to minimise.

        This method is called only if `reads_logits` is True.

        Args:
          value: the objective without this modifier.
          output: the logits of the model.
          inputs: the inputs of the model.
          given: the inputs of the step.
        """
        return value

    def gradients(self, grads: Tree, model: TrainState, given: Any) -> Tree:
        """Return the gradients that the optimizer gets, with zeros for frozen parameters."""
        return grads

    def learning_rates(self, learning_rates: Tree, opt: Any, given: Any) -> Tree:
        """Return the learning rate of every parameter."""
        return learning_rates

    def hold(self, before: TrainState, after: TrainState, given: Any) -> TrainState:
        """Return ``after``, with the values of ``before`` where the update must not change them."""
        return after


@dataclass(frozen=True)
class DropLayers(Modifier, key="drop"):
    """Each step runs only some of the layers.

    Momentum and weight decay still update the layers that did not run, as for a gradient of zero,
    unless the `LayerDrop` has another setting.
    """

    drop: LayerDrop

    def check(self, phase: TrainedPhase) -> None:
        if any(m.savings(phase.config) for m in phase.modifiers):
            raise ValueError(
                "layer dropping is not supported together with token dropping or frozen layers"
            )

    def warnings(self, phase: TrainedPhase) -> list[str]:
        s = self.drop.sensitivity
        if s is None:
            return []
        shares = {"sensitivity.after": s.after, "sensitivity.every": s.every}
        return [t for name, x in shares.items() for t in less_than_one(name, x, phase.steps)]

    def layers(self, phase: TrainedPhase) -> float:
        weights = tuple(flops.layer_weights(phase.config).tolist())
        times = (phase.begin, phase.end, phase.steps)
        if self.drop.execution == "cond":
            return _kept_on_average(self.drop, weights, *times)
        return _run_on_average(self.drop, weights, phase.config.depths, *times)

    def notes(self, model: TrainState) -> dict[str, Any]:
        s = self.drop.sensitivity
        return {
            "block_list": []
            if s is None
            else np.flatnonzero(block_list(model.sensitivity, s)).tolist()
        }

    def step_inputs(
        self, phase: TrainedPhase, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        sizes = (phase.config.depths, phase.steps, setting.accumulate, setting.seed)
        masks = KeepMasks(self.drop, *sizes, model.sensitivity, flops.layer_weights(phase.config))

        def given(step: int) -> ModifierInput:
            probs, keep_mask, ran = masks(step)
            return ModifierInput(keep_mask, ran, log={"keep": probs})

        return given

    def program(self) -> "DropLayers":
        return DropLayers(LayerDrop(dropped=self.drop.dropped))

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        return (
            {} if given is None else {"keep_mask": jax.tree.map(lambda x: x[micro.number], given)}
        )

    def hold(self, before: TrainState, after: TrainState, given: Any) -> TrainState:
        if given is None or self.drop.dropped != "freeze":
            return after
        return _held(before, after, ~_ran(given, before.config.depths), Freeze(below=False))


LOOKED_AT = 100  # number of evenly spaced steps that estimate the mean of a phase


@cache  # so that a copy of a run does not compile this again
def _kept_on_average(
    drop: LayerDrop, weights: tuple[float, ...], begin: int, end: int, steps: int
) -> float:
    """Return the average number of layers with `cond`, which runs only the kept layers."""
    return float(_expected(drop, weights, steps)(np.linspace(begin + 1, end, LOOKED_AT)).mean())


@cache
def _expected(drop: LayerDrop, weights: tuple[float, ...], steps: int) -> Callable:
    cost = np.array(weights, np.float32)
    # The mean does not depend on the sensitivities.
    any_sensitivity = np.zeros(len(cost), np.float32)
    return jax.jit(
        jax.vmap(lambda t: (schedule(drop, len(cost), t, steps, any_sensitivity) * cost).sum())
    )


@cache
def _run_on_average(
    drop: LayerDrop,
    weights: tuple[float, ...],
    depths: tuple[int, ...],
    begin: int,
    end: int,
    steps: int,
) -> float:
    """Return the average number of layers with gathering, which also runs some dropped layers."""
    any_sensitivity = np.zeros(len(weights), np.float32)
    # All layers of a stage have the same cost.
    costs = [part.mean() for part in np.split(np.array(weights), np.cumsum(depths)[:-1])]
    counts = program_counts(drop, depths, steps, any_sensitivity, costs)
    times = np.linspace(begin + 1, end, LOOKED_AT)
    odds = program_odds(drop, depths, steps, times, counts, any_sensitivity)
    return float((odds @ (counts @ costs)).mean())


def _ran(keep_mask: KeepMask, depths: tuple[int, ...]) -> jax.Array:
    """Return the layers that at least one micro-batch kept, as bool [layers].

    Args:
      keep_mask: the keep masks of the step.
      depths: the number of layers of each stage.
    """
    stages = keep_mask.layers if isinstance(keep_mask.layers, tuple) else (keep_mask.layers,)
    if stages[0].dtype == bool:
        return stages[0].reshape(-1, sum(depths)).any(0)
    run = [jax.nn.one_hot(x, n, dtype=bool).any(-2) for n, x in zip(depths, stages, strict=True)]
    run = jnp.concatenate(run, -1)
    if keep_mask.scale is not None:  # a scale of 0 marks a dropped layer that runs as padding
        run = run & (keep_mask.scale > 0)
    return run.reshape(-1, sum(depths)).any(0)


@dataclass(frozen=True)
class DropTokens(Modifier, key="tokens"):
    """Some tokens skip the middle layers."""

    drop: TokenDrop

    def check(self, phase: TrainedPhase) -> None:
        self.drop.middle(phase.config.depth)

    def savings(self, config: Config) -> dict[str, Any]:
        return {"drop": self.drop}

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        positions = sample_tokens(self.drop, micro.key, micro.rows, config.length)
        return {"kept_tokens": KeptTokens(positions, *self.drop.middle(config.depth))}


@dataclass(frozen=True)
class FreezeParts(Modifier, key="freeze"):
    """Parts of the model are frozen. No backward pass runs below the first trainable layer."""

    freeze: Freeze

    def check(self, phase: TrainedPhase) -> None:
        self.freeze.mask(phase.config.depth)

    def savings(self, config: Config) -> dict[str, Any]:
        bottom = self.freeze.bottom(config.axes(), config.sizes())
        return {"frozen": bottom} if bottom else {}

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        return self.savings(config)

    def gradients(self, grads: Tree, model: TrainState, given: Any) -> Tree:
        # Frozen parameters must not count in the norm that limits the gradients of the others.
        zeros = jax.tree.map(jnp.zeros_like, grads)
        freeze = self.freeze
        layers = freeze.mask(model.config.depth)
        return hold_frozen(
            zeros, grads, layers, model.params, model.axes, freeze.paths, freeze.below
        )

    def hold(self, before: TrainState, after: TrainState, given: Any) -> TrainState:
        return _held(before, after, self.freeze.mask(before.config.depth), self.freeze)


def _held(before: TrainState, after: TrainState, layers: Any, freeze: Freeze) -> TrainState:
    """Restore frozen parameters and their optimizer state after an update.

    Args:
      before: the model before the update.
      after: the model after the update.
      layers: whether each layer is frozen, bool [layers].
      freeze: the other parameters that are frozen.
    """
    old = (before.params, before.opt)
    new = (after.params, after.opt)
    axes = before.axes
    params, opt = hold_frozen(old, new, layers, before.params, axes, freeze.paths, freeze.below)
    return replace(after, params=params, opt=opt)


@dataclass(frozen=True)
class Teacher(Modifier):
    """Knowledge inheritance (Qin et al., NAACL 2022): the model ``name`` is a teacher.

    ``(1 - r) cross-entropy + r T^2 KL(teacher || student)``, where the temperature T softens both
    distributions, and r falls linearly from 1 to 0 over the first ``fraction`` of the steps. At the
    first step, the predictions of the teacher are therefore the only target.
    """

    reads_logits: ClassVar[bool] = True

    name: str
    temperature: float = 2.0
    fraction: float = 0.44  # as in the published example: 55 of 125 thousand steps
    config: Config = field(default_factory=Config)  # of the teacher

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    def check(self, phase: TrainedPhase) -> None:
        if not 0 < self.temperature < math.inf or not 0 <= self.fraction < math.inf:
            raise ValueError(
                f"temperature must be positive, and fraction at least 0, but they are {self.temperature} and {self.fraction}"
            )
        own, student = _outputs(self.config), _outputs(phase.config)
        # The divergence is that of the probabilities of tokens or classes.
        if student[0] not in ("tokens", "classes") or student[1] == 1:
            what = "a number" if student[1] == 1 else student[0]
            raise ValueError(
                f"a teacher is only supported for models that predict tokens or classes, but the model predicts {what}"
            )
        if own != student:
            raise ValueError(
                f"the teacher predicts {own[0]} of {own[1]}, but the model predicts {student[0]} of {student[1]}: "
                "both must have the same outputs"
            )
        if not _accepts(self.config, phase.config):
            names = (type(self.config).__name__, type(phase.config).__name__)
            raise ValueError(
                f"the teacher, a {names[0]}, cannot read the inputs of the model, a {names[1]}: both must read "
                "images of the same size, be decoders, or be encoders"
            )
        if self.config.modality == "text" and self.config.length < phase.length:
            raise ValueError(
                f"the teacher has a context of {self.config.length} tokens, but the samples of the model have {phase.length}: "
                "use a teacher with a context that is at least as long"
            )

    def warnings(self, phase: TrainedPhase) -> list[str]:
        return less_than_one("the fraction with a teacher", self.fraction, phase.steps)

    def weight(self, step: int, steps: int) -> float:
        taught = whole_steps(self.fraction, steps)
        return max(0.0, 1 - step / taught) if taught else 0.0

    def flops(self, phase: TrainedPhase, samples: int) -> float:
        steps = sum(self.weight(step, phase.steps) > 0 for step in range(phase.begin, phase.end))
        return steps * self._cost(phase, samples)

    def _cost(self, phase: TrainedPhase, samples: int, at_once: int | None = None) -> float:
        if self.config.modality == "text":
            config = self.config
            if config.masked:  # the samples determine the positions that the head computes
                config = replace(config, masked=phase.config.masked)
            return flops.forward_flops(
                config, samples * phase.length, phase.window, at_once=at_once
            )
        # An image can have another number of positions in the teacher than in the model.
        return flops.forward_flops(self.config, samples * self.config.length)

    def step_inputs(
        self, phase: TrainedPhase, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        teacher = replace(setting.models[self.name], opt=None)
        at_once = setting.at_once(setting.samples * phase.length)
        cost = self._cost(phase, setting.samples, at_once)

        def given(step: int) -> ModifierInput:
            weight = self.weight(step, phase.steps)
            return ModifierInput((teacher, np.float32(weight)), flops=cost) if weight else NOTHING

        return given

    def program(self) -> "Teacher":
        return Teacher("", self.temperature)

    def objective(self, value: jax.Array, output: jax.Array, inputs: Any, given: Any) -> jax.Array:
        if given is None:
            return value
        teacher, weight = given
        distillation = divergence(
            output,
            jax.lax.stop_gradient(logits(teacher, inputs)),
            self.temperature,
            target_weights(inputs),
        )
        return (1 - weight) * value + weight * distillation


def _outputs(config: Config) -> tuple[str, int | None]:
    """Return the kind of the outputs of a model, and their number."""
    axis = "vocab" if config.predicts == "tokens" else "classes"
    return config.predicts, config.sizes().get(axis)


def _accepts(config: Config, student: Config) -> bool:
    """Whether a model can read the inputs of a batch of ``student``."""
    if config.modality != student.modality:
        return False
    if student.predicts == "tokens" or student.modality == "images":
        own, theirs = (c.batch_shapes(1)[0] for c in (student, config))
    else:
        own, theirs = (c.task_shapes(1, 1)[0] for c in (student, config))
    if isinstance(own, dict):
        return own.keys() <= set(getattr(config, "inputs", ()))
    return not isinstance(theirs, dict) and (
        student.modality == "text" or own.shape == theirs.shape
    )


def divergence(
    student_BTV: jax.Array,
    teacher_BTV: jax.Array,
    temperature: float,
    weights_BT: jax.Array | None = None,
) -> jax.Array:
    """Return ``T^2 KL(p_teacher || p_student)`` at temperature T, averaged over tokens by weights.

    References:
      Qin et al. (NAACL 2022), Knowledge Inheritance.
    """
    log_p, log_q = (jax.nn.log_softmax(x / temperature) for x in (teacher_BTV, student_BTV))
    each_BT = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    return temperature**2 * weighted_mean(each_BT, weights_BT)


@dataclass(frozen=True)
class Rewarm(Modifier, key="rewarm"):
    """A second warm-up for new entries, while the old entries keep their schedule.

    This is SPARKLING (2026). New entries are the entries that a growth made. Over ``steps`` steps,
    their learning rate rises from the first learning rate of the phase to ``peak`` times this
    value. It then falls along a cosine to the floor of the phase.
    """

    peak: float = 1.3
    steps: int = 250

    def learning_rate(self, optim: Optim, steps: int, step: int) -> float:
        """Return the learning rate of the new entries at ``step`` of a phase of ``steps`` steps."""
        start = learning_rate(optim, steps, 0)
        floor = optim.floor * optim.peak_lr
        top = self.peak * start
        if step < self.steps:
            return start + (top - start) * (step + 1) / self.steps
        done = (step - self.steps) / max(steps - self.steps, 1)
        return floor + (top - floor) * 0.5 * (1 + math.cos(math.pi * done))

    def check(self, phase: TrainedPhase) -> None:
        if phase.optim.name != "adamw":
            raise ValueError(
                f"rewarm uses the step count of Adam's moments: set optim.name to adamw, not {phase.optim.name}"
            )
        if phase.optim.warmup:
            raise ValueError(
                f"rewarm warms up the new entries instead of all entries: set warmup to 0, not {phase.optim.warmup}"
            )

    def step_inputs(
        self, phase: TrainedPhase, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        # Adam's count at step 0. New entries were made at this count or later.
        first_count = clock(model.opt).count - setting.first

        def given(step: int) -> ModifierInput:
            new = self.learning_rate(phase.optim, phase.steps, step)
            return ModifierInput((np.float32(new), first_count))

        return given

    def program(self) -> "Rewarm":
        return Rewarm()

    def learning_rates(self, learning_rates: Tree, opt: Any, given: Any) -> Tree:
        new, first_count = given
        return jax.tree.map(
            lambda old, count: jnp.where(count >= first_count, new, old),
            learning_rates,
            clock(opt).start_count,
        )


@dataclass(frozen=True)
class Ramp(Modifier, key="ramp"):
    """Residual branches are ramped up gradually.

    At step t (from 0), layer l adds ``a F(x)`` with ``a = min(1, t / steps[l])``.

    ``steps = (T, 2 T, .., L T)`` is ProRes (2026): lower layers reach their full strength first.
    With 0 for old layers and T for layers that a growth made, the grown model computes the function
    of the old model at its first step, and all of its layers are trained. The cost of a step does
    not change. Validation uses the model without the ramp, that is, with complete branches.
    """

    steps: tuple[int, ...]  # for each layer; 0: complete from the first step on

    def check(self, phase: TrainedPhase) -> None:
        if len(self.steps) != phase.config.depth or min(self.steps) < 0:
            raise ValueError(
                f"ramp must have a number of steps, 0 or more, for each of {phase.config.depth} layers, but is {self.steps}"
            )
        if any(isinstance(m, DropLayers) or m.savings(phase.config) for m in phase.modifiers):
            raise ValueError(
                "ramp is not supported together with dropped layers or tokens, or frozen layers"
            )

    def step_inputs(
        self, phase: TrainedPhase, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        ends = np.asarray(self.steps, np.float32)

        def given(step: int) -> ModifierInput:
            if step >= max(self.steps):
                return NOTHING
            share = np.divide(step, ends, out=np.ones_like(ends), where=ends > step)
            return ModifierInput(KeepMask(None, share, "sublayer"))

        return given

    def program(self) -> "Ramp":
        return Ramp(())

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        return {} if given is None else {"keep_mask": given}


@dataclass(frozen=True)
class ShortContext(Modifier, key="windows"):
    """Cuts every sample into independent windows, to train with short contexts first.

    This is SkyLadder (Zhu et al., 2025).

    A step has the same tokens in the same order, but each token attends to fewer of them.
    Validation uses the complete context.
    """

    parts: int

    @property
    def windows(self) -> int:
        return self.parts

    def check(self, phase: TrainedPhase) -> None:
        if not phase.config.causal or phase.config.predicts != "tokens":
            raise ValueError(
                f"a short context is only supported for decoders that are pre-trained on text, not for a "
                f"{type(phase.config).__name__} that predicts {phase.config.predicts}"
            )
        if self.parts < 1 or phase.length % self.parts:
            raise ValueError(
                f"a context of {phase.length} tokens cannot be cut into {self.parts} equal windows"
            )
        if any(isinstance(m, DropTokens) for m in phase.modifiers):
            raise ValueError("token dropping is not supported together with a short context")
