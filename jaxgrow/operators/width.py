"""Operators that widen a model: the residual stream, attention heads and MLP units.

Heads are always copied completely. With GQA, ``kv_heads`` is another axis, and query heads stay
with their key/value heads (`jaxgrow.operators.targets.copied_units`).
"""

from typing import Literal

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind
from jaxgrow.growth.maps import AxisMap, CopyMap, Growth, Maps, Rule, Rules, by_axes, select
from jaxgrow.growth.matrices import SparseMap, dense
from jaxgrow.operators.registry import ModelForm, by_maps, operator
from jaxgrow.operators.targets import (
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
from jaxgrow.typed import check_choice

__all__ = ["aki", "fpi", "hypercloning", "lemon"]


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
            axis_beside("aki", axis, "layers", sizes)
            own, others = (
                AxisMap(masked_rows(m.write, keep), masked_rows(m.read, keep))
                for keep in split_units(m)
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
      norm: the norm of the model: "layer" (LayerNorm), "rms" (RMSNorm), or "unscaled", a LayerNorm
        without a scale, which cannot compensate for remaining slots.

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
    check_choice("norm", norm, Literal["layer", "rms", "unscaled"])
    rng = np.random.default_rng(seed)
    found = grown_sizes("lemon", WIDTHS, sizes, target)
    growth: dict[str, AxisMap] = {}
    for axis, index in copied_units("lemon", sizes, found).items():
        old = sizes[axis]
        stream = axis_beside("lemon", axis, "embed", sizes)
        noise = 1 / (
            target.get(stream, sizes[stream]) ** 0.5
            * sizes[axis_beside("lemon", axis, "layers", sizes)]
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


# --- parts of maps ---


def split_units(m: CopyMap) -> tuple[np.ndarray, np.ndarray]:
    """Two masks: the old units and the new units."""
    old = mark_first_copies(m.write.index[:, 0])
    return old, ~old


def masked_rows(m: SparseMap, keep: np.ndarray) -> SparseMap:
    """The rows of ``m`` where ``keep`` is true; the other rows are zero."""
    return SparseMap(m.index, m.weight * keep[:, None], m.old)
