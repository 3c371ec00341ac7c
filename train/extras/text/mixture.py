"""In which order do several sources of text follow each other?

The sample at a position is a function of the position, the seed and the shares alone, so a run can
resume at any position with any number of processes. A binary tree divides the positions: at each
node, the positions of the larger side are spread evenly. Every window of positions therefore has the shares
of the sources up to 3.36 samples, for any number of sources: the error of a node is at most 1 plus
its part of the error of the node above, and in Huffman's tree, the parts in a row are at most the
ratios of Fibonacci numbers, whose reciprocals sum to 3.36.

The order and the epochs of a source do not depend on the other sources.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TypeAlias

import grain

from train.data.batches import endless_samples
from train.data.dataset import MixedSource


def as_shares(weights: Sequence[float]) -> list[Fraction]:
    """The weights divided by their sum, as exact fractions: ``0.7`` is 7/10."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


class _Split(NamedTuple):
    """A node of the tree that divides positions among sources."""

    ratio: Fraction  # the part of the larger side
    larger: "_Tree"
    smaller: "_Tree"


_Tree: TypeAlias = "int | _Split"  # the number of a source, or a node


def _part(count: int, ratio: Fraction) -> int:
    """How many of the first ``count`` positions belong to the larger side."""
    return count * ratio.numerator // ratio.denominator


@dataclass(frozen=True)
class Mixture(MixedSource):
    """Samples of several sources.

    Attributes:
      parts: the sources, by name.
      shares: the share of each source in the samples; they sum to 1.
    """

    parts: Mapping[str, Any]
    shares: Sequence[Fraction]

    def counts(self, samples: int) -> list[int]:
        found = [0] * len(self.shares)
        left = [(self._tree, samples)]
        while left:
            node, count = left.pop()
            if isinstance(node, int):
                found[node] = count
                continue
            larger = _part(count, node.ratio)
            left += [(node.larger, larger), (node.smaller, count - larger)]
        return found

    def place(self, position: int) -> tuple[int, int]:
        """The source of the sample at a position, and its position within the source."""
        node = self._tree
        while not isinstance(node, int):
            before = _part(position, node.ratio)
            if _part(position + 1, node.ratio) > before:
                node, position = node.larger, before
            else:
                node, position = node.smaller, position - before
        return node, position

    @cached_property
    def _tree(self) -> "_Tree":
        """Huffman's tree of the shares, in which large sources are near the root."""
        found: list[tuple[Fraction, int, _Tree]] = [
            (share, number, number) for number, share in enumerate(self.shares)
        ]
        heapify(found)
        for number in range(len(found), 2 * len(found) - 1):
            (small, _, smaller), (large, _, larger) = heappop(found), heappop(found)
            both = small + large
            heappush(found, (both, number, _Split(large / both, larger, smaller)))
        return found[0][2]

    def samples(self, orders: Sequence[tuple[int, int]]) -> grain.MapDataset:
        parts = [
            endless_samples(part, seed)[first:]
            for part, (seed, first) in zip(self.parts.values(), orders, strict=True)
        ]
        return _Mixed(parts, self.place)


class _Mixed(grain.MapDataset):
    """Elements of endless datasets; ``place`` gives the dataset of an index, and the index there."""

    def __init__(self, parts: Sequence[grain.MapDataset], place: Callable[[int], tuple[int, int]]):
        super().__init__(parts)
        self._parts = parts
        self._place = place

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        number, own = self._place(index)
        return self._parts[number][own]
