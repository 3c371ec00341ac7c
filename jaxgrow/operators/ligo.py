"""LiGO: growth whose maps are learned (Wang et al., ICLR 2023).

Width ``Omega_j = B_out W_j B_in.T``, then depth ``W'_i = sum_j w_ij Omega_j`` (Eq. 8). The
coefficients ``B`` and ``w`` are a pytree; `growth` makes of it a growth for `jaxgrow.grow`, which
is differentiable in them, so that a hundred steps of the pre-training loss can learn them while the
small model stands still::

    coefficients = init(LiGO(), axes, sizes, target, key)
    loss = lambda c, batch: large_loss(grow(growth(c, axes, sizes), small, axes), batch)
"""

import zlib
from collections.abc import Iterator
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
    axis,
    beside,
    is_layers,
    is_names,
    kind,
    layers_of,
    marked,
    path,
    reads,
    role,
)
from jaxgrow.growth.maps import AxisMap, Rule, Rules
from jaxgrow.growth.matrices import Rows
from jaxgrow.operators.targets import HEADS, KV_HEADS, WIDTHS, Sizes, first, grown, sources

Coefficients: TypeAlias = dict[str, Any]  # as `init` makes them
Acting: TypeAlias = list[
    tuple[tuple[str, ...], str]
]  # on a leaf: the axes, and the name of the map over them


@dataclass(frozen=True)
class LiGO:
    """Where the maps begin, and how they are tied. Growth at the start does not keep the function, whichever is chosen.

    =========== =========================================================================================================
    depth       row i of w, for a source s(i): stacking ``i mod L``, interleaving ``floor(i L / L')``
    ----------- ---------------------------------------------------------------------------------------------------------
    stack       u ~ U(0, noise) but u[s(i)] = 1, divided by its sum
    interleave  the same, with the other source
    normalised  u ~ U(0, 1), divided by its sum
    ----------- ---------------------------------------------------------------------------------------------------------
    width       the rows C of ``B = [I; C]``
    ----------- ---------------------------------------------------------------------------------------------------------
    normalised  u ~ U(0, 1), divided by its sum: about the mean of all old units
    selection   u ~ U(0, noise) but u[random] = 1, divided by its sum: with noise = 0 a copy of a random unit
    gaussian    N(0, 1 / new size)
    zero        0: a saddle for all maps but that of ``embed`` under LayerNorm. A control
    =========== =========================================================================================================

    With ``noise = 0`` stacking and interleaving (of layers of one kind: a period of 1) are those
    operators, to the bit; so is zero-padding. The published code starts at noisy stacking and
    normalised rows, and learns C alone; here all of B is learned, as the paper has it.
    """

    depth: Literal["stack", "interleave", "normalised"] = "stack"
    width: Literal["normalised", "selection", "gaussian", "zero"] = "normalised"
    noise: float = 0.03
    shared: bool = (
        True  # by the layers; else each small layer has maps of its own for heads and MLP units
    )
    # readers use the writers' maps; else maps of their own, which start with B over its column sums
    tied: bool = True

    def __post_init__(self):
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise lies between 0 and 1, but is {self.noise}")


def init(ligo: LiGO, axes: Axes, sizes: Sizes, target: Sizes, key: jax.Array) -> Coefficients:
    """The coefficients at their start: ``{"depth": {module: w [L', L]}, "width": {map: {"write": B [new, old]}}}``, float32.

    Depth weights belong to a module: a kernel and its bias, or a norm, in a folder of their own
    (``"blocks/attention/query"``); leaves that share a folder with others have each their own
    (``"blocks/mlp_scale"``). Width maps are those of the paper's tying: one for the residual
    stream, ``embed``, everywhere; ``query``, ``key`` and ``value`` over heads times head_dim, the
    last one for the readers of attention, too; ``mlp``. A key reads ``head_dim``, values mark it
    (`jaxgrow.axes`). Untied, each also has a ``"read"``; not shared, those of heads and MLP units
    are [L, new, old].

    Of a model with stages, each has its own: ``embed.0``, ``query.0``, ``mlp.0``.

    What is drawn goes by axis names, never by those of modules: depth weights of modules of one
    kind begin alike.

    Grouped queries (our extension; the paper has none): ``key`` and ``value`` are over kv_heads
    times head_dim. What reads attention reads each value as often as queries share it, so its map
    is ``value``'s, repeated; where their number changes, that is none, and it is one of its own,
    ``out``. The identity in B keeps query heads with their keys, as all operators do.

    Args:
      ligo: where the maps begin, and how they are tied.
      axes: the axis names of the small model's parameters.
      sizes: the size of every axis of the small model.
      target: new sizes of any of ``layers``, ``embed``, ``heads``, ``kv_heads``, ``mlp``. An axis
        that is not named has no map (but ``heads``, where ``kv_heads`` is named); one that is named
        with its old size is mixed.
      key: what is drawn goes by it.

    Returns:
      A pytree of arrays, to be learned, and to be handed to `growth`.

    Raises:
      ValueError: a target that is smaller, or an axis that is none of these, or query heads that
        cannot share the keys; a leaf that does not say its role, or attention without values that
        are marked.

    Example:
      >>> axes = {"up": ("layers", "embed.in", "mlp")}
      >>> start = init(LiGO(), axes, {"layers": 1, "embed": 2, "mlp": 3}, {"layers": 2, "mlp": 4}, jax.random.key(0))
      >>> start["depth"]["up"].shape, start["width"]["mlp"]["write"].shape
      ((2, 1), (4, 3))

    References:
      Wang et al.,
      `Learning to Grow Pretrained Models for Efficient Transformer Training <https://arxiv.org/abs/2303.00980>`_,
      ICLR 2023
    """
    if KV_HEADS in target:
        target = {HEADS: sizes[HEADS], **target}
    found = grown("ligo", (LAYERS, *WIDTHS), sizes, target)
    index = sources("ligo", sizes, {axis: found[axis] for axis in found if not is_layers(axis)})
    grown_sizes = {**sizes, **target}
    regrouped = (
        KV_HEADS in sizes
        and sizes[HEADS] * grown_sizes[KV_HEADS] != grown_sizes[HEADS] * sizes[KV_HEADS]
    )
    out: Coefficients = {"depth": {}, "width": {}}
    uses, kinds = _uses(axes, "out" if regrouped else "value"), _kinds(axes)
    for names, acting in uses.values():
        for along, name in acting:
            plain = along[0]
            part = "depth" if is_layers(plain) else "width"
            if plain not in found or name in out[part]:
                continue
            if name == "value" and plain == HEADS and KV_HEADS in sizes:
                continue  # a reader: the map has the size of the values themselves
            old, new = found[plain]
            if part == "depth":
                out["depth"][name] = _depth(ligo, old, new, _drawn(key, kinds[name]))
                continue
            own = _drawn(key, name.rpartition("/")[2])
            unit = sizes["head_dim"] if _whole_heads(along) else 1
            rows = _places(index[plain], unit)
            stacked = layers_of(names) if not ligo.shared and kind(plain) != "embed" else None
            copies = sizes[stacked] if stacked else 0
            keys = jax.random.split(own, copies) if copies else own

            def draw(k, old=old * unit, new=new * unit, rows=rows):
                return _width(ligo, old, new, k)[rows]

            write = jax.vmap(draw)(keys) if copies else draw(keys)
            out["width"][name] = {"write": write}
            if not ligo.tied:
                out["width"][name]["read"] = write / jnp.maximum(write.sum(-2, keepdims=True), 1e-6)
    return out


def growth(coefficients: Coefficients, axes: Axes, sizes: Sizes) -> Rules:
    """The growth that the coefficients stand for, as data for `jaxgrow.grow`.

    A rule a leaf; with maps shared by the layers of one term, else one for each small layer:
    ``w_ij B_j W_j A_j.T``.

    Args:
      coefficients: as `init` makes them.
      axes: the axis names of the small model's parameters.
      sizes: the size of every axis of the small model.

    Returns:
      Rules, which `jaxgrow.grow` is differentiable in.

    Example:
      >>> axes, sizes = {"up": ("layers", "embed.in", "mlp")}, {"layers": 1, "embed": 2, "mlp": 3}
      >>> start = init(LiGO(), axes, sizes, {"layers": 2, "mlp": 4}, jax.random.key(0))
      >>> sorted(growth(start, axes, sizes).rules[0].terms[0])
      [('layers',), ('mlp',)]
    """
    weights, width = coefficients["depth"], coefficients["width"]

    def rule(leaf: str, names: Names, acting: Acting) -> Rule:
        maps: dict[tuple[str, ...], AxisMap] = {}
        own: dict[tuple[str, ...], dict[str, Any]] = {}  # of each layer
        for along, name in acting:
            if is_layers(along[0]):
                if name in weights:
                    maps[along] = AxisMap(weights[name], weights[name])
            elif name in width:
                if width[name]["write"].ndim == 3:
                    own[along] = width[name]
                else:
                    maps[along] = _map(width[name], along, sizes)
        if not own:
            return Rule((maps,), leaf)
        terms = []
        stacked = layers_of(names)
        assert stacked is not None  # or no map would be of each layer
        for j in range(sizes[stacked]):
            each = {
                along: _map({k: m[j] for k, m in ms.items()}, along, sizes)
                for along, ms in own.items()
            }
            terms.append(
                {**maps, (stacked,): _one_layer(maps.get((stacked,)), j, sizes[stacked]), **each}
            )
        return Rule(tuple(terms), leaf)

    uses = _uses(axes, "out" if "out" in width else "value")
    return Rules(tuple(rule(leaf, *use) for leaf, use in uses.items()))


def _leaves(axes: Axes) -> Iterator[tuple[str, Names]]:
    for key_path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names):
        yield path(key_path), names


def _modules(axes: Axes) -> dict[str, str]:
    """``{leaf: what its depth weights belong to}``, of layers: its folder, or, where that holds several things, itself."""
    folders: dict[str, dict[str, str]] = {}
    for leaf, names in _leaves(axes):
        if layers_of(names):
            folders.setdefault(leaf.rpartition("/")[0], {})[leaf] = role(leaf, names)
    one = [["kernel"], ["bias", "kernel"], ["norm scale"], ["norm bias", "norm scale"]]
    return {
        leaf: folder if folder and sorted(inside.values()) in one else leaf
        for folder, inside in folders.items()
        for leaf in inside
    }


def _kinds(axes: Axes) -> dict[str, str]:
    """``{module: its axis names}``: what tells it from others, whatever it is called."""
    of, found = _modules(axes), {}
    for leaf, names in _leaves(axes):
        if leaf in of:
            found.setdefault(of[leaf], []).append(" ".join(names))
    return {module: ", ".join(sorted(names)) for module, names in found.items()}


def _drawn(key: jax.Array, kind: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(kind.encode()))


def _uses(axes: Axes, attention: str) -> dict[str, tuple[Names, Acting]]:
    """What acts on each leaf, beside its names; ``attention`` is the map of what reads it.

    Units of blocks that are no layers have maps of their own.

    Raises:
      ValueError: attention whose values are not marked.
    """
    modules, out = _modules(axes), {}
    readers: dict[str, str] = {}  # of attention, and the blocks that they are in
    values = set()
    for leaf, names in _leaves(axes):
        plain, out[leaf] = tuple(axis(n) for n in names), (names, [])
        own = "" if layers_of(names) else leaf.partition("/")[0] + "/"
        for i, name in enumerate(plain):
            along = plain[i : i + 2]
            if is_layers(name):
                out[leaf][1].append(((name,), modules[leaf]))
            elif _whole_heads(along):
                if reads(names[i]):
                    of, readers[leaf] = attention, own
                elif marked(names, VALUE):
                    of = "value"
                    values.add(own)
                else:
                    of = "key" if reads(names[i + 1]) else "query"
                out[leaf][1].append((along, own + beside(name, of)))
            elif kind(name) == "embed":
                out[leaf][1].append(((name,), name))
            elif kind(name) in (
                "heads",
                "mlp",
            ):  # heads alone: of kernels between heads, or of numbers of each
                out[leaf][1].append(((name,), own + name))
    if wrong := [leaf for leaf, own in readers.items() if own not in values]:
        raise ValueError(
            f"{', '.join(wrong)}: reads attention, but no leaf is marked to make its values, which look like queries: name "
            f"their axis 'head_dim{VALUE}'"
        )
    return out


def _whole_heads(along: tuple[str, ...]) -> bool:
    """Whether these two axes are the units of heads."""
    return len(along) == 2 and kind(along[0]) in (HEADS, KV_HEADS) and along[1] == "head_dim"


def _map(matrices: dict[str, Any], along: tuple[str, ...], sizes: Sizes) -> AxisMap:
    write, read, joint = matrices["write"], matrices.get("read", matrices["write"]), None
    if _whole_heads(along):
        dim = sizes["head_dim"]
        queries = sizes[along[0]] * dim // write.shape[1]  # that read a unit of the map
        if queries > 1:
            write, read = (_repeated(m, dim, queries) for m in (write, read))
        joint = ((write.shape[0] // dim, dim), (write.shape[1] // dim, dim))
    return AxisMap(write, read, joint)


def _repeated(m: Any, dim: int, queries: int) -> Any:
    """A map over key heads and ``dim`` as one over the query heads, of which each key head has ``queries``, in their order."""
    new, old = m.shape
    blocks = (
        m.reshape(new // dim, 1, dim, old // dim, 1, dim)
        * np.eye(queries, dtype=m.dtype)[None, :, None, None, :, None]
    )
    return blocks.reshape(new * queries, old * queries)


def _places(index: np.ndarray, unit: int) -> np.ndarray:
    """Which rows of ``[I; C]`` lie where, so that the identity is over the old units among the new ones."""
    old = first(index)
    rows = np.where(old, index, old.sum() + np.cumsum(~old) - 1)
    return (rows[:, None] * unit + np.arange(unit)).reshape(-1)


def _one_layer(depth: AxisMap | None, j: int, layers: int) -> AxisMap:
    """What layer j alone adds: column j of w, the others zero."""
    weight = np.eye(layers)[:, j : j + 1] if depth is None else depth.write[:, j : j + 1]  # type: ignore[index]
    m = Rows(np.full((weight.shape[0], 1), j, np.int32), weight, layers)  # type: ignore[arg-type]
    return AxisMap(m, m)


def _depth(ligo: LiGO, old: int, new: int, key: jax.Array) -> jax.Array:
    if ligo.depth == "normalised":
        return _rows(jax.random.uniform(key, (new, old)))
    source = np.arange(new) % old if ligo.depth == "stack" else np.arange(new) * old // new
    return _noisy(ligo, source, old, key)


def _width(ligo: LiGO, old: int, new: int, key: jax.Array) -> jax.Array:
    shape = (new - old, old)
    choose, key = jax.random.split(key)
    rows = {
        "normalised": lambda: _rows(jax.random.uniform(key, shape)),
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
    return _rows(jnp.where(jax.nn.one_hot(source, old, dtype=bool), 1.0, others))


def _rows(x: jax.Array) -> jax.Array:
    return x / x.sum(-1, keepdims=True)
