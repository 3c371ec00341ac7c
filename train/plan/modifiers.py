"""What a phase of training adds to its steps: dropping layers or tokens, freezing, a teacher, a second warm-up.

Each is one class with two halves. On the host, `Modifier.begin` tells what every step is given, and
what that costs. Within the step, a pure function of one device, the other methods change the
model's call, the objective, the learning rates, or what the update may move. By default each
changes nothing; a new one is a class here, or beside the method that needs it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.growth.moments import clock
from jaxgrow.layerdrop import (
    Kept,
    LayerDrop,
    TokenDrop,
    block_list,
    program_counts,
    program_odds,
    sample_tokens,
    schedule,
)
from jaxgrow.models import Config
from jaxgrow.models.layers import KeptTokens
from jaxgrow.optim.freeze import Freeze, hold
from train.engine.state.model import Model, logits
from train.engine.state.optim import Optim, learning_rate
from train.plan.keep_masks import Gates

if TYPE_CHECKING:
    from train.plan.training import Train


class Setting(NamedTuple):
    """What a run knows when a phase of training begins, or goes on."""

    models: Mapping[str, Model]
    first: int  # the step that comes first
    samples: int  # of a batch
    accumulate: int  # micro-batches of a step
    seed: int
    devices: int = 1  # among which a batch is divided

    def at_once(self, tokens: int) -> int:
        """How many of a batch's tokens a device computes at once."""
        return tokens // (self.accumulate * self.devices)


@dataclass(frozen=True)
class Given:
    """What a modifier gives to one step, on the host."""

    inputs: Any = None  # arrays, the same on all devices; None where the step does without it
    layers: float | None = None  # how many the step runs; None: all
    flops: float = 0.0  # besides those of the model's own step
    log: dict[str, Any] = field(default_factory=dict)  # beside the loss


NOTHING = Given()


class Micro(NamedTuple):
    """A micro-batch, or one device's part of it."""

    number: Any
    key: jax.Array  # of this step
    rows: jax.Array  # its samples, by their places in the batch of the step


@dataclass(frozen=True)
class Modifier:
    """Adds nothing. ``given`` below is the ``inputs`` of what `begin` gave the step."""

    # --- on the host ---

    @property
    def reads(self) -> tuple[str, ...]:
        """Other models that it needs in every step."""
        return ()

    def check(self, phase: "Train") -> None:
        """Raises:
        ValueError: it does not fit the phase.
        """

    def savings(self, config: Config) -> dict[str, Any]:
        """Options of `jaxgrow.flops.train`: what every step saves."""
        return {}

    def layers(self, phase: "Train") -> float | None:
        """How many layers a step runs on average; None: all."""
        return None

    @property
    def windows(self) -> int:
        """How many every sample is cut into."""
        return 1

    def notes(self, model: Model) -> dict[str, Any]:
        """What checkpoints say of it, as JSON."""
        return {}

    def begin(self, phase: "Train", model: Model, setting: Setting) -> Callable[[int], Given]:
        """What each step is given, by its number."""
        return lambda step: NOTHING

    def program(self) -> "Modifier":
        """Itself, but for what only its inputs depend on: those that are equal so share one compiled step."""
        return self

    # --- within the step ---

    reads_logits: ClassVar[bool] = (
        False  # its `objective` is of the logits, which must then be whole
    )

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        """Options of the model's call."""
        return {}

    def objective(self, value: jax.Array, output: jax.Array, inputs: Any, given: Any) -> jax.Array:
        """What is minimised, where ``value`` would be without it; asked only if it reads the logits, ``output``."""
        return value

    def rates(self, rates: Tree, opt: Any, given: Any) -> Tree:
        """The learning rate of every parameter."""
        return rates

    def hold(self, before: Model, after: Model, given: Any) -> Model:
        """``after`` the update, but as ``before`` where it must not move anything."""
        return after


@dataclass(frozen=True)
class DropLayers(Modifier):
    """Each step runs some of the layers. Those that did not run are still moved by momentum and
    decay, by a gradient of zero, unless the `LayerDrop` says otherwise.
    """

    drop: LayerDrop

    def check(self, phase: "Train") -> None:
        if any(m.savings(phase.config) for m in phase.modifiers):
            raise ValueError(
                "layers are dropped from a whole stack: not together with token dropping or frozen layers"
            )

    def layers(self, phase: "Train") -> float:
        weights = tuple(flops.weights(phase.config).tolist())
        run = _run_on_average if self.drop.execution != "cond" else _kept_on_average
        return run(self.drop, weights, phase.config.depths, phase.begin, phase.end, phase.steps)

    def notes(self, model: Model) -> dict[str, Any]:
        s = self.drop.sensitivity
        return {
            "block_list": []
            if s is None
            else np.flatnonzero(block_list(model.sensitivity, s)).tolist()
        }

    def begin(self, phase: "Train", model: Model, setting: Setting) -> Callable[[int], Given]:
        sizes = (phase.config.depths, phase.steps, setting.accumulate, setting.seed)
        gates = Gates(self.drop, *sizes, model.sensitivity, flops.weights(phase.config))

        def given(step: int) -> Given:
            probs, kept, ran = gates(step)
            return Given(kept, ran, log={"keep": probs})

        return given

    def program(self) -> "DropLayers":
        return DropLayers(LayerDrop(dropped=self.drop.dropped))

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        return {} if given is None else {"kept": jax.tree.map(lambda x: x[micro.number], given)}

    def hold(self, before: Model, after: Model, given: Any) -> Model:
        if given is None or self.drop.dropped != "freeze":
            return after
        return _held(before, after, ~_ran(given, before.config.depths), Freeze(below=False))


LOOKED_AT = 100  # steps of a phase, evenly, whose mean stands for all


@cache  # or a copy of a run would compile this again
def _kept_on_average(
    drop: LayerDrop,
    weights: tuple[float, ...],
    depths: tuple[int, ...],
    begin: int,
    end: int,
    steps: int,
) -> float:
    """The layers of a step of `cond`, which runs the kept ones."""
    return float(_expected(drop, weights, steps)(np.linspace(begin + 1, end, LOOKED_AT)).mean())


@cache
def _expected(drop: LayerDrop, weights: tuple[float, ...], steps: int) -> Callable:
    cost = np.array(weights, np.float32)
    any_sensitivity = np.zeros(len(cost), np.float32)  # every one gives the same mean, where it can
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
    """The layers of a step that gathers, whose program may run more than the kept ones."""
    any_sensitivity = np.zeros(len(weights), np.float32)
    costs = [
        part.mean() for part in np.split(np.array(weights), np.cumsum(depths)[:-1])
    ]  # alike within a stage
    counts = program_counts(drop, depths, steps, any_sensitivity, costs)
    times = np.linspace(begin + 1, end, LOOKED_AT)
    odds = program_odds(drop, depths, steps, times, counts, any_sensitivity)
    return float((odds @ (counts @ costs)).mean())


def _ran(kept: Kept, depths: tuple[int, ...]) -> jax.Array:
    """The layers that some micro-batch kept, bool [layers], of ``depths`` in each stage."""
    stages = kept.layers if isinstance(kept.layers, tuple) else (kept.layers,)
    if stages[0].dtype == bool:
        return stages[0].reshape(-1, sum(depths)).any(0)
    run = [jax.nn.one_hot(x, n, dtype=bool).any(-2) for n, x in zip(depths, stages, strict=True)]
    run = jnp.concatenate(run, -1)
    if kept.scale is not None:  # zero: a dropped layer that runs as padding
        run = run & (kept.scale > 0)
    return run.reshape(-1, sum(depths)).any(0)


@dataclass(frozen=True)
class DropTokens(Modifier):
    """Some tokens go around the layers in the middle."""

    drop: TokenDrop

    def check(self, phase: "Train") -> None:
        self.drop.middle(phase.config.depth)

    def savings(self, config: Config) -> dict[str, Any]:
        return {"drop": self.drop}

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        places = sample_tokens(self.drop, micro.key, micro.rows, config.length)
        return {"kept_tokens": KeptTokens(places, *self.drop.middle(config.depth))}


@dataclass(frozen=True)
class Hold(Modifier):
    """Parts of the model do not train; below the first layer that does, no backward pass runs."""

    freeze: Freeze

    def check(self, phase: "Train") -> None:
        self.freeze.mask(phase.config.depth)

    def savings(self, config: Config) -> dict[str, Any]:
        bottom = self.freeze.bottom(config.axes(), config.sizes())
        return {"frozen": bottom} if bottom else {}

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        return self.savings(config)

    def hold(self, before: Model, after: Model, given: Any) -> Model:
        return _held(before, after, self.freeze.mask(before.config.depth), self.freeze)


def _held(before: Model, after: Model, layers: Any, freeze: Freeze) -> Model:
    """``layers`` (bool), and other leaves as ``freeze`` names them, with their moments."""
    old, new, axes = (before.params, before.opt), (after.params, after.opt), before.axes
    params, opt = hold(old, new, layers, before.params, axes, freeze.paths, freeze.below)
    return replace(after, params=params, opt=opt)


@dataclass(frozen=True)
class Teacher(Modifier):
    """Knowledge inheritance (Qin et al., NAACL 2022): what the model ``name`` predicts is a target too, at first the only one.

    ``(1 - r) cross-entropy + r T^2 KL(teacher || student)``, both softened by the temperature T,
    with r falling from 1 to 0 in a straight line over the first ``fraction`` of the steps.
    """

    reads_logits: ClassVar[bool] = True

    name: str
    temperature: float = 2.0
    fraction: float = 0.44  # the published example's 55 of 125 thousand steps

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.name,)

    def weight(self, step: int, steps: int) -> float:
        return max(0.0, 1 - step / max(1, round(self.fraction * steps)))

    def begin(self, phase: "Train", model: Model, setting: Setting) -> Callable[[int], Given]:
        teacher = replace(setting.models[self.name], opt=None)
        cost = flops.forward(teacher.config, setting.samples * phase.length, phase.window)

        def given(step: int) -> Given:
            weight = self.weight(step, phase.steps)
            return Given((teacher, np.float32(weight)), flops=cost) if weight else NOTHING

        return given

    def program(self) -> "Teacher":
        return Teacher("", self.temperature)

    def objective(self, value: jax.Array, output: jax.Array, inputs: Any, given: Any) -> jax.Array:
        if given is None:
            return value
        teacher, weight = given
        lesson = divergence(
            output, jax.lax.stop_gradient(logits(teacher, inputs)), self.temperature
        )
        return (1 - weight) * value + weight * lesson


def divergence(student_BTV: jax.Array, teacher_BTV: jax.Array, temperature: float) -> jax.Array:
    """``T^2 KL(p_teacher || p_student)`` at temperature T, the mean over tokens (Knowledge Inheritance, Qin et al., 2022)."""
    log_p, log_q = (jax.nn.log_softmax(x / temperature) for x in (teacher_BTV, student_BTV))
    return temperature**2 * (jnp.exp(log_p) * (log_p - log_q)).sum(-1).mean()


@dataclass(frozen=True)
class Rewarm(Modifier):
    """A second warm-up for the entries that a growth made, while the old ones keep their schedule (SPARKLING, 2026).

    From the phase's first learning rate to ``peak`` times it over ``steps`` steps, then by a cosine
    to the phase's floor.
    """

    peak: float = 1.3
    steps: int = 250

    def rate(self, optim: Optim, steps: int, step: int) -> float:
        """The learning rate of the new entries at ``step`` of a phase of ``steps``."""
        start, floor = learning_rate(optim, steps, 0), optim.floor * optim.peak_lr
        top = self.peak * start
        if step < self.steps:
            return start + (top - start) * (step + 1) / self.steps
        done = (step - self.steps) / max(steps - self.steps, 1)
        return floor + (top - floor) * 0.5 * (1 + math.cos(math.pi * done))

    def check(self, phase: "Train") -> None:
        if phase.optim.name != "adamw":
            raise ValueError(
                f"a second warm-up goes by the age of Adam's moments: set optim.name to adamw, not {phase.optim.name}"
            )
        if phase.optim.warmup:
            raise ValueError(
                f"what is new warms up again by itself: set warmup to 0, not {phase.optim.warmup}"
            )

    def begin(self, phase: "Train", model: Model, setting: Setting) -> Callable[[int], Given]:
        birth = (
            clock(model.opt).count - setting.first
        )  # Adam's count at step 0: what is new is as old as that, or younger
        return lambda step: Given((np.float32(self.rate(phase.optim, phase.steps, step)), birth))

    def program(self) -> "Rewarm":
        return Rewarm()

    def rates(self, rates: Tree, opt: Any, given: Any) -> Tree:
        rate, birth = given
        return jax.tree.map(
            lambda r, born: jnp.where(born >= birth, rate, r), rates, clock(opt).born
        )


@dataclass(frozen=True)
class Ramp(Modifier):
    """Residual branches come in by and by: at step t, from 0, layer l adds ``a F(x)`` with ``a = min(1, t / steps[l])``.

    With ``steps = (T, 2 T, .., L T)``, ProRes (2026): below settles first. With 0 for the layers
    that were there and T for those that a growth made, the model that trains is the old one when it
    is born, and all of it trains. No step costs more or less. Validation is of the model as it is,
    with whole branches.
    """

    steps: tuple[int, ...]  # of each layer; 0: whole from the first step on

    def check(self, phase: "Train") -> None:
        if len(self.steps) != phase.config.depth or min(self.steps) < 0:
            raise ValueError(
                f"a ramp has a number of steps for each of {phase.config.depth} layers, not {self.steps}"
            )
        if any(isinstance(m, DropLayers) or m.savings(phase.config) for m in phase.modifiers):
            raise ValueError(
                "a ramp is of a whole stack: not together with dropped layers or tokens, or frozen layers"
            )

    def begin(self, phase: "Train", model: Model, setting: Setting) -> Callable[[int], Given]:
        whole = np.asarray(self.steps, np.float32)

        def given(step: int) -> Given:
            if step >= max(self.steps):
                return NOTHING
            share = np.divide(step, whole, out=np.ones_like(whole), where=whole > step)
            return Given(Kept(None, share, "sublayer"))

        return given

    def program(self) -> "Ramp":
        return Ramp(())

    def options(self, given: Any, micro: Micro, config: Config) -> dict[str, Any]:
        return {} if given is None else {"kept": given}


@dataclass(frozen=True)
class ShortContext(Modifier):
    """Every sample is cut into windows that do not see each other: short contexts first (SkyLadder; Zhu et al., 2025).

    A step has as many tokens, in the same order, and attention over fewer of them. Validation has
    the whole context.
    """

    parts: int

    @property
    def windows(self) -> int:
        return self.parts

    def check(self, phase: "Train") -> None:
        if not phase.config.causal or phase.config.predicts != "tokens":
            raise ValueError(
                f"a short context is for a decoder that is pre-trained on text, not for a {type(phase.config).__name__} that "
                f"predicts {phase.config.predicts}"
            )
        if self.parts < 1 or phase.length % self.parts:
            raise ValueError(
                f"a context of {phase.length} tokens cannot be cut into {self.parts} equal windows"
            )
        if any(isinstance(m, DropTokens) for m in phase.modifiers):
            raise ValueError(
                "tokens are dropped from whole samples: not together with a short context"
            )
