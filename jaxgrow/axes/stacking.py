"""Layers that are subtrees of their own, stacked for operators and taken apart again, to the bit.

An optimizer state is brought into the same form as its parameters, whose names its moments have. So
what is found by a path is found by the end of a path.
"""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import LAYERS, Tree, is_names, path


def stack_layers(tree: Tree, layers: str) -> Tree:
    """Layers that are subtrees, such as ``layers_0``, ``layers_1``, .., as one whose leaves have a leading axis of them all.

    They are taken in the order of their numbers, 10 after 9. Beside them nothing changes, such as
    an optimizer's step count.

    Args:
      tree: a pytree of arrays: parameters, or an optimizer state of any optax optimizer; or an axes
        tree, whose leaves get the axis ``"layers"``.
      layers: where they are, with ``{}`` for their number, as the end of a path: ``"layers_{}"``,
        ``"decoder/layers_{}"``, and for a list ``"layers/{}"``. All places that fit are stacked.

    Returns:
      The tree, where in place of the layers stands one subtree: in a dict under the name
      ``layers_{}`` itself, in a list, or under numbers, the only one. `unstack_layers` takes it
      apart again.

    Raises:
      ValueError: there are none, numbers are missing, layers differ in structure, shapes, or names;
        every leaf that does is listed.

    Example:
      >>> tree = {"norm": np.ones(2), "layers_0": {"w": np.zeros(3)}, "layers_1": {"w": np.ones(3)}}
      >>> stack_layers(tree, "layers_{}")["layers_{}"]["w"].tolist()
      [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    where, name = _place(layers)
    is_leaf = _leaves_of(tree)
    wrong: list[str] = []

    def stack(at: str, node: Any) -> Any:
        entries = _entries(node)
        keys = _numbered(entries, name)
        places = [f"{at}/{name.format(i)}".removeprefix("/") for i in range(max(keys) + 1)]
        if missing := [of for i, of in enumerate(places) if i not in keys]:
            wrong.append(f"{', '.join(missing)}: not there, but {places[-1]} is")
            return node
        flat, differ = [_flat(entries[keys[i]], is_leaf) for i in range(len(keys))], []
        first, of_first = flat[0], places[0]
        for of, layer in zip(places, flat, strict=True):
            differ += [f"{of}/{p}: {of_first} has no such leaf" for p in layer if p not in first]
            differ += [
                f"{of}/{p}: is not there, but {of_first}/{p} is" for p in first if p not in layer
            ]
            differ += [
                f"{of}/{p}: is {_what(x)}, but {of_first}/{p} is {_what(first[p])}"
                for p, x in layer.items()
                if p in first and _what(x) != _what(first[p])
            ]
        if differ:
            wrong.extend(differ)
            return node
        whole = jax.tree_util.tree_map_with_path(
            lambda p, _: _stacked([layer[path(p)] for layer in flat]),
            entries[keys[0]],
            is_leaf=is_leaf,
        )
        others = {key: x for key, x in entries.items() if key not in keys.values()}
        return _rebuilt(node, others | {_only(entries, name): whole})

    out = at_nodes(
        stack,
        tree,
        where,
        lambda node: bool(_numbered(_entries(node), name)),
        f"no layers are at {layers!r}",
    )
    if wrong:
        raise ValueError(f"the layers {layers!r} are not alike:\n  " + "\n  ".join(wrong))
    return out


def unstack_layers(tree: Tree, layers: str, number: int | None = None) -> Tree:
    """The inverse of `stack_layers`, for as many layers as there are now.

    Args:
      tree: as `stack_layers` returns it, perhaps grown.
      layers: as of `stack_layers`.
      number: how many layers; only an axes tree cannot tell.

    Returns:
      The tree with a subtree for each layer.

    Raises:
      ValueError: nothing is stacked there, or leaves have other numbers of layers.

    Example:
      >>> unstack_layers({"layers_{}": {"w": np.array([[1.0], [2.0]])}}, "layers_{}")
      {'layers_0': {'w': array([1.])}, 'layers_1': {'w': array([2.])}}
    """
    where, name = _place(layers)
    is_leaf = _leaves_of(tree)
    wrong: list[str] = []

    def stacked(node: Any) -> bool:
        return _is_stacked(_entries(node), name)

    def lengths(node: Any) -> dict[str, int | None]:
        """The leading axis of each leaf of the stacked layers in a node."""
        flat = _flat(_entries(node)[_only(_entries(node), name)], is_leaf)
        return {p: number if is_names(x) else (*np.shape(x), None)[0] for p, x in flat.items()}

    # Layers without a leaf of their own, such as those that an optimizer's mask leaves out, are as
    # many as elsewhere.
    found = [
        next(iter(lengths(node).values()), None) for node in nodes(tree, where, stacked).values()
    ]
    everywhere = {n for n in found if n is not None}

    def unstack(at: str, node: Any) -> Any:
        entries, counts = _entries(node), lengths(node)
        key = _only(entries, name)
        whole = entries.pop(key)
        flat, place = _flat(whole, is_leaf), f"{at}/{name}".removeprefix("/")
        count = number or next((n for n in counts.values() if n is not None), 0)
        if not flat and not number:
            if len(everywhere) != 1:
                wrong.append(
                    f"{place}: has no leaf that tells how many layers there are; give their number"
                )
                return node
            (count,) = everywhere
        differ = [
            f"{place}/{p}: is {_what(x)}, not stacked from {f'{count} layers' if count else 'layers'}"
            for p, x in flat.items()
            if counts[p] is None or counts[p] != count or (is_names(x) and x[:1] != (LAYERS,))
        ]
        if differ:
            wrong.extend(differ)
            return node

        def layer(i: int) -> Any:
            return jax.tree.map(lambda x: x[1:] if is_names(x) else x[i], whole, is_leaf=is_leaf)

        return _rebuilt(
            node, entries | {i if key == 0 else name.format(i): layer(i) for i in range(count)}
        )

    out = at_nodes(unstack, tree, where, stacked, f"nothing is stacked at {layers!r}")
    if wrong:
        raise ValueError("one number of layers in all leaves is needed:\n  " + "\n  ".join(wrong))
    return out


def _leaves_of(tree: Tree) -> Callable[[Any], bool]:
    """``is_leaf`` of an axes tree, or of one of arrays, where an empty tuple is a node without leaves."""
    if any(is_names(x) and x for x in jax.tree.leaves(tree, is_leaf=is_names)):
        return is_names
    return lambda node: False


def _place(layers: str) -> tuple[str, str]:
    """``("decoder", "layers_{}")`` of ``"decoder/layers_{}"``."""
    where, _, name = layers.rpartition("/")
    if not re.fullmatch(r"[^{}]*\{[^{}]*\}[^{}]*", name) or "{" in where:
        raise ValueError(
            f"{layers!r} does not say where the number of a layer stands: 'layers_{{}}' or 'layers/{{}}'"
        )
    return where, name


def _entries(node: Any) -> dict:
    """Of a dict, or of a list by their places; of anything else, none."""
    if isinstance(node, Mapping):
        return dict(node)
    is_list = isinstance(node, list | tuple) and not hasattr(node, "_fields") and not is_names(node)
    return dict(enumerate(node)) if is_list else {}


def _rebuilt(node: Any, entries: dict) -> Any:
    """A dict or list like ``node``, of other entries."""
    return type(node)(entries if isinstance(node, Mapping) else entries.values())


def _numbered(entries: dict, name: str) -> dict[int, Any]:
    """The keys of the layers by their numbers, in order."""
    before, after = re.split(r"\{.*\}", name)
    found = {
        key: re.fullmatch(re.escape(before) + r"(\d+)" + re.escape(after), str(key))
        for key in entries
    }
    numbers = {
        int(m[1]): key for key, m in found.items() if m and name.format(int(m[1])) == str(key)
    }
    return dict(sorted(numbers.items()))


def _only(entries: dict, name: str) -> Any:
    """The key of the stacked layers: the pattern itself, or 0 in what counts its layers by numbers."""
    return 0 if any(isinstance(key, int) for key in entries) else name


def _is_stacked(entries: dict, name: str) -> bool:
    return name in entries or (name == "{}" and set(entries) == {0})


def _flat(tree: Tree, is_leaf: Callable[[Any], bool] = is_names) -> dict[str, Any]:
    return {path(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def _what(x: Any) -> str:
    return (
        f"named {x}"
        if is_names(x)
        else f"of shape {np.shape(x)} and {getattr(x, 'dtype', type(x).__name__)}"
    )


def _stacked(parts: list) -> Any:
    if is_names(parts[0]):
        return (LAYERS, *parts[0])
    return (np if all(isinstance(x, np.ndarray) for x in parts) else jnp).stack(parts)


def _ends(at: str, where: str) -> bool:
    """Whether a path ends as a pattern says."""
    return fnmatchcase(at, where) or fnmatchcase(at, f"*/{where}")


def at_nodes(
    change: Callable[[str, Any], Any],
    tree: Tree,
    where: str,
    fits: Callable[[Any], bool],
    none: str,
) -> Tree:
    """``tree`` with ``change(path, node)`` for every node that ``fits``, at a path that ends in ``where``."""
    places = nodes(tree, where, fits)
    is_leaf = _leaves_of(tree)

    def leaf(key_path, node):
        return change(path(key_path), node) if path(key_path) in places else node

    def is_node(key_path, node):
        return is_leaf(node) or path(key_path) in places

    out = jax.tree.map_with_path(leaf, tree, is_leaf=is_node, is_leaf_takes_path=True)
    # A state without moments, such as that of plain SGD, has nothing to change.
    there = [p for p, x in _flat(tree).items() if (x if is_names(x) else np.ndim(x))]
    if there and not places:
        raise ValueError(
            f"{none}; the leaves of the tree are {', '.join(there[:3])}{', ..' * (len(there) > 3)}"
        )
    return out


def nodes(tree: Tree, where: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """The nodes of ``tree`` that ``fits``, outermost first, at a path that ends in ``where``."""
    is_leaf, found = _leaves_of(tree), {}

    def is_node(key_path, node):
        if not is_leaf(node) and (not where or _ends(path(key_path), where)) and fits(node):
            found[path(key_path)] = node
            return True
        return is_leaf(node)

    jax.tree.map_with_path(lambda *_: None, tree, is_leaf=is_node, is_leaf_takes_path=True)
    return found


def restructured(tree: Tree, like: Tree) -> Tree:
    """The leaves of ``tree`` in the structure of ``like``, each where its path says.

    What a module holds beside its arrays, such as its number of heads, is part of its structure:
    grown parameters belong into that of the larger model.

    Args:
      tree: a pytree of arrays, such as the grown parameters.
      like: one with leaves at the same paths, of the same shapes, such as the larger model's;
        shapes suffice.

    Returns:
      A pytree of the structure of ``like``.

    Raises:
      ValueError: leaves that one of the two lacks, and leaves of other shapes; all in one message.

    Example:
      >>> restructured({"0": np.ones(2), "1": np.zeros(2)}, [np.empty(2), np.empty(2)])
      [array([1., 1.]), array([0., 0.])]
    """
    given, asked = _flat(tree), _flat(like)
    wrong = [
        f"{p}: of shape {np.shape(x)} in the larger model, is not there"
        for p, x in asked.items()
        if p not in given
    ]
    wrong += [
        f"{p}: of shape {np.shape(x)}, the larger model has no such leaf"
        for p, x in given.items()
        if p not in asked
    ]
    wrong += [
        f"{p}: has shape {np.shape(x)}, but {np.shape(asked[p])} in the larger model"
        for p, x in given.items()
        if p in asked and np.shape(x) != np.shape(asked[p])
    ]
    if wrong:
        raise ValueError(
            "these parameters are not those of the larger model:\n  " + "\n  ".join(wrong)
        )
    return jax.tree_util.tree_map_with_path(lambda p, _: given[path(p)], like)
