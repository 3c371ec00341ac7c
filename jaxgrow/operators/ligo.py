"""LiGO: a growth operator whose maps are learned (Wang et al., ICLR 2023).

The width grows by ``Omega_j = B_out W_j B_in.T``, then the depth by ``W'_i = sum_j w_ij Omega_j``
(Eq. 8). The coefficients ``B`` and ``w`` are a pytree. `learned_growth` converts them to a growth
for `jaxgrow.grow`, which is differentiable in them. They can therefore be learned in about a
hundred steps on the pre-training loss, while the small model is frozen::

    coefficients = init_coefficients(LiGO(), axes, sizes, target, key)
    loss = lambda c, batch: large_loss(grow(learned_growth(c, axes, sizes), small, axes), batch)
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import (
    LAYERS,
    VALUE,
    Axes,
    Names,
    axis_kind,
    axis_of,
    by_path,
    has_mark,
    is_layers,
    is_names,
    layers_of,
    reads_axis,
    role_of,
    sibling_axis,
)
from jaxgrow.growth.maps import AxisMap, Rule, Rules, Term
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    copied_units,
    grown_sizes,
    mark_first_copies,
)
from jaxgrow.typed import check_choices

Coefficients: TypeAlias = dict[str, Any]  # the result of `init_coefficients`
# The maps that act on a leaf: the axes, and the name of the map over them.
Acting: TypeAlias = list[tuple[tuple[str, ...], str]]


@dataclass(frozen=True)
class LiGO:
    """Options of LiGO: how its maps are initialised, and which axes share them.

    In general, the initial growth does not preserve the function, whichever options are chosen.

    =========== ====================================================================================
    depth       row i of w, with a source s(i): stacking ``i mod L``, interleaving ``i L // L'``
    ----------- ------------------------------------------------------------------------------------
    stack       u ~ U(0, noise) except for u[s(i)] = 1, divided by its sum
    interleave  the same, with the other source
    normalised  u ~ U(0, 1), divided by its sum
    ----------- ------------------------------------------------------------------------------------
    width       the rows C of ``B = [I; C]``
    ----------- ------------------------------------------------------------------------------------
    normalised  u ~ U(0, 1), divided by its sum: about the mean of all old units
    selection   u ~ U(0, noise) except for u[random] = 1, divided by its sum: with noise = 0, a
                copy of a random unit
    gaussian    N(0, 1 / new size)
    zero        0, as a control: a saddle point for all maps except the map of ``embed`` under
                LayerNorm
    =========== ====================================================================================

    With ``noise = 0``, stacking and interleaving are bitwise identical to the operators `stack` and
    `interleave` (the latter only for a period of 1, where all layers are of one kind). Zero rows
    are bitwise identical to `zero_pad`. The published code starts with noisy stacking and
    normalised rows, and learns only C. Here all of B is learned, as described in the paper.

    Attributes:
      depth: initialisation of the depth weights w.
      width: initialisation of the new rows C of the width maps.
      noise: upper limit of the random weights of all old units or layers except the source of a
        row; at least 0 and below 1.
      shared: whether all layers share the maps of heads and MLP units. If not, each layer of the
        small model has separate maps.
      tied: whether input axes use the maps of output axes. If not, input axes have separate maps,
        which are initialised to B divided by its column sums.
    """

    depth: Literal["stack", "interleave", "normalised"] = "stack"
    width: Literal["normalised", "selection", "gaussian", "zero"] = "normalised"
    noise: float = 0.03
    shared: bool = True
    tied: bool = True

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "noise": ({"depth": ("stack", "interleave")}, {"width": ("selection",)}),
    }

    def __post_init__(self):
        check_choices(self)
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise must be at least 0 and below 1, but is {self.noise}")


def init_coefficients(
    ligo: LiGO, axes: Axes, sizes: Sizes, target: Sizes, key: jax.Array
) -> Coefficients:
    """Initialise the coefficients of LiGO: a pytree of float32 arrays.

    ``{"depth": {module: w [L', L]}, "width": {map: {"write": B [new, old]}}}``

    Each module has its own depth weights. A module is a subtree of the parameters that contains,
    for example, a kernel and its bias, or a norm (``"blocks/attention/query"``). A leaf next to
    other modules in a subtree is a module itself (``"blocks/mlp_scale"``).

    Width maps are tied as in the paper. There is one map ``embed`` for all axes of the residual
    stream, one map ``mlp`` for MLP units, and the maps ``query``, ``key`` and ``value`` over heads
    times head_dim. The input axes of the attention output also use ``value``. The axis names
    distinguish queries, keys and values: ``head_dim`` is an input axis of keys, and has the suffix
    ``.value`` in values (`jaxgrow.axes`). If maps are not tied, each also has a ``"read"`` matrix.
    If they are not shared, the maps of heads and MLP units have shape [L, new, old]. In a model
    with stages, each stage has separate maps: ``embed.0``, ``query.0``, ``mlp.0``.

    The random numbers of depth weights depend on the axis names of a module, not on its name.
    Modules of one kind therefore have equal initial depth weights.

    GQA is our extension; the paper does not cover it. With GQA, ``key`` and ``value`` are maps over
    kv_heads times head_dim. The attention output reads each value once for every query head that
    shares it, so it uses ``value``, repeated for these query heads. If the number of query heads
    per key/value head changes, such a map does not exist, and the attention output has a separate
    map, ``out``. The identity in B keeps query heads with their key/value heads, as in all
    operators.

    Args:
      ligo: how the maps are initialised and shared.
      axes: the axis names of the small model's parameters.
      sizes: the size of every axis of the small model.
      target: the new sizes of any of ``layers``, ``embed``, ``heads``, ``kv_heads`` and ``mlp``. An
        axis that is not in ``target`` has no map (except for ``heads`` if ``kv_heads`` is given).
        If an axis is given with its old size, it has a map that mixes its units.
      key: random key of the initial coefficients.

    Returns:
      A pytree of arrays: the parameters to learn, and the first argument of `learned_growth`.

    Raises:
      ValueError: a target below the size of the model, an axis that is not in the list above, query
        heads that cannot be divided among the key/value heads, a leaf whose role is unknown, or
        attention whose value projection does not have the suffix ``.value``.

    Example:
      >>> axes, key = {"up": ("layers", "embed.in", "mlp")}, jax.random.key(0)
      >>> start = init_coefficients(LiGO(), axes, {"layers": 1, "embed": 2, "mlp": 3}, {"layers": 2, "mlp": 4}, key)
      >>> start["depth"]["up"].shape, start["width"]["mlp"]["write"].shape
      ((2, 1), (4, 3))

    References:
      Wang et al.,
      `Learning to Grow Pretrained Models for Efficient Transformer Training <https://arxiv.org/abs/2303.00980>`_,
      ICLR 2023
    """
    readers = {name: sibling_axis(name, HEADS) for name in sizes if axis_kind(name) == KV_HEADS}
    for name, heads in readers.items():
        if name in target:
            target = {heads: sizes[heads], **target}
    found = grown_sizes("ligo", (LAYERS, *WIDTHS), sizes, target)
    index = copied_units(
        "ligo", sizes, {axis: found[axis] for axis in found if not is_layers(axis)}
    )
    new_sizes = {**sizes, **target}
    regrouped = any(
        sizes[heads] * new_sizes[name] != new_sizes[heads] * sizes[name]
        for name, heads in readers.items()
    )
    out: Coefficients = {"depth": {}, "width": {}}
    uses = _uses(axes, "out" if regrouped else "value")
    kinds = _module_kinds(axes)
    for names, acting in uses.values():
        for along, name in acting:
            plain = along[0]
            part = "depth" if is_layers(plain) else "width"
            if plain not in found or name in out[part]:
                continue
            if _attention_map(name) == "value" and plain in readers.values():
                continue  # the attention output uses the map that the values define
            old, new = found[plain]
            if part == "depth":
                out["depth"][name] = _depth_weights(ligo, old, new, _folded_key(key, kinds[name]))
                continue
            own = _folded_key(key, name.rpartition("/")[2])
            unit = sizes["head_dim"] if _whole_heads(along) else 1
            rows = _row_positions(index[plain], unit)
            stacked = layers_of(names) if not ligo.shared and axis_kind(plain) != "embed" else None
            copies = sizes[stacked] if stacked else 0
            out["width"][name] = _pair(ligo, old * unit, new * unit, rows, own, copies)
    return out


def _pair(
    ligo: LiGO, old: int, new: int, rows: np.ndarray, key: jax.Array, copies: int
) -> dict[str, jax.Array]:
    """Initialise a write map and, if the maps are not tied, a read map.

    Args:
      ligo: how the maps are initialised.
      old: the number of old units.
      new: the number of new units.
      rows: the row of ``[I; C]`` for each new unit.
      key: random key of the rows C.
      copies: number of layers that have separate maps, or 0 for one map of shape [new, old].
    """

    def draw(key: jax.Array) -> jax.Array:
        return _width_matrix(ligo, old, new, key)[rows]

    write = jax.vmap(draw)(jax.random.split(key, copies)) if copies else draw(key)
    if ligo.tied:
        return {"write": write}
    return {"write": write, "read": write / jnp.maximum(write.sum(-2, keepdims=True), 1e-6)}


def learned_growth(coefficients: Coefficients, axes: Axes, sizes: Sizes) -> Rules:
    """Convert coefficients to a growth for `jaxgrow.grow`.

    Each leaf has one rule. If layers share the maps, the rule has one term. Otherwise it has one
    term ``w_ij B_j W_j A_j.T`` for each layer j of the small model.

    Args:
      coefficients: the coefficients, as returned by `init_coefficients`.
      axes: the axis names of the small model's parameters.
      sizes: the size of every axis of the small model.

    Returns:
      Rules for `jaxgrow.grow`, which is differentiable in the coefficients.

    Example:
      >>> axes, sizes = {"up": ("layers", "embed.in", "mlp")}, {"layers": 1, "embed": 2, "mlp": 3}
      >>> start = init_coefficients(LiGO(), axes, sizes, {"layers": 2, "mlp": 4}, jax.random.key(0))
      >>> sorted(learned_growth(start, axes, sizes).rules[0].terms[0])
      [('layers',), ('mlp',)]
    """
    weights: Mapping[str, jax.Array] = coefficients["depth"]
    width: Mapping[str, Mapping[str, jax.Array]] = coefficients["width"]

    def rule(leaf: str, names: Names, acting: Acting) -> Rule:
        maps: dict[tuple[str, ...], AxisMap[jax.Array]] = {}
        own: dict[tuple[str, ...], Mapping[str, jax.Array]] = {}  # the maps of each layer
        for along, name in acting:
            if is_layers(along[0]):
                if name in weights:
                    maps[along] = AxisMap(weights[name], weights[name])
            elif name in width:
                if width[name]["write"].ndim == 3:
                    own[along] = width[name]
                else:
                    maps[along] = _axis_map(width[name], along, sizes)
        if not own:
            return Rule((maps,), leaf)
        terms: list[Term] = []
        stacked = layers_of(names)
        assert stacked is not None  # only leaves of layers have a map for each layer
        for j in range(sizes[stacked]):
            one = _single_layer(maps.get((stacked,)), j, sizes[stacked])
            term: dict[tuple[str, ...], AxisMap] = {**maps, (stacked,): one}
            for along, matrices in own.items():
                term[along] = _axis_map({k: m[j] for k, m in matrices.items()}, along, sizes)
            terms.append(term)
        return Rule(tuple(terms), leaf)

    uses = _uses(axes, "out" if "out" in map(_attention_map, width) else "value")
    return Rules(tuple(rule(leaf, *use) for leaf, use in uses.items()))


def _modules(axes: Axes) -> dict[str, str]:
    """``{leaf: module that its depth weights belong to}`` for the leaves of layers.

    The module is the subtree that contains the leaf, or the leaf itself if the subtree contains
    several modules.
    """
    folders: dict[str, dict[str, str]] = {}
    for leaf, names in by_path(axes, is_leaf=is_names).items():
        if layers_of(names):
            folders.setdefault(leaf.rpartition("/")[0], {})[leaf] = role_of(leaf, names)
    one = [["kernel"], ["bias", "kernel"], ["norm scale"], ["norm bias", "norm scale"]]
    modules: dict[str, str] = {}
    for folder, inside in folders.items():
        is_module = folder != "" and sorted(inside.values()) in one
        for leaf in inside:
            modules[leaf] = folder if is_module else leaf
    return modules


def _module_kinds(axes: Axes) -> dict[str, str]:
    """``{module: its axis names}``. The axis names identify the kind of a module, without its name."""
    of = _modules(axes)
    found: dict[str, list[str]] = {}
    for leaf, names in by_path(axes, is_leaf=is_names).items():
        if leaf in of:
            found.setdefault(of[leaf], []).append(" ".join(names))
    return {module: ", ".join(sorted(names)) for module, names in found.items()}


def _folded_key(key: jax.Array, kind: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(kind.encode()))


def _uses(axes: Axes, attention: str) -> dict[str, tuple[Names, Acting]]:
    """The axis names of each leaf, and the maps that act on it.

    Heads and MLP units of blocks outside the layers have separate maps.

    Args:
      axes: the axis names of the small model's parameters.
      attention: the name of the map for the input axes of the attention output.

    Raises:
      ValueError: attention whose value projection does not have the suffix ``.value``.
    """
    modules = _modules(axes)
    out: dict[str, tuple[Names, Acting]] = {}
    readers: dict[str, str] = {}  # leaves that read the attention values, and their blocks
    values: set[str] = set()
    for leaf, names in by_path(axes, is_leaf=is_names).items():
        plain = tuple(axis_of(n) for n in names)
        acting: Acting = []
        out[leaf] = (names, acting)
        own = "" if layers_of(names) else leaf.partition("/")[0] + "/"
        for i, name in enumerate(plain):
            along = plain[i : i + 2]
            if is_layers(name):
                acting.append(((name,), modules[leaf]))
            elif _whole_heads(along):
                of = _heads_map(names, i, attention)
                if reads_axis(names[i]):
                    readers[leaf] = own
                elif of == "value":
                    values.add(own)
                acting.append((along, own + sibling_axis(name, of)))
            elif axis_kind(name) == "embed":
                acting.append(((name,), name))
            elif axis_kind(name) in ("heads", "mlp"):
                # Heads without head_dim occur in kernels between heads, or as one number per head.
                acting.append(((name,), own + name))
    if wrong := [leaf for leaf, own in readers.items() if own not in values]:
        raise ValueError(
            f"{', '.join(wrong)}: reads attention, but no leaf is marked as the value projection, which otherwise looks like "
            f"a query projection. Name its axis 'head_dim{VALUE}'"
        )
    return out


def _heads_map(names: Names, i: int, attention: str) -> str:
    """The name of the map for the heads on axis ``i``; ``attention``: the map of its output."""
    if reads_axis(names[i]):
        return attention
    if has_mark(names, VALUE):
        return "value"
    return "key" if reads_axis(names[i + 1]) else "query"


def _attention_map(name: str) -> str:
    """The name of a map without its block and its stage: ``"value"`` for ``"top/value.1"``."""
    return axis_kind(name.rpartition("/")[2])


def _whole_heads(along: tuple[str, ...]) -> bool:
    """Whether these two axes are a heads axis and its head dimension."""
    return len(along) == 2 and axis_kind(along[0]) in (HEADS, KV_HEADS) and along[1] == "head_dim"


def _axis_map(
    matrices: Mapping[str, jax.Array], along: tuple[str, ...], sizes: Sizes
) -> AxisMap[jax.Array]:
    write = matrices["write"]
    read = matrices.get("read", matrices["write"])
    joint = None
    if _whole_heads(along):
        dim = sizes["head_dim"]
        queries = sizes[along[0]] * dim // write.shape[1]  # query heads per head of the map
        if queries > 1:
            write, read = (_repeated(m, dim, queries) for m in (write, read))
        joint = ((write.shape[0] // dim, dim), (write.shape[1] // dim, dim))
    return AxisMap(write, read, joint)


def _repeated(m: jax.Array, dim: int, queries: int) -> jax.Array:
    """Repeat a map over key/value heads for the ``queries`` query heads of each head."""
    new, old = m.shape
    blocks = (
        m.reshape(new // dim, 1, dim, old // dim, 1, dim)
        * np.eye(queries, dtype=m.dtype)[None, :, None, None, :, None]
    )
    return blocks.reshape(new * queries, old * queries)


def _row_positions(index: np.ndarray, unit: int) -> np.ndarray:
    """The row of ``[I; C]`` for each new unit. Old units get the rows of the identity."""
    old = mark_first_copies(index)
    rows = np.where(old, index, old.sum() + np.cumsum(~old) - 1)
    return (rows[:, None] * unit + np.arange(unit)).reshape(-1)


def _single_layer(depth: AxisMap[jax.Array] | None, j: int, layers: int) -> AxisMap:
    """The depth map of layer j only: column j of w; the other columns are zero."""
    weight = np.eye(layers)[:, j : j + 1] if depth is None else depth.write[:, j : j + 1]
    m = SparseMap(np.full((weight.shape[0], 1), j, np.int32), weight, layers)  # type: ignore[arg-type]
    return AxisMap(m, m)


def _depth_weights(ligo: LiGO, old: int, new: int, key: jax.Array) -> jax.Array:
    if ligo.depth == "normalised":
        return _normalised_rows(jax.random.uniform(key, (new, old)))
    source = np.arange(new) % old if ligo.depth == "stack" else np.arange(new) * old // new
    return _noisy(ligo, source, old, key)


def _width_matrix(ligo: LiGO, old: int, new: int, key: jax.Array) -> jax.Array:
    shape = (new - old, old)
    choose, key = jax.random.split(key)
    rows = {
        "normalised": lambda: _normalised_rows(jax.random.uniform(key, shape)),
        "selection": lambda: _noisy(
            ligo, jax.random.randint(choose, (new - old,), 0, old), old, key
        ),
        "gaussian": lambda: jax.random.normal(key, shape) / new**0.5,
        "zero": lambda: jnp.zeros(shape),
    }[ligo.width]()
    return jnp.concatenate([jnp.eye(old), rows])


def _noisy(ligo: LiGO, source: jax.Array | np.ndarray, old: int, key: jax.Array) -> jax.Array:
    others = (
        jax.random.uniform(key, (len(source), old), maxval=ligo.noise)
        if ligo.noise
        else jnp.zeros((1, 1))
    )
    return _normalised_rows(jnp.where(jax.nn.one_hot(source, old, dtype=bool), 1.0, others))


def _normalised_rows(x: jax.Array) -> jax.Array:
    return x / x.sum(-1, keepdims=True)
