"""Knowledge inheritance: a small model is the teacher of the large one in its first steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.layerdrop.schedules import whole_steps
from jaxgrow.models import Config
from jaxgrow.models.loss import weighted_mean
from train.common.fields import GIVEN
from train.plan.lifetimes import Plan
from train.plan.methods import LARGE, METHODS, SOURCE, Method, TrainStage, source_phases
from train.plan.modifiers import less_than_one
from train.plan.training import NOTHING, Modifier, ModifierInput, PhaseStart, Train
from train.state.model import TrainState, logits, target_weights
from train.state.optim import Optim


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

    def check(self, phase: Train) -> None:
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

    def warnings(self, phase: Train) -> list[str]:
        return less_than_one("the fraction with a teacher", self.fraction, phase.steps)

    def weight(self, step: int, steps: int) -> float:
        taught = whole_steps(self.fraction, steps)
        return max(0.0, 1 - step / taught) if taught else 0.0

    def flops(self, phase: Train, samples: int) -> float:
        steps = sum(self.weight(step, phase.steps) > 0 for step in range(phase.begin, phase.end))
        return steps * self._cost(phase, samples)

    def _cost(self, phase: Train, samples: int, at_once: int | None = None) -> float:
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
        self, phase: Train, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        teacher = replace(setting.models[self.name], opt=None, average=None)
        at_once = setting.at_once(setting.samples * phase.length)
        cost = self._cost(phase, setting.samples, at_once)

        def given(step: int) -> ModifierInput:
            weight = self.weight(step, phase.steps)
            return ModifierInput((teacher, np.float32(weight)), flops=cost) if weight else NOTHING

        return given

    def program(self) -> "Teacher":
        return Teacher("", self.temperature)

    def objective(
        self, value: jax.Array, output: jax.Array, inputs: Tree, given: Tree
    ) -> jax.Array:
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
class Inherit(Method):
    """Knowledge inheritance (Qin et al., NAACL 2022).

    The large model is trained from scratch. In the first steps a small model is its teacher.
    """

    small: Config
    source: TrainStage | str = field(default_factory=lambda: TrainStage(0.5))
    stage: TrainStage = field(default_factory=lambda: TrainStage(1.0))
    temperature: float = 2.0
    fraction: float = 0.44  # fraction of the steps of the stage that have a teacher

    # The choices that use a field (`train.extras.effect`).
    used_with = {"temperature": {"fraction": GIVEN}}

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        text = model.predicts == "tokens"
        if text and isinstance(self.source, TrainStage) and self.small.length != model.length:
            raise ValueError(
                f"the small model has a context of {self.small.length} tokens, but is trained on the samples of the "
                f"experiment, which have {model.length}: give it the same context"
            )
        teacher = Teacher(SOURCE, self.temperature, self.fraction, self.small)
        source = source_phases(self.small, self.source, optim, steps)
        return (*source, *self.stage.train(LARGE, model, optim, steps, teacher))


METHODS.add("Inherit", Inherit)
