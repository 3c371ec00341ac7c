"""Operators that add layers, of publications that the methods of this project do not use."""

import math
import warnings
from collections.abc import Sequence

import numpy as np

from jaxgrow.axes.names import LAYERS
from jaxgrow.growth.maps import AxisMap, CopyMap, select
from jaxgrow.growth.matrices import SparseMap, dense
from jaxgrow.operators.depth import check_doubling, layer_maps
from jaxgrow.operators.registry import operator
from jaxgrow.operators.targets import Sizes

__all__ = ["g_stack_tokens", "lidas", "midas", "midas_lengths", "mslt", "passthrough", "solar"]


def g_stack_tokens(parameters: float, tokens: float, at_most: float = 0.25) -> float:
    """The number of tokens on which to train the small model before `g_stack`.

    ``log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74``, with N parameters of the grown model and
    ``C = 6 N tokens`` FLOPs. The formula was fitted to models with billions of parameters. For 410
    million parameters and 8.2e9 tokens, the result is more than twice the tokens of the complete
    training. Therefore a result above the fraction ``at_most`` of ``tokens`` is reduced to that
    fraction, with a warning.

    Args:
      parameters: number of parameters of the grown model.
      tokens: number of tokens of the complete training.
      at_most: the largest fraction of ``tokens`` to return.

    Returns:
      A number of tokens.

    Example:
      >>> round(g_stack_tokens(7e9, 2e12) / 1e9, 1)
      11.1

    References:
      Du et al., `Stacking Your Transformers <https://arxiv.org/abs/2405.15319>`_, NeurIPS 2024
    """
    compute = math.log10(6 * parameters * tokens)
    found = 10 ** (0.88 * math.log10(parameters) + 163.27 / compute - 5.74)
    if found <= at_most * tokens:
        return found
    warnings.warn(
        f"the formula of G_stack gives {found:.3g} tokens for the small model, {found / tokens:.0%} of the training. It was "
        f"fitted to larger models; using {at_most:.0%} instead",
        stacklevel=2,
    )
    return at_most * tokens


@operator(
    axes=(LAYERS,),
    sizes="at most twice the old number",
    preserves="no",
    source="Yang et al. 2020",
    policies=("copy", "asymmetric"),
    example={"layers": 3},
    inverts="bitwise",
)
def mslt(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Repeat the top ``L' - L`` layers on top of the model: multi-stage layerwise training.

    After each growth, the method trains only the new layers. In its last stage, it trains all
    layers (`jaxgrow.extras.freeze`).

    {sections}

    Example:
      >>> mslt({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 2, 3, 2, 3]

    References:
      Yang et al., `Progressively Stacking 2.0 <https://arxiv.org/abs/2011.13635>`_, 2020
    """

    def copies(old: int, new: int) -> CopyMap:
        check_doubling("mslt", old, new)
        return select([*range(old), *range(2 * old - new, old)], old)

    return layer_maps("mslt", sizes, target, copies)


@operator(
    axes=(LAYERS,),
    sizes="one more block, whose size divides the old number of layers",
    preserves="no",
    source="Saunshi et al. 2024",
    policies=("copy", "asymmetric"),
    example={"layers": 3},
    inverts="bitwise",
)
def midas(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Repeat the middle block of ``b = L' - L`` layers directly behind itself (MIDAS).

    With ``n = L / b`` blocks, counted from 1, the middle block has the number ``ceil(n / 2)``.
    `midas_lengths` gives the lengths of the training stages.

    {sections}

    Example:
      >>> midas({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 0, 1, 2, 3]

    References:
      Saunshi et al.,
      `On the Inductive Bias of Stacking Towards Improving Reasoning <https://arxiv.org/abs/2409.19044>`_,
      NeurIPS 2024
    """

    def copies(old: int, new: int) -> CopyMap:
        block = new - old
        if block and old % block:
            raise ValueError(
                f"midas adds one block of layers, but {old} layers are not divisible by the block "
                f"size {block}. Add a divisor of {old}"
            )
        start = (math.ceil(old / block / 2) - 1) * block if block else 0
        return select([*range(start + block), *range(start, old)], old)

    return layer_maps("midas", sizes, target, copies)


def midas_lengths(stages: int, power: float = 1.0) -> tuple[float, ...]:
    """The fraction of the training steps for each stage: ``T_i = i^power / sum_j j^power``.

    Args:
      stages: number of stages.
      power: exponent of the stage number i. With 1, the length of a stage is proportional to its
        number; larger values make the last stages longer.

    Returns:
      Fractions that add up to 1.

    Example:
      >>> midas_lengths(4)
      (0.1, 0.2, 0.3, 0.4)

    References:
      Saunshi et al.,
      `On the Inductive Bias of Stacking Towards Improving Reasoning <https://arxiv.org/abs/2409.19044>`_,
      NeurIPS 2024
    """
    weights = np.arange(1, stages + 1) ** power
    return tuple((weights / weights.sum()).tolist())


@operator(
    axes=(LAYERS,),
    sizes="at most twice the old number",
    preserves="no",
    source="LIDAS 2025",
    policies=("copy", "asymmetric"),
    example={"layers": 3},
    inverts="bitwise",
)
def lidas(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Repeat the ``L' - L`` middle layers in the middle of the model (LIDAS).

    Half of the repeated layers come from below the middle, and half from above.

    {sections}

    Example:
      >>> lidas({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 1, 2, 2, 3]

    References:
      `LIDAS <https://arxiv.org/abs/2512.08819>`_, 2025
    """

    def copies(old: int, new: int) -> CopyMap:
        check_doubling("lidas", old, new)
        middle = old // 2
        added = new - old
        first = min(max(0, middle - added // 2), old - added)
        return select([*range(middle), *range(first, first + added), *range(middle, old)], old)

    return layer_maps("lidas", sizes, target, copies)


@operator(
    axes=(LAYERS,),
    sizes="even, or odd if blend is odd",
    preserves="no",
    source="Kim et al. 2023",
    policies=("copy",),
    example={"layers": 4},
    inverts="bitwise",
)
def solar(sizes: Sizes, target: Sizes, blend: int = 0) -> dict[str, AxisMap]:
    """Stack two copies of the model, and remove m layers of each where they meet (SOLAR).

    The lower copy loses its top m layers, and the upper copy loses its bottom m layers. The result
    has the layers ``0 .. L - m - 1`` and then ``m .. L - 1``, so ``L' = 2 (L - m)`` (depth
    up-scaling of SOLAR). With ``blend``, the remaining top ``blend`` layers of the lower copy and
    the remaining bottom ``blend`` layers of the upper copy are averaged, so
    ``L' = 2 (L - m) - blend``.

    Args:
      {arguments}
      blend: number of layers that are averaged where the two copies meet.

    Returns:
      The map of ``layers``, or of the layers of each stage.

    Raises:
      ValueError: a number of layers that cannot be reached with any m.
      {raises}

    Example:
      >>> solar({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 2, 1, 2, 3]

    References:
      Kim et al., `SOLAR 10.7B <https://arxiv.org/abs/2312.15166>`_, 2023
    """

    def copies(old: int, new: int) -> AxisMap:
        cut, odd = divmod(2 * old - new - blend, 2)
        if odd or cut < 0 or not 0 <= blend <= old - cut:
            raise ValueError(
                f"solar turns {old} layers into 2 ({old} - m) - blend layers, and {new} cannot be "
                f"reached with blend {blend} and any m. Choose another number of layers or another "
                "blend"
            )
        lower = list(range(old - cut))
        upper = list(range(cut, old))
        once = old - cut - blend
        pairs = [(i, i) for i in lower[:once]]
        pairs += list(zip(lower[once:], upper[:blend], strict=True))
        pairs += [(i, i) for i in upper[blend:]]
        if not blend:
            return select([i for i, _ in pairs], old)
        write = SparseMap(np.array(pairs, np.int32), np.full((new, 2), 0.5), old)
        return AxisMap(write, np.linalg.pinv(dense(write)).T)

    return layer_maps("solar", sizes, target, copies)


@operator(
    axes=(LAYERS,),
    sizes="the number of layers in a list",
    preserves="no",
    source="Goddard et al. 2024 (mergekit)",
    policies=("copy",),
    example={"layers": 3},
    inverts="bitwise",
)
def passthrough(sizes: Sizes, target: Sizes, sources: Sequence[int] = ()) -> dict[str, CopyMap]:
    """Take the layers of a list, in its order: ``W'_l = W_{sources[l]}``.

    A layer may occur several times, or not at all. If all layers occur in their old order, the
    growth is the identity. If some are left out, it is `keep_units`, and its `swap` does not invert
    it, but sets the layers that were left out to zero.

    Args:
      {arguments}
      sources: the old layer of each new layer.

    Returns:
      The map of ``layers``.

    Raises:
      ValueError: the list is empty or has a layer that the model does not have, the target is
        another number than that of its layers, or the model has several stages.

    Example:
      >>> passthrough({"layers": 4}, {}, sources=(0, 1, 2, 1, 2, 3))["layers"].write.index[:, 0].tolist()
      [0, 1, 2, 1, 2, 3]

    References:
      Goddard et al., `Arcee's MergeKit <https://arxiv.org/abs/2403.13257>`_, EMNLP 2024
    """
    if LAYERS not in sizes:
        raise ValueError(
            f"passthrough takes one list of layers, but the model has the axes {', '.join(sizes)}: use an "
            "operator with a size for each stage, such as interleave"
        )
    last = sizes[LAYERS] - 1
    outside = [i for i in sources if not 0 <= i <= last]
    if outside or not sources:
        found = f"has layer {outside[0]}" if outside else "is empty"
        raise ValueError(
            f"axis 'layers': the list of layers {found}, but the model has the layers 0 to {last}: name some of "
            f"them (sources, or --layers-from 0-{last})"
        )
    if {LAYERS: len(sources), **target} != {LAYERS: len(sources)}:
        raise ValueError(
            f"passthrough makes the {len(sources)} layers of the list, but the target is {dict(target)}: "
            "leave out the sizes"
        )
    return {LAYERS: select(sources, sizes[LAYERS])}
