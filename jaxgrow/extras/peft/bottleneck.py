"""The module of a bottleneck adapter. Shape suffixes: B batch, T positions, D embed."""

from flax import linen as nn
from jax.typing import DTypeLike

from jaxgrow.axes.names import READ
from jaxgrow.models.bottleneck import ADAPTER_ACTIVATIONS, ADAPTER_MODULES, BOTTLENECK, Adapter
from jaxgrow.models.modules import Linear


class Bottleneck(nn.Module):
    """``f(y D + d) U + u``, where U is initialised to zeros.

    D is initialised as in He et al. (ICLR 2022): uniform in ``+- 1 / sqrt(embed)``.
    """

    adapter: Adapter
    dtype: DTypeLike

    @nn.compact
    def __call__(self, y_BTD):
        embed = y_BTD.shape[-1]
        size = self.adapter.size
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        down = Linear(("embed" + READ, BOTTLENECK), (embed, size), 1, init, self.dtype, name="down")
        up = Linear(
            (BOTTLENECK + READ, "embed"),
            (size, embed),
            1,
            nn.initializers.zeros,
            self.dtype,
            name="up",
        )
        return up(ADAPTER_ACTIVATIONS[self.adapter.activation](down(y_BTD)))


ADAPTER_MODULES.add("bottleneck", Bottleneck)
