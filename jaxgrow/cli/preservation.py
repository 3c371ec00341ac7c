"""Does a growth preserve the function of a model?"""

from jaxgrow import operators
from jaxgrow.axes.names import LAYERS
from jaxgrow.growth.maps import Growth, Rules, by_axes, new_sizes, preserves_function
from jaxgrow.models import Config


def keeps_function(growth: Growth, config: Config, method: str = "") -> bool:
    """Return whether a growth preserves the function of a model, up to rounding.

    Args:
      growth: the growth.
      config: the config of the model before the growth.
      method: the name of the operator that made the growth, if it made `Rules`.
    """
    if config.predicts == "tokens" and "vocab" in new_sizes(growth):
        return False  # the softmax is over other tokens
    if config.loop is not None and not isinstance(growth, Rules):
        # The only growth of its layers gives each pass its own layer (`Config.resized`).
        growth = {axes: m for axes, m in by_axes(growth).items() if axes != (LAYERS,)}
    headless = config.predicts == "states"
    if not isinstance(growth, Rules):
        # Without a head, all output features need the same number of copies.
        axes = None if headless else config.axes()
        return preserves_function(growth, axes, config.normed)
    sizes = new_sizes(growth)
    if headless and sizes.get("embed", 0) % config.integers()["embed"]:
        return False
    if not headless and not config.norm_scale and "embed" in sizes:
        # A norm without a scale cannot compensate for an embedding that is also the head.
        return method == "staged" and not config.ties
    operator = operators.OPERATORS.get(method)
    return operator is not None and operator.preserves_for(growth, config)
