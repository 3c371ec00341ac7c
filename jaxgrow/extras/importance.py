"""The importance of the layers and units of a trained model, for `jaxgrow.operators.prune`.

The scores need one pass over data. The importance of layers comes from their effect on the residual
stream, which `residual_streams` returns: `block_influence` (ShortGPT) and `angular_distance`
(Gromov et al.). The importance of units comes from `unit_importance` (Minitron). Scores are means
over positions. For several batches of equal size, take the mean of their scores.

All scores are keyed by axis, as `jaxgrow.operators.prune` takes them::

    streams = residual_streams(config, params, inputs)
    scores = {layers: block_influence(x) for layers, x in streams.items()}
    scores |= unit_importance(config, params, inputs)

In a model with stages, the axes are ``layers.0`` or ``heads.1``, for example, and each stage has a
separate stream.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.module import InterceptorContext

from jaxgrow.axes.names import Params, Tree, axis_kind, axis_of, stages
from jaxgrow.models.config import EXPERTS, Config, Inputs
from jaxgrow.models.modules import Linear
from jaxgrow.models.norms import LayerNorm, RMSNorm
from jaxgrow.models.stack import Observe
from jaxgrow.typed import check_choice


def residual_streams(config: Config, params: Params, inputs: Inputs) -> dict[str, jax.Array]:
    """Return the residual stream before the first layer and after each layer, for every stage.

    Args:
      config: config of the model, of any family.
      params: parameters of the model.
      inputs: inputs of its module.

    Returns:
      For each axis of layers: ``x_0 .. x_L``, [layers + 1, batch, positions, embed], in the dtype
      of activations. If the positions form a grid, as in a Swin, they are two axes.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=11, context=8, layers=3, embed=4, heads=2, head_dim=2, mlp=8)
      >>> residual_streams(config, config.init(jax.random.key(0)), jnp.zeros((2, 5), int))["layers"].shape
      (4, 2, 5, 4)
    """
    seen = observe_layers(config, params, inputs, lambda x, y: (x, y))
    return {layers: jnp.concatenate([x[:1], y]) for layers, (x, y) in seen.items()}


def block_influence(stream: jax.Array) -> jax.Array:
    """Block influence: ``BI_l = 1 - E cos(x_l, x_{l+1})``, the mean over positions.

    It is computed as ``|u - v|^2 / 2`` of vectors of length one. This is accurate for a layer with
    a small effect, and exactly zero for a layer with no effect.

    Args:
      stream: residual stream of one stage, from `residual_streams`.

    Returns:
      The influence of each layer, [layers]. The least important layers have the smallest values.

    Example:
      The first layer rotates the stream by a right angle, and the second layer only doubles it.

      >>> block_influence(jnp.array([[[[1.0, 0.0]]], [[[0.0, 1.0]]], [[[0.0, 2.0]]]])).tolist()
      [1.0, 0.0]

    References:
      Men et al., `ShortGPT <https://arxiv.org/abs/2403.03853>`_, 2024, Eq. 1
    """
    return mean_of_layers(squared_turns(stream, 1) / 2)


def observe_layers(
    config: Config, params: Params, inputs: Inputs, observe: Observe
) -> dict[str, Tree]:
    """Return the results of ``observe`` by axis of layers, stacked over the layers of a stage."""
    output: Tree = config.module.apply({"params": params}, inputs, observe=observe)
    return dict(
        zip(
            stages(config.sizes()), output[1] if len(config.depths) > 1 else output[1:], strict=True
        )
    )


def widen_dtype(x: jax.Array) -> jax.Array:
    """Return ``x`` in float32 or better."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def squared_turns(streams: jax.Array, count: int) -> jax.Array:
    """Return ``|u - v|^2`` of the directions u and v of the stream, from 0 to 4.

    They are the directions before and after each ``count`` consecutive layers.
    """
    x = widen_dtype(streams)
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = x / jnp.maximum(length, jnp.finfo(x.dtype).tiny)
    return jnp.square(x[count:] - x[:-count]).sum(-1)


def mean_of_layers(x: jax.Array) -> jax.Array:
    """Return the mean over all axes except the first."""
    return x.mean(tuple(range(1, x.ndim)))


def angular_distance(stream: jax.Array, count: int) -> jax.Array:
    """Angular distance over blocks of ``count`` consecutive layers, as one number for each layer.

    The distance of the block from layer l on is ``d_l = E arccos(cos(x_l, x_{l+count})) / pi``.
    Gromov et al. remove the block with the smallest d. To give one number for each layer, as in
    `block_influence`, a layer gets the smallest d of all blocks that contain it: the ``count``
    layers with the smallest numbers are the block of the paper.

    Deviation(Gromov): the mean is over all positions, not only over the last position of each text.
    In a causal model, every position is the last position of a shorter text. In other models, the
    last position has no more information than the others.

    Args:
      stream: residual stream of one stage, from `residual_streams`.
      count: number of layers to remove.

    Returns:
      The distance of each layer, [layers], from 0 to 1.

    Raises:
      ValueError: ``count`` is less than 1 or greater than the number of layers.

    Example:
      Two rotations by a right angle add up to a half turn or cancel.

      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 1.0]])[:, None, None]
      >>> angular_distance(x, 2).round(6).tolist()
      [1.0, 0.0, 0.0]

    References:
      Gromov et al.,
      `The Unreasonable Ineffectiveness of the Deeper Layers <https://arxiv.org/abs/2403.17887>`_,
      ICLR 2025
    """
    layers = len(stream) - 1
    if not 1 <= count <= layers:
        raise ValueError(
            f"count is {count}, but must be between 1 and the {layers} layers of the stream"
        )
    # The distance of the directions is used, as in `block_influence`, because the arc cosine of a
    # number near one is imprecise.
    distance = mean_of_layers(
        2 / jnp.pi * jnp.arcsin(jnp.minimum(jnp.sqrt(squared_turns(stream, count)) / 2, 1))
    )
    layer = jnp.arange(layers)[:, None]
    begin = jnp.arange(len(distance))[None]
    return jnp.where((begin <= layer) & (layer < begin + count), distance[None], jnp.inf).min(1)


def unit_importance(
    config: Config,
    params: Params,
    inputs: Inputs,
    experts: Literal["reap", "frequency"] = "reap",
) -> dict[str, jax.Array]:
    """Minitron's importance of the units of each layer and of the residual stream.

    The importance is the mean size of a unit's activations:

    ========= ============================================================== ====================
    axis      mean over batch and positions of                               shape
    ========= ============================================================== ====================
    heads     the L2 norm of attention's output over ``head_dim``            [layers, heads]
    mlp       the absolute value of the input of ``down``                    [layers, mlp]
    embed     the absolute value of the outputs of norms, over all layers    [embed]
    experts   the gate times the L2 norm of the expert's output (REAP), over [layers, experts]
              the tokens that use the expert
    ========= ============================================================== ====================

    The paper compares means, L2 norms and variances over the batch and over positions. This
    function uses the mean over both. For the heads of a Swin, the padding of windows also counts as
    positions. The units of experts get no scores. The scores of experts are those of Lasby et al.

    Args:
      config: config of the model, of any family.
      params: parameters of the model.
      inputs: inputs of its module.
      experts: the scores of experts: "reap", or as a control "frequency", the share of the tokens
        that use the expert.

    Returns:
      The scores of each axis, for `jaxgrow.operators.prune`.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=11, context=8, layers=3, embed=4, heads=2, head_dim=2, mlp=8)
      >>> found = unit_importance(config, config.init(jax.random.key(0)), jnp.zeros((2, 5), int))
      >>> {axis: scores.shape for axis, scores in found.items()}
      {'embed': (4,), 'heads': (3, 2), 'mlp': (3, 8)}

    References:
      Muralidharan et al., `Compact Language Models via Pruning and Knowledge Distillation
      <https://arxiv.org/abs/2407.14679>`_, NeurIPS 2024

      Lasby et al., `REAP the Experts <https://arxiv.org/abs/2510.13999>`_, 2025, Eq. 9
    """
    check_choice("experts", experts, Literal["reap", "frequency"])
    found = _Activations(experts)
    # Values cannot leave a traced `jax.checkpoint`, so the pass runs without it.
    config = replace(config, remat="none")
    with nn.intercept_methods(found.intercept):
        seen = observe_layers(config, params, inputs, found.means)
    scores = (pair for stage in seen.values() for pair in stage.items())
    return {axis: x.mean(0) if axis_kind(axis) == "embed" else x for axis, x in scores}


def expert_utility(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the utility of each expert: how much it matters to the loss, to first order.

    ``u_e = mean_b |sum_t <dl_b / dy_t, g_te f_te>|``, with the loss l of sample b, the output y of
    the mixture for token t, the gate g and the output f of expert e. It is the change of the loss
    per change of the scale of the expert's output, and is computed as ``|<W_e, dl_b / dW_e>|`` of
    the kernel ``down``.

    Args:
      config: config of a decoder with experts.
      params: parameters of the model.
      tokens: int [B, T].

    Returns:
      The utilities [layers, experts], for `jaxgrow.operators.expert_copies`.
    """
    own: dict[str, float] = {"balance": 0.0, "z_loss": 0.0}  # losses of the router
    config = replace(config, **own)
    blocks = params["blocks"]
    mlp = blocks["mlp"]

    def loss(down_LEFD: jax.Array, row_T: jax.Array) -> jax.Array:
        new = {**blocks, "mlp": {**mlp, "down": {**mlp["down"], "kernel": down_LEFD}}}
        inputs = {"params": {**params, "blocks": new}}
        return config.module.apply(inputs, row_T[None, :-1], targets=row_T[None, 1:])[0]

    down_LEFD = mlp["down"]["kernel"]

    return jax.lax.map(
        lambda row_T: jnp.abs((jax.grad(loss)(down_LEFD, row_T) * down_LEFD).sum((-2, -1))), tokens
    ).mean(0)


@runtime_checkable
class Routed(Protocol):
    """A module that sends each token to a few experts."""

    def contributions(self, x_BTD: jax.Array) -> jax.Array:
        """Return the gate of each expert times the norm of its output for each token [B, T, E].

        It is 0 for experts that are not chosen.
        """
        ...


class _Activations:
    """The sizes of the activations of the block that is traced, by axis."""

    def __init__(self, experts: Literal["reap", "frequency"]):
        self.experts = experts
        # The number of nested `apply` calls: the model is the first one, and a block in it is the
        # second.
        self.depth = 0
        self.found: dict[str, list[jax.Array]] = defaultdict(list)

    def intercept(
        self,
        call: Callable[..., Tree],
        args: tuple[jax.Array, ...],
        kwargs: dict[str, object],
        context: InterceptorContext,
    ) -> Tree:
        """Call a method of a module, and keep its activations if it belongs to a block."""
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        module = context.module
        applied = not context.module.path
        if applied and self.depth == 1:
            self.found = defaultdict(list)
        self.depth += applied
        try:
            output = call(*args, **kwargs)
        finally:
            self.depth -= applied
        if self.depth == 2:
            self._keep(module, args, output)
        return output

    def _keep(self, module: nn.Module, args: tuple[jax.Array, ...], outputs: jax.Array) -> None:
        """Keep the sizes of a module's inputs or outputs if they are activations of units."""
        if isinstance(module, Linear):
            read = [axis_of(name) for name in module.axes[: module.contract]]
            kinds = [axis_kind(name) for name in read]
            if kinds == ["heads", "head_dim"]:
                self.found[read[0]].append(jnp.linalg.norm(widen_dtype(args[0]), axis=-1))
            elif kinds == ["mlp"]:
                self.found[read[0]].append(jnp.abs(widen_dtype(args[0])))
        elif isinstance(module, Routed):
            self.found[EXPERTS].append(module.contributions(args[0]))
        elif isinstance(module, LayerNorm | RMSNorm) and axis_kind(axis_of(module.axis)) == "embed":
            self.found[axis_of(module.axis)].append(jnp.abs(widen_dtype(outputs)))

    def means(self, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        """Return the means of the block that has just been traced, as `run_stack` calls it."""
        means = {}
        for name, parts in self.found.items():
            each = [part.mean(tuple(range(part.ndim - 1))) for part in parts]
            means[name] = jnp.stack(each).mean(0)
        for part in self.found.get(EXPERTS, ()):
            used = part > 0
            of_users = part.sum((0, 1)) / jnp.maximum(used.sum((0, 1)), 1)
            by_reap = self.experts == "reap"
            means[EXPERTS] = of_users if by_reap else used.mean((0, 1), dtype=part.dtype)
        return means
