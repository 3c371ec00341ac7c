"""Operators that add layers.

Except for `llama_pro`, they do not preserve the function, because a copied layer changes it to
first order. ``target`` is ``{"layers": new number}``, or ``{"layers.2": new number}`` for one stage
of a model with stages. Layers are counted from 0. ``L`` is the old number of layers, and ``L'`` is
the new number. No parameter contracts the ``layers`` axis, so its read maps do not act in the
growth itself. They are chosen such that `swap` inverts the growth: ``grow(swap(g), grow(g, s)) == s``.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from jaxgrow.axes.names import LAYERS, is_layers, sibling_axis, stages
from jaxgrow.growth.maps import AxisMap, CopyMap, Growth, M, Rule, Rules, by_axes, identity, select
from jaxgrow.growth.matrices import SparseMap, dense
from jaxgrow.operators.registry import ModelForm, operator
from jaxgrow.operators.targets import (
    Sizes,
    grown_sizes,
    layer_axes,
    mark_first_copies,
    multiple_sizes,
)

__all__ = [
    "g_stack",
    "g_stack_tokens",
    "interleave",
    "lidas",
    "llama_pro",
    "midas",
    "midas_lengths",
    "mslt",
    "new_layers",
    "passthrough",
    "solar",
    "stack",
]


@operator(
    axes=(LAYERS,),
    preserves="no",
    source="Gong et al. 2019 (StackBERT)",
    policies=("copy",),
    example={"layers": 4},
    inverts="bitwise",
)
def stack(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Repeat the stack of layers on top of itself: ``W'_l = W_{l mod L}``.

    This is the operator of StackBERT, and Eq. 1 of LiGO.

    {sections}

    Example:
      >>> stack({"layers": 2}, {"layers": 5})["layers"].write.index[:, 0].tolist()
      [0, 1, 0, 1, 0]

    References:
      Gong et al., `Efficient Training of BERT by Progressively Stacking
      <https://proceedings.mlr.press/v97/gong19a.html>`_, ICML 2019
    """
    return _maps("stack", sizes, target, lambda old, new: select(np.arange(new) % old, old))


@operator(
    axes=(LAYERS,),
    preserves="no",
    source="Chang et al. 2018",
    policies=("copy",),
    example={"layers": 4},
    inverts="bitwise",
)
def interleave(sizes: Sizes, target: Sizes, period: int = 1) -> dict[str, CopyMap]:
    """Place the copies of each layer directly behind it: ``W'_l = W_{floor(l L / L')}``.

    LiGO calls this operator "interpolation".

    Args:
      {arguments}
      period: number p of consecutive layers that are copied together
        (`jaxgrow.models.Config.traits`). If p divides both numbers of layers,
        ``W'_l = W_{p floor(floor(l / p) L / L') + l mod p}``. Then a copy is a layer of the same
        kind as its source, for example a layer with an attention window.

    Returns:
      The map of ``layers``, or of the layers of each stage.

    Raises:
      {raises}

    Example:
      >>> interleave({"layers": 2}, {"layers": 4})["layers"].write.index[:, 0].tolist()
      [0, 0, 1, 1]

    References:
      Chang et al.,
      `Multi-level Residual Networks from Dynamical Systems View <https://arxiv.org/abs/1710.10348>`_,
      ICLR 2018
    """

    def copies(old: int, new: int) -> CopyMap:
        whole = 1 if old % period or new % period else period
        block, place = np.divmod(np.arange(new), whole)
        return select(block * old // new * whole + place, old)

    return _maps("interleave", sizes, target, copies)


@operator(
    axes=(LAYERS,),
    sizes="a multiple of the old number",
    preserves="no",
    source="Du et al. 2024",
    policies=("copy", "drop"),
    example={"layers": 4},
    inverts="bitwise",
)
def g_stack(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Repeat the complete stack of layers an integer number of times.

    The authors recommend a factor of four. `g_stack_tokens` gives the number of tokens on which to
    train the small model first. The published recipe drops the optimizer state.

    {sections}

    Example:
      >>> g_stack({"layers": 2}, {"layers": 4})["layers"].write.index[:, 0].tolist()
      [0, 1, 0, 1]

    References:
      Du et al., `Stacking Your Transformers <https://arxiv.org/abs/2405.15319>`_, NeurIPS 2024
    """
    multiple_sizes("g_stack", (LAYERS,), sizes, target)
    return stack(sizes, target)


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
        _at_most_twice("mslt", old, new)
        return select([*range(old), *range(2 * old - new, old)], old)

    return _maps("mslt", sizes, target, copies)


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

    return _maps("midas", sizes, target, copies)


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
        _at_most_twice("lidas", old, new)
        middle = old // 2
        added = new - old
        first = min(max(0, middle - added // 2), old - added)
        return select([*range(middle), *range(first, first + added), *range(middle, old)], old)

    return _maps("lidas", sizes, target, copies)


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

    return _maps("solar", sizes, target, copies)


def _is_pre_norm(growth: Growth, form: ModelForm) -> bool:
    return form.pre_norm


@operator(
    axes=(LAYERS,),
    sizes="at most twice the old number",
    preserves="yes, bitwise; post-LN models: no",
    source="Wu et al. 2024",
    policies=("asymmetric",),
    preserves_for=_is_pre_norm,
    dual=False,  # the zeroed kernels have gradients that are not zero
    example={"layers": 3},
    inverts="bitwise",
)
def llama_pro(sizes: Sizes, target: Sizes, post_norm: bool = False) -> Rules:
    """Insert copies of layers that initially add nothing: ``W_out = W_down = 0``, zero biases.

    One new layer follows after every ``L / (L' - L)`` layers. The operator preserves the function
    of any pre-LN model bitwise. At first, only the zeroed kernels of a new layer have a gradient.
    The authors train only the new layers (`jaxgrow.extras.freeze`). The identity blocks of LEMON and
    bert2BERT have the same form. ``W_out`` and ``W_down`` are the kernels of layers whose output
    axis is ``embed``. Norms and scales are copied. If a norm follows each sublayer (``post_norm``;
    OLMo 2, Gemma 2), the scale of this norm is set to zero instead of the kernels. Otherwise the
    norm would rescale the output to unit variance after the first small update of the kernel.

    Args:
      {arguments}
      post_norm: whether a norm follows each sublayer (`jaxgrow.models.Config.traits`).

    Returns:
      Two rules: one for the outputs of layers into the residual stream, and one for the other
      parameters.

    Raises:
      ValueError: more than twice the old number of layers.
      {raises}

    Example:
      >>> new_layers(llama_pro({"layers": 4}, {"layers": 6}))
      (2, 5)

    References:
      Wu et al.,
      `LLaMA Pro: Progressive LLaMA with Block Expansion <https://arxiv.org/abs/2401.02415>`_, ACL
      2024
    """

    def copies(old: int, new: int) -> CopyMap:
        _at_most_twice("llama_pro", old, new)
        after = [(j + 1) * old // (new - old) - 1 for j in range(new - old)]
        return select(sorted([*range(old), *after]), old)

    growth = _maps("llama_pro", sizes, target, copies)
    written: list[Rule] = []
    for axis, m in growth.items():
        zeroed = SparseMap(
            m.write.index, m.write.weight * mark_first_copies(m.write.index[:, 0])[:, None], m.old
        )
        nothing = ({axis: AxisMap(zeroed, zeroed)},)
        embed = sibling_axis(axis, "embed")
        if post_norm:
            written.append(Rule(nothing, axes=(axis, f"{embed}.post")))
        else:
            written.append(Rule(nothing, axes=(axis, f"{embed}.out"), roles=("kernel", "bias")))
    return Rules((*written, Rule((growth,))))


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


def new_layers(growth: Growth) -> tuple[int, ...]:
    """The indices of the layers that a growth added.

    These are all layers except the first copy of each source layer.

    Args:
      growth: a growth by an operator of this module.

    Returns:
      Indices in the grown model, in ascending order.

    Example:
      >>> new_layers(stack({"layers": 2}, {"layers": 4}))
      (2, 3)
    """
    maps = by_axes(growth.rules[-1].terms[0] if isinstance(growth, Rules) else growth)
    every = {
        axes[0]: ~mark_first_copies(dense(m.write).argmax(1))
        for axes, m in maps.items()
        if is_layers(axes[0])
    }
    parts = stages({name: len(new) for name, new in every.items()})
    found: list[int] = []
    for name, part in parts.items():
        found += [part.start + int(i) for i in np.flatnonzero(every[name])]
    return tuple(found)


def _maps(
    name: str, sizes: Sizes, target: Sizes, of: Callable[[int, int], AxisMap[M]]
) -> dict[str, AxisMap[M | SparseMap]]:
    """The maps of the layers of each stage. Stages that are not in ``target`` keep their layers.

    Args:
      name: the name of the operator, for error messages.
      sizes: the size of every axis of the model.
      target: the new numbers of layers.
      of: function that returns the map from an old to a new number of layers.

    Raises:
      ValueError: an axis that is not a layer axis, a new number below the old one, or an error of
        ``of``.
    """
    found = grown_sizes(name, (LAYERS,), sizes, target)
    out: dict[str, AxisMap[M | SparseMap]] = {
        axis: identity(sizes[axis]) for axis in layer_axes(sizes)
    }
    for axis, (old, new) in found.items():
        try:
            out[axis] = of(old, new)
        except ValueError as error:
            raise ValueError(f"axis {axis!r}: {error}") from None
    return out


def _at_most_twice(name: str, old: int, new: int) -> None:
    if new > 2 * old:
        raise ValueError(
            f"{name} can at most double the {old} layers, but {new} were requested; grow twice"
        )
