"""Methods: each is data, and builds a plan."""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

from jaxgrow.growth.moments import Policy
from jaxgrow.layerdrop import LayerDrop, Sensitivity, TokenDrop
from jaxgrow.models import Adapter, Config
from jaxgrow.operators.ligo import LiGO
from jaxgrow.optim.freeze import Freeze
from jaxgrow.peft.lora import LoRA
from train.config.overrides import LATER
from train.engine.state.optim import Optim
from train.plan.adapting import Adapt, Merge
from train.plan.best import Best, KeepBest, TakeBest
from train.plan.dropout import DropUnits
from train.plan.learning import Apply, Learn
from train.plan.lifetimes import Plan
from train.plan.modifiers import DropTokens, Hold, Modifier, Ramp, Rewarm, ShortContext, Teacher
from train.plan.phase import Phase
from train.plan.training import Measure, Train, training
from train.plan.transforms import (
    Coalesce,
    Correct,
    Decoalesce,
    Grouping,
    Grow,
    Import,
    Interpolate,
    Pruning,
    Way,
    smaller,
)

LARGE = "large"  # the model that a method is for
# the model that a growth begins from, which one may have already: tables tell its cost apart
SOURCE = "small"


@dataclass(frozen=True)
class Scratch:
    """One model, trained to the end of a fully decayed schedule."""

    drop: LayerDrop | None = None
    ramp: tuple[int, ...] | None = field(
        default=None, metadata=LATER
    )  # as of `train.plan.modifiers.Ramp`

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        modifiers = () if self.ramp is None else (Ramp(self.ramp),)
        return training(LARGE, steps, optim, model, self.drop, modifiers)


@dataclass(frozen=True)
class Stage:
    """The training of one level. What is None is as in the experiment."""

    steps: float  # as a fraction of the experiment's steps
    lr: float = 1.0  # times the experiment's peak learning rate
    warmup: int | None = None
    floor: float | None = None
    schedule: Literal["cosine", "linear", "wsd"] | None = None
    drop: LayerDrop | None = None
    tokens: TokenDrop | None = None
    freeze: Freeze | None = None
    rewarm: Rewarm | None = None  # of what a growth with the policy "asymmetric" has just made
    ramp: tuple[int, ...] | None = field(
        default=None, metadata=LATER
    )  # as of `train.plan.modifiers.Ramp`
    windows: int | None = field(
        default=None, metadata=LATER
    )  # as of `train.plan.modifiers.ShortContext`

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
        """The phases that train the model ``name``; ``steps`` are the experiment's."""
        if self.tokens is not None:
            modifiers += (DropTokens(self.tokens),)
        if self.freeze is not None:
            modifiers += (Hold(self.freeze),)
        if self.rewarm is not None:
            modifiers += (self.rewarm,)
        if self.ramp is not None:
            modifiers += (Ramp(self.ramp),)
        if self.windows is not None:
            modifiers += (ShortContext(self.windows),)
        return training(
            name, round(self.steps * steps), self.optim(base), config, self.drop, modifiers
        )


@dataclass(frozen=True)
class VCycle:
    """Algorithm 1 of Zou et al. (ICLR 2024): down the levels, train the smallest, up again.

    ``down`` has a stage for each level that is coalesced, the large one first; ``up`` one for every
    level, the smallest first. ``correction`` replaces the interpolation by the multigrid form
    ``M + alpha D(s - C(M))``. A `Pruning` among the ``groupings`` leaves layers out, in place of
    coalescing; which, is measured before.
    """

    down: tuple[Stage, ...] = (Stage(0.05),)
    up: tuple[Stage, ...] = (Stage(0.5, lr=2.0), Stage(0.5))
    groupings: tuple[Way, ...] = (
        Grouping(),
    )  # one a level that is coalesced, or pruned; or one for all
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

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        names = [LARGE, *(f"coarse{i}" for i in range(1, len(self.up)))]
        configs = [model]
        groupings = self.groupings * len(self.down) if len(self.groupings) == 1 else self.groupings
        for grouping in groupings:
            configs.append(smaller(grouping, configs[-1]))

        def train(level: int, stage: Stage) -> tuple[Phase, ...]:
            if level and not round(stage.steps * steps):
                # there is nothing to train, nor to initialise: it comes from another level
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
            large, small = names[level], names[level + 1]
            if self.correction:
                plan.append(Correct(large, small, groupings[level], self.alpha, self.moments_up))
            else:
                plan.append(Decoalesce(small, "up", large, groupings[level], self.moments_up))
                plan.append(Interpolate(large, "up", self.alpha))
            plan += train(level, stage)
        return tuple(plan)


@dataclass(frozen=True)
class Learned:
    """LiGO: the maps are learned, on the pre-training loss, with the small model standing still."""

    ligo: LiGO = field(default_factory=LiGO)
    steps: int = 100  # 0 is the control: the maps as they begin
    lr: float = 1.0  # times the experiment's peak
    warmup: int = 10


@dataclass(frozen=True)
class GrowTo:
    """One growth, and the stages of training after it."""

    stages: tuple[Stage, ...] = (Stage(0.5),)
    by: tuple[str, ...] | Learned = ("stack",)  # names of `jaxgrow.operators`, in turn
    config: Config | None = None  # what it grows to; None: the experiment's model
    seed: int = 0
    noise: float | None = None  # as of `train.plan.transforms.Grow`
    moments: Policy = "drop"
    # What is new is as at birth, in place of copies; "spectral": its matrices as of
    # `jaxgrow.growth.symmetry.spectral`.
    fresh: bool | Literal["spectral"] = field(default=False, metadata=LATER)
    redrawn: float = field(
        default=0.0, metadata=LATER
    )  # of each expert's units, the part that is drawn anew

    def __post_init__(self):
        if isinstance(self.by, Learned) and (
            self.noise is not None or self.moments != "drop" or self.fresh
        ):
            raise ValueError(
                "noise, moments and fresh are of operators, not of learned maps: leave them out"
            )
        if self.fresh and self.noise is not None:
            raise ValueError(
                "noise tells copies apart, and what is fresh is no copy: leave out one of them"
            )


@dataclass(frozen=True)
class Growing:
    """A small model first, trained here or by an earlier run; then it grows and trains, once or several times.

    StackBERT, MSLT, MIDAS, G_stack, bert2BERT, LiGO, staged training and the like are values of
    this.
    """

    small: Config
    source: Stage | str = Stage(
        0.5
    )  # its training; or the folder of its run, as of `train.plan.transforms.Import`
    to: tuple[GrowTo, ...] = (GrowTo(),)

    def __post_init__(self):
        if (
            not self.to
            or self.to[-1].config is not None
            or any(t.config is None for t in self.to[:-1])
        ):
            raise ValueError(
                "every growth but the last one has a config; the last one ends at the experiment's model"
            )
        if isinstance(self.source, str) and self.to[0].moments != "drop":
            moments = self.to[0].moments
            raise ValueError(
                f"an imported model has no moments, so moments must be 'drop', not {moments!r}"
            )

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        plan, config, name = (
            list(_source(self.small, self.source, optim, steps)),
            self.small,
            SOURCE,
        )
        eps = 1.0  # what growths so far have multiplied that of the norms by
        for i, to in enumerate(self.to):
            last = i == len(self.to) - 1
            into, target = to.config or model, LARGE if last else f"grown{i + 1}"
            into = replace(into, eps=into.eps * eps)
            if isinstance(to.by, Learned):
                learned = replace(optim, peak_lr=optim.peak_lr * to.by.lr, warmup=to.by.warmup)
                options = {"source": name, "small": config, "ligo": to.by.ligo}
                plan += [
                    Learn("maps", to.by.steps, learned, into, **options),
                    Apply("maps", target),
                ]
            else:
                own = to.by, to.seed, to.noise, to.moments, to.fresh, to.redrawn
                grown = Grow(name, target, config, into, *own, optim.base if to.fresh else None)
                plan.append(grown)
                eps *= grown.config.eps / into.eps
                into = grown.config
            for stage in to.stages:
                plan += stage.train(target, into, optim, steps)
            config, name = into, target
        return tuple(plan)


@dataclass(frozen=True)
class Continue:
    """A model that one has, trained on: grown by ``jaxgrow grow``, downloaded, or of an earlier run."""

    source: str  # its folder, as of `train.plan.transforms.Import`
    drop: LayerDrop | None = None

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        return (Import(LARGE, model, self.source), *training(LARGE, steps, optim, model, self.drop))


@dataclass(frozen=True)
class FineTune:
    """A model that one has, trained on a task."""

    source: str  # its folder, as of `train.plan.transforms.Import`
    new_head: bool = (
        True  # or it has the task's already: it was fine-tuned, and perhaps grown since
    )
    length: int | None = None  # positions of a sample; None: as many as the model has
    drop: LayerDrop | None = None
    freeze: Freeze | None = None
    lora: LoRA | None = (
        None  # trains beside the head, in place of the body; merged into it at the end
    )
    adapter: Adapter | None = field(
        default=None, metadata=LATER
    )  # so does this; the model has it then
    # Files of adapters that runs left: one to go on from, or several that are fused.
    saved: tuple[str, ...] = field(default=(), metadata=LATER)
    dropout: float = field(default=0.0, metadata=LATER)  # as of `train.plan.dropout`
    best: Best | None = field(
        default=None, metadata=LATER
    )  # keep the best evaluation; None: the last one

    def __post_init__(self):
        if self.best is not None and self.drop is not None and self.drop.sensitivity is not None:
            raise ValueError(
                "best is not supported together with sensitivities, which divide the training otherwise"
            )
        given = [name for name in ("lora", "adapter", "freeze") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"with a LoRA or an adapter nothing else of the body trains: leave out {', or '.join(reversed(given))}"
            )

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        if optim.base is not None:
            raise ValueError(
                "a base is of pre-training, and says nothing of a fresh head or an adapter: leave optim.base out"
            )
        held: tuple[Modifier, ...] = () if self.freeze is None else (Hold(self.freeze),)
        held += (DropUnits(self.dropout),) if self.dropout else ()
        source = Import(LARGE, model, self.source, self.new_head)
        adapter = self.lora or self.adapter
        kind = Train if adapter is None else partial(Adapt, adapter=adapter, saved=self.saved)
        trained = training(LARGE, steps, optim, model, self.drop, held, self.length, kind)
        phases = (source, *(trained if self.best is None else _with_best(trained, self.best)))
        return phases if adapter is None else (*phases, Merge(LARGE))


def _with_best(trained: tuple[Phase, ...], best: Best) -> tuple[Phase, ...]:
    """One training, cut where it is evaluated."""
    (phase,) = trained
    assert isinstance(phase, Train)
    parts = min(best.evaluations or 1, max(1, phase.steps))
    cuts = [round(i * phase.steps / parts) for i in range(parts + 1)]
    pairs = [
        (replace(phase, begin=a, until=b), KeepBest(LARGE, best))
        for a, b in itertools.pairwise(cuts)
    ]
    return (*(p for pair in pairs for p in pair), TakeBest(LARGE))


@dataclass(frozen=True)
class Inherit:
    """Knowledge inheritance (Qin et al., NAACL 2022): the large model from scratch, taught by a small one at first."""

    small: Config
    source: Stage | str = Stage(0.5)
    stage: Stage = Stage(1.0)
    temperature: float = 2.0
    fraction: float = 0.44  # of the stage's steps

    def plan(self, model: Config, optim: Optim, steps: int) -> Plan:
        teacher = Teacher(SOURCE, self.temperature, self.fraction)
        source = _source(self.small, self.source, optim, steps)
        return (*source, *self.stage.train(LARGE, model, optim, steps, teacher))


def _source(small: Config, source: Stage | str, optim: Optim, steps: int) -> tuple[Phase, ...]:
    if isinstance(source, str):
        return (Import(SOURCE, small, source),)
    return source.train(SOURCE, small, optim, steps)


Method: TypeAlias = Scratch | Continue | FineTune | VCycle | Growing | Inherit
