"""Operators that add layers.

Except for `llama_pro`, they do not preserve the function, because a copied layer changes it to
first order. ``target`` is ``{"layers": new number}``, or ``{"layers.2": new number}`` for one stage
of a model with stages. Layers are counted from 0. ``L`` is the old number of layers, and ``L'`` is
the new number. No parameter contracts the ``layers`` axis, so its read maps do not act in the
growth itself. They are chosen such that `swap` inverts the growth: ``grow(swap(g), grow(g, s)) == s``.
"""

from collections.abc import Callable

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

__all__ = ["g_stack", "interleave", "llama_pro", "new_layers", "stack"]


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
    return layer_maps("stack", sizes, target, lambda old, new: select(np.arange(new) % old, old))


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

    return layer_maps("interleave", sizes, target, copies)


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
        check_doubling("llama_pro", old, new)
        after = [(j + 1) * old // (new - old) - 1 for j in range(new - old)]
        return select(sorted([*range(old), *after]), old)

    growth = layer_maps("llama_pro", sizes, target, copies)
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


def layer_maps(
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


def check_doubling(name: str, old: int, new: int) -> None:
    """Raise an error if the new number of layers is more than twice the old one."""
    if new > 2 * old:
        raise ValueError(
            f"{name} can at most double the {old} layers, but {new} were requested; grow twice"
        )
