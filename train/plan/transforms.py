"""Phases that make a model from earlier ones: coalescing, de-coalescing, interpolating, growing, importing."""

import inspect
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import optax

from jaxgrow import grow, operators
from jaxgrow.axes import Axes, stages
from jaxgrow.growth.maps import Growth, Rules, swap
from jaxgrow.growth.merge import correct, interpolate
from jaxgrow.growth.moments import Policy, grow_optimizer
from jaxgrow.growth.symmetry import break_symmetry, fresh, spectral
from jaxgrow.models import Config
from jaxgrow.models.upcycling import redrawn, routed
from jaxgrow.operators import Groups, best, decoalesce, keep
from jaxgrow.operators.targets import depth, width
from train.engine.state.heads import fresh_head
from train.engine.state.model import Model, initial
from train.plan.phase import Context, Models, Phase


class Transform(Phase):
    """A phase that computes its model from others at once."""

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        raise NotImplementedError

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        return self.apply(models, tx)

    def run(self, context: Context) -> Model:
        model, flops = context.compute(self, _applied, context.models)
        context.ledger.add(flops=flops)
        context.validate(0, model)
        return model


def _applied(phase: Transform, tx: optax.GradientTransformation, models: Models) -> Model:
    return phase.apply(models, tx)


@dataclass(frozen=True)
class Grouping:
    """Which heads, MLP units and layers of a model are one unit of the next smaller one (`jaxgrow.operators.coalesce`)."""

    heads: Groups | None = "far"
    mlp: Groups | None = None
    layers: Groups | None = "adjacent"
    tied: Literal["norm", "paper"] = (
        "norm"  # what a tied head does with the 1/k: exact, or as in the published code
    )

    def up(self, large: Config) -> Growth:
        """From the small model to the large one; its `swap` is the way down."""
        kinds = large.layer_kinds
        return decoalesce(
            large.sizes(), heads=self.heads, mlp=self.mlp, layers=self.layers, kinds=kinds
        )

    def axes(self, config: Config) -> Axes:
        return config.paper_axes() if self.tied == "paper" else config.axes()

    def measured(self, large: Model) -> "Grouping":
        """As it is for this model."""
        return self


@dataclass(frozen=True)
class Pruning:
    """In place of a `Grouping`: the small model has the layers that matter most, as they are (`jaxgrow.operators.keep`).

    On the way up the others are as they were, by `Correct`; their moments begin anew
    (``moments_up="asymmetric"``).
    """

    layers: int | tuple[int, ...]  # that stay; in each stage
    by: Literal["influence", "loss_delta", "taylor"] = (
        "influence"  # how they are measured: a kind of `Sensitivity`
    )
    batches: int = 8  # held-out micro-batches that they are measured on
    kept: tuple[int, ...] | None = (
        None  # which stay, counted from the input on; None: those of the greatest measure
    )

    def __post_init__(self):
        if self.kept is not None and len(self.kept) != sum(self.depths):
            raise ValueError(f"{self.layers} layers stay, but kept names {self.kept}")

    @property
    def depths(self) -> tuple[int, ...]:
        """The layers that stay of each stage."""
        return self.layers if isinstance(self.layers, tuple) else (self.layers,)

    def parts(self, large: Config) -> list[tuple[str, slice, slice]]:
        """The axis of each stage's layers, which of all layers these are, and which of those that stay.

        Raises:
          ValueError: the model has another number of stages.
        """
        old = stages(large.sizes())
        if len(old) != len(self.depths):
            raise ValueError(
                f"a pruning to layers={self.layers} is of a model of {len(self.depths)} stages, but this one has "
                f"{len(old)}, of {large.depths} layers: name how many stay in each"
            )
        new = stages(dict(zip(old, self.depths, strict=True)))
        return [(axis, old[axis], new[axis]) for axis in old]

    def up(self, large: Config) -> Growth:
        """As of `Grouping`. Before they are measured any layers stay, whose shapes are alike."""
        kept = {
            axis: np.arange(new.stop - new.start)
            if self.kept is None
            else np.subtract(self.kept[new], old.start)
            for axis, old, new in self.parts(large)
        }
        return swap(keep(large.sizes(), kept))

    def axes(self, config: Config) -> Axes:
        return config.axes()

    def measured(self, large: Model) -> "Pruning":
        """With the layers that stay, by what was measured of this model; those of two kinds by turns stay so."""
        if self.kept is not None:
            return self
        scores, alternating = np.asarray(large.sensitivity), large.config.traits["alternating"]
        kept = [
            old.start + best(scores[old], new.stop - new.start, axis in alternating)
            for axis, old, new in self.parts(large.config)
        ]
        return replace(self, kept=tuple(np.concatenate(kept).tolist()))


Way: TypeAlias = Grouping | Pruning


def smaller(way: Way, large: Config) -> Config:
    """The config at the lower end of a way down."""
    return large.resized(swap(way.up(large)))


class Regrouping(Transform):
    """A transformation by a way down, which checkpoints note, and which may depend on what was measured of the large model."""

    grouping: Way

    @property
    def large(self) -> str:
        """The name of the model at its upper end."""
        raise NotImplementedError

    @property
    def notes(self) -> dict[str, Any]:  # type: ignore[override]
        return asdict(self.grouping)

    def run(self, context: Context) -> Model:
        grouping = self.grouping.measured(context.models[self.large])
        return Transform.run(replace(self, grouping=grouping), context)  # type: ignore[type-var]


@dataclass(frozen=True)
class Coalesce(Regrouping):
    """``target = C(source)``, of which a pruning leaves out layers."""

    source: str
    target: str
    grouping: Way
    moments: Policy = "drop"

    @property
    def large(self) -> str:
        return self.source

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def writes(self) -> str:
        return self.target

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        large = models[self.source]
        return _grown(large, swap(self.grouping.up(large.config)), self.grouping, tx, self.moments)


@dataclass(frozen=True)
class Decoalesce(Regrouping):
    """``target = D(source)``, of the sizes of the model ``like``."""

    source: str
    target: str
    like: str
    grouping: Way
    moments: Policy = "drop"

    @property
    def large(self) -> str:
        return self.like

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source, self.like)

    @property
    def writes(self) -> str:
        return self.target

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        return _grown(
            models[self.source],
            self.grouping.up(models[self.like].config),
            self.grouping,
            tx,
            self.moments,
        )


@dataclass(frozen=True)
class Interpolate(Transform):
    """``before = (1 - alpha) before + alpha up``. The optimizer state is that of ``up``, if it has one."""

    before: str
    up: str
    alpha: float

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.before, self.up)

    @property
    def writes(self) -> str:
        return self.before

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        before, up = models[self.before], models[self.up]
        return Model(interpolate(before.params, up.params, self.alpha), up.opt, before.config)


@dataclass(frozen=True)
class Correct(Regrouping):
    """``before = before + alpha D(small - C(before))``. The optimizer state is ``small``'s, grown by ``moments``."""

    before: str
    small: str
    grouping: Way
    alpha: float = 1.0
    moments: Policy = "drop"

    @property
    def large(self) -> str:
        return self.before

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.before, self.small)

    @property
    def writes(self) -> str:
        return self.before

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        before, small = models[self.before], models[self.small]
        growth, axes = self.grouping.up(before.config), self.grouping.axes(before.config)
        up = _grown(small, growth, self.grouping, tx, self.moments)
        return Model(
            correct(before.params, small.params, growth, axes, self.alpha), up.opt, before.config
        )


@dataclass(frozen=True)
class Import(Phase):
    """``name`` from a run that has ended: its last model, and, in the ledger, all that it cost; or
    from any other checkpoint, whose cost nobody knows: a Hugging Face folder, or one that
    ``jaxgrow`` wrote.
    """

    name: str
    config: Config
    # of it; if no absolute path, beside the work directory of this run; ``{seed}`` in it becomes
    # the seed
    folder: str
    # what it predicts is another thing than there: all but the head is taken, and the head is fresh
    new_head: bool = False

    @property
    def writes(self) -> str:
        return self.name

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> Model:
        return Model(initial(self.config, jax.random.key(0)), None, self.config)

    def run(self, context: Context) -> Model:
        context.begin(self, jax.eval_shape(lambda: initial(self.config, jax.random.key(0))))
        model, result = context.imported(
            self.folder.format(seed=context.seed), self.config, self.new_head
        )
        if self.config.axes().keys() - model.params.keys():  # a rehearsal has it all
            model = replace(model, params=model.params | fresh_head(self.config, context.key))
        if result is not None:
            layers = sum(phase["layers"] for phase in result["phases"])
            context.ledger.add(
                **{unit: result[unit] for unit in ("flops", "tokens", "steps")}, layers=layers
            )
            context.ledger.charge(result["seconds"], result.get("compile_seconds", 0.0))
        context.validate(0, model)
        return model


@dataclass(frozen=True)
class Grow(Transform):
    """``target``: the model ``source``, of the config ``small``, grown to the sizes of ``large``."""

    source: str
    target: str
    small: Config
    large: Config
    by: tuple[str, ...]  # operators, in turn; the last one takes all axes that still differ
    seed: int = 0
    noise: float | None = (
        None  # signal to noise, in decibels, of what tells copies apart (`jaxgrow.growth.symmetry`)
    )
    moments: Policy = "drop"
    # What is new is as at birth, in place of copies (`jaxgrow.growth.symmetry.fresh`); or its
    # matrices at the spectral scale.
    fresh: bool | Literal["spectral"] = False
    # the part of each expert's units that is drawn anew (`jaxgrow.models.upcycling.redrawn`)
    redrawn: float = 0.0
    base: Config | None = (
        None  # by whose sizes what is fresh has its scale, as of `train.engine.state.optim.Optim`
    )

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def writes(self) -> str:
        return self.target

    @cached_property
    def growths(self) -> tuple[Growth, ...]:
        """The growths, in turn.

        Raises:
          ValueError: no such operator, or sizes that it cannot reach.
        """
        growths, config = [], self.small
        for i, name in enumerate(self.by):
            target = differing(config, self.large)
            if name in operators.DEPTH:
                axes, operator = depth(config.sizes()), operators.DEPTH[name]
            elif name in operators.WIDTH:
                axes, operator = width(config.sizes()), operators.WIDTH[name]
            elif name in operators.EXPERTS:
                axes, operator = ("experts", "mlp"), operators.EXPERTS[name]
            else:
                known = ", ".join(sorted(operators.DEPTH | operators.WIDTH | operators.EXPERTS))
                raise ValueError(f"there is no operator {name!r}, only {known}")
            if i < len(self.by) - 1:
                target = {axis: new for axis, new in target.items() if axis in axes}
            takes = inspect.signature(operator).parameters
            options: dict[str, Any] = {"seed": self.seed, **config.traits}
            options = {name: value for name, value in options.items() if name in takes}
            growths.append(operator(config.sizes(), target, **options))
            config = config.resized(growths[-1])
        if left := differing(config, self.large):
            raise ValueError(f"{' and '.join(self.by)} do not reach {left}")
        return tuple(growths)

    @property
    def config(self) -> Config:
        """The config of the grown model: that of ``large``, but for what the operators change in it."""
        config = self.small
        for growth in self.growths:
            config = config.resized(growth)
        return replace(self.large, eps=self.large.eps * (config.eps / self.small.eps))

    def apply(self, models: Models, tx: optax.GradientTransformation) -> Model:
        model, axes, config = models[self.source], self.small.axes(), self.small
        params, opt = model.params, model.opt if self.moments != "drop" else None
        for growth in self.growths:
            if opt is not None:
                opt = grow_optimizer(tx, opt, growth, params, axes, self.moments)
            config = config.resized(growth)
            if self.fresh:
                new = initial(config, jax.random.key(self.seed), self.base)
                params = fresh(
                    params, growth, axes, spectral(new, axes) if self.fresh == "spectral" else new
                )
            else:
                params = grow(growth, params, axes)
            if self.noise is not None and not isinstance(growth, Rules):
                params = break_symmetry(params, growth, axes, self.seed, self.noise)
        before, after = (c.sizes().get("experts", 1) for c in (self.small, self.large))
        if after > before:
            params = routed(params, axes, self.seed, group=max(1, self.small.mlp // self.large.mlp))
            params = redrawn(params, axes, self.redrawn, self.seed) if self.redrawn else params
        return Model(params, opt, self.config)


def _grown(model: Model, growth: Growth, grouping: Way, tx, moments: Policy) -> Model:
    axes = grouping.axes(model.config)
    params = grow(growth, model.params, axes)
    opt = None
    if moments != "drop" and model.opt is not None:
        opt = grow_optimizer(tx, model.opt, growth, model.params, axes, moments)
    return Model(params, opt, model.config.resized(growth))


def differing(small: Config, large: Config) -> dict[str, int]:
    """The sizes that differ."""
    old = small.integers()
    return {axis: new for axis, new in large.integers().items() if new != old[axis]}
