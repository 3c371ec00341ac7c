"""How do models with fused kernels, such as one ``qkv`` kernel, grow? The kernels are split first.

`split_fused` makes one leaf of each part, with all of its axes, and `join_fused` fuses them again.
Both only move values, so the round trip is exact.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

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
    """Split fused kernels: a leaf ``qkv`` becomes a dict of ``query``, ``key`` and ``value``.

    Each part has all of its axes, such as ``heads`` and ``head_dim``. The layout names the axes of
    the fused leaf as in einops, where parentheses group axes that are flattened into one. The parts
    are stored along the axis ``parts``.

    ======================================= ====================================================
    layout                                  example
    ======================================= ====================================================
    ``"embed (parts heads head_dim)"``      GPT-2: queries of all heads, then keys, then values
    ``"embed (heads parts head_dim)"``      GPT-NeoX: query, key and value of each head together
    ``"(parts heads head_dim) embed"``      as the first one, but ``[outputs, inputs]``
    ``"(heads head_dim) embed"``            only heads are flattened: without ``parts``, the
                                            result is the leaf with all of its axes
    ======================================= ====================================================

    If the parts have different sizes, as with GQA, give the size of each part:
    ``{"query": 12, "key": 4, "value": 4}`` with ``"embed (parts head_dim)"``. Each part then keeps
    the axis ``parts``, with its own size.

    Args:
      tree: a pytree of arrays: parameters, or an optimizer state.
      pattern: shell-style pattern for the end of the paths of the fused leaves, such as
        ``"attention/qkv/kernel"``.
      layout: layout of the leaves, with ``layers`` as the first axis if layers are stacked.
      parts: names of the parts in order, or a mapping from their names to their sizes.
      **sizes: sizes of axes, as far as the shapes do not determine them: ``heads=12``.

    Returns:
      The tree with a dict of the parts instead of each fused leaf. Each part has its axes in the
      order of the layout. `join_fused` is the inverse.

    Raises:
      ValueError: no leaf matches, or leaves do not have the layout. The message lists all of them.

    Example:
      >>> tree = {"qkv": np.arange(12).reshape(1, 12)}
      >>> split_fused(tree, "qkv", "embed (heads parts head_dim)", ("q", "k", "v"), heads=2)["qkv"]["k"].tolist()
      [[[2, 3], [8, 9]]]
    """
    plain = _part_axes(layout, parts)

    def split(x: Tree) -> Tree:
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
    """Join the parts of fused kernels: the inverse of `split_fused`, also after growing.

    Args:
      tree: result of `split_fused`, possibly grown.
      pattern: as in `split_fused`.
      layout: as in `split_fused`.
      parts: as in `split_fused`. Only the names are used.

    Returns:
      The tree with a fused leaf instead of each dict of parts.

    Raises:
      ValueError: no node matches, or parts do not have the layout. The message lists all of them.

    Example:
      >>> tree = {"qkv": {"q": np.zeros((1, 2, 2)), "k": np.ones((1, 2, 2))}}
      >>> join_fused(tree, "qkv", "embed (heads parts head_dim)", ("q", "k"))["qkv"].tolist()
      [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]]
    """
    plain = _part_axes(layout, parts)

    def join(node: Tree) -> Tree:
        if not parts:
            return rearrange(node, f"{plain} -> {layout}")
        pieces = [node[name] for name in parts]
        if not isinstance(parts, Mapping):
            return rearrange(pieces, f"parts {plain} -> {layout}")
        stack: ModuleType = np if all(isinstance(x, np.ndarray) for x in pieces) else jnp
        return rearrange(
            stack.concatenate(pieces, plain.split().index("parts")), f"{plain} -> {layout}"
        )

    def fits(node: Tree) -> bool:
        return (
            jax.tree_util.all_leaves([node])
            if not parts
            else isinstance(node, Mapping) and set(parts) == {*node}
        )

    return _rearranged(join, tree, pattern, layout, fits)


def _part_axes(layout: str, parts: Sequence[str] | Mapping[str, int]) -> str:
    """Return the axes of one part.

    Raises:
      ValueError: there are parts, but the layout has no axis ``parts``, or vice versa.
    """
    words = re.sub(r"[()]", " ", layout).split()
    if ("parts" in words) != bool(parts):
        raise ValueError(
            f"the layout {layout!r} does not fit the parts {tuple(parts)}. The layout must "
            "contain 'parts' if and only if parts are given."
        )
    return " ".join(w for w in words if w != "parts" or isinstance(parts, Mapping))


def _rearranged(
    change: Callable[[Tree], Tree],
    tree: Tree,
    pattern: str,
    layout: str,
    fits: Callable[[Tree], bool],
) -> Tree:
    wrong: list[str] = []

    def one(at: str, node: Tree) -> Tree:
        try:
            return change(node)
        except (EinopsError, ValueError) as error:
            shapes = ", ".join(str(np.shape(x)) for x in jax.tree.leaves(node))
            wrong.append(f"{at}, of shape {shapes}: {str(error).strip().splitlines()[-1].strip()}")
            return node

    out = at_nodes(one, tree, pattern, fits, f"no node matches {pattern!r}")
    if wrong:
        raise ValueError(f"leaves do not have the layout {layout!r}:\n  " + "\n  ".join(wrong))
    return out
