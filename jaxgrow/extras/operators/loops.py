"""Operators that run layers several times, and that give each pass its own weights.

`jaxgrow.models.stack.Loop` describes which layers run how often.
"""

from collections.abc import Sequence

from jaxgrow.axes.names import LAYERS
from jaxgrow.growth.maps import CopyMap, select
from jaxgrow.operators.registry import operator
from jaxgrow.operators.targets import Sizes, grown_sizes

__all__ = ["loop", "unloop"]


@operator(
    axes=(),
    preserves="no",
    source="Dehghani et al. 2019 (Universal Transformer), Kapl et al. 2026",
    policies=("copy",),
)
def loop(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Run some layers several times, with the same weights and the same optimizer state.

    The growth changes no parameter. The config of the grown model has the field ``loop``
    (`jaxgrow.models.stack.Loop`). A step costs the FLOPs of every pass, and the gradient of a layer
    is the sum of the gradients of its passes.

    Args:
      {arguments}

    Returns:
      A growth without maps.

    Raises:
      ValueError: ``target`` is not empty.

    Example:
      >>> loop({"layers": 3}, {})
      {}

    References:
      Kapl et al., `From Growing to Looping <https://arxiv.org/abs/2602.16490>`_, 2026;
      Dehghani et al., `Universal Transformers <https://arxiv.org/abs/1807.03819>`_, ICLR 2019
    """
    if target:
        raise ValueError(
            f"loop adds no weights, but the target has {', '.join(target)}: name the layers that run "
            "several times instead (Config.loop, or --loop 4-7x2)"
        )
    return {}


@operator(
    axes=(LAYERS,),
    sizes="the number of passes of a loop",
    preserves="yes, for a model with a loop",
    source="Kapl et al. 2026",
    policies=("copy", "exact"),
    example={"layers": 3},
    inverts="bitwise",
)
def unloop(sizes: Sizes, target: Sizes, passes: Sequence[int] = ()) -> dict[str, CopyMap]:
    """Replace each pass of a loop by a separate layer: ``W'_p = W_{passes[p]}``.

    The function is preserved bitwise. The sum of the gradients of the copies of a layer is the
    gradient that it had in the loop.

    Args:
      {arguments}
      passes: the layer of each pass (`jaxgrow.models.Config.traits`).

    Returns:
      The map of ``layers``.

    Raises:
      ValueError: the model has no loop, or the target is another number than that of its passes.

    Example:
      >>> unloop({"layers": 3}, {"layers": 5}, passes=(0, 1, 1, 1, 2))["layers"].write.index[:, 0].tolist()
      [0, 1, 1, 1, 2]

    References:
      Kapl et al., `From Growing to Looping <https://arxiv.org/abs/2602.16490>`_, 2026
    """
    _, new = grown_sizes("unloop", (LAYERS,), sizes, target).get(LAYERS, (0, len(passes)))
    if not passes:
        raise ValueError("unloop needs a model with a loop, but each layer of this model runs once")
    if new != len(passes):
        raise ValueError(
            f"axis 'layers': unloop makes a layer for each of the {len(passes)} passes of a loop, but "
            f"the target is {new} layers"
        )
    return {LAYERS: select(passes, sizes[LAYERS])}
