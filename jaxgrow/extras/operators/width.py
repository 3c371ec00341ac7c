"""Operators that widen a model, of publications that the methods of this project do not use."""

from collections.abc import Sequence

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind, sibling_axis
from jaxgrow.growth.maps import AxisMap, CopyMap, Maps, Rule, Rules, select
from jaxgrow.growth.matrices import SparseMap
from jaxgrow.operators.registry import operator
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    axis_beside,
    copied_units,
    grown_sizes,
    layer_axes,
    mark_first_copies,
    multiple_sizes,
    width_axes,
)
from jaxgrow.operators.width import hypercloning, masked_rows, split_units

__all__ = ["average", "sparkling", "staged", "zero_pad"]

MEANS = 32  # the largest number of old units in a mean of `average`


@operator(
    axes=WIDTHS,
    preserves="heads and mlp: yes; embed: no",
    source="a control; LiGO with C = 0",
    policies=("exact",),
    example={"embed": 8, "heads": 5, "mlp": 13},
    inverts="bitwise",
)
def zero_pad(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Copy the old weights into a corner and fill the rest with zeros: ``W' = [[W, 0], [0, 0]]``.

    This preserves the function for ``heads`` and ``mlp``, but not for ``embed``, because norms also
    average over the zeros. The new units never train, because each of their gradients contains a
    factor of zero (a saddle point; LiGO with ``C = 0``). An exception are new query heads of an old
    key/value head (GQA): a query of zero averages its values, so their output weights have
    gradients. The operator serves as a control. If fewer query heads share a key/value head than
    before, the new key/value heads are copies, because old query heads read them.

    {sections}

    Example:
      >>> from jaxgrow.growth.matrices import dense
      >>> dense(zero_pad({"mlp": 2}, {"mlp": 3})["mlp"].write).tolist()
      [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]

    References:
      Wang et al., `LiGO <https://arxiv.org/abs/2303.00980>`_, ICLR 2023
    """
    index = copied_units(
        "zero_pad",
        sizes,
        grown_sizes("zero_pad", WIDTHS, sizes, target),
        # The sources of zero rows do not matter.
        lambda old, new: np.minimum(np.arange(new), old - 1),
    )
    growth: dict[str, CopyMap] = {}
    for axis, of in index.items():
        rows = select(of, sizes[axis]).write
        old = mark_first_copies(of)
        written = old
        if axis_kind(axis) == KV_HEADS:
            readers = sibling_axis(axis, HEADS)
            heads = (
                mark_first_copies(index[readers])
                if readers in index
                else np.ones(sizes[readers], bool)
            )
            written = old | heads.reshape(len(of), -1).any(1)
        growth[axis] = AxisMap(masked_rows(rows, written), masked_rows(rows, old))
    return growth


@operator(
    axes=WIDTHS,
    sizes="twice the old size, for all of them",
    preserves="yes",
    source="Shen et al. 2022",
    policies=("exact",),
    preserves_for=lambda growth, form: True,
    example={"embed": 12, "heads": 6, "mlp": 18},
    inverts="bitwise",
)
def staged(sizes: Sizes, target: Sizes) -> Rules:
    """Place two copies of the model next to each other: ``W' = [[W, 0], [0, W]]``.

    Training then mixes the copies. Staged Training doubles ``embed``, ``heads`` (and ``kv_heads``)
    and ``mlp`` together, and preserves the function. Parameters outside the blocks, and parameters
    between heads, are tiled. The final norm, or an untied head, is halved, as in `hypercloning`.
    The growth is a sum of two terms.

    The gradient of a grown kernel is not block-diagonal: it connects each half of the inputs with
    each half of the outputs, as in `hypercloning`. Therefore the dual and the swap of this growth
    equal the dual and the swap of a `hypercloning` that has different maps for input axes and for
    output axes.

    Args:
      {arguments}

    Returns:
      Rules with two terms each for the kernels of layers, and one rule for the other parameters.

    Raises:
      {raises}

    Example:
      >>> growth = staged({"layers": 2, "embed": 4, "heads": 2, "mlp": 8}, {"embed": 8, "heads": 4, "mlp": 16})
      >>> len(growth.rules[0].terms)
      2

    References:
      Shen et al.,
      `Staged Training for Transformer Language Models <https://arxiv.org/abs/2203.06211>`_, ICML
      2022
    """
    axes = width_axes(sizes)
    found = multiple_sizes("staged", WIDTHS, sizes, target)
    if set(found) != set(axes) or any(new != 2 * old for old, new in found.values()):
        raise ValueError(
            f"staged must double all of {', '.join(axes)}, but the target is {dict(target)}"
        )
    copies = hypercloning(sizes, target)

    def half(which: int, read: Sequence[str]) -> Maps:
        out: dict[str, AxisMap] = {}
        for axis, m in copies.items():
            keep = split_units(m)[which]
            block = masked_rows(m.write, keep)
            out[axis] = (
                AxisMap(m.write, block)
                if axis in read
                else AxisMap(block, masked_rows(m.read, keep))
            )
        return out

    units = [axis for axis in axes if axis_kind(axis) != "embed"]
    streams = [axis for axis in axes if axis not in units]
    into = half(0, streams), half(1, streams)
    out_of = half(0, units), half(1, units)

    def rule(terms: tuple[Maps, ...], axis: str, inner: str, outer: str) -> Rule:
        return Rule(
            terms,
            axes=(
                axis_beside("staged", axis, "layers", sizes),
                axis + inner,
                sibling_axis(axis, "embed") + outer,
            ),
            roles=("kernel",),
        )

    writing = [rule(out_of, axis, ".in", ".out") for axis in units if axis_kind(axis) != KV_HEADS]
    reading = [rule(into, axis, ".out", ".in") for axis in units]
    return Rules((*writing, *reading, Rule((copies,))))


@operator(
    axes=WIDTHS,
    preserves="no; it preserves the scale of activations",
    source="SPARKLING 2026",
    policies=("asymmetric",),
    example={"embed": 8, "heads": 5, "mlp": 13},
    inverts="no",
)
def sparkling(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """Copy units, and scale their input weights so that activations keep their scale.

    The function is not preserved. With ``c = (d' - d) / d``, the outputs become ``[y; y~]`` and the
    inputs ``alpha [W, W~]``, where ``alpha = 1 / sqrt(1 + 3 c)`` for c <= 1 and ``1 / (1 + c)``
    otherwise. Norm scales are copied. For c = 1 it equals `hypercloning`. The published recipe
    continues with the optimizer policy ``asymmetric`` and a second warm-up of the new parameters.

    {sections}

    Example:
      >>> from jaxgrow.growth.matrices import dense
      >>> dense(sparkling({"mlp": 1}, {"mlp": 2})["mlp"].read).tolist()
      [[0.5], [0.5]]

    References:
      `SPARKLING <https://arxiv.org/abs/2602.02472>`_, 2026
    """
    growth: dict[str, AxisMap] = {}
    for axis, index in copied_units(
        "sparkling", sizes, grown_sizes("sparkling", WIDTHS, sizes, target)
    ).items():
        old = sizes[axis]
        c = (len(index) - old) / old
        alpha = 1 / (1 + 3 * c) ** 0.5 if c <= 1 else 1 / (1 + c)
        write = select(index, old).write
        growth[axis] = AxisMap(write, SparseMap(write.index, write.weight * alpha, old))
    return growth


@operator(
    axes=(LAYERS, *WIDTHS),
    preserves="no",
    source="Wang et al. 2023 (LiGO's initialisation)",
    policies=("exact",),
    example={"embed": 8, "heads": 5, "mlp": 13, "layers": 5},
    inverts="no",
)
def average(sizes: Sizes, target: Sizes, seed: int = 0, noise: float = 0.03) -> dict[str, AxisMap]:
    """Make each new unit a random mean of old units, and each new layer a noisy copy.

    In width, output and input axes grow by ``B = [I; C]``. Each row of C is uniform in 0..1 and
    divided by its sum. In depth, layer l grows by ``u / sum(u)`` with ``u ~ U(0, noise)``, except
    for ``u = 1`` at ``l mod L``. This is the initialisation of LiGO in the published code. No two
    new units are equal. New units start small: the mean of n units has about ``1 / sqrt(n)`` of
    their size. The function is not preserved. Deviation: each mean uses 32 random units, or all
    units if there are fewer, so that the operator can grow models of any size.

    With GQA, a new query head is a mean of query heads of different key/value heads, all at the
    same position within their group.

    Args:
      {arguments}
      noise: the largest weight of any other layer in a copied layer, relative to the weight of its
        source.

    Returns:
      One map for each axis of ``target``.

    Raises:
      {raises}

    Example:
      >>> from jaxgrow.growth.matrices import dense
      >>> rows = dense(average({"mlp": 2}, {"mlp": 3})["mlp"].write)
      >>> rows[:2].tolist(), round(float(rows[2].sum()), 6)
      ([[1.0, 0.0], [0.0, 1.0]], 1.0)

    References:
      Wang et al., `LiGO <https://arxiv.org/abs/2303.00980>`_, ICLR 2023
    """
    rng = np.random.default_rng(seed)
    layers = layer_axes(sizes)
    found = grown_sizes("average", (LAYERS, *WIDTHS), sizes, target)
    growth: dict[str, AxisMap] = {}
    for axis in layers:
        if axis not in found:
            continue
        old, new = found[axis]
        weights = rng.uniform(0, noise, (new, old))
        weights[np.arange(new), np.arange(new) % old] = 1
        rows = weights / weights.sum(1, keepdims=True)
        growth[axis] = AxisMap(rows, rows)
    for axis, index in copied_units(
        "average", sizes, {a: found[a] for a in found if a not in layers}
    ).items():
        keys = sibling_axis(axis, KV_HEADS)
        group = sizes[axis] // sizes[keys] if axis_kind(axis) == HEADS and keys in sizes else 1
        growth[axis] = _averaged(index, sizes[axis], group, rng)
    return growth


def _averaged(index: np.ndarray, old: int, group: int, rng: np.random.Generator) -> AxisMap:
    """``[I; C]``: the old units, and means of units at the same position within their groups."""
    count = min(MEANS, old // group)
    of = np.repeat(index[:, None], count, 1)
    weight = np.zeros((len(index), count))
    weight[:, 0] = 1
    for i in np.flatnonzero(~mark_first_copies(index)):
        of[i] = np.sort(rng.choice(old // group, count, replace=False)) * group + index[i] % group
        uniform = rng.uniform(size=count)
        weight[i] = uniform / uniform.sum()
    rows = SparseMap(of, weight, old)
    return AxisMap(rows, rows)
