"""How the parameters of a model are made of what trains and of what stands still, where they are not what trains themselves.

A new way to train a model by something smaller is a class here, and a phase that begins it
(`train.plan.learning`, `train.plan.adapting`).
"""

from dataclasses import dataclass

from jaxgrow import grow
from jaxgrow.axes import Axes, Params, Tree, sizes
from jaxgrow.models import Adapter, Config
from jaxgrow.models.bottleneck import ADAPTER, FUSION
from jaxgrow.operators import ligo
from jaxgrow.peft import adapters, lora
from jaxgrow.peft.lora import LoRA
from train.engine.state.heads import split


@dataclass(frozen=True)
class Made:
    """How the parameters of a model are assembled from trained and frozen ones.

    ``trained`` and ``base`` are the `train.engine.state.model.Model.params` and `Model.base`.
    """

    def axes(self, config: Config) -> Axes | None:
        """The axis names of what trains; None of what is not named by the model's axes."""
        raise NotImplementedError

    def base_axes(self, config: Config) -> Axes:
        """Those of what stands still."""
        raise NotImplementedError

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        """What the model computes with."""
        raise NotImplementedError

    def plain(self, config: Config, trained: Tree, base: Params) -> Params:
        """Parameters of the same function, of the structure that ``config`` has."""
        return self.parameters(config, trained, base)


@dataclass(frozen=True)
class ByMaps(Made):
    """LiGO: coefficients of maps train, and grow a small model that stands still."""

    source: Config  # the small model's

    def axes(self, config: Config) -> None:
        return None

    def base_axes(self, config: Config) -> Axes:
        return self.source.axes()

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        axes = self.source.axes()
        return grow(ligo.growth(trained, axes, sizes(base, axes)), base, axes)


@dataclass(frozen=True)
class ByLoRA(Made):
    """An adapter trains, and the head; the body stands still."""

    lora: LoRA

    def axes(self, config: Config) -> Axes:
        body, head = split(config.axes())
        return lora.axes_of(self.lora, body) | head

    def base_axes(self, config: Config) -> Axes:
        return split(config.axes())[0]

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        adapter, head = split(trained)
        return lora.attach(base | head, adapter, self.lora)

    def plain(self, config: Config, trained: Tree, base: Params) -> Params:
        adapter, head = split(trained)
        return lora.merge(base | head, adapter, self.lora)


@dataclass(frozen=True)
class ByAdapter(Made):
    """Bottleneck adapters train, and the head; the body stands still. Of adapters that are fused, what composes them trains."""

    adapter: Adapter

    def apart(self, body: Tree) -> tuple[Tree, Tree]:
        """``(what stands still, what trains)`` of a model's body with adapters."""
        return adapters.detach(body, (ADAPTER,) if self.adapter.fused is None else (FUSION,))

    def axes(self, config: Config) -> Axes:
        body, head = split(config.axes())
        return self.apart(body)[1] | head

    def base_axes(self, config: Config) -> Axes:
        return self.apart(split(config.axes())[0])[0]

    def parameters(self, config: Config, trained: Tree, base: Params) -> Params:
        own, head = split(trained)
        return adapters.attach(base, own) | head
