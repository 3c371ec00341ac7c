"""Under which names does PEFT store the factors of the kernels of a model?"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxgrow.axes.names import READ, KernelAxes, Names, axis_kind, axis_of, split_kernel
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.hf.registry import FAMILIES
from jaxgrow.checkpoints.hf.storage import family_for
from jaxgrow.checkpoints.hf.tensor_layout import INPUT, TensorLayout
from jaxgrow.checkpoints.io.files import ADAPTER
from jaxgrow.checkpoints.source import Source, initial_layout
from jaxgrow.extras.hf_peft.dora import output_norms
from jaxgrow.extras.peft.lora import RANK, LoRA
from jaxgrow.models import Config

CONFIG, WEIGHTS = ADAPTER
PREFIX = "base_model.model."


def name_in_memory(family: Family, name: str) -> str:
    """Return the name of a stored tensor in the model that transformers 5 loads."""
    for old, new in family.modules.items():
        name = name.replace(old, new)
    return name


class ModuleNames(NamedTuple):
    """An architecture, and the version of transformers after which the modules are named."""

    family: Family
    older: bool  # names of transformers 4

    def of(self, config: Config) -> dict[str, TensorLayout]:
        """The place of each leaf, by the names of the modules."""
        names = self.family.names(config)
        if self.older:
            return dict(names)
        return {p: replace(s, name=name_in_memory(self.family, s.name)) for p, s in names.items()}

    def modules(self, config: Config) -> dict[str, list["Factors"]]:
        """The kernels of layers by the module of the base model, with ``{layers}`` in its name.

        Experts and routers are not included, because PEFT has no LoRA for them that can be read
        here.
        """
        found: dict[str, list[Factors]] = {}
        for path, stored in self.of(config).items():
            of_experts = "experts" in f"{stored.name} {stored.layout}"
            if path.endswith("/kernel") and "{layers}" in stored.name and not of_experts:
                axes = initial_layout(config)[path][0]
                factors = factor_layouts(stored, axes)
                of = Factors(path.removesuffix("/kernel"), split_kernel(axes), *factors, stored)
                found.setdefault(stored.name.removesuffix(".weight"), []).append(of)
        return found

    def of_layers(self, config: Config) -> Iterator[tuple[str, int, list["Factors"]]]:
        """Yield the module of each layer that may have a LoRA: its name, the layer, and its kernels."""
        sizes = config.sizes()
        for pattern, group in self.modules(config).items():
            for layer in range(group[0].layers(sizes)):
                yield pattern.format(layers=layer), layer, group


class Factors(NamedTuple):
    """The places of the two factors of a kernel, which has one tensor of each for each layer."""

    module: str  # its path in jaxgrow
    kernel: KernelAxes
    a: TensorLayout
    b: TensorLayout
    weight: TensorLayout

    @property
    def magnitude(self) -> TensorLayout:
        """The place of the magnitudes of a DoRA, one for each output."""
        name = self.b.name.replace("lora_B.weight", "lora_magnitude_vector")
        return replace(self.b, name=name, layout=self.b.layout.removesuffix(f" {RANK}"))

    def norms(
        self, base: Source, layer: int, lora: LoRA, leaves: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """The norm of the adapted weights of each output of one layer, as float32."""
        a, b = (np.asarray(leaves[f"{self.module}/{leaf}"][layer]) for leaf in "ab")
        return output_norms(base, self.module, self.kernel, layer, lora, a, b)

    @property
    def sides(self) -> tuple[tuple[str, TensorLayout, tuple[str, ...]], ...]:
        """The two factors of the kernel of one layer: leaf, place, and axes."""
        return (
            ("a", self.a, (*self.kernel.read, RANK)),
            ("b", self.b, (RANK + READ, *self.kernel.written)),
        )

    def layers(self, sizes: Mapping[str, int]) -> int:
        """The number of layers of the kernel."""
        return sizes[axis_of(self.kernel.stacked[0])]

    @property
    def reads_first(self) -> bool:
        """Whether the weight has its input axes before its output axes."""
        return self.weight.groups[0] in self.a.groups


def factor_layouts(kernel: TensorLayout, names: Names) -> tuple[TensorLayout, TensorLayout]:
    """Return the layouts of the two factors of a LoRA of a kernel.

    They have the shapes [rank, inputs] and [outputs, rank]. The outputs have the same parts, order
    and multiplier as in the kernel.

    Args:
      kernel: the layout of the kernel.
      names: its axis names.
    """
    read, written = (
        {axis_kind(axis_of(n)) for n in side}
        for side in (split_kernel(names).read, split_kernel(names).written)
    )
    marked = {n + INPUT for n in read} | (read - written)
    inputs = [group for group in kernel.groups if marked & set(group.strip("()").split())]
    outputs = [group for group in kernel.groups if group not in inputs]
    module = kernel.name.removesuffix(".weight")
    first = TensorLayout(f"{module}.lora_A.weight", " ".join([RANK, *inputs]).replace(INPUT, ""))
    return first, replace(kernel, name=f"{module}.lora_B.weight", layout=" ".join([*outputs, RANK]))


def storing_families(config: Config) -> list[Family]:
    """Return the architectures that store a model of ``config``.

    Raises:
      CheckpointError: none does.
    """
    out = [family_for(config, None)[0]]
    kind = (type(config), out[0].mixture)
    for family in FAMILIES.values():
        if (family.config, family.mixture) == kind and family.has_head(config):
            with suppress(ValueError):
                family.to_hf(config)
                out.append(family)
    return out
