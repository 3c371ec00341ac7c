"""A LoRA in the layout of PEFT, in memory: factors, gains and complete leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxgrow.axes.names import Params, split_kernel
from jaxgrow.checkpoints.hf.base import Family
from jaxgrow.checkpoints.io.files import CheckpointError
from jaxgrow.checkpoints.source import Source, initial_layout, leaves_by_path, tree_from_paths
from jaxgrow.extras.hf_peft.dora import grown_gains, with_gains
from jaxgrow.extras.peft import lora
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.growth.apply import grow, grow_leaf
from jaxgrow.growth.maps import Growth, new_sizes, swap, terms
from jaxgrow.models import Config
from jaxgrow.typed import Json

# The leaves that PEFT saves after a change of the vocabulary, without a setting for them.
RESAVED = ("token_embedding", "head_kernel", "head_bias")


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA, with the settings and the complete leaves that PEFT stores in the same files.

    Attributes:
      config: the config of the adapted model, with the head that the adapter holds.
      lora: the rank, the scale and the modules.
      factors: the factors, as from `jaxgrow.extras.peft.lora.init_lora`.
      saved: complete trained leaves of the model, by path (``modules_to_save``). They replace the
        leaves of the base model.
      about: the ``adapter_config.json`` that was read.
      family: the architecture after which the modules are named; None: any architecture that stores
        ``config``.
      older: whether the modules have the names of transformers 4, where transformers 5 has
        other names.
      gains: the gain of each output of the kernels of a DoRA, ``[layers, *outputs]``, by module;
        empty for a LoRA.
      notes: remarks for the user about the adapter.
    """

    config: Config
    lora: LoRA
    factors: Params
    saved: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Json = field(default_factory=dict)
    family: Family | None = None
    older: bool = False
    gains: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def grown(self, growth: Growth) -> "PeftAdapter":
        """Return the adapter of the grown model.

        The factors grow by `jaxgrow.extras.peft.lora.lora_growth`. Complete leaves grow like the leaves of the
        model.

        Args:
          growth: the growth of the model.

        Raises:
          ValueError: as from `jaxgrow.extras.peft.lora.lora_growth` and `jaxgrow.grow`, or the growth of a
            DoRA is not a DoRA.
        """
        axes, own = self.config.axes(), self.config.sizes()
        if wrong := [
            f"{axis} {own[axis]}, not {n}"
            for axis, n in new_sizes(swap(growth)).items()
            if own.get(axis, n) != n
        ]:
            raise ValueError(
                f"the adapter belongs to a model with {', '.join(wrong)}. First merge it into its model with PEFT "
                "(resize_token_embeddings, then merge_and_unload), and change the merged model"
            )
        rules = lora.lora_growth(growth, self.lora, axes)
        return replace(
            self,
            config=self.config.resized(growth),
            lora=self.lora.resized(rules),
            factors=grow(rules, self.factors, lora.lora_axes(self.lora, axes)),
            saved={path: self._grown_leaf(growth, path) for path in self.saved},
            gains={module: self._grown_gain(growth, module) for module in self.gains},
        )

    def _grown_gain(self, growth: Growth, module: str) -> np.ndarray:
        path = f"{module}/kernel"
        names = initial_layout(self.config)[path][0]
        of = terms(growth, path, names)
        return grown_gains(self.gains[module], of, split_kernel(names), module)

    def _grown_leaf(self, growth: Growth, path: str) -> np.ndarray:
        names = initial_layout(self.config)[path][0]
        return np.asarray(grow_leaf(terms(growth, path, names), names, self.saved[path]))

    def merged(self, params: Params) -> Params:
        """Merge the adapter into the parameters of the base model.

        Args:
          params: the parameters of the base model, which may have another head.

        Returns:
          The parameters of the adapted model.

        Raises:
          ValueError: neither the model nor the adapter has all leaves.
        """
        expected = initial_layout(self.config)
        leaves = leaves_by_path(params) | dict(self.saved)
        if lost := expected.keys() - leaves:
            raise ValueError(f"neither the model nor the adapter has {', '.join(sorted(lost))}")
        own = tree_from_paths({path: leaves[path] for path in expected})
        merged = lora.merge_lora(own, self.factors, self.lora)
        kernels = {module: split_kernel(expected[f"{module}/kernel"][0]) for module in self.gains}
        return tree_from_paths(with_gains(leaves_by_path(merged), self.gains, kernels))

    def check_base(self, base: Source | None) -> None:
        """Check that a DoRA has a base model.

        Args:
          base: the base model.

        Raises:
          CheckpointError: it has none.
        """
        if self.gains and base is None:
            raise CheckpointError(
                "the adapter is a DoRA, whose magnitudes are norms of the kernels of its base "
                "model: give its folder (like=...)"
            )
