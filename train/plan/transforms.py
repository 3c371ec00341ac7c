"""Which phases make a model from earlier ones?

They coalesce, de-coalesce, interpolate, grow or import models.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import jax
import numpy as np
import optax

from jaxgrow import grow, operators
from jaxgrow.axes import LAYERS, Axes, axis_kind
from jaxgrow.growth.maps import Growth, Rules, swap
from jaxgrow.growth.merge import correct, interpolate
from jaxgrow.growth.moments import Policy, grow_optimizer
from jaxgrow.growth.symmetry import INITIALISING, break_symmetry
from jaxgrow.layerdrop import Sensitivity
from jaxgrow.models import Config
from jaxgrow.models.llama import MIXTURES
from jaxgrow.operators import Groups, decoalesce
from jaxgrow.operators.tying import RETIED
from jaxgrow.typed import Json, did_you_mean
from train.plan.phase import Context, Models, Phase
from train.state.model import TrainState, fresh_head, initial, placed, plain, shared_rules


class Transform(Phase):
    """A phase that computes its model from other models in one operation."""

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        raise NotImplementedError

    def with_average(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        """Apply the phase to the models, and again with the averages of their weights as weights."""
        model = self.apply(models, tx)
        averages = {
            name: replace(m, params=m.average, opt=None)
            for name, m in models.items()
            if m.average is not None
        }
        if not averages.keys() & set(self.reads):
            return model
        return replace(model, average=self.apply({**models, **averages}, tx).params)

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        return self.with_average(models, tx)

    def run(self, context: Context) -> TrainState:
        model, flops = context.compute(self, _applied, context.models)
        context.ledger.add(flops=flops)
        context.validate(0, model)
        return model


def _applied(phase: Transform, tx: optax.GradientTransformation, models: Models) -> TrainState:
    """Return the model of a phase, sharded along the axes along which its sources are sharded.

    If its sizes permit more or fewer shards, the run then moves its arrays.
    """
    return placed(
        phase.with_average(models, tx), shared_rules(models[name] for name in phase.reads)
    )


@dataclass(frozen=True)
class Way:
    """How a large model becomes the next smaller one, and the smaller one a large one again."""

    @property
    def measurement(self) -> Sensitivity | None:
        """The measurement of the large model that `measured` needs; None: it needs none."""
        return None

    def measured(self, large: TrainState) -> "Way":
        """Return this way with the choices that depend on measurements of the large model."""
        return self

    def up(self, large: Config) -> Growth:
        """Return the growth from the small model to the large one; its `swap` is the way down."""
        raise NotImplementedError

    def axes(self, config: Config) -> Axes:
        return config.axes()


@dataclass(frozen=True)
class Grouping(Way):
    """How heads, MLP units and layers are grouped into the units of the next smaller model.

    See `jaxgrow.operators.coalesce`.
    """

    heads: Groups | None = "far"
    mlp: Groups | None = None
    layers: Groups | None = "adjacent"
    # Where the factor 1/k of a tied head is applied: "norm" is exact, "paper" is the published
    # code.
    tied: Literal["norm", "paper"] = "norm"

    def up(self, large: Config) -> Growth:
        kinds = large.layer_kinds
        return decoalesce(
            large.sizes(), heads=self.heads, mlp=self.mlp, layers=self.layers, kinds=kinds
        )

    def axes(self, config: Config) -> Axes:
        return config.paper_axes() if self.tied == "paper" else config.axes()


def smaller(way: Way, large: Config) -> Config:
    """Return the config of the smaller model that the `Way` makes from ``large``."""
    return large.resized(swap(way.up(large)))


class Regrouping(Transform):
    """A transformation by a `Way`, which may depend on measurements of the large model.

    Checkpoints record the way.
    """

    grouping: Way
    _large: ClassVar[str]  # the field with the name of the larger model

    @property
    def notes(self) -> Json:  # type: ignore[override]
        return asdict(self.grouping)

    def run(self, context: Context) -> TrainState:
        grouping = self.grouping.measured(context.models[getattr(self, self._large)])
        return Transform.run(replace(self, grouping=grouping), context)  # type: ignore[type-var]


@dataclass(frozen=True)
class Coalesce(Regrouping, reads=("source",), writes="target"):
    """``target = C(source)``. If the grouping is a `train.extras.pruning.Pruning`, it leaves out layers."""

    source: str
    target: str
    grouping: Way
    moments: Policy = "drop"

    _large = "source"

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        large = models[self.source]
        return _grow_state(
            large, swap(self.grouping.up(large.config)), self.grouping, tx, self.moments
        )


@dataclass(frozen=True)
class Decoalesce(Regrouping, reads=("source", "like"), writes="target"):
    """``target = D(source)``, with the sizes of the model ``like``."""

    source: str
    target: str
    like: str
    grouping: Way
    moments: Policy = "drop"

    _large = "like"

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        growth = self.grouping.up(models[self.like].config)
        return _grow_state(models[self.source], growth, self.grouping, tx, self.moments)


@dataclass(frozen=True)
class Interpolate(Transform, reads=("before", "up"), writes="before"):
    """``before = (1 - alpha) before + alpha up``.

    The result has the optimizer state of ``up``, if ``up`` has one.
    """

    before: str
    up: str
    alpha: float

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        before, up = models[self.before], models[self.up]
        return TrainState(interpolate(before.params, up.params, self.alpha), up.opt, before.config)


@dataclass(frozen=True)
class Correct(Regrouping, reads=("before", "small"), writes="before"):
    """``before = before + alpha D(small - C(before))``.

    The result has the optimizer state of ``small``, grown by the policy ``moments``.
    """

    before: str
    small: str
    grouping: Way
    alpha: float = 1.0
    moments: Policy = "drop"

    _large = "before"

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        before, small = models[self.before], models[self.small]
        growth = self.grouping.up(before.config)
        axes = self.grouping.axes(before.config)
        up = _grow_state(small, growth, self.grouping, tx, self.moments)
        return TrainState(
            correct(before.params, small.params, growth, axes, self.alpha), up.opt, before.config
        )


@dataclass(frozen=True)
class Apply(Transform, reads=("source",), writes="target"):
    """Makes ``target``: the model ``source`` without its parametrisation.

    LiGO's maps grow the small model, and a LoRA is added to the kernels. Any other adapter stays in
    its layers.
    """

    source: str
    target: str

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        model = models[self.source]
        return TrainState(plain(model), None, model.config)


@dataclass(frozen=True)
class LoadCheckpoint(Phase, writes="name", kind="import"):
    """Reads the model ``name`` from a finished run or another checkpoint.

    From a finished run, the phase takes the last model, and adds its complete cost to the ledger.
    The cost of any other checkpoint (a Hugging Face folder, or a folder that ``jaxgrow`` wrote) is
    unknown, and is not counted.
    """

    name: str
    config: Config
    # Folder of the run or checkpoint. A relative path starts at the folder that contains the work
    # directory of this run, and ``{seed}`` in it is replaced by the seed.
    folder: str
    # Whether to take everything except the head, and to initialise a new head for other
    # predictions.
    new_head: bool = False

    def shapes(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        return TrainState(initial(self.config, jax.random.key(0)), None, self.config)

    def folder_of(self, seed: int) -> str:
        """Return the folder for a seed. Other braces are part of its name."""
        return self.folder.replace("{seed}", str(seed))

    def run(self, context: Context) -> TrainState:
        context.begin(self, jax.eval_shape(lambda: initial(self.config, jax.random.key(0))))
        model, result = context.imported(self.folder_of(context.seed), self.config, self.new_head)
        if self.config.axes().keys() - model.params.keys():  # not in AOT compilation
            model = replace(model, params=model.params | fresh_head(self.config, context.key))
        if result is not None:
            layers = sum(phase["layers"] for phase in result["phases"])
            context.ledger.add(
                **{unit: result[unit] for unit in ("flops", "tokens", "steps")},
                layers=layers,
                source_tokens=result.get("source_tokens"),
            )
            context.ledger.charge(result["seconds"], result.get("compile_seconds", 0.0))
        context.validate(0, model)
        return model


@dataclass(frozen=True)
class Grow(Transform, reads=("source",), writes="target"):
    """Makes ``target``: the model ``source``, grown from ``small`` to the sizes of ``large``."""

    source: str
    target: str
    small: Config
    large: Config
    by: tuple[str, ...]  # operators, in order; the last one grows all axes that still differ
    seed: int = 0
    # Signal-to-noise ratio, in decibels, of the noise that breaks the symmetry of copies
    # (`jaxgrow.growth.symmetry`); None: no noise.
    noise: float | None = None
    moments: Policy = "drop"
    # New entries are freshly initialised instead of copied (`jaxgrow.extras.fresh`); with
    # "spectral", new matrices have the spectral scale.
    fresh: bool | Literal["spectral"] = False
    # Fraction of the units of each expert that is initialised again
    # (`jaxgrow.extras.models.upcycling.redraw_units`).
    redrawn: float = 0.0
    # Config whose sizes set the scale of fresh entries, as in `train.state.optim.Optim`.
    base: Config | None = None
    # Measured utility of each expert in each layer, for ``expert_copies``; None: they are equal.
    utility: tuple[tuple[float, ...], ...] | None = None

    @cached_property
    def growths(self) -> tuple[Growth, ...]:
        """The growths, in the order in which they are applied.

        Raises:
          ValueError: an operator does not exist, the operators cannot reach the sizes, or noise would
            have no effect.
        """
        growths = []
        config = self.small
        for i, name in enumerate(self.by):
            operator = operators.OPERATORS.get(name)
            if operator is None:
                known = ", ".join(sorted(operators.OPERATORS))
                near = did_you_mean(name, operators.OPERATORS)
                raise ValueError(f"there is no operator {name!r}; the operators are {known}{near}")
            target = differing(config, self.large)
            if i < len(self.by) - 1:
                # An operator for widths that can also add layers leaves them to the next operator.
                kinds = set(operator.axes) - {LAYERS} or {*operator.axes}
                target = {axis: new for axis, new in target.items() if axis_kind(axis) in kinds}
            options = {"seed": self.seed, "utility": self.utility} | config.traits
            growths.append(operator(config.sizes(), target, **options))
            config = _retied(config.resized(growths[-1]), name)
        if left := differing(config, self.large):
            raise ValueError(
                f"{' and '.join(self.by)} do not reach the sizes {left}: add an operator for these axes"
            )
        if config.tied != self.large.tied:
            raise ValueError(
                f"the model after {' and '.join(self.by) or 'no operator'} has tied={config.tied}, but the grown model "
                f"has tied={self.large.tied}: use the operator untie for False, and tie for True"
            )
        loops = "loop" in self.by
        if (config.loop != self.large.loop) != loops or (loops and self.large.loop is None):
            raise ValueError(
                f"{' and '.join(self.by) or 'no operator'} turns a model with loop={config.loop} into one with "
                f"loop={self.large.loop}: use the operator loop for a new loop, and unloop for none"
            )
        if self.noise is not None and all(isinstance(growth, Rules) for growth in growths):
            raise ValueError(
                f"noise does not apply to {' and '.join(self.by)}, whose maps of an axis differ between parameters: "
                "leave out noise"
            )
        return tuple(growths)

    @property
    def config(self) -> Config:
        """The config of the grown model: ``large``, with the changes that the operators require."""
        config = self.small
        for growth in self.growths:
            config = config.resized(growth)
        return replace(self.large, eps=self.large.eps * (config.eps / self.small.eps))

    def run(self, context: Context) -> TrainState:
        found = np.asarray(context.models[self.source].sensitivity)
        # `train.extras.expert_utility` has measured experts instead of layers.
        utility = tuple(map(tuple, found.tolist())) if found.ndim == 2 else None
        return Transform.run(replace(self, utility=utility), context)

    def apply(self, models: Models, tx: optax.GradientTransformation) -> TrainState:
        model = models[self.source]
        config = self.small
        params = model.params
        opt = model.opt if self.moments != "drop" else None
        for name, growth in zip(self.by, self.growths, strict=True):
            if name in RETIED:
                params, opt = RETIED[name]((params, opt))
                config = _retied(config, name)
            if not growth:
                continue
            axes = config.axes()
            if opt is not None:
                opt = grow_optimizer(tx, opt, growth, params, axes, self.moments)
            config = config.resized(growth)
            if self.fresh:
                new = initial(config, jax.random.key(self.seed), self.base)
                kind = "spectral" if self.fresh == "spectral" else "fresh"
                params = INITIALISING[kind](params, growth, axes, new)
            else:
                params = grow(growth, params, axes)
            if self.noise is not None and not isinstance(growth, Rules):
                params = break_symmetry(params, growth, axes, self.seed, self.noise)
        before, after = (c.sizes().get("experts", 1) for c in (self.small, self.large))
        if after > before:
            axes = config.axes()
            params = MIXTURES["add_router_noise"](
                params, axes, self.seed, group=max(1, self.small.mlp // self.large.mlp)
            )
            params = (
                MIXTURES["redraw_units"](params, axes, self.redrawn, self.seed)
                if self.redrawn
                else params
            )
        return TrainState(params, opt, self.config)


def _retied(config: Config, operator: str) -> Config:
    """Return the config of the model whose head an operator has tied or untied."""
    change: Json = {"tied": operator == "tie"}
    return replace(config, **change) if operator in RETIED else config


def _grow_state(
    model: TrainState, growth: Growth, grouping: Way, tx, moments: Policy
) -> TrainState:
    axes = grouping.axes(model.config)
    params = grow(growth, model.params, axes)
    opt = (
        None
        if moments == "drop" or model.opt is None
        else grow_optimizer(tx, model.opt, growth, model.params, axes, moments)
    )
    return TrainState(params, opt, model.config.resized(growth))


def differing(small: Config, large: Config) -> dict[str, int]:
    """Return the sizes of ``large`` that differ from ``small``.

    Raises:
      ValueError: the models are of different families, or have different numbers of stages.
    """
    old = small.integers()
    sizes = large.integers()
    if type(small) is not type(large) or old.keys() != sizes.keys():
        raise ValueError(
            f"a {type(small).__name__} cannot become a {type(large).__name__}: both models must be of the same family and "
            "have the same number of stages"
        )
    return {axis: new for axis, new in sizes.items() if new != old[axis]}
