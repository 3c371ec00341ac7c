"""The base of the configs of all model families."""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgrow import typed
from jaxgrow.axes.names import (
    LAYERS,
    Axes,
    Params,
    Tree,
    axis_kind,
    axis_of,
    is_layers,
    is_names,
    path,
    role_of,
    split_boxed,
    with_direction,
)
from jaxgrow.growth.maps import Growth, Rules, by_axes, new_sizes
from jaxgrow.growth.matrices import dense, is_identity, is_traced
from jaxgrow.models.attention import By
from jaxgrow.models.bottleneck import BOTTLENECK, Adapter
from jaxgrow.models.stack import Loop, Remat
from jaxgrow.registry import Registry

# Field types: one size per stage, and a list of numbers.
SIZES = tuple[int, ...]
FLOATS = tuple[float, ...]
# The inputs of a model: tokens or images, or a mapping from names to arrays.
Inputs: TypeAlias = jax.Array | dict[str, jax.Array]
Array: TypeAlias = jax.Array | np.ndarray
Head: TypeAlias = Literal["tokens", "classes", "spans", "token_classes", "states"]
# The axes of a mixture of experts and of its shared expert.
EXPERTS = "experts"
SHARED = "shared"
WITHOUT_CLASSES = ("tokens", "states")  # heads that have no `classes` axis
Modality: TypeAlias = Literal["text", "images"]
# Shapes of a batch: the inputs of the model, and the targets.
Shapes: TypeAlias = tuple[Tree, jax.ShapeDtypeStruct]


class OperatorTraits(TypedDict):
    """The properties of a family in `Config.traits`."""

    norm: str
    post_norm: bool
    alternating: tuple[str, ...]
    period: int
    passes: tuple[int, ...]


class Cost(NamedTuple):
    """FLOPs of the forward pass per position. A multiply-add counts as two.

    Attributes:
      layer: FLOPs of one layer; the mean over the layers if they differ.
      outside: FLOPs of everything outside the layers.
      first: the part of ``outside`` in products with the model's input, which needs no gradient.
      embedding: the part of ``outside`` in products with a tied embedding, which needs no gradient if
        the bottom layers are frozen.
      layers: FLOPs of each layer, if the layers differ.
      between: the part of ``outside`` between each layer and the layer below it.
    """

    layer: float
    outside: float
    first: float = 0.0
    embedding: float = 0.0
    layers: tuple[float, ...] = ()
    between: tuple[float, ...] = ()

    def spared(self, frozen: int) -> float:
        """Return the FLOPs per position that the backward pass saves with frozen bottom layers.

        For each product in the frozen layers, and below them, the backward pass saves two products.
        For each product in the module that reads the output of the frozen layers, it saves one
        product. It also saves one for each product with the model's input or a tied embedding.

        Args:
          frozen: the number of frozen layers at the bottom.
        """
        if not self.layers:
            return 2 * frozen * self.layer + self.first + self.embedding
        held = self.layers[:frozen] + self.between[:frozen]
        reads = self.between[frozen : frozen + 1]
        return 2 * sum(held) + sum(reads) + self.first + self.embedding


@dataclass(frozen=True)
class Config:
    """The base of all model configs: each family is a subclass, and its sizes are fields.

    Size fields have the names of the parameters' axes. A field that is a tuple has one size for
    each stage: ``embed=(96, 192)`` gives the sizes of the axes ``embed.0`` and ``embed.1``.
    """

    layers: int = 12
    embed: int = 768
    heads: int = 12
    head_dim: int = 64
    mlp: int = 3072
    # The eps of the norms.
    eps: float = 1e-5
    # The dtype of activations. Parameters are float32 or better.
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    # The values that a layer saves for the backward pass (`jaxgrow.models.stack.run_stack`). With
    # "auto", a training run chooses this field and ``scan_layers`` by the memory that its compiled
    # programs need; outside of a run, and on CPUs, "auto" means "products".
    remat: Literal["auto", Remat] = "products"
    # The attention kernel (`jaxgrow.models.attention`).
    attention: By = "auto"
    # Whether the layers run in one scan. Unrolled layers take longer to compile and may run faster.
    scan_layers: bool = True
    # The bottleneck adapter of every layer (`jaxgrow.extras.peft.adapters`).
    adapter: Adapter | None = None
    # The layers that run several times (`jaxgrow.operators.loop`); None: each layer runs once.
    loop: Loop | None = None

    # All families, by name.
    families: ClassVar[Registry[type["Config"]]] = Registry("model family")
    # The kind of data that the model reads.
    modality: ClassVar[Modality]
    # Whether a position sees only itself and earlier positions. Only such a model can continue text.
    causal: ClassVar[bool] = False
    # The fraction of the positions that pre-training masks and predicts; 0: pre-training does not
    # mask. Without annotations, this and the following are not dataclass fields. A family may add
    # fields of these names.
    masked = 0.0
    # The number of token types; 0: tokens have no type.
    types = 0
    # Whether the token head shares its weights with the token embedding.
    tied = False
    # Whether norms have a learned scale.
    norm_scale = True
    # The row of the position embedding for the first token.
    first_position = 0
    # Whether norms come before sublayers, so a sublayer with zero output adds nothing.
    pre_norm = True
    # Whether a residual unit that holds the mean of the other units keeps holding it. It does not if
    # a norm produces the residual stream, or if each unit has a learned scale.
    means_stay = True
    # Whether output kernels of sublayers are initialised with a smaller scale. The factor is
    # ``1 / sqrt(2 layers)``, for kernels that write to the residual stream.
    depth_scaled = False
    # Whether the family supports ``loop``.
    loops = False
    # The number of parameter entries that the model never reads. If only some layers have a certain
    # norm, the stacked parameters hold unused entries for the other layers.
    idle = 0
    # Whether the token embedding is also the kernel of the head.
    ties = False
    # Whether all kernels of the layers are used only in the dtype of activations.
    narrow_kernels = False
    # Fields that set how the model is executed. They change results only by rounding.
    executed_by: ClassVar[tuple[str, ...]] = ("remat", "attention", "scan_layers")
    # Fields that set how the model runs, not which function it computes.
    run_by: ClassVar[tuple[str, ...]] = ("dtype", *executed_by)
    # Integer fields that may be 0. In this case, the model does not have this axis.
    optional: ClassVar[tuple[str, ...]] = ()
    # Integer fields that are not the size of an axis.
    no_axes: ClassVar[tuple[str, ...]] = ()
    # The embeddings and the norm before a tied head. The published multi-level code swaps the roles
    # of their ``embed`` axes (`paper_axes`).
    tied_parts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        Config.families.add(cls.__name__, cls)

    def __post_init__(self):
        wrong = [
            f"{n} is {size}, less than {int(axis_kind(n) not in self.optional)}"
            for n, size in self.integers().items()
            if size < 1
        ]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {', '.join(wrong)}")
        for f in fields(self):
            # The upper bound keeps the number within the range of float32.
            if f.type is float and not 0 <= getattr(self, f.name) < 2.0**127:
                raise ValueError(
                    f"{type(self).__name__}: {f.name} is {getattr(self, f.name)}, but must be at "
                    "least 0 and below 2**127"
                )
            typed.check_choice(f.name, getattr(self, f.name), f.type)
        if self.loop is not None and not (self.loops and self.loop.end <= self.layers):
            why = f"has {self.layers} layers" if self.loops else "runs each layer only once"
            raise ValueError(
                f"this {type(self).__name__} {why}, but loop is {self.loop}: change or leave out loop"
            )

    # --- properties that a family defines ---

    @property
    def module(self) -> nn.Module:
        """The Flax module: ``module.apply({"params": p}, inputs) -> logits``, in float32."""
        raise NotImplementedError

    @property
    def example(self) -> Inputs:
        """The smallest inputs that the module accepts."""
        raise NotImplementedError

    @property
    def predicts(self) -> Head:
        """The kind of the model's outputs. "states" means that the model has no head.

        Such a model returns its last hidden states.
        """
        return "classes"

    @property
    def traits(self) -> OperatorTraits:
        """Properties of the family that operators may need, as keyword arguments for them.

        - ``norm``: LayerNorm ("layer"), RMSNorm ("rms"), or LayerNorm without a scale ("unscaled").
        - ``post_norm``: whether a norm produces the values that a sublayer adds to the residual
          stream.
        - ``alternating``: the layer axes along which even and odd layers compute different
          functions, even with equal weights and an equal config.
        - ``period``: the number of layers after which the kinds of layers repeat.
        - ``passes``: the layer of each pass, if layers run several times (`Loop`); otherwise empty.
        """
        return {
            "norm": "layer",
            "post_norm": False,
            "alternating": (),
            "period": 1,
            "passes": () if self.loop is None else tuple(self.loop.repeat(range(self.layers))),
        }

    @property
    def layer_kinds(self) -> str:
        """A letter for each layer, which names its kind.

        Layers of the same kind compute the same function if they have equal weights.
        """
        alternating = self.traits["alternating"]
        layers = {name: n for name, n in self.sizes().items() if is_layers(name)}
        return "".join(
            ("ab" * n)[:n] if name in alternating else "a" * n for name, n in layers.items()
        )

    @property
    def normed(self) -> tuple[str, ...]:
        """The axes over which norms average."""
        return ("embed",)

    @property
    def length(self) -> int:
        """The maximum number of positions that one sample has in the layers."""
        raise NotImplementedError

    def batch_shapes(self, samples: int) -> Shapes:
        """Return the shapes of a pre-training batch: its inputs and its targets.

        Args:
          samples: number of samples.
        """
        raise NotImplementedError

    def task_shapes(self, samples: int, length: int) -> Shapes:
        """Return the shapes of a batch of labelled samples, as `batch_shapes`.

        Args:
          samples: number of samples.
          length: positions of a sample.
        """
        return self.batch_shapes(samples)

    def inputs_of(self, samples: Array) -> Array | dict[str, Array]:
        """Return tokens [B, T] or images in the form that the module takes."""
        return samples

    def for_task(self, head: Head, classes: int, inputs: Tree) -> Self:
        """Return the config of the same model for another task.

        Args:
          head: the kind of the outputs.
          classes: number of classes.
          inputs: the inputs of one sample of the task.
        """
        raise NotImplementedError

    def body_from(self, params: Params, old: "Config") -> Params:
        """Convert the parameters of another model's body to this config.

        Args:
          params: parameters of a model without its head.
          old: the config of that model, which differs in the head and in the size of its inputs.
        """
        return params

    def as_mixture(self) -> Self:
        """Return the config of the same model with a mixture of one expert in each layer.

        Raises:
          ValueError: the model cannot have experts, or it has experts already.
        """
        raise ValueError(
            f"experts can only be made from a dense decoder of the Llama family, but this "
            f"{type(self).__name__} is another kind of model"
        )

    def cost(self, length: int) -> Cost:
        """Return the FLOPs per position for a sample of ``length`` positions."""
        raise NotImplementedError

    def empty(self, at_once: int | None = None) -> float:
        """Return the FLOPs per position that a layer spends beyond `cost`, on rows without a token.

        Only a mixture of experts has such rows.

        Args:
          at_once: the number of positions that a device computes at once; None: a very large
            number.

        Returns:
          FLOPs of the forward pass. Negative if experts have a capacity that drops tokens.
        """
        return 0.0

    # --- methods derived from them ---

    def init(self, key: jax.Array) -> Params:
        """Return freshly initialised parameters: a plain nested dict of arrays.

        The function is pure, and each config compiles to one program.
        """
        concrete = isinstance(key, jax.Array) and not is_traced(key)
        on_cpu = concrete and {device.platform for device in key.devices()} == {"cpu"}
        return split_boxed((_boxed_on_cpu if on_cpu else _boxed)(self, key))[0]

    def axes(self) -> Axes:
        """Return the axis names of the parameters, without creating the parameters."""
        return deepcopy(_axes(self))

    def sizes(self) -> dict[str, int]:
        """Return the size of every axis, as `jaxgrow.sizes` finds them in the parameters."""
        own = self.adapter.sizes() if self.adapter else {}
        absent = {*self.no_axes, *(["classes"] if self.predicts in WITHOUT_CLASSES else [])}
        sizes = {name: n for name, n in self.integers().items() if axis_kind(name) not in absent}
        return sizes | own

    def active_sizes(self, at_once: int | None = None) -> dict[str, float]:
        """Return the part of every axis that one position uses: the full axis, except for experts.

        Args:
          at_once: the number of positions that a device computes at once, as in `empty`.
        """
        return dict(self.sizes())

    def integers(self) -> dict[str, int]:
        """Return the axis sizes and the other integer fields.

        For two models to fit together, each of these values must be equal or mapped by the growth.
        """
        out: dict[str, int] = {}
        for f in fields(self):
            if f.type is int and f.name not in self.run_by:
                out[f.name] = getattr(self, f.name)
            elif f.type == SIZES:
                out |= {f"{f.name}.{i}": size for i, size in enumerate(getattr(self, f.name))}
        return {name: n for name, n in out.items() if n or axis_kind(name) not in self.optional}

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of layers that run in each stage, from the input on.

        Most families have one stage. A layer of a `Loop` counts as often as it runs.
        """
        if self.loop is not None:
            return (len(self.loop.repeat(range(self.layers))),)
        return tuple(size for name, size in self.sizes().items() if is_layers(name))

    @property
    def depth(self) -> int:
        """The total number of layers that run."""
        return sum(self.depths)

    def with_sizes(self, sizes: Mapping[str, int]) -> Self:
        """Return this config with other sizes for the given axes."""
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
        """Return the config of the grown model.

        Raises:
          ValueError: the growth changes the layers of a model with a ``loop``, other than by
            `jaxgrow.operators.unloop`.
        """
        eps = self.eps * growth.eps if isinstance(growth, Rules) else self.eps
        new = new_sizes(growth)
        m = None if isinstance(growth, Rules) else by_axes(growth).get((LAYERS,))
        loop = self.loop
        wrong = loop is not None and new.get(LAYERS, self.layers) != self.layers
        if loop is not None and m is not None and not is_identity(m.write):
            loop, passes = None, np.eye(self.layers)[list(self.traits["passes"])]
            wrong = not np.array_equal(dense(m.write), passes)
        if wrong:
            raise ValueError(
                f"the growth changes the layers of a model with {self.loop}: first give each pass its own "
                "layer, with the operator unloop"
            )
        adapter = self.adapter
        if adapter and BOTTLENECK in new:
            adapter = replace(adapter, size=new.pop(BOTTLENECK))
        return replace(replace(self, loop=loop).with_sizes(new), eps=eps, adapter=adapter)

    def run_as(self, other: "Config") -> Self:
        """Return this config with the run settings (`run_by`) of another config."""
        return replace(self, **{name: getattr(other, name) for name in self.run_by})

    def paper_axes(self) -> Axes:
        """Return axes under which a tied model grows as in the published multi-level code.

        They are used for ``tied="paper"``. In that code, the embeddings *read* ``embed``:
        coalescing sums them, and de-coalescing divides them by the group size. The norm before the
        tied head is copied. In a BERT, this preserves the function except for the eps of the norm
        that follows the embeddings, because that norm receives smaller numbers. In a GPT-2, it does
        not preserve the function (the repository of Zou et al. documents an error of 9e-2; see
        ``tests/operators/test_laws.py``): the residual stream is scaled where it begins, but not
        where the blocks add to it.
        """

        def leaf(key_path, names):
            where = path(key_path) + "/"
            if not any(where.startswith(part + "/") for part in self.tied_parts):
                return names
            embedding = role_of(where, names) == "embedding"
            return tuple(
                with_direction(n, read=embedding) if axis_kind(axis_of(n)) == "embed" else n
                for n in names
            )

        return jax.tree_util.tree_map_with_path(leaf, self.axes(), is_leaf=is_names)

    def as_json(self) -> typed.Json:
        """Return the config as a JSON object, which `from_json` reads."""
        own = {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}
        return {"family": type(self).__name__, **own}


@dataclass(frozen=True)
class TextConfig(Config):
    """The base of the configs of text models.

    ``head`` sets what the model predicts:

    - "tokens": tokens, as in pre-training.
    - "classes": one of ``classes`` for the full text; with one class, a number.
    - "spans": the tokens at which a span of the text begins and ends.
    - "token_classes": one of ``classes`` for each token.
    - "states": nothing. The model has no head and returns its last hidden states.
    """

    vocab: int = 50304
    context: int = 1024
    # Whether the token head shares its weights with the token embedding.
    tied: bool = True
    head: Head = "tokens"
    classes: int = 2
    # The number of positions on a device for which training holds logits over the vocabulary at the
    # same time. 0: the number that `jaxgrow.models.loss.logit_positions` returns.
    head_positions: int = 0

    # The soft cap of the logits (0: none), and their divisor.
    # Without annotations, these are not dataclass fields. A family may add fields of these names.
    logit_cap = 0.0
    logit_divisor = 1.0
    modality: ClassVar = "text"
    executed_by: ClassVar = (*Config.executed_by, "head_positions")
    run_by: ClassVar = (*Config.run_by, "head_positions")
    tasks: ClassVar[tuple[str, ...]] = ("tokens", "classes", "states")
    # Whether attention can stop at the ends of documents, whose numbers are the input ``segments``.
    segments: ClassVar[bool] = False

    # The choices that use a field (`train.extras.effect` checks them for a training).
    used_with = {
        "classes": {"head": ("classes", "spans", "token_classes")},
        **{key: {"head": ("tokens",)} for key in ("tied", "head_positions")},
    }

    def __post_init__(self):
        super().__post_init__()
        if self.head_positions < 0:
            raise ValueError(
                f"{type(self).__name__}: head_positions is {self.head_positions}, less than 0"
            )
        if self.length < 1:
            raise ValueError(
                f"context={self.context} leaves no position after "
                f"first_position={self.first_position}: set a larger context"
            )
        if self.head not in self.tasks:
            raise ValueError(
                f"{type(self).__name__} has no head for {self.head}, only for "
                f"{', '.join(self.tasks)}"
            )
        if self.head == "spans" and self.classes != 2:
            raise ValueError(
                f"head=spans needs classes=2, not {self.classes}: the begin and the end of a span"
            )

    @property
    def predicts(self) -> Head:
        return self.head

    @property
    def example(self) -> Inputs:
        return jnp.zeros((1, 1), jnp.int32)  # tokens [B, T]

    @property
    def length(self) -> int:
        return self.context - self.first_position

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the module accepts."""
        return ("tokens", "lengths", *(("segments", "weights") if self.segments else ()))

    narrow_kernels = True

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a sequence that the model can read."""
        return self.length

    @property
    def ties(self) -> bool:
        return self.tied and self.head == "tokens"

    def with_head(self, head: Head, classes: int = 2) -> Self:
        """Return the config of the same model with another head."""
        return replace(self, head=head, classes=classes)

    def for_task(self, head: Head, classes: int, inputs: Tree) -> Self:
        return self.with_head(head, classes)

    def batch_shapes(self, samples: int) -> Shapes:
        tokens = jax.ShapeDtypeStruct((samples, self.length), jnp.int32)
        return tokens, tokens

    def task_shapes(self, samples: int, length: int) -> Shapes:
        tokens = jax.ShapeDtypeStruct((samples, length), jnp.int32)
        shapes = {
            "tokens": tokens,
            "types": tokens,
            "mask": jax.ShapeDtypeStruct(tokens.shape, bool),
            "lengths": jax.ShapeDtypeStruct((samples,), jnp.int32),
        }
        ends = (2,) if self.head == "spans" else ()
        dtype = jnp.float32 if self.classes == 1 else jnp.int32
        return (
            {name: shapes[name] for name in self.inputs if name in shapes},
            jax.ShapeDtypeStruct((samples, *ends), dtype),
        )


def head_cost(config: TextConfig, length: int) -> float:
    """Return the FLOPs of the head per position.

    They are ``2 D V`` for tokens, ``2 D C`` per text for classes, and 0 without a head. D is
    ``embed``, V is ``vocab``, and C is ``classes``.
    """
    if config.head == "states":
        return 0.0
    return 2 * config.embed * (config.vocab if config.head == "tokens" else config.classes / length)


def _traced(config: Config, key: jax.Array) -> Params:
    """Return fresh parameters with their axis names, from a single trace of the model."""
    # Parameters do not depend on the kernel. The chosen kernel may not support these devices, and
    # does not support the single position of the example of a text model.
    config = replace(config, attention="auto")
    return config.module.init(key, config.example)["params"]


_boxed = jax.jit(_traced, static_argnums=0, inline=True)
# The program runs once, so its compilation is what it costs. On CPUs, this level compiles in a
# quarter of the time, and the parameters are bitwise identical. A level in XLA_FLAGS has priority.
_FLAG = "xla_backend_optimization_level"
_boxed_on_cpu = jax.jit(
    _traced,
    static_argnums=0,
    compiler_options={} if _FLAG in os.environ.get("XLA_FLAGS", "") else {_FLAG: 1},
)


@lru_cache(maxsize=64)
def _axes(config: Config) -> Axes:
    key = jax.eval_shape(lambda: jax.random.key(0))  # a concrete key would be compiled
    return split_boxed(jax.eval_shape(partial(_boxed, config), key))[1]


def from_json(content: Mapping[str, object]) -> Config:
    """Return the config that `Config.as_json` wrote.

    Args:
      content: the JSON object.

    Raises:
      ValueError: the family is unknown, a field is unknown, or a field has the wrong type.
    """
    values = dict(content)
    name = values.pop("family", None)
    family = Config.families.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(
            f"there is no model family {name!r}; the families are "
            f"{', '.join(sorted(Config.families))}"
        )
    return typed.build_dataclass(family, values)
