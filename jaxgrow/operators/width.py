"""Operators that widen a model: the residual stream, attention heads and MLP units.

Heads are always copied completely. With GQA, ``kv_heads`` is another axis, and query heads stay
with their key/value heads (`jaxgrow.operators.targets.copied_units`).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind, sibling_axis
from jaxgrow.growth.maps import AxisMap, CopyMap, Growth, Maps, Rule, Rules, by_axes, select
from jaxgrow.growth.matrices import SparseMap, dense
from jaxgrow.operators.registry import ModelForm, by_maps, operator
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    copied_units,
    grown_sizes,
    layer_axes,
    layers_beside,
    mark_first_copies,
    multiple_sizes,
    stream_beside,
    width_axes,
)

__all__ = ["aki", "average", "fpi", "hypercloning", "lemon", "sparkling", "staged", "zero_pad"]

MEANS = 32  # the largest number of old units in a mean of `average`


def _lemon_preserves(growth: Growth, form: ModelForm) -> bool:
    """Whether a growth by `lemon` preserves the function.

    Its rules preserve a pre-LN model, unless a change of ``eps`` or of a norm over heads cannot be
    represented.
    """
    if not isinstance(growth, Rules):
        return by_maps(growth, form)
    if growth.eps != 1 and not form.means_stay:
        return False
    return form.pre_norm and all(_evenly(growth, axis) for axis in form.normed if axis != "embed")


def _evenly(growth: Rules, axis: str) -> bool:
    """Whether all units of an axis have the same number of copies."""
    m = by_axes(growth.rules[-1].terms[0]).get((axis,))
    return m is None or len(set(np.count_nonzero(dense(m.write), 0).tolist())) == 1


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
      >>> dense(zero_pad({"mlp": 2}, {"mlp": 3})["mlp"].write).tolist()
      [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]

    References:
      Wang et al., `LiGO <https://arxiv.org/abs/2303.00980>`_, ICLR 2023
    """
    index = copied_units(
        "zero_pad", sizes, grown_sizes("zero_pad", WIDTHS, sizes, target), _leading_units
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
        growth[axis] = AxisMap(_some(rows, written), _some(rows, old))
    return growth


@operator(
    axes=WIDTHS,
    preserves="heads and mlp: yes; embed: no, as the norms see some units more often",
    source="Chen et al. 2016 (Net2Net), 2022 (bert2BERT)",
    policies=("exact", "asymmetric"),
    example={"heads": 5, "mlp": 13},
    also="net2net",
)
def fpi(sizes: Sizes, target: Sizes, seed: int = 0) -> dict[str, CopyMap]:
    """Copy random old units into the new ones, and divide the input weights among the copies.

    In function-preserving initialisation, g maps each new unit to its source: ``g(i) = i`` for old
    units, and a uniformly random old unit for all others. Then
    ``U[:, j] = W[g_in, g_out(j)] / copies`` (bert2BERT, section 3.3). It is the map of Net2Net
    (Eq. 2) for complete attention heads, so it is also registered as ``net2net``.

    Norms are an exception: if ``embed`` grows, the function is preserved only if every unit of
    ``embed`` is copied equally often. In general, random copies are not. Check a given growth with
    `jaxgrow.preserves_function`.

    {sections}

    Example:
      >>> fpi({"mlp": 2}, {"mlp": 4}, seed=1)["mlp"].write.index[:2, 0].tolist()
      [0, 1]

    References:
      Chen et al., `bert2BERT <https://arxiv.org/abs/2110.07143>`_, ACL 2022

      Chen et al., `Net2Net <https://arxiv.org/abs/1511.05641>`_, ICLR 2016
    """
    rng = np.random.default_rng(seed)

    def choose(old: int, new: int) -> np.ndarray:
        return np.concatenate([np.arange(old), rng.integers(0, old, new - old)])

    index = copied_units("fpi", sizes, grown_sizes("fpi", WIDTHS, sizes, target), choose)
    return {axis: select(of, sizes[axis]) for axis, of in index.items()}


@operator(
    axes=(LAYERS, *WIDTHS),
    preserves="no, by design",
    source="Chen et al. 2022",
    policies=("asymmetric",),
    example={"embed": 8, "heads": 5, "mlp": 13},
    inverts="no",
)
def aki(sizes: Sizes, target: Sizes, seed: int = 0) -> Rules:
    """Copy units as `fpi` does, but take new heads and MLP units from the *next* layer.

    In advanced knowledge initialisation, ``U^l[:, j] = Ũ^l[:, j]`` for old units and
    ``U^l[:, j] = Ũ^{l+1}[:, g(j)]`` for new units, where Ũ is the result of `fpi`. For the last
    layer, the next layer is the last layer itself. The residual stream grows as in `fpi`. If
    ``target`` contains ``layers``, the widened model is then stacked ``L' // L`` times, and the
    remaining ``L' mod L`` layers repeat its top layers. By design, the function is never preserved:
    the operator makes copies different from their sources.

    The growth is a sum of two terms: one for the old units of each layer, and one for the new
    units, which come from the next layer.

    Args:
      {arguments}

    Returns:
      One rule for each axis that receives new units, and one rule for the other parameters.

    Raises:
      {raises}

    Example:
      >>> growth = aki({"layers": 2, "embed": 4, "heads": 2, "mlp": 4}, {"mlp": 6})
      >>> len(growth.rules[0].terms)
      2

    References:
      Chen et al., `bert2BERT <https://arxiv.org/abs/2110.07143>`_, ACL 2022
    """
    layers = layer_axes(sizes)
    found = grown_sizes(
        "aki", (LAYERS, *WIDTHS), sizes, {**{axis: sizes[axis] for axis in layers}, **target}
    )
    copies = fpi(sizes, {axis: size for axis, size in target.items() if axis not in layers}, seed)
    base: dict[str, AxisMap] = {axis: m for axis, m in copies.items() if axis_kind(axis) == "embed"}
    following: dict[str, AxisMap] = dict(base)
    for axis in layers:
        old, new = found[axis]
        order = np.array([*list(range(old)) * (new // old), *range(old - new % old, old)])
        if new > old:
            base[axis] = select(order, old)
        following[axis] = select(np.minimum(order + 1, old - 1), old)
    rules: list[Rule] = []
    for axis, m in copies.items():
        if axis not in base:
            layers_beside("aki", axis, sizes)
            own, others = (
                AxisMap(_some(m.write, keep), _some(m.read, keep)) for keep in _halves(m)
            )
            rules.append(Rule(({**base, axis: own}, {**following, axis: others}), axes=(axis,)))
    return Rules((*rules, Rule((base,))))


@operator(
    axes=WIDTHS,
    sizes="a multiple of the old size",
    preserves="yes",
    source="Samragh et al. 2024",
    policies=("exact",),
    example={"embed": 12, "heads": 6, "mlp": 18},
    inverts="bitwise",
)
def hypercloning(sizes: Sizes, target: Sizes) -> dict[str, CopyMap]:
    """Repeat every unit k times and divide the input weights by k.

    ``W' = tile(W, (k, k)) / k``; vectors are tiled. The model becomes k times wider and computes
    the same function. `jaxgrow.growth.symmetry.break_symmetry` adds the noise of the paper, which
    also preserves the function.

    {sections}

    Example:
      >>> hypercloning({"mlp": 2}, {"mlp": 4})["mlp"].write.index[:, 0].tolist()
      [0, 1, 0, 1]

    References:
      Samragh et al.,
      `Scaling Smart: Accelerating Large Language Model Pre-training with Small Model Initialization <https://arxiv.org/abs/2409.12903>`_,
      2024
    """
    index = copied_units(
        "hypercloning", sizes, multiple_sizes("hypercloning", WIDTHS, sizes, target)
    )
    return {axis: select(of, sizes[axis]) for axis, of in index.items()}


def _always(growth: Growth, form: ModelForm) -> bool:
    return True


@operator(
    axes=WIDTHS,
    sizes="twice the old size, for all of them",
    preserves="yes",
    source="Shen et al. 2022",
    policies=("exact",),
    preserves_for=_always,
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
            keep = _halves(m)[which]
            block = _some(m.write, keep)
            out[axis] = (
                AxisMap(m.write, block) if axis in read else AxisMap(block, _some(m.read, keep))
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
                layers_beside("staged", axis, sizes),
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
    preserves="yes; in post-LN models and with LayerScale only if embed grows to a multiple",
    source="Wang et al. 2024",
    policies=("copy",),
    preserves_for=_lemon_preserves,
    example={"heads": 5, "mlp": 13},
)
def lemon(
    sizes: Sizes,
    target: Sizes,
    seed: int = 0,
    norm: Literal["layer", "rms", "unscaled"] = "layer",
) -> Growth:
    """Grow to any width, preserve the function of a pre-LN model, and make all copies different.

    Heads and MLP units are copied in turn. The input weights of C copies receive unequal shares:
    ``1/C + noise`` for each copy, and the remainder for the original. The new residual stream
    consists of complete copies of the old stream (tiles) and, in the remaining slots, the *mean* of
    the old units. The mean of the stream therefore stays the same, and its variance shrinks by
    ``1/eta^2 = D' / (tiles D)``. Norms compensate for this with ``eta gamma`` and ``eta^2 eps``
    (`Rules.eps`, which `Config.resized` applies), and ignore the remaining slots. The noise has
    standard deviation ``1 / (sqrt(D') L)``. LEMON adds layers with `llama_pro`.

    With ``norm="rms"``, the remaining slots are zero, so that the mean square shrinks by the same
    factor. This is our extension, because the paper covers LayerNorm only. A model with RMSNorm
    would not preserve its function if the slots were filled with means.

    Args:
      {arguments}
      norm: the norm of the model: LayerNorm, RMSNorm, or a LayerNorm without a scale, which
        cannot compensate for remaining slots.

    Returns:
      One map for each axis of ``target``; `Rules` if the new size of ``embed`` is not a multiple of
      the old one.

    Raises:
      {raises}

    Example:
      >>> lemon({"layers": 2, "embed": 4}, {"embed": 6}).eps
      0.6666666666666666

    References:
      Wang et al., `LEMON: Lossless Model Expansion <https://arxiv.org/abs/2310.07999>`_, ICLR 2024
    """
    rng = np.random.default_rng(seed)
    found = grown_sizes("lemon", WIDTHS, sizes, target)
    growth: dict[str, AxisMap] = {}
    for axis, index in copied_units("lemon", sizes, found).items():
        old = sizes[axis]
        stream = stream_beside("lemon", axis, sizes)
        noise = 1 / (
            target.get(stream, sizes[stream]) ** 0.5 * sizes[layers_beside("lemon", axis, sizes)]
        )
        if axis == stream:
            index = index[: len(index) // old * old]
        copies = np.bincount(index, minlength=old)
        own = mark_first_copies(index)
        share = 1 / copies[index] + noise * rng.normal(size=len(index)) * ~own
        share[own] += (1 - np.bincount(index, share))[index[own]]
        write = select(index, old).write
        growth[axis] = AxisMap(write, SparseMap(write.index, share[:, None], old))
    streams = [axis for axis in width_axes(sizes) if axis_kind(axis) == "embed"]
    tiled = {axis: _tiled(*found.get(axis, (1, 1))) for axis in streams}
    if len(set(tiled.values())) > 1:
        raise ValueError(
            f"lemon would multiply the eps that all norms share by different factors, {tiled}: "
            "make the new sizes of all stages the same multiple"
        )
    norms: list[Rule] = []
    for axis in streams:
        if tiled[axis] < 1:
            growth[axis], *own_norms = _ragged(axis, growth[axis], found[axis][1], norm)
            norms += own_norms
    return Rules((*norms, Rule((growth,))), eps=next(iter(tiled.values()))) if norms else growth


def _tiled(old: int, new: int) -> float:
    """The fraction of the units of a residual stream that are tiles: 1 for multiples."""
    return new // old * old / new


def _ragged(axis: str, tiles: AxisMap, new: int, norm: str) -> tuple[AxisMap, Rule, Rule]:
    """The map of LEMON for a residual stream with remaining slots, and the rules for its norms."""
    old = tiles.old
    if norm == "unscaled":
        raise ValueError(
            f"lemon grows {axis} from {old} to {new} by scaling the norms, but the norms of this "
            f"model have no scale: choose a multiple of {old}"
        )
    spare = np.zeros((new % tiles.old, tiles.old))
    write, read = (np.concatenate([dense(m), spare]) for m in (tiles.write, tiles.read))

    def norms(factor: float) -> tuple[Maps, ...]:
        return ({axis: AxisMap(factor * write, factor * read)},)

    slots = np.concatenate([dense(tiles.write), spare + (norm == "layer") / old])
    scales = Rule(norms(_tiled(old, new) ** 0.5), axes=(axis,), roles=("norm scale",))
    # A rule for other parameters of norms is needed only if the model has some.
    others = Rule(norms(1.0), axes=(axis,), roles=("norm scale", "norm bias"))
    return AxisMap(slots, read), scales, others


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


# --- parts of maps ---


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


def _leading_units(old: int, new: int) -> np.ndarray:
    """The sources of ``[I; 0]``. The sources of the zero rows do not matter."""
    return np.minimum(np.arange(new), old - 1)


def _halves(m: CopyMap) -> tuple[np.ndarray, np.ndarray]:
    """Two masks: the old units and the new units."""
    old = mark_first_copies(m.write.index[:, 0])
    return old, ~old


def _some(m: SparseMap, keep: np.ndarray) -> SparseMap:
    """The rows of ``m`` where ``keep`` is true; the other rows are zero."""
    return SparseMap(m.index, m.weight * keep[:, None], m.old)
