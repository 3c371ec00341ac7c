"""Which training methods are there? Each is a dataclass that builds a plan."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.growth.moments import Policy
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.layerdrop.schedules import whole_steps
from jaxgrow.models import Adapter, Config
from jaxgrow.operators import OPERATORS
from jaxgrow.operators.ligo import LiGO
from jaxgrow.optim.freeze import Freeze
from train.common.fields import CHANGED, GIVEN, named
from train.extras.adapting import Adapt, Merge
from train.plan.best import Best, KeepBest, TakeBest
from train.plan.dropout import DropUnits
from train.plan.learning import Apply, Learn
from train.plan.lifetimes import Plan
from train.plan.modifiers import DropLayers, FreezeParts, Modifier, Rewarm, Teacher
from train.plan.phase import Phase
from train.plan.training import Measure, Train, training
from train.plan.transforms import (
    Coalesce,
    Correct,
    Decoalesce,
    Grouping,
    Grow,
    Interpolate,
    LoadCheckpoint,
    Pruning,
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


@dataclass(frozen=True)
class Scratch:
    """One model, trained from scratch with a schedule that decays fully."""

    modifiers: tuple[Modifier, ...] = field(default=(), metadata=named(Modifier.keys, "drop"))

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        return training(LARGE, steps, optim, model, self.modifiers)


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
        default=(), metadata=named(Modifier.keys, "drop", "tokens", "freeze", "rewarm")
    )

    # The choices that use a field (`train.config.effect`).
    used_with = {name: {"steps": GIVEN} for name in ("lr", "warmup", "floor", "schedule")}

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
        return training(name, whole_steps(self.steps, steps), self.optim(base), config, every)


def _check_rewarm(stages: Sequence[TrainStage], name: str, moments: Policy) -> None:
    """Check that a growth with the policy ``moments``, in the field ``name``, marks new entries."""
    rewarmed = any(isinstance(m, Rewarm) for stage in stages for m in stage.modifiers)
    if rewarmed and moments != "asymmetric":
        raise ValueError(
            f"rewarm finds new entries by their step counts, which only the policy 'asymmetric' restarts: set {name} to "
            f"'asymmetric', not {moments!r}, or leave out rewarm"
        )


@dataclass(frozen=True)
class VCycle:
    """Algorithm 1 of Zou et al. (ICLR 2024): coalesce, train the smallest model, and go up again.

    ``down`` has a stage for each level that is coalesced, starting with the large model. ``up`` has
    a stage for every level, starting with the smallest model. ``correction`` replaces the
    interpolation by the multigrid form ``M + alpha D(s - C(M))``. A `Pruning` in ``groupings``
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
        _check_rewarm(self.up[1:], "moments_up", self.moments_up)

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
            if isinstance(way := groupings[level], Pruning) and way.kept is None:
                plan.append(Measure(names[level], Sensitivity(way.by, batches=way.batches)))
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

    # The choices that use a field (`train.config.effect`).
    used_with = {"lr": {"steps": GIVEN}, "warmup": {"steps": GIVEN}}


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
    # scale of `jaxgrow.growth.symmetry.spectral`.
    fresh: bool | Literal["spectral"] = False
    # Fraction of the units of each expert that is initialised again.
    redrawn: float = 0.0

    # The choices that use a field (`train.config.effect`).
    used_with = {
        "seed": (
            *({name: CHANGED} for name in ("noise", "fresh", "redrawn")),
            {"by": SAMPLING},
        ),
        "redrawn": {"/model.experts": CHANGED},
    }

    def __post_init__(self):
        if isinstance(self.by, Learned) and (
            self.noise is not None or self.moments != "drop" or self.fresh
        ):
            raise ValueError(
                "noise, moments and fresh apply to operators, not to learned maps: leave them out"
            )
        _check_rewarm(self.stages, "moments", self.moments)
        if self.fresh and self.noise is not None:
            raise ValueError(
                "noise breaks the symmetry of copies, but fresh makes no copies: leave out one of them"
            )


@dataclass(frozen=True)
class Growing:
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
        plan = list(_source(self.small, self.source, optim, steps))
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
class Continue:
    """Continue the training of an existing model.

    The model is from ``jaxgrow grow``, a download, or an earlier run.
    """

    source: str  # folder of the model, as in `train.plan.transforms.LoadCheckpoint`
    modifiers: tuple[Modifier, ...] = field(default=(), metadata=named(Modifier.keys, "drop"))

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        trained = training(LARGE, steps, optim, model, self.modifiers)
        return (LoadCheckpoint(LARGE, model, self.source), *trained)


@dataclass(frozen=True)
class FineTune:
    """Train an existing model on a task."""

    source: str  # folder of the model, as in `train.plan.transforms.LoadCheckpoint`
    # Whether to initialise a new head. False: the model already has the head of the task from an
    # earlier fine-tuning, perhaps grown in between.
    new_head: bool = True
    length: int | None = None  # positions of a sample; None: the context length of the model
    drop: LayerDrop | None = None
    freeze: Freeze | None = None
    # Trained with the head while the body is frozen, and merged into the body at the end.
    lora: LoRA | None = None
    # Trained with the head while the body is frozen, and then part of the model.
    adapter: Adapter | None = None
    saved: str | None = None  # adapter file of an earlier run to continue from
    dropout: float = 0.0  # rate, as in `train.plan.dropout`
    # Keep the best evaluation; None: keep the last one.
    best: Best | None = None

    def __post_init__(self):
        if self.best is not None and self.drop is not None and self.drop.sensitivity is not None:
            raise ValueError(
                "best is not supported together with sensitivities, because both divide the training into "
                "phases: leave out best or the sensitivities"
            )
        given = [name for name in ("lora", "adapter", "freeze") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"a LoRA or an adapter freezes the rest of the body: leave out {', or '.join(reversed(given))}"
            )

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        if optim.base is not None:
            raise ValueError(
                "optim.base is for pre-training, and does not apply to a new head or an adapter: leave optim.base out"
            )
        modifiers: list[Modifier] = []
        if self.freeze is not None:
            modifiers.append(FreezeParts(self.freeze))
        if self.dropout:
            modifiers.append(DropUnits(self.dropout))
        if self.drop is not None:
            modifiers.append(DropLayers(self.drop))
        source = LoadCheckpoint(LARGE, model, self.source, self.new_head)
        adapter = self.lora or self.adapter
        kind = Train if adapter is None else partial(Adapt, adapter=adapter, saved=self.saved)
        trained = training(LARGE, steps, optim, model, tuple(modifiers), self.length, kind)
        phases = (source, *(trained if self.best is None else _with_best(trained, self.best)))
        return phases if adapter is None else (*phases, Merge(LARGE))


def _with_best(trained: tuple[Phase, ...], best: Best) -> tuple[Phase, ...]:
    """Split one training at its evaluations."""
    (phase,) = trained
    assert isinstance(phase, Train)
    parts = min(best.evaluations or 1, max(1, phase.steps))
    cuts = [round(i * phase.steps / parts) for i in range(parts + 1)]
    phases: list[Phase] = []
    for begin, until in itertools.pairwise(cuts):
        phases += [replace(phase, begin=begin, until=until), KeepBest(LARGE, best)]
    return (*phases, TakeBest(LARGE))


@dataclass(frozen=True)
class Inherit:
    """Knowledge inheritance (Qin et al., NAACL 2022).

    The large model is trained from scratch. In the first steps a small model is its teacher.
    """

    small: Config
    source: TrainStage | str = TrainStage(0.5)
    stage: TrainStage = TrainStage(1.0)
    temperature: float = 2.0
    fraction: float = 0.44  # fraction of the steps of the stage that have a teacher

    # The choices that use a field (`train.config.effect`).
    used_with = {"temperature": {"fraction": GIVEN}}

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        text = model.predicts == "tokens"
        if text and isinstance(self.source, TrainStage) and self.small.length != model.length:
            raise ValueError(
                f"the small model has a context of {self.small.length} tokens, but is trained on the samples of the "
                f"experiment, which have {model.length}: give it the same context"
            )
        teacher = Teacher(SOURCE, self.temperature, self.fraction, self.small)
        source = _source(self.small, self.source, optim, steps)
        return (*source, *self.stage.train(LARGE, model, optim, steps, teacher))


def _source(small: Config, source: TrainStage | str, optim: Optim, steps: int) -> tuple[Phase, ...]:
    if isinstance(source, str):
        return (LoadCheckpoint(SOURCE, small, source),)
    return source.train(SOURCE, small, optim, steps)


Method: TypeAlias = Scratch | Continue | FineTune | VCycle | Growing | Inherit
