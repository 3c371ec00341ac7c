"""The floating-point operations (FLOPs) of models and of traced programs.

The FLOPs of a model come from a formula of its family. Only matrix products count, and a
multiply-add counts as two. Norms, softmax and Adam are not counted: they take less than 2 % at the
sizes of the papers. `jaxgrow.optim.muon.muon_flops` counts the products of Muon. The test
``tests/models/test_flops.py`` compares the formulas with the operations that XLA counts in the
compiled step.
"""

import itertools
import math
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxgrow.axes.names import (
    Axes,
    Params,
    leaves,
)
from jaxgrow.growth import maps
from jaxgrow.growth.apply import products
from jaxgrow.models.config import Config, Cost


class TokenSkips(Protocol):
    """A method by which tokens bypass layers, such as `jaxgrow.extras.token_dropping.TokenDrop`."""

    def kept(self, length: int) -> int:
        """Return the number of tokens of a sequence that pass through all layers."""
        ...

    def middle(self, layers: int) -> tuple[int, int]:
        """Return the range of layers ``begin .. end - 1`` that the other tokens bypass."""
        ...


def forward_flops(
    config: Config,
    tokens: int,
    length: int | None = None,
    layers: float | None = None,
    *,
    at_once: int | None = None,
) -> float:
    """Return the FLOPs of a forward pass. The FLOPs per position come from the family's ``cost``.

    The head is counted as in training. For a BERT or ModernBERT that predicts tokens, the head is
    counted only at the masked positions (the part ``config.masked`` of all positions), although a
    call without ``positions`` returns the logits of every position.

    Args:
      config: config of the model.
      tokens: number of positions, over all samples.
      length: positions of a sample; None: the config's length.
      layers: number of layers that ran, possibly a mean, with each layer counted by its `layer_weights`;
        None: all layers.
      at_once: number of positions that a device computes at once, which determines the number of
        empty rows in a mixture of experts (`jaxgrow.extras.models.mixture.expert_blocks`); None: very large.

    Returns:
      Floating-point operations.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> forward_flops(GPT2Config(), tokens=1024) / 1e9
      274.81079808
    """
    cost = layer_cost(config, length or config.length, at_once)
    return float(tokens) * (
        (config.depth if layers is None else layers) * cost.layer + cost.outside
    )


def layer_weights(config: Config) -> np.ndarray:
    """Return the FLOPs of each layer relative to their mean: float [layers].

    All weights are 1, except in models with stages.

    Args:
      config: config of the model.

    Returns:
      Numbers whose mean is 1. For the argument ``layers`` of `forward_flops` and `train_flops`, add
      up the weights of the layers that ran.
    """
    cost = config.cost(config.length)
    return np.array(cost.layers) / cost.layer if cost.layers else np.ones(config.depth)


def train_flops(
    config: Config,
    tokens: int,
    length: int | None = None,
    layers: float | None = None,
    *,
    frozen: int = 0,
    drop: TokenSkips | None = None,
    at_once: int | None = None,
) -> float:
    """Return the FLOPs of a training step. The backward pass costs two forward passes.

    Recomputation by remat is not counted. The gradient of the model's input is not needed and not
    counted. Frozen layers at the bottom, and the embeddings below them, have no backward pass. In
    this case, a tied embedding also has no gradient as the kernel of the head.

    Args:
      config: config of the model.
      tokens: number of positions, over all samples.
      length: positions of a sample; None: the config's length.
      layers: number of layers that ran, possibly a mean, with each layer counted by its `layer_weights`;
        None: all layers.
      frozen: number of frozen layers at the bottom.
      drop: which tokens bypass which layers; None: none.
      at_once: number of positions that a device computes at once, as in `forward_flops`.

    Returns:
      Floating-point operations.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> train_flops(GPT2Config(), tokens=1024) / forward_flops(GPT2Config(), tokens=1024)
      3.0
    """
    length = length or config.length
    cost = layer_cost(config, length, at_once)
    total = 3 * forward_flops(config, tokens, length, layers, at_once=at_once) - tokens * cost.first
    if frozen:
        total -= tokens * cost.spared(frozen)
    if drop is not None:
        total -= _skipped(config, tokens, length, drop, frozen, at_once)
    return total


def _skipped(
    config: Config, tokens: int, length: int, drop: TokenSkips, frozen: int, at_once: int | None
) -> float:
    """Return the FLOPs that a step saves because some tokens bypass the middle layers."""
    begin, end = drop.middle(config.depth)
    kept = drop.kept(length)
    kept_at_once = None if at_once is None else at_once * kept // length
    layer = layer_cost(config, length, at_once).layer
    shorter = layer_cost(config, kept, kept_at_once).layer
    saved = tokens * (layer - kept / length * shorter)
    return saved * (3 * (end - begin) - 2 * max(0, min(frozen, end) - begin))


def layer_cost(config: Config, length: int, at_once: int | None) -> Cost:
    """Return the family's cost, with the costs of its adapters and of rows without a token."""
    cost = config.cost(length)
    return cost._replace(layer=cost.layer + _adapter_cost(config) + config.empty(at_once))


def _adapter_cost(config: Config) -> float:
    return config.adapter.cost(config.embed) if config.adapter else 0.0


def growth_flops(growth: maps.Growth, params: Params, axes: Axes) -> float:
    """Return the FLOPs of the matrix products of `jaxgrow.grow`.

    Copies, means and sums by gathering are not counted. A step of learning the maps costs at most
    three times as much, because the small model needs no gradient.

    Args:
      growth: the growth, as in `jaxgrow.grow`.
      params: a pytree of arrays or of their shapes.
      axes: axis names of each array.

    Returns:
      Floating-point operations.

    Example:
      >>> dense = maps.AxisMap(np.ones((4, 3)), np.ones((4, 3)))
      >>> growth_flops({"mlp": dense}, {"b": np.ones(3)}, {"b": ("mlp",)})
      24.0
    """
    total = 0.0
    for leaf, x, names in leaves(params, axes):
        for term in maps.terms(growth, leaf, names):
            total += sum(products(term, names, np.shape(x)))
    return total


class Counted(NamedTuple):
    """The floating-point operations of a traced program (`counted`).

    Attributes:
      products: operations of matrix products and convolutions; a multiply-add counts as two.
      arithmetic: all other operations: one for each element that an arithmetic operation returns or
        a reduction reads.
    """

    products: float
    arithmetic: float

    @property
    def total(self) -> float:
        return self.products + self.arithmetic


_ARITHMETIC = frozenset(
    """
    abs add add_any atan2 cbrt ceil clamp cos cosh div erf erf_inv erfc exp exp2 expm1 floor integer_pow log log1p
    logistic max min mul neg pow rem round rsqrt sign sin sinh sqrt square sub tan tanh
    """.split()  # noqa: SIM905  (a list of quoted names would be three times as long)
)
_REDUCTIONS = frozenset(
    {"argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"}
) | {f"reduce_{name}" for name in ("max", "min", "prod", "sum")}
_SCATTERS = frozenset(f"scatter-{name}" for name in ("add", "max", "min", "mul"))


def counted(jaxpr: Jaxpr) -> Counted:
    """Count the floating-point operations of a program from its jaxpr.

    The jaxpr is the program as it is written, so the count depends neither on the platform nor on
    the version of XLA. The body of a scan counts once per iteration, a conditional counts as its
    most expensive branch, and a `shard_map` counts on all devices that it divides arrays among.
    Work that other devices repeat is not counted, as in programs without `shard_map`. The number of
    iterations of a ``while_loop`` is unknown: its body counts once. Custom kernels are not counted.

    Args:
      jaxpr: the program, from `jax.make_jaxpr` or ``jax.jit(f).trace(*arguments).jaxpr``. For a
        closed jaxpr, pass its ``.jaxpr``.

    Returns:
      Operations of one run of the program, on all devices together.

    Example:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x, y: jnp.tanh(x @ y))(np.ones((2, 3)), np.ones((3, 5)))
      >>> counted(program.jaxpr)
      Counted(products=60.0, arithmetic=10.0)
    """
    products = arithmetic = 0.0
    for eqn in jaxpr.eqns:
        products += _product_flops(eqn)
        arithmetic += _arithmetic(eqn)
        # The program within a scatter only combines two numbers. It is counted as arithmetic above.
        inner = (
            []
            if eqn.primitive.name in _SCATTERS
            else [counted(j) for j in jaxprs_in_params(eqn.params)]
        )
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=lambda c: c.total)]
        times = _repetitions(eqn)
        products += times * sum(c.products for c in inner)
        arithmetic += times * sum(c.arithmetic for c in inner)
    return Counted(products, arithmetic)


def _repetitions(eqn: JaxprEqn) -> int:
    """Return how often the programs within an equation run."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
        dividing: set[str] = set()
        for entry in itertools.chain.from_iterable(specs):
            if entry is not None:
                dividing.update([entry] if isinstance(entry, str) else entry)
        return math.prod(mesh.shape[n] for n in eqn.params["newly_manual_axes"] if n in dividing)
    return 1


def _product_flops(eqn: Any) -> float:
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        outputs = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[outputs]
    if eqn.primitive.name == "dot_general":
        numbers = eqn.params["dimension_numbers"]
    elif eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        return 0.0
    (contracted, _), _ = numbers
    left = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)


def _arithmetic(eqn: Any) -> float:
    """Return the number of elements that an operation computes.

    They are the elements of its result, of the array that it reduces, or of the array that it adds.
    """
    name = eqn.primitive.name
    if name in _ARITHMETIC:
        counts = eqn.outvars[0].aval
    elif name in _REDUCTIONS:
        counts = eqn.invars[0].aval
    elif name in _SCATTERS:
        counts = eqn.invars[2].aval
    else:
        return 0.0
    return float(math.prod(counts.shape)) if jnp.issubdtype(counts.dtype, jnp.inexact) else 0.0
