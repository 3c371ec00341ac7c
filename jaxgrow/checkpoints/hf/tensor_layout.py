"""Where and how does a checkpoint store one parameter of a model?"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from einops import rearrange

from jaxgrow.axes.names import Names, axis_kind, axis_of, is_layers, reads_axis

# This suffix stands for ".in" in layouts, because einops does not accept dots in names.
INPUT = "_in"
_QUERY_HEADS = "heads"
_PER_KEY_HEAD = "q_heads_per_group"


@dataclass(frozen=True)
class TensorLayout:
    """The tensor in which one leaf is stored, and the arrangement of the leaf in it.

    ``TensorLayout("h.{layers}.attn.c_attn.weight", "embed (3 heads head_dim)", part=0)`` is a query
    kernel. Each layer has one tensor, and the query is the first of three equal parts in it.

    Args:
      name: the name of the tensor. With ``{layers}``, each layer of a stacked leaf has a tensor;
        with ``{experts}``, each expert of the leaf has one.
      layout: the kinds of the axes of the tensor, as in einops; empty: those of the leaf. A layer
        axis that it does not name is not an axis of the tensor. A number is the number of parts of a
        fused tensor. In a kernel from ``embed`` to ``embed``, the input axis ends in ``_in``. With
        ``kv_heads q_heads_per_group``, the tensor has two axes for the ``heads`` of the leaf.
      part: the index of this leaf among the parts of a fused tensor.
      beside: for parts that are concatenated along the first axis, the axes of each part there,
        such as ``("heads head_dim", "mlp")``.
      times: the tensor is ``times * leaf + plus``.
      plus: see ``times``. The norms of Gemma are stored minus one, for example. Leaves with other
        values than 1 and 0 are float32 or wider.
      first: the first layer that has a tensor. Lower layers do not use the leaf, whose values are 1
        there.
    """

    name: str = ""
    layout: str = ""
    part: int | None = None
    beside: tuple[str, ...] = ()
    times: float = 1.0
    plus: float = 0.0
    first: int = 0

    @property
    def groups(self) -> list[str]:
        """The axes of the tensor. Leaf axes that form one axis are in parentheses.

        Example:
          >>> TensorLayout("w", "embed (3 heads head_dim)").groups
          ['embed', '(3 heads head_dim)']
        """
        return re.findall(r"\([^)]*\)|[^\s()]+", self.layout)

    @property
    def moved(self) -> bool:
        """Whether the tensor has other values than the leaf."""
        return (self.times, self.plus) != (1.0, 0.0)

    def layers(self, of: Sequence[int | None]) -> Sequence[int | None]:
        """The layers that are stored, out of the layers ``of`` of a leaf."""
        return of[self.first :]

    def of_experts(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the tensor names: one per expert if experts are stored separately, otherwise one.

        Args:
          sizes: the size of every axis.
        """
        if "{experts}" not in self.name:
            return [self.name]
        return [self.name.replace("{experts}", str(i)) for i in range(sizes["experts"])]

    def to_leaf(
        self, tensor: np.ndarray, names: Names, sizes: Mapping[str, int], gradient_power: int = 0
    ) -> np.ndarray:
        """Return the leaf (of one layer) that a tensor holds, as a view if possible.

        Args:
          tensor: the stored tensor.
          names: the axis names of the leaf.
          sizes: the size of every axis.
          gradient_power: the power of the gradient that the tensor accumulates; 0 for a parameter.
            The gradient of the tensor is ``1 / times`` times the gradient of the leaf.

        Returns:
          An array whose axes are ``names`` without the layer axis.

        Raises:
          ValueError: the tensor does not have the shape that ``sizes`` determine.
        """
        expected = self.shape(names, sizes)
        if tensor.shape != expected:
            raise ValueError(f"{self.name} has shape {tensor.shape}, but should have {expected}")
        if self.moved:
            wide = tensor if tensor.dtype == np.float64 else tensor.astype(np.float32)
            times, plus = self._scaling(gradient_power)
            tensor = ((wide - plus) / times).astype(wide.dtype)
        return self._view(tensor, names, sizes)

    def to_tensor(
        self,
        leaf: np.ndarray,
        names: Names,
        sizes: Mapping[str, int],
        into: np.ndarray | None = None,
        gradient_power: int = 0,
    ) -> np.ndarray:
        """Return the tensor that holds a leaf (of one layer). This is the inverse of `to_leaf`.

        Args:
          leaf: the values of the leaf.
          names: the axis names of the leaf.
          sizes: the size of every axis.
          into: the tensor to fill this part into, if several leaves share it; None: a new tensor.
          gradient_power: as for `to_leaf`.
        """
        if self.moved:
            times, plus = self._scaling(gradient_power)
            leaf = (times * leaf + plus).astype(leaf.dtype)
        if self.part is None:
            pattern, known = self._pattern(names, sizes)
            to, _, of = pattern.partition(" -> ")
            return rearrange(leaf, f"{of} -> {to}", **known)
        if into is None:
            into = np.zeros(self.shape(names, sizes), leaf.dtype)
        # `rearrange` only splits and transposes axes here, so this writes into the tensor itself.
        self._view(into, names, sizes)[...] = leaf
        return into

    def shape(self, names: Names, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        axes = self._axes(names)
        known = self._known(axes, sizes)
        groups = self.groups or list(axes)
        assert {*re.findall(r"[a-z]\w*", " ".join(groups))} <= known.keys(), (self, names)
        shape = [_group_size(group, known) for group in groups]
        if self.beside:
            shape[0] = sum(_group_size(group, sizes) for group in self.beside)
        return tuple(shape)

    def _scaling(self, gradient_power: int) -> tuple[float, float]:
        if not gradient_power:
            return self.times, self.plus
        return self.times**-gradient_power, 0.0

    def _view(self, tensor: np.ndarray, names: Names, sizes: Mapping[str, int]) -> np.ndarray:
        pattern, known = self._pattern(names, sizes)
        if self.beside and self.part is not None:
            begin = sum(_group_size(group, sizes) for group in self.beside[: self.part])
            tensor = tensor[begin : begin + _group_size(self.beside[self.part], sizes)]
        elif self.part is not None:
            pattern = re.sub(r"\b\d+\b", "parts", pattern).replace("-> ", "-> parts ")
            return rearrange(tensor, pattern, **known)[self.part]
        return rearrange(tensor, pattern, **known)

    def _pattern(self, names: Names, sizes: Mapping[str, int]) -> tuple[str, dict[str, int]]:
        """The pattern of einops from the tensor to the leaf, and the sizes of its axes."""
        axes = self._axes(names)
        known = self._known(axes, sizes)
        leaf = " ".join(axes)
        if _PER_KEY_HEAD in self.layout:
            keys = "kv_heads" if "kv_heads" in self.layout else _QUERY_HEADS
            leaf = re.sub(rf"\b{_QUERY_HEADS}\b", f"({keys} {_PER_KEY_HEAD})", leaf)
        pattern = f"{self.layout or leaf} -> {leaf}"
        return pattern, {n: size for n, size in known.items() if re.search(rf"\b{n}\b", pattern)}

    def _axes(self, names: Names) -> dict[str, str]:
        """Return the axes of the leaf in the tensor, by their names in the layout."""
        apart = "experts" if "{experts}" in self.name else None
        stacked = not self.layout or "layers" in self.layout
        own = [n for n in names if (stacked or not is_layers(axis_of(n))) and axis_of(n) != apart]
        plain = {axis_kind(axis_of(n)): axis_of(n) for n in own}
        if len(plain) < len(own):
            plain = {axis_kind(axis_of(n)) + INPUT * reads_axis(n): axis_of(n) for n in own}
        return plain

    def _known(self, axes: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, int]:
        """The size of every name in the layout."""
        known = {name: sizes[of] for name, of in axes.items() if of in sizes}
        if _PER_KEY_HEAD in self.layout:
            heads = sizes[_QUERY_HEADS]
            keys = sizes.get("kv_heads", heads)
            known |= {"kv_heads": keys, _PER_KEY_HEAD: heads // keys}
        return known


def _group_size(group: str, sizes: Mapping[str, int]) -> int:
    """The size of axes such as ``"(3 heads head_dim)"``."""
    return math.prod(int(n) if n.isdigit() else sizes[n] for n in group.strip("()").split())


def linear_layouts(
    path: str,
    module: str,
    outputs: str,
    inputs: str = "embed",
    part: int | None = None,
    bias: bool = True,
) -> dict[str, TensorLayout]:
    """Return the layouts of a kernel that is stored as [outputs, inputs], and of its bias.

    Args:
      path: the path of the module in jaxgrow.
      module: the name of the module in Hugging Face's model.
      outputs: the layout of the output axes.
      inputs: the layout of the input axes.
      part: the index of the kernel among the parts of a fused tensor.
      bias: whether there is a bias.
    """
    kernel = TensorLayout(f"{module}.weight", f"{outputs} {inputs}", part)
    biases = {f"{path}/bias": TensorLayout(f"{module}.bias", outputs, part)} if bias else {}
    return {f"{path}/kernel": kernel, **biases}


def norm_layouts(modules: Mapping[str, str]) -> dict[str, TensorLayout]:
    """Return the layouts of the scales and biases of LayerNorms.

    Args:
      modules: a dict from the path of the module in jaxgrow to its name in Hugging Face's model.
    """
    scales = {f"{p}/scale": TensorLayout(f"{m}.weight", "embed") for p, m in modules.items()}
    return scales | {f"{p}/bias": TensorLayout(f"{m}.bias", "embed") for p, m in modules.items()}
