"""Kernels that are fused, taken apart into leaves that each have their heads, and put together again, to the bit."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import EinopsError, rearrange

from jaxgrow.axes.names import Tree
from jaxgrow.axes.stacking import at_nodes


def split_fused(
    tree: Tree,
    pattern: str,
    layout: str,
    parts: Sequence[str] | Mapping[str, int] = (),
    **sizes: int,
) -> Tree:
    """Fused kernels in parts: a leaf ``qkv`` as a dict of ``query``, ``key`` and ``value``, each with all of its axes.

    A layout names the axes of the fused leaf, as in einops; those in parentheses are one axis of
    it. ``parts`` is the axis along which the parts lie.

    ======================================= ==============================================================================
    layout                                  is that of
    ======================================= ==============================================================================
    ``"embed (parts heads head_dim)"``      queries of all heads, then keys, then values: GPT-2
    ``"embed (heads parts head_dim)"``      query, key and value of each head side by side: GPT-NeoX
    ``"(parts heads head_dim) embed"``      the first one, ``[outputs, inputs]``
    ``"(heads head_dim) embed"``            nothing is fused but heads: without ``parts``, the leaf with all of its axes
    ======================================= ==============================================================================

    Parts of unequal sizes, as where queries share keys, are given with them:
    ``{"query": 12, "key": 4, "value": 4}`` with ``"embed (parts head_dim)"``; then each part has
    its share of that axis, which is no axis of their number.

    Args:
      tree: a pytree of arrays: parameters, or an optimizer state.
      pattern: of the end of the paths of the fused leaves, as in a shell:
        ``"attention/qkv/kernel"``.
      layout: of their axes; with ``layers`` first where they are stacked.
      parts: the names of the parts in order, or their sizes by name.
      **sizes: of axes, as many as it takes to tell the others: ``heads=12``.

    Returns:
      The tree with a dict of the parts, in the order of the axes, in place of each leaf;
      `join_fused` is the inverse.

    Raises:
      ValueError: no leaf matches, or a leaf does not have the layout; every one is listed.

    Example:
      >>> tree = {"qkv": np.arange(12).reshape(1, 12)}
      >>> split_fused(tree, "qkv", "embed (heads parts head_dim)", ("q", "k", "v"), heads=2)["qkv"]["k"].tolist()
      [[[2, 3], [8, 9]]]
    """
    plain = _plain(layout, parts)

    def split(x: Any) -> Any:
        if not parts:
            return rearrange(x, f"{layout} -> {plain}", **sizes)
        if not isinstance(parts, Mapping):
            whole = rearrange(x, f"{layout} -> parts {plain}", parts=len(parts), **sizes)
            return dict(zip(parts, whole, strict=True))
        whole = rearrange(x, f"{layout} -> {plain}", parts=sum(parts.values()), **sizes)
        ends = np.cumsum(list(parts.values()))
        along = plain.split().index("parts")
        pieces = (
            whole[(slice(None),) * along + (slice(end - n, end),)]
            for n, end in zip(parts.values(), ends, strict=True)
        )
        return dict(zip(parts, pieces, strict=True))

    return _rearranged(split, tree, pattern, layout, lambda node: jax.tree_util.all_leaves([node]))


def join_fused(
    tree: Tree, pattern: str, layout: str, parts: Sequence[str] | Mapping[str, int] = ()
) -> Tree:
    """The inverse of `split_fused`, whatever the sizes are now.

    Args:
      tree: as `split_fused` returns it, perhaps grown.
      pattern: as of `split_fused`.
      layout: as of `split_fused`.
      parts: as of `split_fused`; only their names count.

    Returns:
      The tree with a fused leaf in place of each dict of parts.

    Raises:
      ValueError: no node matches, or parts do not have the layout; every one is listed.

    Example:
      >>> tree = {"qkv": {"q": np.zeros((1, 2, 2)), "k": np.ones((1, 2, 2))}}
      >>> join_fused(tree, "qkv", "embed (heads parts head_dim)", ("q", "k"))["qkv"].tolist()
      [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]]
    """
    plain = _plain(layout, parts)

    def join(node: Any) -> Any:
        if not parts:
            return rearrange(node, f"{plain} -> {layout}")
        pieces = [node[name] for name in parts]
        if not isinstance(parts, Mapping):
            return rearrange(pieces, f"parts {plain} -> {layout}")
        stack = np if all(isinstance(x, np.ndarray) for x in pieces) else jnp
        return rearrange(
            stack.concatenate(pieces, plain.split().index("parts")), f"{plain} -> {layout}"
        )

    def fits(node: Any) -> bool:
        return (
            jax.tree_util.all_leaves([node])
            if not parts
            else isinstance(node, Mapping) and set(node) == set(parts)
        )

    return _rearranged(join, tree, pattern, layout, fits)


def _plain(layout: str, parts: Sequence[str] | Mapping[str, int]) -> str:
    """The axes of a part.

    Raises:
      ValueError: parts lie along no axis of the layout, or an axis of parts has none.
    """
    words = re.sub(r"[()]", " ", layout).split()
    if ("parts" in words) != bool(parts):
        raise ValueError(
            f"the layout {layout!r} with the parts {tuple(parts)}: name their axis 'parts', if there are any"
        )
    return " ".join(w for w in words if w != "parts" or isinstance(parts, Mapping))


def _rearranged(
    change: Callable[[Any], Any], tree: Tree, pattern: str, layout: str, fits: Callable[[Any], bool]
) -> Tree:
    wrong: list[str] = []

    def one(at: str, node: Any) -> Any:
        try:
            return change(node)
        except (EinopsError, ValueError) as error:
            shapes = ", ".join(str(np.shape(x)) for x in jax.tree.leaves(node))
            wrong.append(f"{at}, of {shapes}: {str(error).strip().splitlines()[-1].strip()}")
            return node

    out = at_nodes(one, tree, pattern, fits, f"nothing fits {pattern!r}")
    if wrong:
        raise ValueError(f"not of the layout {layout!r}:\n  " + "\n  ".join(wrong))
    return out
