"""Phases that make a model from earlier ones: coalescing, de-coalescing, interpolating, growing, importing."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jax
import optax

from jaxgrow import grow, operators
from jaxgrow.maps import Growth, Rules
from jaxgrow.merge import correct, interpolate
from jaxgrow.models import Config
from jaxgrow.moments import Policy, grow_optimizer
from jaxgrow.operators import Groups, coalesce, decoalesce
from jaxgrow.operators.targets import width
from jaxgrow.symmetry import break_symmetry
from train.step import Model, parameters

Models: TypeAlias = Mapping[str, Model]


@dataclass(frozen=True)
class Grouping:
    """Which heads, MLP units and layers of a model are one unit of the next smaller one (`jaxgrow.operators.coalesce`)."""

    heads: Groups | None = "far"
    mlp: Groups | None = None
    layers: Groups | None = "adjacent"
    tied: Literal["norm", "paper"] = "norm"  # what a tied head does with the 1/k: exact, or as in the published code

    def growth(self, large: Config, operator):
        return operator(large.sizes(), heads=self.heads, mlp=self.mlp, layers=self.layers)

    def axes(self, config: Config):
        return config.paper_axes() if self.tied == "paper" else config.axes()

    def small(self, large: Config) -> Config:
        return large.resized(self.growth(large, coalesce))


@dataclass(frozen=True)
class Coalesce:
    """``target = C(source)``."""

    source: str
    target: str
    grouping: Grouping
    moments: Policy = "drop"

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: self.target)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        return _grown(models[self.source], self.grouping, coalesce, models[self.source].config, tx, self.moments)


@dataclass(frozen=True)
class Decoalesce:
    """``target = D(source)``, of the sizes of the model ``like``."""

    source: str
    target: str
    like: str
    grouping: Grouping
    moments: Policy = "drop"

    reads = property(lambda self: (self.source, self.like))
    writes = property(lambda self: self.target)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        return _grown(models[self.source], self.grouping, decoalesce, models[self.like].config, tx, self.moments)


@dataclass(frozen=True)
class Interpolate:
    """``before = (1 - alpha) before + alpha up``. The optimizer state is that of ``up``, if it has one."""

    before: str
    up: str
    alpha: float

    reads = property(lambda self: (self.before, self.up))
    writes = property(lambda self: self.before)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        before, up = models[self.before], models[self.up]
        return Model(interpolate(before.params, up.params, self.alpha), up.opt, before.config)


@dataclass(frozen=True)
class Correct:
    """``before = before + alpha D(small - C(before))``. The optimizer state is ``small``'s, grown by ``moments``."""

    before: str
    small: str
    grouping: Grouping
    alpha: float = 1.0
    moments: Policy = "drop"

    reads = property(lambda self: (self.before, self.small))
    writes = property(lambda self: self.before)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        before, small = models[self.before], models[self.small]
        up = _grown(small, self.grouping, decoalesce, before.config, tx, self.moments)
        growth, axes = self.grouping.growth(before.config, decoalesce), self.grouping.axes(before.config)
        return Model(correct(before.params, small.params, growth, axes, self.alpha), up.opt, before.config)


@dataclass(frozen=True)
class Import:
    """``name`` from a run that has ended: its last model, and, in the ledger, all that it cost."""

    name: str
    config: Config
    run: str  # its folder, beside the work directory of this run; ``{seed}`` in it becomes the seed

    reads = ()
    writes = property(lambda self: self.name)

    def shapes(self) -> Model:
        return Model(self.config.init(jax.random.key(0)), None, self.config)


@dataclass(frozen=True)
class Grow:
    """``target``: the model ``source``, of the config ``small``, grown to the sizes of ``large``."""

    source: str
    target: str
    small: Config
    large: Config
    by: tuple[str, ...]  # operators, in turn; the last one takes all axes that still differ
    seed: int = 0
    noise: float | None = None  # signal to noise, in decibels, of what tells copies apart (`jaxgrow.symmetry`)
    moments: Policy = "drop"

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: self.target)

    @cached_property
    def growths(self) -> tuple[Growth, ...]:
        """The growths, in turn.

        Raises:
          ValueError: no such operator, or sizes that it cannot reach.
        """
        found, config = [], self.small
        for i, name in enumerate(self.by):
            target = differing(config, self.large)
            if name in operators.DEPTH:
                axes, operator = ("layers",), operators.DEPTH[name]
            elif name in operators.WIDTH:
                axes, operator = width(config.sizes()), operators.WIDTH[name]
            else:
                known = ", ".join(sorted(operators.DEPTH | operators.WIDTH))
                raise ValueError(f"there is no operator {name!r}, only {known}")
            if i < len(self.by) - 1:
                target = {axis: new for axis, new in target.items() if axis in axes}
            takes = inspect.signature(operator).parameters
            options: dict[str, Any] = {"seed": self.seed, "norm": config.normalisation}
            options = {name: value for name, value in options.items() if name in takes}
            found.append(operator(config.sizes(), target, **options))
            config = config.resized(found[-1])
        if left := differing(config, self.large):
            raise ValueError(f"{' and '.join(self.by)} do not reach {left}")
        return tuple(found)

    @property
    def config(self) -> Config:
        """The config of the grown model: that of ``large``, but for what the operators change in it."""
        config = self.small
        for growth in self.growths:
            config = config.resized(growth)
        return replace(self.large, eps=self.large.eps * (config.eps / self.small.eps))

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        model, axes = models[self.source], self.small.axes()
        params, opt = model.params, model.opt if self.moments != "drop" else None
        for growth in self.growths:
            if opt is not None:
                opt = grow_optimizer(tx, opt, growth, params, axes, self.moments)
            params = grow(growth, params, axes)
            if self.noise is not None and not isinstance(growth, Rules):
                params = break_symmetry(params, growth, axes, self.seed, self.noise)
        return Model(params, opt, self.config)


@dataclass(frozen=True)
class Apply:
    """``target``: the small model, grown by the maps that a `Learn` left under ``source``."""

    source: str
    target: str

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: self.target)

    def run(self, models: Models, tx: optax.GradientTransformation, held_out: Any) -> Model:
        model = models[self.source]
        return Model(parameters(model), None, model.config)


def _grown(model: Model, grouping: Grouping, operator, large: Config, tx, moments: Policy) -> Model:
    growth, axes = grouping.growth(large, operator), grouping.axes(model.config)
    params = grow(growth, model.params, axes)
    opt = None
    if moments != "drop" and model.opt is not None:
        opt = grow_optimizer(tx, model.opt, growth, model.params, axes, moments)
    return Model(params, opt, model.config.resized(growth))


def differing(small: Config, large: Config) -> dict[str, int]:
    """The sizes that differ."""
    old = small.integers()
    return {axis: new for axis, new in large.integers().items() if new != old[axis]}
