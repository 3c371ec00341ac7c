"""Optimizer state across a growth.

A state leaf belongs to the parameter whose path ends its own and whose shape it has; this finds the moments in any optax
state. Counters pass through.
"""

from typing import Literal, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgrow import maps
from jaxgrow._grow import grow, grow_leaf
from jaxgrow.axes import Axes, Params, Tree, is_names, owner, path
from jaxgrow.maps import Growth, dual

Policy: TypeAlias = Literal["drop", "copy", "exact", "asymmetric"]

# What a param-shaped leaf of an optax state measures, by the name of its field: the power of the gradient in it.
_POWER = {"mu": 1, "trace": 1, "acc_grads": 1, "nu": 2, "nu_max": 2, "sum_of_squares": 2}


def grow_optimizer(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    growth: Growth,
    params: Params,
    axes: Axes,
    policy: Policy,
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

    ``exact`` is what training the grown model would have accumulated, where gradients grow by the `dual`. Coalescing sums
    over twins: exact for ``m`` on the range of the de-coalescing map; for ``v`` if twins had equal gradients, else an upper
    bound. ``asymmetric`` restarts single entries under one step count: chain `rebias` after Adam, or entries that restart
    late move up to 6.6 times too far; without it this policy is refused.

    Args:
      tx: the optimizer; only ``drop`` asks it for a state.
      state: its state for ``params``, of any optax optimizer.
      growth: as of `jaxgrow.grow`.
      params: the parameters before the growth.
      axes: their axis names.
      policy: one of the table above.

    Returns:
      A state of the same structure, with leaves of the grown shapes.

    Raises:
      ValueError: a moment of unknown kind, ``asymmetric`` without `rebias`, or when the model shrinks.

    Example:
      >>> params, axes, tx = {"b": jnp.ones(2)}, {"b": ("mlp",)}, optax.adam(1e-3)
      >>> grown = grow_optimizer(tx, tx.init(params), {"mlp": maps.tile(2, times=2)}, params, axes, "exact")
      >>> grown[0].mu["b"].shape
      (4,)

    References:
      Shen et al., `Staged Training for Transformer Language Models <https://arxiv.org/abs/2203.06211>`_, ICML 2022

      `SPARKLING <https://arxiv.org/abs/2602.02472>`_, 2026
    """
    if policy == "drop":
        return tx.init(grow(growth, params, axes))
    if jax.tree.structure(params) == jax.tree.structure(0):  # a bare array has no path to find its moments by
        leaves, alone = jax.tree.flatten(state)
        inside = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(tx.init, {"": params})), leaves)
        grown = grow_optimizer(tx, inside, growth, {"": params}, {"": axes}, policy)
        return jax.tree.unflatten(alone, jax.tree.leaves(grown))
    names = {path(p): n for p, n in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names)}
    shapes = {path(p): jnp.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}
    clocks = [s for s in jax.tree.leaves(state, is_leaf=_is_clock) if _is_clock(s)]
    if policy == "asymmetric" and not clocks:
        raise ValueError("policy 'asymmetric' restarts single entries: chain jaxgrow.moments.rebias(b1, b2) after Adam")

    def leaf(key_path, x):
        name = path(key_path)
        mine = owner(name, shapes)
        if mine is None:
            return x
        xp = np if isinstance(x, np.ndarray | np.generic) else jnp
        field = name.removesuffix("/" + mine).rsplit("/", 1)[-1]
        on = names[mine]
        terms = maps.terms(growth, mine, on)
        alike = maps.first_copies(terms, "policy 'asymmetric'") if policy == "asymmetric" else maps.copying(terms)
        if field == "born":
            if policy == "asymmetric":
                kept = grow_leaf(alike, on, xp.ones(shapes[mine], bool))
                return xp.where(kept, grow_leaf(alike, on, xp.broadcast_to(x, shapes[mine])), clocks[0].count)
            return grow_leaf(alike, on, x) if jnp.shape(x) == shapes[mine] else x
        if jnp.shape(x) != shapes[mine]:
            raise ValueError(
                f"optimizer state {name}: shape {jnp.shape(x)} is not its parameter's {shapes[mine]}; use 'drop'"
            )
        if policy != "exact":
            return grow_leaf(alike, on, x)
        if field not in _POWER:
            raise ValueError(f"optimizer state {name}: {field!r} is none of {', '.join(_POWER)}; use policy 'drop'")
        back = [dual(term) for term in terms]
        if _POWER[field] == 1:
            return grow_leaf(back, on, x)
        return xp.square(grow_leaf(back, on, xp.sqrt(x)))

    return jax.tree_util.tree_map_with_path(leaf, state)


class RebiasState(NamedTuple):
    """What `rebias` counts."""

    count: chex.Array  # type: ignore[assignment]  # int32 [], steps taken
    born: Tree  # int32, a scalar a parameter or its shape: the step count at which a moment began


def rebias(b1: float, b2: float) -> optax.GradientTransformation:
    """Corrects Adam's bias for entries whose moments began later than its step count; chain it after ``scale_by_adam``.

    Adam divides by ``1 - b^count`` with one count for all. An entry that restarted at zero ``a`` steps ago needs ``1 - b^a``:
    the update is multiplied by ``(1 - b1^count) / (1 - b1^a) * sqrt((1 - b2^a) / (1 - b2^count))``, which is exactly 1
    for entries that never restarted. Without it, at b2 = 0.999, such an entry moves 3.2 times too far at once and 6.6
    times after 12 steps. Exact up to Adam's eps.

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
        return RebiasState(jnp.zeros([], jnp.int32), jax.tree.map(lambda _: jnp.zeros([], jnp.int32), params))

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
        raise ValueError("this optimizer has no clock: chain jaxgrow.moments.rebias(b1, b2) after Adam")
    return found[0]


def _is_clock(x) -> bool:
    return isinstance(x, RebiasState)
