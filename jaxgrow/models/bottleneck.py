"""The settings of the bottleneck adapters of a layer.

`jaxgrow.extras.peft.bottleneck` has their module, and `jaxgrow.extras.peft.adapters` grows them.
Shape suffixes: B batch, T positions, D embed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import jax
from flax import linen as nn

from jaxgrow.axes.names import Axes
from jaxgrow.registry import Registry

if TYPE_CHECKING:
    from jaxgrow.models.config import Config

BOTTLENECK = "bottleneck"
ADAPTER = "_adapter"  # suffix of module names, after the sublayer's name
# Unlike in the configs of models, "gelu" is the tanh approximation here.
ADAPTER_ACTIVATIONS: Mapping[str, Callable] = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclass(frozen=True)
class Adapter:
    """Bottleneck adapters in every layer.

    The defaults are the adapters of Houlsby et al. (2019). ``at=("mlp",)`` with
    ``activation="relu"`` gives those of Pfeiffer et al. (2021).

    Attributes:
      size: units of the bottleneck.
      at: the sublayers that have an adapter.
      activation: activation function of the bottleneck.

    Deviation(Pfeiffer): in a post-LN model, the adapters of Pfeiffer et al. read the output of
    the norm that follows a sublayer. Here, adapters read the output of the sublayer itself.
    """

    size: int = 64
    at: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
    activation: Literal["gelu", "relu", "silu"] = "gelu"

    def __post_init__(self):
        known = (
            isinstance(self.at, tuple)
            and set(self.at) <= {"attention", "mlp"}
            and len(set(self.at)) == len(self.at)
        )
        if type(self.size) is not int or self.size < 1 or not known or not self.at:
            raise ValueError(
                "an adapter needs a size of at least 1, and a place (at) of attention, mlp or both, "
                f"but is {self}"
            )
        if self.activation not in ADAPTER_ACTIVATIONS:
            raise ValueError(
                f"an adapter's activation must be one of {', '.join(ADAPTER_ACTIVATIONS)}, not "
                f"{self.activation!r}"
            )

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the adapter's own axes."""
        return {BOTTLENECK: self.size}

    def adapted(self, config: "Config") -> "Config":
        """Return the config of a model with these adapters."""
        return replace(config, adapter=self)

    def kernels(self, axes: Axes) -> tuple[Axes, Axes]:
        """Return the frozen kernels of the layers, to count the FLOPs of training."""
        blocks = axes["blocks"]
        return {name: own for name, own in blocks.items() if not name.endswith(ADAPTER)}, {}

    def cost(self, embed: int) -> float:
        """Return the FLOPs per position in a layer: ``4 D S`` in each sublayer with an adapter.

        Args:
          embed: hidden size, D.
        """
        return len(self.at) * 4.0 * embed * self.size


# The module of an adapter in a layer.
ADAPTER_MODULES: Registry[Callable[..., nn.Module]] = Registry("adapter module")


def add_adapter(
    block: nn.Module, sublayer: Literal["attention", "mlp"], y_BTD: jax.Array
) -> jax.Array:
    """Return a sublayer's output plus the output of its adapter, if it has one.

    Call it inside a compact block that has a config.
    """
    config = block.config  # type: ignore[attr-defined]
    dtype = block.dtype  # type: ignore[attr-defined]
    adapter: Adapter | None = config.adapter
    if adapter is None or sublayer not in adapter.at:
        return y_BTD
    return y_BTD + ADAPTER_MODULES["bottleneck"](adapter, dtype, name=sublayer + ADAPTER)(y_BTD)
