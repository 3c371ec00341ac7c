"""How a Hugging Face architecture stores a model: names, layouts and settings, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from einops import rearrange

from jaxgrow.axes import LAYERS, READ, Names, axis
from jaxgrow.models import Config

_IN = "_in"  # for READ, which einops would not take


@dataclass(frozen=True)
class Stored:
    """Where a leaf is stored. ``Stored("h.{layers}.attn.c_attn.weight", "embed (3 heads head_dim)", part=0)`` is a query
    kernel: one tensor a layer, the first of three that lie side by side."""

    name: str  # of the tensor; with ``{layers}``, one for each layer of a stacked leaf
    # Its axes, as in einops; a number is the parts of a fused tensor; of a kernel from ``embed`` to ``embed``, the one that it
    # reads is ``embed_in``.
    layout: str
    part: int | None = None

    def ours(self, tensor: np.ndarray, names: Names, sizes: Mapping[str, int]) -> np.ndarray:
        """The leaf (of one layer), with its axes ``names``, as it lies in the tensor: a view where that is possible.

        Raises:
          ValueError: the tensor has another shape than ``sizes`` make.
        """
        parts, plain = self._parts(names)
        if tensor.shape != self.shape(names, sizes):
            raise ValueError(f"{self.name} has shape {tensor.shape}, but should have {self.shape(names, sizes)}")
        known = {n: _size(sizes, n) for n in plain}
        if parts is None:
            return rearrange(tensor, f"{self.layout} -> {' '.join(plain)}", **known)
        split = self.layout.replace(str(parts), "parts")
        return rearrange(tensor, f"{split} -> parts {' '.join(plain)}", parts=parts, **known)[self.part]

    def theirs(self, leaf: np.ndarray, names: Names, into: np.ndarray | None = None) -> np.ndarray:
        """The tensor of the leaf (of one layer): the whole of it, or ``into`` with this part filled in."""
        parts, plain = self._parts(names)
        if parts is None:
            return rearrange(leaf, f"{' '.join(plain)} -> {self.layout}")
        known = dict(zip(plain, leaf.shape, strict=True))
        if into is None:
            into = np.zeros(self.shape(names, known), leaf.dtype)
        self.ours(into, names, known)[...] = leaf  # a view: axes are only divided and exchanged
        return into

    def shape(self, names: Names, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape."""
        _, plain = self._parts(names)
        axes = [a.strip("() ") for a in _top(self.layout)]
        assert {n for a in axes for n in a.split() if not n.isdigit()} == set(plain), (self, names)
        return tuple(int(np.prod([int(n) if n.isdigit() else _size(sizes, n) for n in a.split()])) for a in axes)

    def _parts(self, names: Names) -> tuple[int | None, list[str]]:
        plain = [axis(n) for n in names if axis(n) != LAYERS or "{layers}" not in self.name]
        if len(set(plain)) < len(plain):
            plain = [n.replace(READ, _IN) for n in names if axis(n) != LAYERS or "{layers}" not in self.name]
        numbers = [int(n) for n in self.layout.replace("(", " ").replace(")", " ").split() if n.isdigit()]
        return (numbers[0] if numbers and self.part is not None else None), plain


def _size(sizes: Mapping[str, int], name: str) -> int:
    return sizes[name] if name in sizes else sizes[name.removesuffix(_IN)]


def _top(layout: str) -> list[str]:
    """``["embed", "(3 heads head_dim)"]``."""
    out, depth = [], 0
    for word in layout.replace("(", "( ").replace(")", " )").split():
        depth += word == "("
        if depth and out and out[-1].startswith("(") and not out[-1].endswith(")"):
            out[-1] += " " + word
        else:
            out.append(word)
        depth -= word == ")"
    return out


@dataclass(frozen=True)
class Family:
    """An architecture: ``config.json`` and tensors, against a config and leaves of ours."""

    architecture: str  # as in ``config.json``
    model_type: str
    config: type[Config]
    fields: Mapping[str, str]  # their key: our field
    names: Callable[[Config], dict[str, Stored]]  # our leaf: where it is stored
    # What of our config the architecture leaves no choice of: our field: value. A config with another is stored elsewhere.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # What we compute: their key, and the values that mean it, the first one where it is left out. Others are refused.
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # What follows from our config and is written, but not read: their key: value.
    derived: Callable[[Config], dict[str, Any]] = lambda config: {}
    # Tensors that hold nothing that was learned, as patterns of names: they may be there.
    ignored: tuple[str, ...] = ()
    # How names end in older files: how they end now.
    renamed: Mapping[str, str] = field(default_factory=dict)

    def current(self, name: str) -> str:
        """The name of a tensor today, whatever it was in the file."""
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name
