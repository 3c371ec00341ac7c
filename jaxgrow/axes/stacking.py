"""How do models with separate layers grow in depth? Their layers are stacked first, then unstacked.

Operators expect all layers in one subtree whose leaves have a leading layer axis. Stacking and
unstacking change no values. They also work on an optimizer state, because the paths of its moments
end with the paths of the parameters. For this reason, all patterns here match the end of a path.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import ModuleType
from typing import TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import LAYERS, KeyPath, Tree, by_path, is_names, path

# The entries of a dict, or of a list by their indices.
Entries: TypeAlias = dict[str | int, Tree]

_NO_TUPLES = (
    ", which does not match tuples, because the state of optax.chain is a tuple. For a tuple of "
    "layers, use {'layers': params} and the pattern 'layers/{}'"
)


def stack_layers(tree: Tree, layers: str) -> Tree:
    """Stack layers that are separate subtrees (``layers_0``, ``layers_1``, ...) into one subtree.

    Each leaf of the new subtree has a leading axis of layers, in the order of their numbers (10
    after 9). Other leaves, such as the step count of an optimizer, are unchanged.

    Args:
      tree: a pytree of arrays (parameters, or the state of any optax optimizer), or an axes tree.
        The leaves of an axes tree get the axis ``"layers"``.
      layers: path pattern of the layers, with ``{}`` for their number, which matches the end of a
        path: ``"layers_{}"``, ``"decoder/layers_{}"``, and for a list ``"layers/{}"``. The layers
        at all matching paths are stacked. If the parameters are a bare list of layers, the pattern
        is ``"{}"``. It matches lists and dicts, but no tuples, because the state of `optax.chain`
        is a tuple. For a tuple of layers, use ``{"layers": params}`` and ``"layers/{}"``.

    Returns:
      The tree with one subtree in place of the layers. In a dict, the key of this subtree is the
      pattern ``layers_{}`` itself. In a list, or in a dict whose keys are numbers, the subtree is
      the only entry. `unstack_layers` is the inverse.

    Raises:
      ValueError: no layers match, numbers are missing, or layers differ in structure, shapes or
        names. The message lists every leaf that differs.

    Example:
      >>> tree = {"norm": np.ones(2), "layers_0": {"w": np.zeros(3)}, "layers_1": {"w": np.ones(3)}}
      >>> stack_layers(tree, "layers_{}")["layers_{}"]["w"].tolist()
      [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    where, name = _split_pattern(layers)
    is_leaf = _leaves_of(tree)
    wrong: list[str] = []

    def stack(at: str, node: Tree) -> Tree:
        entries = _entries_of(node)
        keys = _numbered_entries(entries, name)
        paths = [f"{at}/{name.format(i)}".removeprefix("/") for i in range(max(keys) + 1)]
        if missing := [of for i, of in enumerate(paths) if i not in keys]:
            wrong.append(f"{', '.join(missing)}: missing, but {paths[-1]} exists")
            return node
        flat = [by_path(entries[keys[i]], is_leaf) for i in range(len(keys))]
        if differ := _differences(dict(zip(paths, flat, strict=True))):
            wrong.extend(differ)
            return node

        def leaf(key_path: KeyPath, _: object) -> Tree:
            return _stack_parts([layer[path(key_path)] for layer in flat])

        whole = jax.tree_util.tree_map_with_path(leaf, entries[keys[0]], is_leaf=is_leaf)
        others = {key: x for key, x in entries.items() if key not in keys.values()}
        return _rebuilt(node, others | {_stacked_key(entries, name): whole})

    out = at_nodes(
        stack,
        tree,
        where,
        lambda node: _may_hold(node, layers) and bool(_numbered_entries(_entries_of(node), name)),
        f"no layers found at {layers!r}{_NO_TUPLES * (layers == '{}')}",
    )
    if wrong:
        raise ValueError(f"the layers {layers!r} cannot be stacked:\n  " + "\n  ".join(wrong))
    return out


def unstack_layers(tree: Tree, layers: str, number: int | None = None) -> Tree:
    """Unstack layers: the inverse of `stack_layers`, also after growing.

    Args:
      tree: result of `stack_layers`, possibly grown.
      layers: path pattern of the layers, as in `stack_layers`.
      number: number of layers. It is required only for an axes tree, which does not contain the
        number.

    Returns:
      The tree with one subtree per layer.

    Raises:
      ValueError: nothing is stacked at this path, or leaves have different numbers of layers.

    Example:
      >>> unstack_layers({"layers_{}": {"w": np.array([[1.0], [2.0]])}}, "layers_{}")
      {'layers_0': {'w': array([1.])}, 'layers_1': {'w': array([2.])}}
    """
    where, name = _split_pattern(layers)
    is_leaf = _leaves_of(tree)
    wrong: list[str] = []

    def stacked(node: Tree) -> bool:
        return _may_hold(node, layers) and _has_stack(_entries_of(node), name)

    # Some stacked layers have no leaves, for example if they are excluded by the mask of an
    # optimizer. Their number is taken from the other nodes.
    everywhere = _numbers(find_nodes(tree, where, stacked).values(), name, number, is_leaf)

    def unstack(at: str, node: Tree) -> Tree:
        entries = _entries_of(node)
        counts = _lengths(node, name, number, is_leaf)
        key = _stacked_key(entries, name)
        whole = entries.pop(key)
        at_node = f"{at}/{name}".removeprefix("/")
        count = number or next((n for n in counts.values() if n is not None), 0)
        if not counts and not number:
            if len(everywhere) != 1:
                wrong.append(
                    f"{at_node}: the number of layers is unknown without a leaf. Pass number."
                )
                return node
            (count,) = everywhere
        if differ := _other_lengths(at_node, by_path(whole, is_leaf), counts, count):
            wrong.extend(differ)
            return node
        keys = [i if key == 0 else name.format(i) for i in range(count)]
        parts = [jax.tree.map(partial(_layer, i), whole, is_leaf=is_leaf) for i in range(count)]
        return _rebuilt(node, entries | dict(zip(keys, parts, strict=True)))

    none = f"nothing is stacked at {layers!r}{_NO_TUPLES * (layers == '{}')}"
    out = at_nodes(unstack, tree, where, stacked, none)
    if wrong:
        raise ValueError("the layers cannot be unstacked:\n  " + "\n  ".join(wrong))
    return out


def _differences(layers: Mapping[str, Mapping[str, Tree]]) -> list[str]:
    """List the leaves of layers that differ from those of the first layer.

    Args:
      layers: for the path of each layer, its leaves by their paths.
    """
    of_first, first = next(iter(layers.items()))
    differ: list[str] = []
    for of, layer in layers.items():
        differ += [f"{of}/{p}: missing in {of_first}" for p in layer if p not in first]
        differ += [f"{of}/{p}: missing, but {of_first}/{p} exists" for p in first if p not in layer]
        differ += [
            f"{of}/{p}: is {_what(x)}, but {of_first}/{p} is {_what(first[p])}"
            for p, x in layer.items()
            if p in first and _what(x) != _what(first[p])
        ]
    return differ


def _lengths(
    node: Tree, name: str, number: int | None, is_leaf: Callable[[Tree], bool]
) -> dict[str, int | None]:
    """Return the number of layers in each leaf of the stacked layers; in axes trees, ``number``."""
    flat = by_path(_entries_of(node)[_stacked_key(_entries_of(node), name)], is_leaf)
    # A scalar has no layers.
    return {p: number if is_names(x) else next(iter(np.shape(x)), None) for p, x in flat.items()}


def _numbers(
    every: Iterable[Tree], name: str, number: int | None, is_leaf: Callable[[Tree], bool]
) -> set[int]:
    """Return the numbers of layers in the first leaves of the nodes with stacked layers."""
    lengths = [_lengths(node, name, number, is_leaf) for node in every]
    firsts = [next(iter(of_leaves.values()), None) for of_leaves in lengths]
    return {n for n in firsts if n is not None}


def _other_lengths(
    at: str, flat: Mapping[str, Tree], counts: Mapping[str, int | None], count: int
) -> list[str]:
    """List the leaves of stacked layers that do not have ``count`` layers along the first axis."""
    expected = f"{count} layers" if count else "layers"
    return [
        f"{at}/{p}: is {_what(x)}, expected {expected} along the first axis"
        for p, x in flat.items()
        if counts[p] is None or counts[p] != count or (is_names(x) and x[:1] != (LAYERS,))
    ]


def _layer(i: int, x: Tree) -> Tree:
    """Return layer ``i`` of a stacked leaf, or the axis names of one layer."""
    return x[1:] if is_names(x) else x[i]


def _leaves_of(tree: Tree) -> Callable[[Tree], bool]:
    """Return ``is_leaf`` for an axes tree or a tree of arrays.

    In a tree of arrays, an empty tuple is a node without leaves.
    """
    if any(is_names(x) and x for x in jax.tree.leaves(tree, is_leaf=is_names)):
        return is_names
    return _never


def _never(*_: object) -> bool:
    return False


def _split_pattern(layers: str) -> tuple[str, str]:
    """Split a pattern: ``"decoder/layers_{}"`` gives ``("decoder", "layers_{}")``."""
    where, _, name = layers.rpartition("/")
    if not re.fullmatch(r"[^{}]*\{[^{}]*\}[^{}]*", name) or "{" in where:
        raise ValueError(
            f"the pattern {layers!r} must have one {{}} for the number of a layer in its last "
            "part, such as 'layers_{}' or 'layers/{}'"
        )
    return where, name


def _may_hold(node: Tree, layers: str) -> bool:
    """Whether a node may hold layers: with the pattern ``{}``, which has no name, tuples may not."""
    return layers != "{}" or not isinstance(node, tuple)


def _entries_of(node: Tree) -> Entries:
    """Return the entries of a dict, or of a list by their indices; empty for other nodes."""
    if _is_mapping(node):
        return dict(node)
    return dict(enumerate(node)) if _is_list_of_nodes(node) else {}


def _is_mapping(node: Tree) -> TypeGuard[Mapping[str | int, Tree]]:
    return isinstance(node, Mapping)


def _is_list_of_nodes(node: Tree) -> TypeGuard[Sequence[Tree]]:
    named = hasattr(node, "_fields")
    return isinstance(node, list | tuple) and not named and not is_names(node)


def _rebuilt(node: Tree, entries: Entries) -> Tree:
    """Return a dict or list of the same type as ``node``, with other entries."""
    return type(node)(entries if isinstance(node, Mapping) else entries.values())


def _numbered_entries(entries: Entries, name: str) -> dict[int, str | int]:
    """Return the keys of the layers by their numbers, in order."""
    before, after = re.split(r"\{.*\}", name)
    found = {
        key: re.fullmatch(re.escape(before) + r"(\d+)" + re.escape(after), str(key))
        for key in entries
    }
    numbers = {
        int(m[1]): key for key, m in found.items() if m and name.format(int(m[1])) == str(key)
    }
    return dict(sorted(numbers.items()))


def _stacked_key(entries: Entries, name: str) -> str | int:
    """Return the key of the stacked layers: the pattern itself, or 0 if the keys are numbers."""
    return 0 if any(isinstance(key, int) for key in entries) else name


def _has_stack(entries: Entries, name: str) -> bool:
    return name in entries or (name == "{}" and set(entries) == {0})


def _what(x: Tree) -> str:
    return (
        f"named {x}"
        if is_names(x)
        else f"of shape {np.shape(x)} and {getattr(x, 'dtype', type(x).__name__)}"
    )


def _stack_parts(parts: Sequence[Tree]) -> Tree:
    if is_names(parts[0]):
        return (LAYERS, *parts[0])
    xp: ModuleType = np if all(isinstance(x, np.ndarray) for x in parts) else jnp
    return xp.stack(parts)


def at_nodes(
    change: Callable[[str, Tree], Tree],
    tree: Tree,
    where: str,
    fits: Callable[[Tree], bool],
    none: str,
) -> Tree:
    """Apply ``change(path, node)`` to every node that fits, at a path that ends in ``where``.

    Args:
      change: function of the path and the node that returns the new node.
      tree: a pytree of arrays, or an axes tree.
      where: shell-style pattern for the end of the path.
      fits: condition for the node.
      none: start of the error message if no node matches.

    Raises:
      ValueError: no node matches, although the tree has leaves with axes.
    """
    paths = find_nodes(tree, where, fits)
    is_leaf = _leaves_of(tree)

    def leaf(key_path: KeyPath, node: Tree) -> Tree:
        return change(path(key_path), node) if path(key_path) in paths else node

    def is_node(key_path: KeyPath, node: Tree) -> bool:
        return is_leaf(node) or path(key_path) in paths

    out = jax.tree.map_with_path(leaf, tree, is_leaf=is_node, is_leaf_takes_path=True)
    # A state without moments, such as the state of plain SGD, needs no change and is not an error.
    there = [p for p, x in by_path(tree, is_names).items() if (x if is_names(x) else np.ndim(x))]
    if there and not paths:
        raise ValueError(
            f"{none}; the leaves of the tree are {', '.join(there[:3])}{', ...' * (len(there) > 3)}"
        )
    return out


def find_nodes(tree: Tree, where: str, fits: Callable[[Tree], bool]) -> dict[str, Tree]:
    """Return the nodes that meet a condition by their paths, outermost first.

    Args:
      tree: a pytree of arrays, or an axes tree.
      where: shell-style pattern for the end of the path.
      fits: condition for the node.
    """
    is_leaf = _leaves_of(tree)
    found: dict[str, Tree] = {}

    def is_node(key_path: KeyPath, node: Tree) -> bool:
        if (
            not is_leaf(node)
            and (not where or fnmatchcase(f"/{path(key_path)}", f"*/{where}"))
            and fits(node)
        ):
            found[path(key_path)] = node
            return True
        return is_leaf(node)

    jax.tree.map_with_path(_never, tree, is_leaf=is_node, is_leaf_takes_path=True)
    return found
