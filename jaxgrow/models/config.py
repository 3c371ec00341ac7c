"""What the configs of all model families have in common."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, get_args, get_origin

import jax
from flax import linen as nn

from jaxgrow.axes.names import (
    Axes,
    Params,
    axis,
    is_layers,
    is_names,
    kind,
    path,
    role,
    split,
    turned,
)
from jaxgrow.growth.maps import Growth, Rules, new_sizes
from jaxgrow.models.attention import By
from jaxgrow.models.bottleneck import BOTTLENECK, Adapter
from jaxgrow.models.layers import Remat

SIZES = tuple[int, ...]  # the type of a field that has one size for each stage
FLOATS = tuple[float, ...]  # .. of one that has several numbers
Inputs: TypeAlias = (
    jax.Array | dict[str, jax.Array]
)  # of a model: tokens or images, or several things by name
Head: TypeAlias = Literal["tokens", "classes", "spans", "token_classes", "states"]
WITHOUT_CLASSES = ("tokens", "states")  # heads without an axis of classes


class Cost(NamedTuple):
    """FLOPs of one position's pass through a model, forward; a multiply-add counts two."""

    layer: float  # one layer; where they differ, their mean
    outside: float  # all that is in no layer
    first: float = 0.0  # of ``outside``: products with the input, which has no gradient
    # of ``outside``: products with a tied table, which has no gradient where the bottom is frozen
    table: float = 0.0
    layers: tuple[float, ...] = ()  # each layer, where they differ
    between: tuple[
        float, ...
    ] = ()  # of ``outside``: what lies between each of these and the one below it

    def spared(self, frozen: int) -> float:
        """What the backward pass of a position costs less where so many layers, and all that is
        below them, are frozen: two products for each of theirs, one for each that reads what they
        make, and those of a tied table.
        """
        if not self.layers:
            return 2 * frozen * self.layer + self.first + self.table
        held, reads = (
            self.layers[:frozen] + self.between[:frozen],
            self.between[frozen : frozen + 1],
        )
        return 2 * sum(held) + sum(reads) + self.first + self.table


@dataclass(frozen=True)
class Config:
    """A family's config is a subclass: its sizes are fields, named as the axes of the parameters are.

    A field that is a tuple has one size for each stage: ``embed=(96, 192)`` is of the axes
    ``embed.0`` and ``embed.1``.
    """

    layers: int = 12
    embed: int = 768
    heads: int = 12
    head_dim: int = 64
    mlp: int = 3072
    eps: float = 1e-5  # of the norms
    dtype: Literal["float32", "bfloat16", "float64"] = (
        "float32"  # of activations; parameters are float32 or better
    )
    # What a layer saves for the backward pass (`jaxgrow.models.layers.run_stack`). "auto": a run
    # chooses this and ``scan_layers`` by the memory of its compiled programs; elsewhere, and on
    # CPUs, "products".
    remat: Literal["auto", Remat] = "products"
    attention: By = "auto"  # the kernel (`jaxgrow.models.attention`)
    scan_layers: bool = True  # or unrolled: longer to compile, perhaps faster
    adapter: Adapter | None = None  # in every layer (`jaxgrow.peft.adapters`)

    families: ClassVar[dict[str, type["Config"]]] = {}  # by name
    causal: ClassVar[bool] = (
        False  # whether a position sees those before it alone, so that a text can be continued
    )
    run_by: ClassVar[tuple[str, ...]] = (
        "dtype",
        "remat",
        "attention",
        "scan_layers",
    )  # how it is run, not what it is
    no_axes: ClassVar[tuple[str, ...]] = ()  # fields of integers that are no axis's size
    later: ClassVar[
        tuple[str, ...]
    ] = ()  # fields that came later: they are written only where they say something
    # Tables, and the norm before a tied head: what the published multi-level code takes the other
    # way round (`paper_axes`).
    tied_parts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        Config.families[cls.__name__] = cls

    def __post_init__(self):
        wrong = [
            f"{n} is {size}, less than {self.least(n)}"
            for n, size in self.integers().items()
            if size < self.least(n)
        ]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {', '.join(wrong)}")
        for f in fields(self):
            if f.type is float and not 0 <= getattr(self, f.name) < 2.0**127:  # what float32 holds
                raise ValueError(
                    f"{type(self).__name__}: {f.name} is {getattr(self, f.name)}, not a number from 0"
                )
        for f in fields(self):
            if get_origin(f.type) is Literal and getattr(self, f.name) not in get_args(f.type):
                *others, last = map(repr, get_args(f.type))
                raise ValueError(
                    f"{f.name} is {', '.join(others)} or {last}, not {getattr(self, f.name)!r}"
                )

    @classmethod
    def least(cls, field: str) -> int:
        """The smallest value that the integer ``field`` may have."""
        return 1

    # --- what a family says of itself ---

    @property
    def module(self) -> nn.Module:
        """``module.apply({"params": p}, inputs) -> logits``, float32."""
        raise NotImplementedError

    @property
    def example(self) -> Inputs:
        """The smallest inputs that the module takes."""
        raise NotImplementedError

    @property
    def pre_norm(self) -> bool:
        """Whether norms come before sublayers, so that one which writes zeros adds nothing."""
        return True

    @property
    def means_stay(self) -> bool:
        """Whether a unit of the residual stream that holds the mean of the others goes on to: not
        behind a norm, nor where each unit has a size of its own.
        """
        return True

    @property
    def depth_scaled(self) -> bool:
        """Whether kernels that write the residual stream are born smaller by ``1 / sqrt(2 layers)`` than others."""
        return False

    @property
    def predicts(self) -> Head:
        """What its outputs are of; "states": a model without a head, whose outputs are the last hidden states."""
        return "classes"

    @property
    def traits(self) -> dict[str, Any]:
        """What operators may have to know, as arguments of theirs: ``norm``, LayerNorm ("layer") or
        RMSNorm ("rms"); ``post_norm``, whether a norm makes what a sublayer adds to the residual
        stream; ``alternating``, the axes of layers of which even and odd ones compute different
        things, whatever their weights and the config; and ``period``, after how many layers their
        kinds come again.
        """
        return {"norm": "layer", "post_norm": False, "alternating": (), "period": 1}

    @property
    def layer_kinds(self) -> str:
        """A letter for each layer; layers with the same letter compute the same if they have the same weights."""
        alternating = self.traits["alternating"]
        return "".join(
            "ab"[i % 2] if axis in alternating else "a"
            for axis, n in self.sizes().items()
            if is_layers(axis)
            for i in range(n)
        )

    @property
    def idle(self) -> int:
        """How many numbers of the parameters are not read, because a layer that is stacked with others lacks a norm."""
        return 0

    @property
    def normed(self) -> tuple[str, ...]:
        """The axes that norms average over."""
        return ("embed",)

    @property
    def length(self) -> int:
        """The positions that one sample has in the layers, at most."""
        raise NotImplementedError

    def by_length(self) -> tuple[tuple[int, Self], ...]:
        """``((longest, config), ..)``: the config for samples of up to ``longest`` positions, and more than those before it.

        There are several if positions depend on the length of the sample. Each config ignores the
        length, so that padding does not change what it computes.
        """
        return ((self.length, self),)

    def cost(self, length: int) -> Cost:
        """Of a position of a sample that has ``length``."""
        raise NotImplementedError

    def empty(self, at_once: int | None = None) -> float:
        """FLOPs that a layer computes for each position besides `cost`: in a mixture of experts, in rows without a token.

        Args:
          at_once: the positions that a device computes at once; None: very many.

        Returns:
          FLOPs of the forward pass; below 0 if experts have a capacity that drops tokens.
        """
        return 0.0

    # --- what follows from it ---

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters: a plain nested dict of arrays. Pure, and one program for each config."""
        return split(_boxed(self, key))[0]

    def axes(self) -> Axes:
        """The axis names of the parameters, without making any."""
        return deepcopy(_axes(self))

    def sizes(self) -> dict[str, int]:
        """The size of every axis, as `jaxgrow.sizes` finds them in the parameters."""
        own = self.adapter.sizes() if self.adapter else {}
        return {
            name: size for name, size in self.integers().items() if kind(name) not in self.no_axes
        } | own

    def active_sizes(self, at_once: int | None = None) -> dict[str, float]:
        """The part of every axis that one position computes: all of it, except of experts. ``at_once``: as of `empty`."""
        return dict(self.sizes())

    def integers(self) -> dict[str, int]:
        """The sizes of axes, and the other fields that are integers: what must be equal, or grown, for two models to fit."""
        out: dict[str, int] = {}
        for f in fields(self):
            if f.type is int and f.name not in self.run_by:
                out[f.name] = getattr(self, f.name)
            elif f.type == SIZES:
                out |= {f"{f.name}.{i}": size for i, size in enumerate(getattr(self, f.name))}
        return out

    @property
    def depths(self) -> tuple[int, ...]:
        """The layers of each stage, from the input on. Most families have one."""
        return tuple(size for name, size in self.sizes().items() if is_layers(name))

    @property
    def depth(self) -> int:
        """All layers."""
        return sum(self.depths)

    def with_sizes(self, sizes: Mapping[str, int]) -> Self:
        """The same config with other sizes of these axes."""
        values: dict[str, Any] = {}
        for name, size in sizes.items():
            field, _, stage = name.partition(".")
            if stage:
                every = values.get(field, getattr(self, field))
                values[field] = (*every[: int(stage)], size, *every[int(stage) + 1 :])
            else:
                values[field] = size
        return replace(self, **values)

    def resized(self, growth: Growth) -> Self:
        """The config of the grown model."""
        eps = self.eps * growth.eps if isinstance(growth, Rules) else self.eps
        new, adapter = new_sizes(growth), self.adapter
        if adapter and BOTTLENECK in new:
            adapter = replace(adapter, size=new.pop(BOTTLENECK))
        return replace(self.with_sizes(new), eps=eps, adapter=adapter)

    def run_as(self, other: "Config") -> Self:
        """This config, run as another one is."""
        return replace(self, **{name: getattr(other, name) for name in self.run_by})

    def paper_axes(self) -> Axes:
        """The axes under which a tied model grows as in the published multi-level code (``tied="paper"``).

        There the tables *read* ``embed``: coalescing sums them, de-coalescing divides them by the
        group size; the norm before the tied head is copied. In a BERT this keeps the function but
        for the eps of the norm that follows the tables, which meets smaller numbers. In a GPT-2 it
        does not (Zou et al.'s repository documents an error of 9e-2; see
        ``tests/operators/test_laws.py``): the residual stream is scaled where it begins, but not
        where the blocks add to it.
        """

        def leaf(key_path, names):
            where = path(key_path) + "/"
            if not any(where.startswith(part + "/") for part in self.tied_parts):
                return names
            table = role(where, names) == "table"
            return tuple(turned(n, read=table) if kind(axis(n)) == "embed" else n for n in names)

        return jax.tree_util.tree_map_with_path(leaf, self.axes(), is_leaf=is_names)

    def as_json(self) -> dict[str, Any]:
        """What a model has that says nothing by fields that came later is written as it always was."""
        own = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}
        later = ("adapter", "head_positions", *self.later)
        silent = {
            f.name for f in fields(self) if f.name in later and getattr(self, f.name) == f.default
        }
        return {"family": type(self).__name__} | {
            name: x for name, x in own.items() if name not in silent
        }


@dataclass(frozen=True)
class TextConfig(Config):
    """A model of text. ``head`` is what it predicts: tokens, as it was pre-trained; one of
    ``classes``, for the whole text (or, with one class, a number); the tokens at which a span of
    the text begins and ends; or one of ``classes`` for each token ("token_classes"). With "states"
    the model has no head, and its outputs are the last hidden states.
    """

    vocab: int = 50304
    context: int = 1024
    tied: bool = True  # the head over tokens is the table of tokens
    head: Head = "tokens"
    classes: int = 2
    # Positions on a device whose logits over the vocabulary exist at once in training; 0:
    # `jaxgrow.models.layers.scored`.
    head_positions: int = 0

    run_by: ClassVar = (*Config.run_by, "head_positions")
    tasks: ClassVar[tuple[str, ...]] = ("tokens", "classes")

    def __post_init__(self):
        super().__post_init__()
        if self.head_positions < 0:
            raise ValueError(
                f"{type(self).__name__}: head_positions is {self.head_positions}, less than 0"
            )
        if self.head not in self.tasks:
            raise ValueError(
                f"{type(self).__name__} has no head for {self.head}, only {', '.join(self.tasks)}"
            )
        if self.head == "spans" and self.classes != 2:
            raise ValueError(
                f"a span has a begin and an end: head=spans needs classes=2, not {self.classes}"
            )

    @property
    def means_stay(self) -> bool:
        """Whether a unit of the residual stream that holds the mean of the others goes on to: not
        behind a norm, nor where each unit has a size of its own.
        """
        return True

    @property
    def predicts(self) -> Head:
        return self.head

    @property
    def ties(self) -> bool:
        """Whether the table of tokens is used both ways."""
        return self.tied and self.head == "tokens"

    def sizes(self) -> dict[str, int]:
        return {
            name: n
            for name, n in super().sizes().items()
            if name != "classes" or self.head not in WITHOUT_CLASSES
        }

    def with_head(self, head: Head, classes: int = 2) -> Self:
        """The same model with another head."""
        return replace(self, head=head, classes=classes)

    def as_json(self) -> dict[str, Any]:
        """What a model has that predicts tokens is written as it always was."""
        out = super().as_json()
        return {
            k: v for k, v in out.items() if self.head != "tokens" or k not in ("head", "classes")
        }


def head_cost(config: TextConfig, length: int) -> float:
    """FLOPs a position: ``2 D V``, or ``2 D C`` once a text; none without a head."""
    if config.head == "states":
        return 0.0
    return 2 * config.embed * (config.vocab if config.head == "tokens" else config.classes / length)


@partial(jax.jit, static_argnums=0, inline=True)
def _boxed(config: Config, key: jax.Array) -> Any:
    """Fresh parameters with their names; the model is traced once for both."""
    return config.module.init(key, config.example)["params"]


@lru_cache(maxsize=64)
def _axes(config: Config) -> Axes:
    return split(jax.eval_shape(partial(_boxed, config), jax.random.key(0)))[1]


def from_json(content: Mapping[str, Any]) -> Config:
    """The config that `Config.as_json` wrote.

    Raises:
      ValueError: another family, or fields that are unknown or of another type.
    """
    values = dict(content)
    name = values.pop("family", None)
    family = Config.families.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(
            f"there is no model family {name!r}, only {', '.join(sorted(Config.families))}"
        )
    if isinstance(values.get("remat"), bool):  # as it was once written
        values["remat"] = "projections" if values["remat"] else "products"
    adapter = _adapter(values.pop("adapter", None))
    kinds = {f.name: f.type for f in fields(family)}
    for field, value in values.items():
        if field not in kinds:
            raise ValueError(f"{name} has no {field!r}")
        of, choices = (
            kinds[field],
            get_args(kinds[field]) if kinds[field] not in (SIZES, FLOATS) else (),
        )
        each = (int,) if of == SIZES else (int, float)
        if (
            of in (SIZES, FLOATS)
            and isinstance(value, list | tuple)
            and all(type(n) in each for n in value)
        ):
            values[field] = tuple(value)
        elif (
            value not in choices
            if choices
            else type(value) not in ((int, float) if of is float else (of,))
        ):
            raise ValueError(f"{name}: {field} is {value!r}, but should be {choices or of}")
    return family(**values, adapter=adapter)


def _adapter(content: Any) -> Adapter | None:
    """
    Raises:
      ValueError: it is none that `Config.as_json` wrote.
    """
    if content is None:
        return None
    try:
        return Adapter(**{**content, "at": tuple(content["at"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"adapter is {content!r}, with {type(error).__name__}: {error}") from None
