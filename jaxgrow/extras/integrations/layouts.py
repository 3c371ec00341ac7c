"""How does an array of a checkpoint store a parameter?

Most arrays have the axes and the values of their parameter. In others, several axes are flattened
into one, the axes have another order, or the values are scaled or shifted.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from einops import rearrange

from jaxgrow.axes.names import LAYERS, Names, axis_of

HEADS = "heads"
KV_HEADS = "kv_heads"
_GROUP = "q_heads_per_group"


@dataclass(frozen=True)
class Layout:
    """The relation between an array and its parameter.

    The array is ``embed ** embed_power * parameter + plus``, rearranged. Gemma, for example, multiplies
    its embedding by the square root of ``embed``, and stores the scales of its norms minus one.

    Attributes:
      names: the axis names of the parameter.
      axes: the axes of the array as in einops, such as ``"(heads head_dim) embed"``; empty if the
        array has the axes of the parameter. With ``kv_heads q_heads_per_group``, the array has two axes
        for the ``heads`` of the parameter.
      embed_power: the power of the size of ``embed`` by which the parameter is multiplied.
      plus: the number that is added to the parameter.
    """

    names: Names
    axes: str = ""
    embed_power: float = 0.0
    plus: float = 0.0

    def stacked(self, dim: int) -> "Layout":
        """The layout of an array that stacks layers along the dimension ``dim``."""
        groups = self.groups()
        axes = " ".join((*groups[:dim], LAYERS, *groups[dim:])) if self.axes else ""
        # The axes of the parameter are in the order of its names, so layers can be anywhere.
        at = 0 if self.axes else dim
        names = (*self.names[:at], LAYERS, *self.names[at:])
        return replace(self, names=names, axes=axes)

    def renamed(self, old: str, new: str) -> "Layout":
        """The layout with another name for one axis."""
        names = tuple(new + n[len(old) :] if axis_of(n) == old else n for n in self.names)
        axes = re.sub(rf"\b{old}\b", new, self.axes)
        return replace(self, names=names, axes=axes)

    def groups(self) -> list[str]:
        """The axes of the array. Axes that are flattened into one are in parentheses.

        Example:
          >>> Layout(("embed.in", "heads", "head_dim"), "(heads head_dim) embed").groups()
          ['(heads head_dim)', 'embed']
        """
        return re.findall(r"\([^)]*\)|[^ ()]+", self.axes) or [axis_of(n) for n in self.names]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the array for these sizes of the axes."""
        known = grouped(sizes)
        shape: list[int] = []
        for group in self.groups():
            shape.append(math.prod(known[n] for n in _names(group)))
        return tuple(shape)

    def leaf(self, array: np.ndarray, sizes: Mapping[str, int], power: int = 0) -> np.ndarray:
        """The parameter that an array stores.

        Args:
          array: the array.
          sizes: the size of every axis.
          power: the power of the gradient that the array accumulates; 0 for a parameter. The
            gradient of the array is ``embed ** -embed_power`` times the gradient of the parameter.
        """
        x = self._unshifted(array, sizes, power)
        if not self.axes:
            return x
        known = {n: size for n, size in grouped(sizes).items() if n in _names(self.axes)}
        return rearrange(x, f"{self.axes} -> {self._plain()}", **known)

    def array(self, leaf: np.ndarray, sizes: Mapping[str, int], power: int = 0) -> np.ndarray:
        """Return the array that stores a parameter. This is the inverse of `leaf`."""
        if self.axes:
            known = {n: size for n, size in grouped(sizes).items() if n in _names(self.axes)}
            leaf = rearrange(leaf, f"{self._plain()} -> {self.axes}", **known)
        if not self.embed_power and not self.plus:
            return leaf
        x = _wide(leaf)
        plus = 0.0 if power else self.plus
        return x * x.dtype.type(self._factor(sizes, power)) + x.dtype.type(plus)

    def _plain(self) -> str:
        """The axes of the parameter as in einops."""
        plain = " ".join(axis_of(n) for n in self.names)
        if _GROUP not in self.axes:
            return plain
        keys = KV_HEADS if KV_HEADS in self.axes else HEADS
        return re.sub(rf"\b{HEADS}\b", f"({keys} {_GROUP})", plain)

    def _unshifted(self, x: np.ndarray, sizes: Mapping[str, int], power: int) -> np.ndarray:
        if not self.embed_power and not self.plus:
            return x
        x = _wide(x)
        plus = 0.0 if power else self.plus
        return (x - x.dtype.type(plus)) / x.dtype.type(self._factor(sizes, power))

    def _factor(self, sizes: Mapping[str, int], power: int) -> float:
        if not self.embed_power:
            return 1.0
        factor = float(sizes["embed"]) ** self.embed_power
        return factor**-power if power else factor


def grouped(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the axes, with the number of query heads per key/value head."""
    known = dict(sizes)
    if HEADS in sizes:
        known[_GROUP] = sizes[HEADS] // sizes.get(KV_HEADS, sizes[HEADS])
    elif {KV_HEADS, _GROUP} <= sizes.keys():
        known[HEADS] = sizes[KV_HEADS] * sizes[_GROUP]
    return known


def _names(group: str) -> list[str]:
    return re.sub("[()]", " ", group).split()


def _wide(x: np.ndarray) -> np.ndarray:
    """The values in float32 or a wider type, so that a shift is not rounded."""
    return x if x.dtype == np.float64 else x.astype(np.float32)
