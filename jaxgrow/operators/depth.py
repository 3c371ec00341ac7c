"""Operators that add layers. Except `llama_pro`, none keeps the function: a copied layer changes it to first order.

Each takes the ``sizes`` of a model and a ``target``, ``{"layers": new number}``, or, of a model with stages, of some of them,
``{"layers.2": new number}``; layers are counted from 0, ``L`` are old and ``L'`` new. The read maps, which no layer uses, are
those that invert: ``grow(swap(g), grow(g, s)) == s``.
"""

import math
import warnings
from collections.abc import Callable

import numpy as np

from jaxgrow.axes import LAYERS, beside, is_layers, stages
from jaxgrow.maps import AxisMap, Growth, Rule, Rules, by_axes, identity, select
from jaxgrow.matrices import Rows, dense
from jaxgrow.operators.targets import Sizes, depth, first, grown, multiples


def stack(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """``W'_l = W_{l mod L}``: the whole stack again on top (StackBERT, Gong et al., ICML 2019, Eq. 1 of LiGO).

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them.

    Example:
      >>> stack({"layers": 2}, {"layers": 5})["layers"].write.index[:, 0].tolist()
      [0, 1, 0, 1, 0]

    References:
      Gong et al., `Efficient Training of BERT by Progressively Stacking
      <https://proceedings.mlr.press/v97/gong19a.html>`_, ICML 2019
    """
    return _maps("stack", sizes, target, lambda old, new: select(np.arange(new) % old, old))


def interleave(sizes: Sizes, target: Sizes, period: int = 1) -> dict[str, AxisMap]:
    """``W'_l = W_{floor(l L / L')}``: each layer followed by its copies (Chang et al., ICLR 2018; interpolation in LiGO).

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.
      period: the model's (`jaxgrow.models.Config.traits`), ``p``: where it divides both numbers of layers, each ``p`` are
        followed by their copies, ``W'_l = W_{p floor(floor(l / p) L / L') + l mod p}``, so that each is of its source's kind.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them.

    Example:
      >>> interleave({"layers": 2}, {"layers": 4})["layers"].write.index[:, 0].tolist()
      [0, 0, 1, 1]

    References:
      Chang et al., `Multi-level Residual Networks from Dynamical Systems View <https://arxiv.org/abs/1710.10348>`_, ICLR 2018
    """

    def copies(old: int, new: int) -> AxisMap:
        whole = 1 if old % period or new % period else period
        block, place = np.divmod(np.arange(new), whole)
        return select(block * old // new * whole + place, old)

    return _maps("interleave", sizes, target, copies)


def g_stack(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """`stack`, a whole number of times: G_stack of Du et al. (NeurIPS 2024), who recommend four; when: `g_stack_tokens`.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them, or no whole number of times as many.

    Example:
      >>> g_stack({"layers": 2}, {"layers": 4})["layers"].write.index[:, 0].tolist()
      [0, 1, 0, 1]

    References:
      Du et al., `Stacking Your Transformers <https://arxiv.org/abs/2405.15319>`_, NeurIPS 2024
    """
    multiples("g_stack", (LAYERS,), sizes, target)
    return stack(sizes, target)


def g_stack_tokens(parameters: float, tokens: float, at_most: float = 0.25) -> float:
    """For how many tokens to train the small model before `g_stack`, of a training of ``tokens`` in all.

    ``log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74``, with N the ``parameters`` of the grown model and ``C = 6 N tokens``
    FLOPs (Du et al., NeurIPS 2024). Fitted to models of billions: for 410 M parameters and 8.2e9 tokens it asks for more than
    twice the whole training. What exceeds the fraction ``at_most`` of ``tokens`` is cut to it, with a warning.

    Args:
      parameters: of the grown model.
      tokens: of the whole training.
      at_most: the largest part of ``tokens`` to return.

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
        f"G_stack's formula asks for {found:.3g} tokens of the small model, {found / tokens:.0%} of the training: "
        f"it was fitted to larger ones; using {at_most:.0%}",
        stacklevel=2,
    )
    return at_most * tokens


def mslt(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """The top ``L' - L`` layers once more on top: multi-stage layerwise training (Yang et al., 2020).

    The method then trains the new layers alone, and all of them in a last stage: `jaxgrow.freeze`.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them, or more than twice as many.

    Example:
      >>> mslt({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 2, 3, 2, 3]

    References:
      Yang et al., `Progressively Stacking 2.0 <https://arxiv.org/abs/2011.13635>`_, 2020
    """

    def copies(old: int, new: int) -> AxisMap:
        _at_most_twice("mslt", old, new)
        return select([*range(old), *range(2 * old - new, old)], old)

    return _maps("mslt", sizes, target, copies)


def midas(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """The middle block of ``b = L' - L`` layers once more, right after itself (MIDAS, Saunshi et al., NeurIPS 2024).

    With ``n = L / b`` blocks, it is the ``ceil(n / 2)``-th. Stages as long as `midas_lengths` says.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them, or a number that is not made of equal blocks.

    Example:
      >>> midas({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 0, 1, 2, 3]

    References:
      Saunshi et al., `On the Inductive Bias of Stacking Towards Improving Reasoning <https://arxiv.org/abs/2409.19044>`_,
      NeurIPS 2024
    """

    def copies(old: int, new: int) -> AxisMap:
        block = new - old
        if block and old % block:
            raise ValueError(f"midas repeats one of equal blocks, but {old} layers are no blocks of {block}")
        start = (math.ceil(old / block / 2) - 1) * block if block else 0
        return select([*range(start + block), *range(start, old)], old)

    return _maps("midas", sizes, target, copies)


def midas_lengths(stages: int, power: float = 1.0) -> tuple[float, ...]:
    """The fraction of the steps for each of MIDAS's stages: ``T_i = i^power / sum_j j^power``.

    Args:
      stages: how many there are.
      power: 1 in proportion to the stage's number; larger: longer last stages.

    Returns:
      Fractions that add up to 1.

    Example:
      >>> midas_lengths(4)
      (0.1, 0.2, 0.3, 0.4)

    References:
      Saunshi et al., `On the Inductive Bias of Stacking Towards Improving Reasoning <https://arxiv.org/abs/2409.19044>`_,
      NeurIPS 2024
    """
    weights = np.arange(1, stages + 1) ** power
    return tuple((weights / weights.sum()).tolist())


def lidas(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """The ``L' - L`` layers around the middle once more, in the middle: half from below, half from above (LIDAS, 2025).

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them, or more than twice as many.

    Example:
      >>> lidas({"layers": 4}, {"layers": 6})["layers"].write.index[:, 0].tolist()
      [0, 1, 1, 2, 2, 3]

    References:
      `LIDAS <https://arxiv.org/abs/2512.08819>`_, 2025
    """

    def copies(old: int, new: int) -> AxisMap:
        _at_most_twice("lidas", old, new)
        middle, added = old // 2, new - old
        first = min(max(0, middle - added // 2), old - added)
        return select([*range(middle), *range(first, first + added), *range(middle, old)], old)

    return _maps("lidas", sizes, target, copies)


def solar(sizes: Sizes, target: Sizes, blend: int = 0) -> dict[str, AxisMap]:
    """``0 .. L - m - 1``, then ``m .. L - 1``: two copies, of which one lacks its last m, the other its first m layers.

    ``L' = 2 (L - m)`` (SOLAR's depth up-scaling, Kim et al., 2023). With ``blend``, the last ``blend`` layers of the lower
    copy and the first ``blend`` of the upper one are one, their mean, so that ``L' = 2 (L - m) - blend``.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.
      blend: how many layers of the two copies are averaged where they meet.

    Returns:
      The map of ``layers``, or of each stage's.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them, or a number that no m gives.

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
                f"solar makes 2 ({old} - m) - blend layers of {old}; no m gives {new} with a blend of {blend}"
            )
        lower, upper = list(range(old - cut)), list(range(cut, old))
        once = old - cut - blend
        pairs = [(i, i) for i in lower[:once]]
        pairs += list(zip(lower[once:], upper[:blend], strict=True))
        pairs += [(i, i) for i in upper[blend:]]
        if not blend:
            return select([i for i, _ in pairs], old)
        write = Rows(np.array(pairs, np.int32), np.full((new, 2), 0.5), old)
        return AxisMap(write, np.linalg.pinv(dense(write)).T)

    return _maps("solar", sizes, target, copies)


def llama_pro(sizes: Sizes, target: Sizes, post_norm: bool = False) -> Rules:
    """A copy that adds nothing after every ``L / (L' - L)`` layers: ``W_out = W_down = 0`` there, biases too.

    Keeps the function of any pre-LN model to the bit; at first only the zeroed kernels have a gradient (LLaMA Pro, Wu et al.,
    ACL 2024, who train the new layers alone: `jaxgrow.freeze`). LEMON's and bert2BERT's identity blocks are these.
    ``W_out`` and ``W_down`` are the kernels of layers that write ``embed``; norms and scales are copied. Where a norm follows
    each sublayer (``post_norm``; OLMo 2, Gemma 2), its scale is zero instead: of a kernel's first small numbers the norm would
    make whole units.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: ``{"layers": new number}``.
      post_norm: the model's (`jaxgrow.models.Config.traits`).

    Returns:
      Two rules: for what layers write into the residual stream, and for all else.

    Raises:
      ValueError: an axis other than ``layers``, or fewer of them, or more than twice as many.

    Example:
      >>> new_layers(llama_pro({"layers": 4}, {"layers": 6}))
      (2, 5)

    References:
      Wu et al., `LLaMA Pro: Progressive LLaMA with Block Expansion <https://arxiv.org/abs/2401.02415>`_, ACL 2024
    """

    def copies(old: int, new: int) -> AxisMap:
        _at_most_twice("llama_pro", old, new)
        after = [(j + 1) * old // (new - old) - 1 for j in range(new - old)]
        return select(sorted([*range(old), *after]), old)

    growth, written = _maps("llama_pro", sizes, target, copies), []
    for axis, m in growth.items():
        assert isinstance(m.write, Rows)
        zeroed = Rows(m.write.index, m.write.weight * first(m.write.index[:, 0])[:, None], m.old)
        nothing = ({axis: AxisMap(zeroed, zeroed)},)
        embed = beside(axis, "embed")
        if post_norm:
            written.append(Rule(nothing, axes=(axis, f"{embed}.post")))
        else:
            written.append(Rule(nothing, axes=(axis, f"{embed}.out"), roles=("kernel", "bias")))
    return Rules((*written, Rule((growth,))))


def new_layers(growth: Growth) -> tuple[int, ...]:
    """The layers that are not the first copy of their source, counted after the growth: what one may want to train alone.

    Args:
      growth: by an operator of this module.

    Returns:
      Their numbers, in order.

    Example:
      >>> new_layers(stack({"layers": 2}, {"layers": 4}))
      (2, 3)
    """
    maps = by_axes(growth.rules[-1].terms[0] if isinstance(growth, Rules) else growth)
    every = {axes[0]: ~first(dense(m.write).argmax(1)) for axes, m in maps.items() if is_layers(axes[0])}
    parts = stages({name: len(new) for name, new in every.items()})
    return tuple(parts[name].start + int(i) for name in parts for i in np.flatnonzero(every[name]))


def _maps(operator: str, sizes: Sizes, target: Sizes, of: Callable[[int, int], AxisMap]) -> dict[str, AxisMap]:
    """``of(old, new)`` of the layers of each stage that grows; others stay.

    Raises:
      ValueError: an axis that is none of layers, or fewer of them, or what ``of`` refuses.
    """
    found = grown(operator, (LAYERS,), sizes, target)
    out = {axis: identity(sizes[axis]) for axis in depth(sizes)}
    for axis, (old, new) in found.items():
        try:
            out[axis] = of(old, new)
        except ValueError as error:
            raise ValueError(f"axis {axis!r}: {error}") from None
    return out


def _at_most_twice(operator: str, old: int, new: int) -> None:
    if new > 2 * old:
        raise ValueError(f"{operator} adds at most as many as there are, not {old} to {new}; grow twice")
