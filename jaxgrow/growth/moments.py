"""How does the optimizer state grow together with the model?

A leaf of the state belongs to a parameter if its path ends with the path of the parameter
(`jaxgrow.axes.state_owners`) and both have the same shape: ``0/mu/mlp/up`` belongs to ``mlp/up``.
The leaf grows by the maps of this parameter, in a way that depends on its content: gradients,
squared gradients, or parameters. The content is not guessed from names. It is determined by running
the optimizer on a small problem. Counters are kept. If there is no rule for a leaf, an error names
the leaf.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

from jaxgrow.axes.names import (
    Axes,
    KeyPath,
    Names,
    Params,
    Tree,
    by_path,
    is_names,
    path,
    sizes,
    state_owners,
)
from jaxgrow.axes.stacking import stack_layers, unstack_layers
from jaxgrow.growth import maps
from jaxgrow.growth._trial import MOST, Kind, kinds
from jaxgrow.growth.apply import check, grow, grow_leaf
from jaxgrow.growth.maps import Growth, dual
from jaxgrow.growth.matrices import Array
from jaxgrow.typed import check_choice

Policy: TypeAlias = Literal["drop", "copy", "exact", "asymmetric"]
# JAX does not annotate this function.
_eval_shape: Callable[..., Any] = jax.eval_shape  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def grow_optimizer(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    growth: Growth,
    params: Params,
    axes: Axes,
    policy: Policy,
    layers: str | None = None,
) -> optax.OptState:
    """Grow an optimizer state together with its parameters.

    The state of ``params`` becomes a state of ``grow(growth, params, axes)``, by one of four
    policies:

    ========== ============================================= ======================================
    policy     first moment m and second moment v            source
    ========== ============================================= ======================================
    drop       fresh ``tx.init``, also a fresh step count    Zou et al. 2024, LiGO, G_stack
    copy       copied like the units, without scaling        an option of StackBERT
    exact      m' = D* m, sqrt(v') = D* sqrt(v),             Staged Training (Shen et al. 2022) for
               with D* = grow(dual(g), .)                    the idea, extended here
    asymmetric the first copy of a unit keeps m and v,       SPARKLING (2026)
               the other copies get zero
    ========== ============================================= ======================================

    Where a map has negative weights, ``copy`` uses their absolute values for ``v``, which therefore
    never becomes negative.

    State leaves that are initialized as a copy of the parameters grow like the parameters, under
    every policy. Examples are ``z`` of `optax.contrib.schedule_free`, and a stored copy of the
    initial parameters. How other leaves grow depends on their content, not on their names. A trial
    run of ``tx`` with two units per axis determines the content. ``exact`` requires leaves that
    hold the first or second power of the gradients of each entry.

    ``exact`` gives the moments that training the grown model would have accumulated, if its
    gradients grow by the `dual`. When a model is coalesced, the moments of the copies are summed.
    For ``m``, this is exact if the large model is in the range of the de-coalescing map, that is,
    if the merged units are copies. For ``v``, it is exact if the copies had equal gradients;
    otherwise it is an upper bound.

    ``asymmetric`` resets some entries to zero while the step count continues. Without a
    correction, entries that restart late in training would move up to 6.6 times too far. Therefore
    the optimizer must contain `rebias` after Adam; otherwise this policy raises an error.

    Args:
      tx: the optimizer.
      state: its state for ``params``, of any optax optimizer.
      growth: as in `jaxgrow.grow`.
      params: the parameters before the growth.
      axes: their axis names.
      policy: how the state grows, one of the table above.
      layers: path pattern of the layers, if `jaxgrow.stack_layers` stacked the layers of the state,
        ``params`` and ``axes`` with this pattern. The trial then runs on separate layers, as the
        optimizer expects them.

    Returns:
      A state of the same structure, with leaves of the grown shapes.

    Raises:
      ValueError: the policy does not exist or does not support a leaf, the growth does not fit the
        parameters (`jaxgrow.grow`), the trial cannot run the optimizer, or the state belongs to
        another optimizer or to parameters of other sizes; with ``asymmetric`` also if `rebias` is
        missing or the model shrinks.

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
    check_choice("policy", policy, Policy)
    _check_before(growth, params, axes)
    if policy == "drop":
        grown = grow(growth, params, axes)
        return (
            stack_layers(tx.init(unstack_layers(grown, layers)), layers)
            if layers
            else tx.init(grown)
        )
    # Moments are found by the path of their parameter. A single array has an empty path, so it is
    # put into a dict.
    if jax.tree.structure(params) == jax.tree.structure(0):
        leaves, alone = jax.tree.flatten(state)
        inside = jax.tree.unflatten(jax.tree.structure(_eval_shape(tx.init, {"": params})), leaves)
        grown = grow_optimizer(tx, inside, growth, {"": params}, {"": axes}, policy)
        return jax.tree.unflatten(alone, jax.tree.leaves(grown))
    clocks = _clocks(state)
    if policy == "asymmetric" and not clocks:
        raise ValueError(
            "policy 'asymmetric' restarts single entries, but the optimizer does not correct their "
            "bias. Chain jaxgrow.growth.moments.rebias(b1, b2) after Adam."
        )
    shapes = {leaf: jnp.shape(x) for leaf, x in by_path(params).items()}
    grower = _Grower(
        growth,
        policy,
        names=by_path(axes, is_leaf=is_names),
        shapes=shapes,
        owners=state_owners(state, shapes),
        holds=kinds(tx, params, axes, layers),
        clock=clocks[0] if clocks else None,
    )
    return jax.tree_util.tree_map_with_path(grower.leaf, state)


@dataclass(frozen=True)
class _Grower:
    """What is needed to grow each leaf of an optimizer state.

    Args:
      growth: the growth of the parameters.
      policy: how the leaves grow.
      names: the axis names of the parameters, by path.
      shapes: the shapes of the parameters, by path.
      owners: the path of the parameter of each leaf, by path.
      holds: the kind of value that each leaf of the state holds, by path.
      clock: the state of `rebias`, if the optimizer contains it.
    """

    growth: Growth
    policy: Policy
    names: Mapping[str, Names]
    shapes: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, str]
    holds: Mapping[str, Kind]
    clock: "RebiasState | None"

    def leaf(self, key_path: KeyPath, x: Any) -> Any:
        name = path(key_path)
        mine = self.owners.get(name)
        if mine is None:
            return _of_no_parameter(name, x, self.holds)
        on = self.names[mine]
        shape = self.shapes[mine]
        terms = maps.terms(self.growth, mine, on)
        alike = (
            maps.first_copies(terms, "policy 'asymmetric'")
            if self.policy == "asymmetric"
            else maps.copying(terms)
        )
        field = name.removesuffix("/" + mine).rsplit("/", 1)[-1]
        if self.clock is not None and field == "start_count":
            if self.policy != "asymmetric":
                alike = maps.copying(terms, squares=True)  # positive weights
            return _grown_clock(x, self.clock, alike, on, shape, self.policy)
        if jnp.shape(x) != shape:
            _check_not_grown(name, x, shape, self.growth, on)
            return _of_another_shape(name, x, shape, self.holds)
        kind = _known(name, self.holds)
        if kind == "parameters":
            return grow_leaf(terms, on, x)
        _check_separate(name, kind)
        if self.policy == "copy":
            alike = maps.copying(terms, squares=kind == 2)
        if self.policy != "exact":
            return grow_leaf(alike, on, x)
        return _grown_by_dual(name, x, kind, [dual(term) for term in terms], on)


def _check_before(growth: Growth, params: Params, axes: Axes) -> None:
    """Check that the growth fits the parameters, which are those from before the growth."""
    try:
        check(growth, params, axes)
    except ValueError as error:
        if maps.new_sizes(growth).items() <= sizes(params, axes).items():
            raise ValueError(
                f"{error}\nThe parameters have the sizes of the grown model. Pass the parameters "
                "from before the growth."
            ) from error
        raise


def _check_not_grown(name: str, x: Any, shape: tuple[int, ...], growth: Growth, on: Names) -> None:
    """Check that a leaf of the state does not have the shape of its parameter after the growth."""
    grown = maps.new_shape(growth, on, shape)
    if jnp.shape(x) == grown:
        raise ValueError(
            f"optimizer state {name}: has the shape {grown} of the grown parameter, but the "
            f"parameter has shape {shape}. Pass the state and the parameters from before the "
            "growth."
        )


def _check_separate(name: str, kind: Kind) -> None:
    """Check that each entry depends only on the gradients of the same entry."""
    if kind in ("mixed", "other"):
        on_what = (
            "the parameters and on other values"
            if kind == "mixed"
            else "gradients of other entries"
        )
        raise ValueError(
            f"optimizer state {name}: each entry depends on {on_what}. Use policy 'drop'."
        )


def _grown_by_dual(name: str, x: Array, kind: Kind, back: Sequence[maps.Term], on: Names) -> Array:
    """Grow a first or second moment by the `dual` of the growth."""
    if kind == "unchanged":
        raise ValueError(
            f"optimizer state {name}: did not change in the trial of the optimizer, which takes at "
            f"most {MOST} steps. If the optimizer accumulates more micro-batches than that "
            "(optax.MultiSteps), pass one that accumulates two: its state has the same structure. "
            "If the gradients of this parameter are always zero, use policy 'copy' or 'drop'."
        )
    if kind not in (1, 2):
        raise ValueError(
            f"optimizer state {name}: holds neither the gradients of each entry nor their "
            "squares. Use policy 'copy' or 'drop'."
        )
    if kind == 1:
        return grow_leaf(back, on, x)
    xp: Any = jnp if isinstance(x, jax.Array) else np
    return xp.square(grow_leaf(back, on, xp.sqrt(x)))


def _known(name: str, holds: Mapping[str, Kind]) -> Kind:
    if name not in holds:
        raise ValueError(
            f"optimizer state {name}: the optimizer has no such leaf for these parameters. Pass "
            "the optimizer that the state belongs to and, if stack_layers stacked the layers, "
            "its path pattern as layers."
        )
    return holds[name]


def _of_no_parameter(name: str, x: Any, holds: Mapping[str, Kind]) -> Any:
    """Return a counter unchanged; reject values that depend on all gradients or parameters."""
    if _known(name, holds) != "unchanged":
        raise ValueError(
            f"optimizer state {name}: belongs to no single parameter and depends on all gradients "
            "or parameters. Use policy 'drop'."
        )
    return x


def _of_another_shape(name: str, x: Any, shape: tuple[int, ...], holds: Mapping[str, Kind]) -> Any:
    """Return a per-parameter scalar as it is, if it does not depend on the gradients."""
    if jnp.shape(x) == () and _known(name, holds) == "unchanged":
        return x
    raise ValueError(
        f"optimizer state {name}: has shape {jnp.shape(x)}, but its parameter has shape {shape}. "
        "Use policy 'drop'."
    )


def _grown_clock(
    x: Array,
    clock: "RebiasState",
    alike: Sequence[maps.Term],
    on: Names,
    shape: tuple[int, ...],
    policy: Policy,
) -> Array:
    """Grow the start step of each entry, the state of `rebias`."""
    xp: Any = jnp if isinstance(x, jax.Array) else np
    if policy != "asymmetric":
        if jnp.shape(x) != shape:
            return x
        # Steps are not scaled with the values of their units, so they are averaged.
        total = grow_leaf(alike, on, x.astype(np.float32))
        weight = grow_leaf(alike, on, xp.ones_like(x, np.float32))
        return xp.round(total / xp.where(weight == 0, 1, weight)).astype(x.dtype)
    kept = grow_leaf(alike, on, xp.ones(shape, bool))
    return xp.where(kept, grow_leaf(alike, on, xp.broadcast_to(x, shape)), clock.count)


class RebiasState(NamedTuple):
    """State of `rebias`.

    Args:
      count: number of steps taken, int32 scalar.
      start_count: step count at which the moments of a parameter began, int32: one scalar per parameter,
        or an array of the parameter's shape.
    """

    count: jax.Array  # type: ignore[assignment]
    start_count: Tree


def rebias(b1: float, b2: float) -> optax.GradientTransformation:
    """Correct Adam's bias correction for entries whose moments restarted; chain it after Adam.

    ``scale_by_adam`` divides by ``1 - b^count``, with one step count for all entries. An entry that
    restarted at zero ``a`` steps ago needs ``1 - b^a``. Therefore each update is multiplied by

    ``(1 - b1^count) / (1 - b1^a) * sqrt((1 - b2^a) / (1 - b2^count))``

    which is exactly 1 for entries that never restarted. Without this factor, at b2 = 0.999, a
    restarted entry moves 3.2 times too far in its first step and 6.6 times too far after 12 steps.
    The correction is exact up to Adam's eps.

    Args:
      b1: decay rate of Adam's first moment.
      b2: decay rate of Adam's second moment.

    Returns:
      The transformation. Its state stores for each parameter, or for each entry, the step at which
      the moments began.

    Example:
      >>> tx = optax.chain(optax.scale_by_adam(0.9, 0.999), rebias(0.9, 0.999), optax.scale(-1e-3))
      >>> int(clock(tx.init({"b": jnp.ones(2)})).count)
      0
    """

    def zero(_: Any = None) -> jax.Array:
        return jnp.zeros([], jnp.int32)

    def init(params: Params) -> RebiasState:
        return RebiasState(zero(), jax.tree.map(zero, params))

    def update(updates: Params, state: Any, params: Params = None) -> tuple[Params, RebiasState]:
        del params
        count = state.count + 1

        def one(u: jax.Array, start: jax.Array) -> jax.Array:
            age = count - start
            first = (1 - b1**count) / (1 - b1**age)
            second = (1 - b2**age) / (1 - b2**count)
            return u * (first * jnp.sqrt(second)).astype(u.dtype)

        return jax.tree.map(one, updates, state.start_count), RebiasState(count, state.start_count)

    return optax.GradientTransformation(init, update)


def clock(state: optax.OptState) -> RebiasState:
    """Return the state of `rebias` within an optimizer state.

    Raises:
      ValueError: the optimizer does not contain `rebias`.
    """
    found = _clocks(state)
    if not found:
        raise ValueError(
            "the optimizer state contains no RebiasState: chain jaxgrow.growth.moments.rebias(b1, "
            "b2) after Adam"
        )
    return found[0]


def _clocks(state: optax.OptState) -> list[RebiasState]:
    def is_clock(x: Any) -> bool:
        return isinstance(x, RebiasState)

    return [s for s in jax.tree.leaves(state, is_leaf=is_clock) if is_clock(s)]
