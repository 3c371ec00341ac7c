"""Optimizer state across a growth.

A state leaf belongs to the parameter whose path ends its own and whose shape it has. What it holds
(gradients, their squares, parameters) is measured, by trying the optimizer on a small problem.
Counters pass through. A leaf for which no rule is known is an error that names it.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgrow.axes.names import Axes, Params, Tree, is_names, owner, path
from jaxgrow.axes.stacking import stack_layers, unstack_layers
from jaxgrow.growth import maps
from jaxgrow.growth._trial import Kind, kinds
from jaxgrow.growth.apply import grow, grow_leaf
from jaxgrow.growth.maps import Growth, dual

Policy: TypeAlias = Literal["drop", "copy", "exact", "asymmetric"]


def grow_optimizer(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    growth: Growth,
    params: Params,
    axes: Axes,
    policy: Policy,
    layers: str | None = None,
) -> optax.OptState:
    """The optimizer state of ``grow(growth, params, axes)``, from the state of ``params``.

    ========== ================================================================ ==========================================
    policy     first moment m, second moment v                                  source
    ========== ================================================================ ==========================================
    drop       a fresh ``tx.init``, its step count too                          Zou et al. 2024, LiGO, G_stack
    copy       like the units they belong to, unscaled                          StackBERT's option
    exact      m' = D* m, sqrt(v') = D* sqrt(v), with D* = grow(dual(g), .)     Staged Training (Shen et al. 2022), ours
    asymmetric the first copy of a unit keeps m and v, its twins get zero       SPARKLING (2026)
    ========== ================================================================ ==========================================

    State leaves that begin as a copy of the parameters grow as these do, under every policy: the
    ``z`` of `optax.contrib.schedule_free`, initial parameters. Other leaves are treated by what a
    trial of ``tx`` on two units an axis finds in them, whatever their names: ``exact`` needs the
    first or second power of each entry's own gradients.

    ``exact`` is what training the grown model would have accumulated, where gradients grow by the
    `dual`. Coalescing sums over twins: exact for ``m`` on the range of the de-coalescing map; for
    ``v`` if twins had equal gradients, else an upper bound. ``asymmetric`` restarts single entries
    under one step count: chain `rebias` after Adam, or entries that restart late move up to 6.6
    times too far; without it this policy is refused.

    Args:
      tx: the optimizer.
      state: its state for ``params``, of any optax optimizer.
      growth: as of `jaxgrow.grow`.
      params: the parameters before the growth.
      axes: their axis names.
      policy: one of the table above.
      layers: where the layers are, as of `jaxgrow.stack_layers`, if the state, ``params`` and
        ``axes`` were stacked by it: the optimizer is tried on layers that are apart, as it knows
        them.

    Returns:
      A state of the same structure, with leaves of the grown shapes.

    Raises:
      ValueError: a leaf for which the policy has no rule, an optimizer that the trial cannot run, a
        state of another optimizer; ``asymmetric`` without `rebias`, or when the model shrinks.

    Example:
      >>> params, axes, tx = {"b": jnp.ones(2)}, {"b": ("mlp",)}, optax.adam(1e-3)
      >>> grown = grow_optimizer(tx, tx.init(params), {"mlp": maps.tile(2, times=2)}, params, axes, "exact")
      >>> grown[0].mu["b"].shape
      (4,)

    References:
      Shen et al.,
      `Staged Training for Transformer Language Models <https://arxiv.org/abs/2203.06211>`_, ICML
      2022

      `SPARKLING <https://arxiv.org/abs/2602.02472>`_, 2026
    """
    if policy == "drop":
        return _fresh(tx, grow(growth, params, axes), layers)
    if jax.tree.structure(params) == jax.tree.structure(
        0
    ):  # a bare array has no path to find its moments by
        leaves, alone = jax.tree.flatten(state)
        inside = jax.tree.unflatten(
            jax.tree.structure(jax.eval_shape(tx.init, {"": params})), leaves
        )
        grown = grow_optimizer(tx, inside, growth, {"": params}, {"": axes}, policy)
        return jax.tree.unflatten(alone, jax.tree.leaves(grown))
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    shapes = {path(p): jnp.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}
    clocks = [s for s in jax.tree.leaves(state, is_leaf=_is_clock) if _is_clock(s)]
    if policy == "asymmetric" and not clocks:
        raise ValueError(
            "policy 'asymmetric' restarts single entries: chain jaxgrow.growth.moments.rebias(b1, b2) after Adam"
        )
    holds = kinds(tx, params, axes, layers)

    def leaf(key_path, x):
        name = path(key_path)
        mine = owner(name, shapes)
        if mine is None:
            return _of_no_parameter(name, x, holds)
        on, terms = names[mine], maps.terms(growth, mine, names[mine])
        alike = (
            maps.first_copies(terms, "policy 'asymmetric'")
            if policy == "asymmetric"
            else maps.copying(terms)
        )
        if _field(name, mine) == "born":
            return _grown_clock(x, clocks[0], alike, on, shapes[mine], policy)
        if jnp.shape(x) != shapes[mine]:
            return _of_another_shape(name, x, shapes[mine], holds)
        kind = _known(name, holds)
        if kind == "parameters":
            return grow_leaf(terms, on, x)
        if kind in ("mixed", "other"):
            on_what = (
                "the parameters, and on more than these"
                if kind == "mixed"
                else "gradients of other entries"
            )
            raise ValueError(
                f"optimizer state {name}: each entry depends on {on_what}; use policy 'drop'"
            )
        if policy != "exact":
            return grow_leaf(alike, on, x)
        if kind not in (1, 2):
            raise ValueError(
                f"optimizer state {name}: holds neither each entry's gradients nor their squares; use policy 'copy' or 'drop'"
            )
        back, xp = [dual(term) for term in terms], (jnp if isinstance(x, jax.Array) else np)
        return grow_leaf(back, on, x) if kind == 1 else xp.square(grow_leaf(back, on, xp.sqrt(x)))

    return jax.tree_util.tree_map_with_path(leaf, state)


def _fresh(tx: optax.GradientTransformation, params: Params, layers: str | None) -> optax.OptState:
    return (
        stack_layers(tx.init(unstack_layers(params, layers)), layers) if layers else tx.init(params)
    )


def _field(name: str, parameter: str) -> str:
    return name.removesuffix("/" + parameter).rsplit("/", 1)[-1]


def _known(name: str, holds: dict[str, Kind]) -> Kind:
    if name not in holds:
        raise ValueError(
            f"optimizer state {name}: the optimizer makes no such leaf for these parameters. Pass the optimizer of the state, "
            "and, where layers were stacked by stack_layers, their place as layers"
        )
    return holds[name]


def _of_no_parameter(name: str, x: Any, holds: dict[str, Kind]) -> Any:
    """A counter; but not a number that is measured from gradients or parameters of all entries."""
    if _known(name, holds) != "unchanged":
        raise ValueError(
            f"optimizer state {name}: belongs to no parameter, and depends on all gradients or parameters; use policy 'drop'"
        )
    return x


def _of_another_shape(name: str, x: Any, shape: tuple[int, ...], holds: dict[str, Kind]) -> Any:
    """A number for each parameter, which no gradient changes."""
    if jnp.shape(x) == () and _known(name, holds) == "unchanged":
        return x
    raise ValueError(
        f"optimizer state {name}: shape {jnp.shape(x)} is not its parameter's {shape}; use policy 'drop'"
    )


def _grown_clock(
    x: Any, clock: "RebiasState", alike: Any, on: Any, shape: tuple[int, ...], policy: Policy
) -> Any:
    """When each entry began: for `rebias`."""
    if policy != "asymmetric":
        return grow_leaf(alike, on, x) if jnp.shape(x) == shape else x
    xp: Any = jnp if isinstance(x, jax.Array) else np
    kept = grow_leaf(alike, on, xp.ones(shape, bool))
    return xp.where(kept, grow_leaf(alike, on, xp.broadcast_to(x, shape)), clock.count)


class RebiasState(NamedTuple):
    """What `rebias` counts."""

    count: chex.Array  # type: ignore[assignment]  # int32 [], steps taken
    born: Tree  # int32, a scalar a parameter or its shape: the step count at which a moment began


def rebias(b1: float, b2: float) -> optax.GradientTransformation:
    """Corrects Adam's bias for entries whose moments began later than its step count; chain it after ``scale_by_adam``.

    Adam divides by ``1 - b^count`` with one count for all. An entry that restarted at zero ``a``
    steps ago needs ``1 - b^a``: the update is multiplied by
    ``(1 - b1^count) / (1 - b1^a) * sqrt((1 - b2^a) / (1 - b2^count))``, which is exactly 1 for
    entries that never restarted. Without it, at b2 = 0.999, such an entry moves 3.2 times too far
    at once and 6.6 times after 12 steps. Exact up to Adam's eps.

    Args:
      b1: Adam's.
      b2: Adam's.

    Returns:
      The transformation, whose state counts for each parameter, or each entry, when it began.

    Example:
      >>> tx = optax.chain(optax.scale_by_adam(0.9, 0.999), rebias(0.9, 0.999), optax.scale(-1e-3))
      >>> int(clock(tx.init({"b": jnp.ones(2)})).count)
      0
    """

    def init(params):
        return RebiasState(
            jnp.zeros([], jnp.int32), jax.tree.map(lambda _: jnp.zeros([], jnp.int32), params)
        )

    def update(updates, state, params=None):
        del params
        count = state.count + 1

        def one(u, born):
            age = count - born
            first = (1 - b1**count) / (1 - b1**age)
            second = (1 - b2**age) / (1 - b2**count)
            return u * (first * jnp.sqrt(second)).astype(u.dtype)

        return jax.tree.map(one, updates, state.born), RebiasState(count, state.born)

    return optax.GradientTransformation(init, update)


def clock(state: optax.OptState) -> RebiasState:
    """The state of `rebias` in an optimizer state.

    Raises:
      ValueError: there is none.
    """
    found = [s for s in jax.tree.leaves(state, is_leaf=_is_clock) if _is_clock(s)]
    if not found:
        raise ValueError(
            "this optimizer has no clock: chain jaxgrow.growth.moments.rebias(b1, b2) after Adam"
        )
    return found[0]


def _is_clock(x) -> bool:
    return isinstance(x, RebiasState)
