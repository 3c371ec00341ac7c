"""How are the parameters of a model computed if they are not trained directly?

A new parameter-efficient way to train a model is a new class here, and a phase that starts it
(`train.plan.learning`, `train.extras.adapting`).
"""

from dataclasses import dataclass

from jaxgrow import grow
from jaxgrow.axes import Axes, Params, Tree, sizes
from jaxgrow.extras.peft import adapters, lora
from jaxgrow.extras.peft.lora import LoRA
from jaxgrow.models import Adapter, Config
from jaxgrow.operators import ligo
from train.state.heads import split


@dataclass(frozen=True)
class Made:
    """How the parameters of a model are assembled from trained and frozen ones.

    ``trained`` is `train.state.model.TrainState.params`, and ``base`` is `TrainState.base`.
    """

    def axes(self, config: Config) -> Axes | None:
        """Return the axis names of the trained parameters, or None if they do not have any."""
        raise NotImplementedError

    def base_axes(self, config: Config) -> Axes:
        """Return the axis names of the frozen parameters."""
        raise NotImplementedError

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        """Return the parameters that the model computes with."""
        raise NotImplementedError

    def plain(self, config: Config, trained: Tree, base: Params) -> Params:
        """Return parameters of the same function with the tree structure of ``config``."""
        return self.parameters(config, trained, base)


@dataclass(frozen=True)
class ByMaps(Made):
    """LiGO: the coefficients of the growth maps are trained, and grow a frozen small model."""

    source: Config  # config of the small model

    def axes(self, config: Config) -> None:
        return None

    def base_axes(self, config: Config) -> Axes:
        return self.source.axes()

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        axes = self.source.axes()
        return grow(ligo.learned_growth(trained, axes, sizes(base, axes)), base, axes)


@dataclass(frozen=True)
class ByLoRA(Made):
    """LoRA: the adapter and the head are trained, and the body is frozen."""

    lora: LoRA

    def axes(self, config: Config) -> Axes:
        body, head = split(config.axes())
        return lora.lora_axes(self.lora, body) | head

    def base_axes(self, config: Config) -> Axes:
        return split(config.axes())[0]

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        adapter, head = split(trained)
        return lora.attach_lora(base | head, adapter, self.lora)

    def plain(self, config: Config, trained: Tree, base: Params) -> Params:
        adapter, head = split(trained)
        return lora.merge_lora(base | head, adapter, self.lora)


@dataclass(frozen=True)
class ByAdapter(Made):
    """Bottleneck adapters: the adapters and the head are trained, and the body is frozen."""

    adapter: Adapter

    def axes(self, config: Config) -> Axes:
        body, head = split(config.axes())
        return adapters.detach_adapters(body)[1] | head

    def base_axes(self, config: Config) -> Axes:
        return adapters.detach_adapters(split(config.axes())[0])[0]

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        own, head = split(trained)
        return adapters.attach_adapters(base, own) | head
