"""What does each leaf of an optimizer state hold? A trial on a small problem determines it.

The names of leaves do not determine it. ``mu`` is a mean of gradients in Adam and a mean of
normalized gradients in ADOPT, and the values that ``optax.trace`` accumulates depend on the
transformations before it. Therefore the optimizer takes a few steps with parameters of two units
per axis. It repeats these steps with scaled gradients and with scaled parameters. The content of a
leaf follows from the factor by which this multiplies the changes of the leaf. The trial has all
layers of the model, because an optimizer may have a mask or labels for each of them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
from jax.tree_util import PyTreeDef

from jaxgrow.axes.names import LAYERS, Axes, Names, Params, Tree, by_path, is_names, state_owners
from jaxgrow.axes.stacking import stack_layers, unstack_layers

# 1 and 2: the first or second power of the gradients of the same entry.
# own: another function of these gradients, such as their signs.
# parameters: the leaf is initialized as a copy of the parameters.
# unchanged: the leaf does not depend on gradients.
# mixed: the leaf depends on gradients and on parameters.
# other: the leaf depends on gradients of other entries.
Kind: TypeAlias = Literal[1, 2, "own", "parameters", "unchanged", "mixed", "other"]

# The largest size of an axis in the trial, except the number of separate layers.
UNITS = 2
# A trial takes at least STEPS steps, and at most MOST until every leaf has changed that a step
# computes. Some leaves change only at intervals of several steps.
STEPS = 4
MOST = 64
# Magnitudes of the gradients. Clipping does not change small gradients. Large gradients outweigh
# the small numbers with which some states are initialized.
MAGNITUDES = (1.0, 1e-3)
# Arguments of an update besides gradients, state and parameters. The trial uses the first
# combination that the optimizer accepts.
EXTRA = (("axes", "value", "grad"), ("axes",), ())
# Gradients are scaled by 2, so their powers 0, 1 and 2 are scaled by 1, 2 and 4. The tolerance
# allows for the epsilon of the optimizer.
TOLERANCE = 0.05

# JAX does not annotate this function.
_jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def kinds(
    tx: optax.GradientTransformation, params: Params, axes: Axes, layers: str | None = None
) -> dict[str, Kind]:
    """Return the kind of value that each leaf of the states of ``tx`` holds, by its path.

    Args:
      tx: the optimizer.
      params: a pytree of arrays, or of objects with a shape.
      axes: their axis names.
      layers: path pattern of the layers that ``params`` and ``axes`` have stacked, as in
        `jaxgrow.stack_layers`.

    Raises:
      ValueError: the trial cannot run the optimizer, or a parameter is a PRNG key.
    """
    of: dict[str, Names] = by_path(axes, is_leaf=is_names)
    shapes: list[tuple[tuple[int, ...], str]] = []
    number: int | None = None
    for leaf, x in by_path(params).items():
        full: tuple[int, ...] = jnp.shape(x)
        shape = [min(n, UNITS) for n in full]
        if layers and LAYERS in of[leaf]:
            dim = of[leaf].index(LAYERS)
            number = shape[dim] = full[dim]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{leaf}: has dtype {x.dtype}, but the trial of the optimizer needs numbers. Leave "
                "the PRNG key out of the parameters, or use policy 'drop'."
            )
        shapes.append((tuple(shape), np.dtype(x.dtype).name))
    names, names_tree = jax.tree.flatten(axes, is_leaf=is_names)
    tree = jax.tree.structure(params)
    return _kinds(tx, tree, tuple(shapes), names_tree, tuple(names), layers, number)


@cache  # a run may grow several times
def _kinds(
    tx: optax.GradientTransformation,
    tree: PyTreeDef,
    shapes: tuple[tuple[tuple[int, ...], str], ...],
    names_tree: PyTreeDef,
    names: tuple[Names, ...],
    layers: str | None,
    number: int | None,
) -> dict[str, Kind]:
    rng = np.random.default_rng(0)

    def sampled(draw: Callable[[tuple[int, ...]], Any]) -> Tree:
        made = jax.tree.unflatten(tree, [np.asarray(draw(shape), dtype) for shape, dtype in shapes])
        return jax.tree.map(jnp.asarray, unstack_layers(made, layers) if layers else made)

    axes = jax.tree.unflatten(names_tree, names)
    axes = unstack_layers(axes, layers, number) if layers else axes
    with jax.ensure_compile_time_eval():
        params = sampled(rng.standard_normal)
        # They differ along each axis of a leaf.
        factors = sampled(partial(np.resize, [2.0, 1.0, 1.0]))
        gradients = [sampled(rng.standard_normal) for _ in range(MOST)]
        trials = _tried(_Problem(tx, params, axes, gradients, factors, layers))
    found: dict[str, Kind] = {}
    for leaf in trials[0].leaves:
        kind = _either([trial.kind(leaf) for trial in trials])
        # The step sizes of Rprop, for example, depend on the signs of the gradients alone.
        invariant = kind == "unchanged" and any(trial.moves(leaf) for trial in trials)
        found[leaf] = "own" if invariant else kind
    return found


class _Problem(NamedTuple):
    """A small problem on which the optimizer is tried.

    Args:
      tx: the optimizer.
      params: the initial parameters.
      axes: their axis names.
      gradients: the gradients of each step.
      factors: factors of the gradients, which differ within a leaf.
      layers: path pattern of the layers, if results are compared with stacked layers.
    """

    tx: optax.GradientTransformation
    params: Params
    axes: Axes
    gradients: list[Params]
    factors: Params
    layers: str | None


def _tried(problem: _Problem) -> "list[_Trial]":
    """Run one trial per magnitude, with the first extra arguments that the optimizer accepts."""
    failed: list[Exception] = []
    for extra in EXTRA:
        try:
            init = _jit(problem.tx.init)
            step = _jit(partial(_step, problem, extra))
            return [_Trial(problem, init, step, size) for size in MAGNITUDES]
        except Exception as error:  # an optimizer may raise any exception
            failed.append(error)
    raise ValueError(
        "to grow an optimizer state, a trial of the optimizer determines what the state holds. It "
        f"failed with {type(failed[0]).__name__}: {failed[0]}. Use policy 'drop'."
    ) from failed[0]


def _either(found: list[Kind]) -> Kind:
    """Combine the kinds of a leaf that were found with gradients of different magnitudes.

    Large gradients may be clipped, and small ones may be negligible.
    """
    order: tuple[Kind, ...] = ("mixed", "parameters", 1, 2, "own", "other", "unchanged")
    return next(kind for kind in order if kind in found)


class _Trial:
    """A few steps of three runs that differ in their gradients and parameters.

    The first run is the reference. The second run multiplies the gradients by ``factors``. The
    third run starts from parameters that are ten times as large.
    """

    def __init__(self, problem: _Problem, init: Any, step: Any, size: float):
        params = problem.params
        factors = problem.factors
        layers = problem.layers

        def begin(params: Params) -> tuple[Params, optax.OptState]:
            return params, init(params)

        ones = jax.tree.map(jnp.ones_like, factors)
        tenfold = jax.tree.map(_tenfold, params)
        runs = [begin(params), begin(params), begin(tenfold)]
        scales = [ones, factors, ones]
        self.params, self.factors = (_leaves(x, layers) for x in (params, factors))
        self.first = [_leaves(state, layers) for _, state in runs]
        self.owners = state_owners(
            stack_layers(runs[0][1], layers) if layers else runs[0][1], self.params
        )
        self.after: list[list[dict[str, np.ndarray]]] = []
        moving = _leaves(_moving(step.trace(*runs[0], problem.gradients[0], ones, size)), layers)
        for t, g in enumerate(problem.gradients):
            runs = [step(*run, g, scale, size) for run, scale in zip(runs, scales, strict=True)]
            self.after.append([_leaves(state, layers) for _, state in runs])
            waiting = [leaf for leaf in self.leaves if moving[leaf].any()]
            if t + 1 >= STEPS and all(map(self._changed, waiting)):
                break

    @property
    def leaves(self) -> list[str]:
        return list(self.first[0])

    def _changed(self, leaf: str) -> bool:
        return any((plain[leaf] != self.first[0][leaf]).any() for plain, *_ in self.after)

    def moves(self, leaf: str) -> bool:
        """Whether a leaf with one entry for each entry of a parameter has changed."""
        own = self.owners.get(leaf)
        if own is None or self.first[0][leaf].shape != self.params[own].shape:
            return False
        return self._changed(leaf)

    def kind(self, leaf: str) -> Kind:
        begun = self.first[0][leaf]
        own = self.owners.get(leaf)
        if own is not None and np.array_equal(begun, self.params[own]):
            return "parameters"
        if not all(np.array_equal(plain[leaf], tenfold[leaf]) for plain, _, tenfold in self.after):
            return "mixed"
        if all(np.array_equal(plain[leaf], scaled[leaf]) for plain, scaled, _ in self.after):
            return "unchanged"
        if own is None or begun.shape != self.params[own].shape:
            return "other"
        factors = self.factors[own]
        if self._scales(leaf, factors, factors > 0):
            return 1
        if self._scales(leaf, factors**2, factors > 0):
            return 2
        return "own" if self._scales(leaf, factors, factors == 1) else "other"

    def _scales(self, leaf: str, by: np.ndarray, where: np.ndarray) -> bool:
        """Whether the changes of the entries ``where`` are multiplied by ``by``, in all steps."""
        begun = self.first[0][leaf][where]
        for plain, scaled, _ in self.after:
            expected = by[where] * (plain[leaf][where] - begun)
            found = scaled[leaf][where] - begun
            if abs(found - expected).max(initial=0) > TOLERANCE * abs(expected).max(initial=0):
                return False
        return True


def _step(
    problem: _Problem,
    extra: tuple[str, ...],
    params: Params,
    state: optax.OptState,
    gradients: Params,
    factors: Params,
    size: jax.Array,
) -> tuple[Params, optax.OptState]:
    """Take one step with the gradients multiplied by ``size`` and by ``factors``."""
    tx = optax.with_extra_args_support(problem.tx)

    def scaled(g: jax.Array, f: jax.Array) -> jax.Array:
        return (size * g * f).astype(g.dtype)

    g = jax.tree.map(scaled, gradients, factors)
    more = {"axes": problem.axes, "value": jnp.float32(1), "grad": g}
    updates, state = tx.update(g, state, params, **{name: more[name] for name in extra})
    return optax.apply_updates(params, updates), state


def _moving(step: jax.stages.Traced) -> optax.OptState:
    """Return a state of truth values: False for the leaves that a step returns unchanged."""
    program = step.jaxpr.jaxpr
    # The inputs and the outputs begin with the parameters and the state.
    into = program.invars
    out = program.outvars
    moving = [x is not y for x, y in zip(into, out, strict=False)]
    _, state = jax.tree.unflatten(jax.tree.structure(step.out_info), moving)

    def full(leaf: jax.ShapeDtypeStruct, moves: bool) -> jax.Array:
        return jnp.full(leaf.shape, moves)

    return jax.tree.map(full, step.out_info[1], state)


def _tenfold(p: jax.Array) -> jax.Array:
    return (10 * p).astype(p.dtype)


def _leaves(tree: Tree, layers: str | None) -> dict[str, np.ndarray]:
    """Return the leaves by their paths, as numbers that can be compared."""

    def numbers(x: Any) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x, None if jnp.issubdtype(x.dtype, jnp.integer) else np.float64)

    tree = stack_layers(tree, layers) if layers else tree
    return {leaf: numbers(jnp.asarray(x)) for leaf, x in by_path(tree).items()}
