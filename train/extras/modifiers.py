"""Further changes of the steps: fewer tokens, frozen parts, warm-ups, ramps, contexts, dropout."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes import Tree
from jaxgrow.extras.freeze import Freeze, hold_frozen
from jaxgrow.extras.token_dropping import TokenDrop, sample_tokens
from jaxgrow.growth.moments import clock
from jaxgrow.layerdrop import KeepMask
from jaxgrow.layerdrop.execution import Dropout
from jaxgrow.models import Config
from jaxgrow.models.stack import KeptTokens
from train.plan.modifiers import HOLDING, DropLayers
from train.plan.training import (
    NOTHING,
    Micro,
    Modifier,
    ModifierInput,
    PhaseStart,
    SavedFlops,
    Train,
)
from train.state.model import TrainState
from train.state.optim import Optim, learning_rate


@dataclass(frozen=True)
class Rewarm(Modifier, key="rewarm"):
    """A second warm-up for new entries, while the old entries keep their schedule.

    This is SPARKLING (2026). New entries are the entries that a growth made. Over ``steps`` steps,
    their learning rate rises from the first learning rate of the phase to ``peak`` times this
    value. It then falls along a cosine to the floor of the phase.
    """

    by_counts = True
    step_counts = ("steps",)

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

    def check(self, phase: Train) -> None:
        if phase.optim.name != "adamw":
            raise ValueError(
                f"rewarm uses the step count of Adam's moments: set optim.name to adamw, not {phase.optim.name}"
            )
        if phase.optim.warmup:
            raise ValueError(
                f"rewarm warms up the new entries instead of all entries: set warmup to 0, not {phase.optim.warmup}"
            )

    def warnings(self, phase: Train) -> list[str]:
        said = f"{phase.label} has {phase.steps} steps, but rewarm has {self.steps}: its learning rate never reaches the peak"
        return [said] * (0 < phase.steps < self.steps)

    def step_inputs(
        self, phase: Train, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        # Adam's count at step 0. New entries were made at this count or later.
        first_count = clock(model.opt).count - setting.first

        def given(step: int) -> ModifierInput:
            new = self.learning_rate(phase.optim, phase.steps, step)
            return ModifierInput((np.float32(new), first_count))

        return given

    def program(self) -> "Rewarm":
        return Rewarm()

    def learning_rates(self, learning_rates: Tree, opt: Tree, given: Tree) -> Tree:
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

    step_counts = ("steps",)

    steps: tuple[int, ...]  # for each layer; 0: complete from the first step on

    def check(self, phase: Train) -> None:
        if len(self.steps) != phase.config.depth or min(self.steps) < 0:
            raise ValueError(
                f"ramp must have a number of steps, 0 or more, for each of {phase.config.depth} layers, but is {self.steps}"
            )
        if any(isinstance(m, DropLayers) or m.savings(phase.config) for m in phase.modifiers):
            raise ValueError(
                "ramp is not supported together with dropped layers or tokens, or frozen layers"
            )

    def warnings(self, phase: Train) -> list[str]:
        said = f"{phase.label} has {phase.steps} steps, but ramp has {max(self.steps)}: a layer never has its full strength"
        return [said] * (0 < phase.steps <= max(self.steps))

    def step_inputs(
        self, phase: Train, model: TrainState, setting: PhaseStart
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

    def options(self, given: Tree, micro: Micro, config: Config) -> Mapping[str, object]:
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

    def check(self, phase: Train) -> None:
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


@dataclass(frozen=True)
class DropTokens(Modifier, key="tokens"):
    """Some tokens skip the middle layers."""

    drop: TokenDrop

    def check(self, phase: Train) -> None:
        self.drop.middle(phase.config.depth)

    def savings(self, config: Config) -> SavedFlops:
        return {"drop": self.drop}

    def options(self, given: Tree, micro: Micro, config: Config) -> Mapping[str, object]:
        positions = sample_tokens(self.drop, micro.key, micro.rows, config.length)
        return {"kept_tokens": KeptTokens(positions, *self.drop.middle(config.depth))}


@dataclass(frozen=True)
class FreezeParts(Modifier, key="freeze"):
    """Parts of the model are frozen. No backward pass runs below the first trainable layer."""

    freeze: Freeze

    def check(self, phase: Train) -> None:
        if phase.config.loop is not None:
            raise ValueError(
                f"freeze is not supported for a model with {phase.config.loop}: leave out freeze or loop"
            )
        self.freeze.mask(phase.config.depth)

    def savings(self, config: Config) -> SavedFlops:
        bottom = self.freeze.bottom(config.axes(), config.sizes())
        return {"frozen": bottom} if bottom else {}

    def options(self, given: Tree, micro: Micro, config: Config) -> Mapping[str, object]:
        return self.savings(config)

    def gradients(self, grads: Tree, model: TrainState, given: Tree) -> Tree:
        # Frozen parameters must not count in the norm that limits the gradients of the others.
        zeros = jax.tree.map(jnp.zeros_like, grads)
        freeze = self.freeze
        layers = freeze.mask(model.config.depth)
        return hold_frozen(
            zeros, grads, layers, model.params, model.axes, freeze.paths, freeze.below
        )

    def hold(self, before: TrainState, after: TrainState, given: Tree) -> TrainState:
        return hold_parts(before, after, self.freeze.mask(before.config.depth), self.freeze)


# These modifiers also change the keep mask, or the samples that it belongs to.
OTHERS = (DropLayers, DropTokens, FreezeParts, Ramp, ShortContext)


@dataclass(frozen=True)
class DropUnits(Modifier, key="dropout"):
    """Dropout of the outputs of attention and MLPs, before they are added to the residual stream.

    Deviation(BERT): embeddings, attention probabilities and the input of the head are not dropped.
    """

    rate: float

    def check(self, phase: Train) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"dropout must be between 0 and 1, but is {self.rate}")
        if any(isinstance(other, OTHERS) for other in phase.modifiers):
            raise ValueError(
                "dropout is not supported together with dropped layers or tokens, frozen layers, a ramp or a short context: "
                "leave out dropout or the others"
            )

    def options(self, given: Tree, micro: Micro, config: Config) -> Mapping[str, object]:
        layers = jax.random.split(jax.random.fold_in(micro.key, 1), config.depth)
        of_rows = jax.vmap(jax.random.fold_in, (None, 0))
        keys = jax.vmap(lambda key: of_rows(key, micro.rows))(layers)
        return {"keep_mask": KeepMask(None, Dropout(keys, self.rate), "sublayer")}


def hold_parts(
    before: TrainState,
    after: TrainState,
    layers: jax.Array | np.ndarray,
    freeze: Freeze,
) -> TrainState:
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


HOLDING.add("layers", partial(hold_parts, freeze=Freeze(below=False)))
