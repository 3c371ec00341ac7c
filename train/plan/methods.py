"""Which training methods are there? Each is a dataclass that builds a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from jaxgrow.growth.moments import Policy
from jaxgrow.layerdrop import Sensitivity
from jaxgrow.layerdrop.schedules import whole_steps
from jaxgrow.models import Config
from jaxgrow.operators import OPERATORS
from jaxgrow.operators.ligo import LiGO
from jaxgrow.registry import Registry
from train.common.fields import CHANGED, GIVEN, named
from train.plan.learning import Learn
from train.plan.lifetimes import Plan
from train.plan.modifiers import train_phases
from train.plan.phase import Phase
from train.plan.training import MODIFIERS, Measure, Modifier
from train.plan.transforms import (
    Apply,
    Coalesce,
    Correct,
    Decoalesce,
    Grouping,
    Grow,
    Interpolate,
    LoadCheckpoint,
    Way,
    smaller,
)
from train.state.optim import Optim

LARGE = "large"  # name of the target model of a method
# Name of the source model of a growth. It may exist before the run, so tables show its cost
# separately.
SOURCE = "small"
# The operators that use a random seed.
SAMPLING = tuple(name for name, made in OPERATORS.items() if made.accepted({"seed": 0}))


# The methods, by name. A config file can also have its own class.
METHODS: "Registry[type[Method]]" = Registry("method", "train.extras")
# Measurements that only some plans have. "experts" measures experts in place of layers.
PHASES: Registry[type[Measure]] = Registry("phase", "train.extras")


@dataclass(frozen=True)
class Method:
    """A training method: a dataclass of settings that builds a plan."""

    choices: ClassVar = METHODS  # for messages

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        """Return the phases of a run.

        Args:
          model: config of the model that the run trains.
          optim: optimizer of the experiment, whose values a stage may replace.
          steps: number of steps of the experiment.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Scratch(Method):
    """One model, trained from scratch with a schedule that decays fully."""

    modifiers: tuple[Modifier, ...] = field(default=(), metadata=named(MODIFIERS, "drop"))

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        return train_phases(LARGE, steps, optim, model, self.modifiers)


@dataclass(frozen=True)
class TrainStage:
    """The training of one model in a method. A setting that is None has the experiment's value."""

    steps: float  # fraction of the steps of the experiment
    lr: float = 1.0  # factor on the peak learning rate of the experiment
    warmup: int | None = None
    floor: float | None = None
    schedule: Literal["cosine", "linear", "wsd"] | None = None
    # Changes of the steps (`train.plan.modifiers`), at most one of each class.
    modifiers: tuple[Modifier, ...] = field(
        default=(), metadata=named(MODIFIERS, "drop", "tokens", "freeze", "rewarm")
    )

    # The choices that use a field (`train.extras.effect`).
    used_with = {name: {"steps": GIVEN} for name in ("lr", "warmup", "floor", "schedule")}
    step_counts = ("warmup",)

    def optim(self, base: Optim) -> Optim:
        own = {
            n: getattr(self, n)
            for n in ("warmup", "floor", "schedule")
            if getattr(self, n) is not None
        }
        return replace(base, peak_lr=base.peak_lr * self.lr, **own)

    def train(
        self, name: str, config: Config, base: Optim, steps: int, *modifiers: Modifier
    ) -> tuple[Phase, ...]:
        """Return the phases that train ``name``; ``steps`` is the number of the experiment."""
        if not 0 <= self.steps < math.inf:
            raise ValueError(
                f"the steps of a stage are a fraction of the steps of the experiment, at least 0, but are {self.steps}"
            )
        every = (*modifiers, *self.modifiers)
        return train_phases(name, whole_steps(self.steps, steps), self.optim(base), config, every)


def _check_step_counts(stages: Sequence[TrainStage], name: str, moments: Policy) -> None:
    """Check that the policy ``moments`` of a growth, in the field ``name``, fits the modifiers."""
    for modifier in (m for stage in stages for m in stage.modifiers):
        if modifier.by_counts and moments != "asymmetric":
            raise ValueError(
                f"{modifier.key} finds new entries by their step counts, which only the policy 'asymmetric' restarts: "
                f"set {name} to 'asymmetric', not {moments!r}, or leave out {modifier.key}"
            )


@dataclass(frozen=True)
class VCycle(Method):
    """Algorithm 1 of Zou et al. (ICLR 2024): coalesce, train the smallest model, and go up again.

    ``down`` has a stage for each level that is coalesced, starting with the large model. ``up`` has
    a stage for every level, starting with the smallest model. ``correction`` replaces the
    interpolation by the multigrid form ``M + alpha D(s - C(M))``. A `train.extras.pruning.Pruning` in ``groupings``
    removes layers instead of coalescing them. A measurement before the removal selects the layers.
    """

    down: tuple[TrainStage, ...] = (TrainStage(0.05),)
    up: tuple[TrainStage, ...] = (TrainStage(0.5, lr=2.0), TrainStage(0.5))
    # One for each level that is coalesced or pruned, or one for all of them.
    groupings: tuple[Way, ...] = (Grouping(),)
    alpha: float = 0.25  # weight of the small model
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
                f"there must be one grouping for all levels, or one for each of the {len(self.down)} levels down, "
                f"not {len(self.groupings)}"
            )
        # The first stage up trains the smallest model, which has no new entries.
        _check_step_counts(self.up[1:], "moments_up", self.moments_up)

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        names = [LARGE, *(f"coarse{i}" for i in range(1, len(self.up)))]
        configs = [model]
        groupings = self.groupings * len(self.down) if len(self.groupings) == 1 else self.groupings
        for grouping in groupings:
            configs.append(smaller(grouping, configs[-1]))

        def train(level: int, stage: TrainStage) -> tuple[Phase, ...]:
            if level and not stage.steps:
                # Without steps, a coarse level needs no phase: its model comes from another level.
                return ()
            return stage.train(names[level], configs[level], optim, steps)

        plan: list[Phase] = []
        for level, stage in enumerate(self.down):
            plan += train(level, stage)
            if (measurement := groupings[level].measurement) is not None:
                plan.append(Measure(names[level], measurement))
            plan.append(
                Coalesce(names[level], names[level + 1], groupings[level], self.moments_down)
            )
        plan += train(len(self.down), self.up[0])
        for level, stage in zip(reversed(range(len(self.down))), self.up[1:], strict=True):
            large = names[level]
            small = names[level + 1]
            if self.correction:
                plan.append(Correct(large, small, groupings[level], self.alpha, self.moments_up))
            else:
                plan.append(Decoalesce(small, "up", large, groupings[level], self.moments_up))
                plan.append(Interpolate(large, "up", self.alpha))
            plan += train(level, stage)
        return tuple(plan)


@dataclass(frozen=True)
class Learned:
    """LiGO: the maps are learned on the pre-training loss, while the small model is frozen."""

    ligo: LiGO = field(default_factory=LiGO)
    steps: int = 100  # 0 is a control with the initial maps
    lr: float = 1.0  # factor on the peak learning rate of the experiment
    warmup: int = 10

    # The choices that use a field (`train.extras.effect`).
    used_with = {"lr": {"steps": GIVEN}, "warmup": {"steps": GIVEN}}
    step_counts = ("steps", "warmup")


@dataclass(frozen=True)
class GrowTo:
    """One growth, and the stages of training after it."""

    stages: tuple[TrainStage, ...] = (TrainStage(0.5),)
    by: tuple[str, ...] | Learned = ("stack",)  # names of `jaxgrow.operators`, applied in order
    config: Config | None = None  # config of the grown model; None: the model of the experiment
    seed: int = 0
    noise: float | None = None  # as in `train.plan.transforms.Grow`
    moments: Policy = "drop"
    # New entries are freshly initialised instead of copied; with "spectral", new matrices have the
    # scale of `jaxgrow.extras.fresh.spectral`.
    fresh: bool | Literal["spectral"] = False
    # Fraction of the units of each expert that is initialised again.
    redrawn: float = 0.0
    # Number of micro-batches, outside training, on which the utility of each expert is measured.
    # 0: experts are copied evenly.
    utility: int = 0

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "seed": (
            *({name: CHANGED} for name in ("noise", "fresh", "redrawn")),
            {"by": SAMPLING},
        ),
        "redrawn": {"/model.experts": CHANGED},
        "utility": {"by": ("expert_copies",)},
    }

    def __post_init__(self):
        if self.utility < 0:
            raise ValueError(f"utility must be at least 0, but is {self.utility}")
        if isinstance(self.by, Learned) and (
            self.noise is not None or self.moments != "drop" or self.fresh
        ):
            raise ValueError(
                "noise, moments and fresh apply to operators, not to learned maps: leave them out"
            )
        _check_step_counts(self.stages, "moments", self.moments)
        if self.utility and self.noise is not None:
            raise ValueError(
                "copies by utility differ between layers, so noise does not apply to them: leave out noise or utility"
            )
        if self.fresh and self.noise is not None:
            raise ValueError(
                "noise breaks the symmetry of copies, but fresh makes no copies: leave out one of them"
            )


@dataclass(frozen=True)
class Growing(Method):
    """Train a small model first, then grow and train it, once or several times.

    The small model is trained in this run or in an earlier one.

    StackBERT, MSLT, MIDAS, G_stack, bert2BERT, LiGO, staged training and similar methods are values
    of this class.
    """

    small: Config
    # Training of the small model; or the folder of its run, as in `train.plan.transforms.LoadCheckpoint`.
    source: TrainStage | str = TrainStage(0.5)
    to: tuple[GrowTo, ...] = (GrowTo(),)

    def __post_init__(self):
        if (
            not self.to
            or self.to[-1].config is not None
            or any(t.config is None for t in self.to[:-1])
        ):
            raise ValueError(
                "every growth except the last one must have a config; the last one grows to the model of the experiment"
            )
        if isinstance(self.source, str) and self.to[0].moments != "drop":
            moments = self.to[0].moments
            raise ValueError(
                f"an imported model has no optimizer state, so moments must be 'drop', not {moments!r}"
            )

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        plan = list(source_phases(self.small, self.source, optim, steps))
        config = self.small
        name = SOURCE
        eps = 1.0  # factor by which the growths so far multiplied the epsilon of the norms
        for i, to in enumerate(self.to):
            last = i == len(self.to) - 1
            into = to.config or model
            target = LARGE if last else f"grown{i + 1}"
            into = replace(into, eps=into.eps * eps)
            if isinstance(to.by, Learned):
                learned = replace(optim, peak_lr=optim.peak_lr * to.by.lr, warmup=to.by.warmup)
                options = {"source": name, "small": config, "ligo": to.by.ligo}
                plan += [
                    Learn("maps", to.by.steps, learned, into, **options),
                    Apply("maps", target),
                ]
            else:
                if to.utility:
                    plan.append(PHASES["experts"](name, Sensitivity(batches=to.utility)))
                grown = Grow(
                    name,
                    target,
                    config,
                    into,
                    by=to.by,
                    seed=to.seed,
                    noise=to.noise,
                    moments=to.moments,
                    fresh=to.fresh,
                    redrawn=to.redrawn,
                    base=optim.base if to.fresh else None,
                )
                plan.append(grown)
                eps *= grown.config.eps / into.eps
                into = grown.config
            for stage in to.stages:
                plan += stage.train(target, into, optim, steps)
            config = into
            name = target
        return tuple(plan)


@dataclass(frozen=True)
class Continue(Method):
    """Continue the training of an existing model.

    The model is from ``jaxgrow grow``, a download, or an earlier run.
    """

    source: str  # folder of the model, as in `train.plan.transforms.LoadCheckpoint`
    modifiers: tuple[Modifier, ...] = field(default=(), metadata=named(MODIFIERS, "drop"))

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        trained = train_phases(LARGE, steps, optim, model, self.modifiers)
        return (LoadCheckpoint(LARGE, model, self.source), *trained)


def source_phases(
    small: Config, source: TrainStage | str, optim: Optim, steps: int
) -> tuple[Phase, ...]:
    """Return the phases that train the small model, or load it from a folder."""
    if isinstance(source, str):
        return (LoadCheckpoint(SOURCE, small, source),)
    return source.train(SOURCE, small, optim, steps)


for method in (Scratch, VCycle, Growing, Continue):
    METHODS.add(method.__name__, method)
