"""Operators that widen a model: the residual stream (``embed``), ``heads`` as whole units, ``mlp``.

Each takes the ``sizes`` of a model and a ``target``, the new sizes of any of these axes. Where queries share keys, ``kv_heads``
is one of them, and query heads go with their key heads (`jaxgrow.operators.targets.sources`).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxgrow.axes import LAYERS, beside, kind
from jaxgrow.maps import AxisMap, Growth, Maps, Rule, Rules, select
from jaxgrow.matrices import Matrix, Rows, dense
from jaxgrow.operators.targets import (
    HEADS,
    KV_HEADS,
    WIDTHS,
    Sizes,
    depth,
    first,
    grown,
    layers_beside,
    multiples,
    sources,
    width,
)

MEANS = 32  # old units that a new one of `average` is a mean of, at most


def zero_pad(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """``W' = [[W, 0], [0, 0]]``: direct copy into the corner, zeros elsewhere.

    Keeps the function for ``heads`` and ``mlp``, not for ``embed``, whose norms count the zeros. New units never move: every
    gradient of theirs is a product with a zero (LiGO's ``C = 0``, a saddle; Wang et al., ICLR 2023). A control. If fewer
    queries share a key head, the new key heads are copies: old query heads read them.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow.

    Returns:
      One map for each axis of ``target``.

    Raises:
      ValueError: an axis that is no width, a smaller size, or query heads that cannot share the keys.

    Example:
      >>> dense(zero_pad({"mlp": 2}, {"mlp": 3})["mlp"].write).tolist()
      [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]

    References:
      Wang et al., `LiGO <https://arxiv.org/abs/2303.00980>`_, ICLR 2023
    """
    index = sources("zero_pad", sizes, grown("zero_pad", WIDTHS, sizes, target), _top)
    growth = {}
    for axis, of in index.items():
        rows, old = select(of, sizes[axis]).write, first(of)
        written = old
        if axis == KV_HEADS:
            heads = first(index[HEADS]) if HEADS in index else np.ones(sizes[HEADS], bool)
            written = old | heads.reshape(len(of), -1).any(1)
        growth[axis] = AxisMap(_some(rows, written), _some(rows, old))
    return growth


def fpi(sizes: Sizes, target: Sizes, seed: int = 0) -> dict[str, AxisMap]:
    """Function-preserving initialisation: new units copy random old ones, their readers share the weight.

    ``g(i) = i`` for old units, else uniform over them; ``U[:, j] = W[g_in, g_out(j)] / copies`` (bert2BERT, Chen et al.,
    ACL 2022, section 3.3: Net2Net's map, Chen et al., ICLR 2016, Eq. 2, with whole heads).

    Keeps the function but for norms: exact only if every unit of ``embed`` is copied equally often, which random copies
    are not; ask `preserves_function`.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow.
      seed: of the units that are drawn.

    Returns:
      One map for each axis of ``target``.

    Raises:
      ValueError: an axis that is no width, a smaller size, or query heads that cannot share the keys.

    Example:
      >>> fpi({"mlp": 2}, {"mlp": 4}, seed=1)["mlp"].write.index[:2, 0].tolist()
      [0, 1]

    References:
      Chen et al., `bert2BERT <https://arxiv.org/abs/2110.07143>`_, ACL 2022

      Chen et al., `Net2Net <https://arxiv.org/abs/1511.05641>`_, ICLR 2016
    """
    return _copied("fpi", sizes, target, seed)


def net2net(sizes: Sizes, target: Sizes, seed: int = 0) -> dict[str, AxisMap]:
    """`fpi`, by the name of the paper that it came from (Chen et al., ICLR 2016).

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow.
      seed: of the units that are drawn.

    Returns:
      One map for each axis of ``target``.

    Raises:
      ValueError: an axis that is no width, a smaller size, or query heads that cannot share the keys.

    Example:
      >>> net2net({"mlp": 2}, {"mlp": 4}, seed=1)["mlp"].new
      4

    References:
      Chen et al., `Net2Net <https://arxiv.org/abs/1511.05641>`_, ICLR 2016
    """
    return _copied("net2net", sizes, target, seed)


def _copied(operator: str, sizes: Sizes, target: Sizes, seed: int) -> dict[str, AxisMap]:
    rng = np.random.default_rng(seed)

    def choose(old: int, new: int) -> np.ndarray:
        return np.concatenate([np.arange(old), rng.integers(0, old, new - old)])

    index = sources(operator, sizes, grown(operator, WIDTHS, sizes, target), choose)
    return {axis: select(of, sizes[axis]) for axis, of in index.items()}


def aki(sizes: Sizes, target: Sizes, seed: int = 0) -> Rules:
    """Advanced knowledge initialisation: `fpi`, but new heads and MLP units come from the *next* layer.

    ``U^l[:, j] = Ũ^l[:, j]`` for old units, ``Ũ^{l+1}[:, g(j)]`` for new ones, with Ũ of `fpi` and the last layer its own next
    (bert2BERT, Chen et al., ACL 2022, section 3.4). The residual stream grows as in `fpi`. A ``target`` with ``layers`` then
    stacks the widened model as often as it fits, and fills up from its top. Never keeps the function, by design: it breaks
    the symmetry of the copies.

    A sum of two terms, the old units of each layer and the new ones of the next.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow, widths and ``layers``.
      seed: of the units that are drawn.

    Returns:
      A rule for each axis that gets new units, and one for all else.

    Raises:
      ValueError: another axis, a smaller size, or query heads that cannot share the keys.

    Example:
      >>> growth = aki({"layers": 2, "embed": 4, "heads": 2, "mlp": 4}, {"mlp": 6})
      >>> len(growth.rules[0].terms)
      2

    References:
      Chen et al., `bert2BERT <https://arxiv.org/abs/2110.07143>`_, ACL 2022
    """
    layers = depth(sizes)
    found = grown("aki", (LAYERS, *WIDTHS), sizes, {**{axis: sizes[axis] for axis in layers}, **target})
    copies = fpi(sizes, {axis: size for axis, size in target.items() if axis not in layers}, seed)
    base: dict[str, AxisMap] = {axis: m for axis, m in copies.items() if kind(axis) == "embed"}
    following: dict[str, AxisMap] = dict(base)
    for axis in layers:
        old, new = found[axis]
        order = np.array([*list(range(old)) * (new // old), *range(old - new % old, old)])
        if new > old:
            base[axis] = select(order, old)
        following[axis] = select(np.minimum(order + 1, old - 1), old)
    rules = []
    for axis, m in copies.items():
        if axis not in base:
            layers_beside("aki", axis, sizes)
            own, others = (AxisMap(_some(m.write, keep), _some(m.read, keep)) for keep in _halves(m))
            rules.append(Rule(({**base, axis: own}, {**following, axis: others}), axes=(axis,)))
    return Rules((*rules, Rule((base,))))


def hypercloning(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """``W' = tile(W, (k, k)) / k``, vectors tiled: k times the width, the same function (Samragh et al., 2024).

    `jaxgrow.symmetry.break_symmetry` adds the paper's noise, which keeps the function too.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow.

    Returns:
      One map for each axis of ``target``.

    Raises:
      ValueError: an axis that is no width, a smaller size, one that is no multiple, or query heads that cannot
        share the keys.

    Example:
      >>> hypercloning({"mlp": 2}, {"mlp": 4})["mlp"].write.index[:, 0].tolist()
      [0, 1, 0, 1]

    References:
      Samragh et al., `Scaling Smart: Accelerating Large Language Model Pre-training with Small Model Initialization
      <https://arxiv.org/abs/2409.12903>`_, 2024
    """
    index = sources("hypercloning", sizes, multiples("hypercloning", WIDTHS, sizes, target))
    return {axis: select(of, sizes[axis]) for axis, of in index.items()}


def staged(sizes: Sizes, target: Sizes) -> Rules:
    """``W' = [[W, 0], [0, W]]``: two copies that do not see each other, until training mixes them; the same function.

    Staged Training (Shen et al., ICML 2022), which doubles all of ``embed``, ``heads`` (and ``kv_heads``) and ``mlp``. What is
    outside of the blocks, or between heads, is tiled, and the final norm, or an untied head, halved, as in `hypercloning`. A
    sum of two terms.

    Gradients are not block-diagonal: each half of a kernel's inputs meets each half of its outputs, as in `hypercloning`. So
    its dual and its swap are those of `hypercloning`, for which reading axes are mapped otherwise than writing ones.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: twice the size of every width.

    Returns:
      Rules for the kernels of layers, of two terms each, and one for all else.

    Raises:
      ValueError: other sizes.

    Example:
      >>> growth = staged({"layers": 2, "embed": 4, "heads": 2, "mlp": 8}, {"embed": 8, "heads": 4, "mlp": 16})
      >>> len(growth.rules[0].terms)
      2

    References:
      Shen et al., `Staged Training for Transformer Language Models <https://arxiv.org/abs/2203.06211>`_, ICML 2022
    """
    axes = width(sizes)
    found = multiples("staged", WIDTHS, sizes, target)
    if set(found) != set(axes) or any(new != 2 * old for old, new in found.values()):
        raise ValueError(f"staged doubles {', '.join(axes)}, all of them, but was asked for {dict(target)}")
    copies = hypercloning(sizes, target)

    def half(which: int, read: Sequence[str]) -> Maps:
        out: dict[str, AxisMap] = {}
        for axis, m in copies.items():
            keep = _halves(m)[which]
            block = _some(m.write, keep)
            out[axis] = AxisMap(m.write, block) if axis in read else AxisMap(block, _some(m.read, keep))
        return out

    units = [axis for axis in axes if kind(axis) != "embed"]
    into, out_of = ((half(0, read), half(1, read)) for read in ([a for a in axes if a not in units], units))

    def rule(terms: tuple[Maps, ...], axis: str, inner: str, outer: str) -> Rule:
        return Rule(
            terms,
            axes=(layers_beside("staged", axis, sizes), axis + inner, beside(axis, "embed") + outer),
            roles=("kernel",),
        )

    writing = [rule(out_of, axis, ".in", ".out") for axis in units if kind(axis) != KV_HEADS]
    reading = [rule(into, axis, ".out", ".in") for axis in units]
    return Rules((*writing, *reading, Rule((copies,))))


def lemon(sizes: Sizes, target: Sizes, seed: int = 0, norm: Literal["layer", "rms"] = "layer") -> Growth:
    """Any width, the same function of a pre-LN model, and no two copies alike (LEMON, Wang et al., ICLR 2024).

    Heads and MLP units are copied in turn; the readers of C copies take unequal shares of the weight, ``1/C + noise`` for a
    copy, the rest for the original. The residual stream is as many tiles as fit and its *mean* in the slots that are left,
    so that means stay and variances shrink by ``1/eta^2 = D' / (tiles D)``; norms take ``eta gamma`` and ``eta^2 eps``
    (`Rules.eps`, which `Config.resized` applies), and nothing of the spare slots. The noise has deviation
    ``1 / (sqrt(D') L)``. Layers are added by `llama_pro`.

    ``norm="rms"``, of a model with RMSNorm: the spare slots are zero (our extension; the paper has LayerNorm alone), so that
    mean squares shrink by the same factor. With the other's slots such a model does not keep its function at ragged widths.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow.
      seed: of the shares of copies.
      norm: the model's: LayerNorm or RMSNorm.

    Returns:
      One map for each axis of ``target``; rules, where ``embed`` grows by no whole number of times.

    Raises:
      ValueError: an axis that is no width, a smaller size, or query heads that cannot share the keys.

    Example:
      >>> lemon({"layers": 2, "embed": 4}, {"embed": 6}).eps
      0.6666666666666666

    References:
      Wang et al., `LEMON: Lossless Model Expansion <https://arxiv.org/abs/2310.07999>`_, ICLR 2024
    """
    rng = np.random.default_rng(seed)
    found = grown("lemon", WIDTHS, sizes, target)
    growth: dict[str, AxisMap] = {}
    for axis, index in sources("lemon", sizes, found).items():
        old, stream = sizes[axis], beside(axis, "embed")
        noise = 1 / (target.get(stream, sizes[stream]) ** 0.5 * sizes[layers_beside("lemon", axis, sizes)])
        if axis == stream:
            index = index[: len(index) // old * old]
        copies, own = np.bincount(index, minlength=old), first(index)
        share = 1 / copies[index] + noise * rng.normal(size=len(index)) * ~own
        share[own] += (1 - np.bincount(index, share))[index[own]]
        write = select(index, old).write
        assert isinstance(write, Rows)
        growth[axis] = AxisMap(write, Rows(write.index, share[:, None], old))
    streams = [axis for axis in width(sizes) if kind(axis) == "embed"]
    # Of each residual stream, how many of its units are tiles, of all: 1, but of a ragged one.
    tiled = {axis: new // old * old / new for axis in streams for old, new in [found.get(axis, (1, 1))]}
    if len(set(tiled.values())) > 1:
        raise ValueError(
            f"lemon multiplies one eps of norms by {tiled}, which differ: make the new sizes of all stages the same multiple"
        )
    norms: list[Rule] = []
    for axis in streams:
        if tiled[axis] < 1:
            growth[axis], *own_norms = _ragged(axis, growth[axis], found[axis][1], norm)
            norms += own_norms
    return Rules((*norms, Rule((growth,))), eps=next(iter(tiled.values()))) if norms else growth


def _ragged(axis: str, tiles: AxisMap, new: int, norm: str) -> tuple[AxisMap, Rule, Rule]:
    """LEMON's map of a residual stream of tiles and slots that are left, and rules for the norms over it."""
    old, spare = tiles.old, np.zeros((new % tiles.old, tiles.old))
    write, read = (np.concatenate([dense(m), spare]) for m in (tiles.write, tiles.read))

    def norms(factor: float) -> tuple[Maps, ...]:
        return ({axis: AxisMap(factor * write, factor * read)},)

    slots = np.concatenate([dense(tiles.write), spare + (norm == "layer") / old])
    scales = Rule(norms((new // old * old / new) ** 0.5), axes=(axis,), roles=("norm scale",))
    others = Rule(norms(1.0), axes=(axis,), roles=("norm scale", "norm bias"))  # what else norms have: perhaps nothing
    return AxisMap(slots, read), scales, others


def sparkling(sizes: Sizes, target: Sizes) -> dict[str, AxisMap]:
    """Copies whose readers are scaled to keep the size of activations, not the function (SPARKLING, 2026).

    With ``c = (d' - d) / d``: fan-out ``[y; y~]``, fan-in ``alpha [W, W~]``, ``alpha = 1 / sqrt(1 + 3 c)`` for c <= 1 and
    ``1 / (1 + c)`` beyond; norm scales copied. At c = 1 it is `hypercloning`. Its recipe goes on with the policy
    ``asymmetric`` for the optimizer and a second warm-up of the new entries alone.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow.

    Returns:
      One map for each axis of ``target``.

    Raises:
      ValueError: an axis that is no width, a smaller size, or query heads that cannot share the keys.

    Example:
      >>> dense(sparkling({"mlp": 1}, {"mlp": 2})["mlp"].read).tolist()
      [[0.5], [0.5]]

    References:
      `SPARKLING <https://arxiv.org/abs/2602.02472>`_, 2026
    """
    growth = {}
    for axis, index in sources("sparkling", sizes, grown("sparkling", WIDTHS, sizes, target)).items():
        old = sizes[axis]
        c = (len(index) - old) / old
        alpha = 1 / (1 + 3 * c) ** 0.5 if c <= 1 else 1 / (1 + c)
        write = select(index, old).write
        assert isinstance(write, Rows)
        growth[axis] = AxisMap(write, Rows(write.index, write.weight * alpha, old))
    return growth


def average(sizes: Sizes, target: Sizes, seed: int = 0, noise: float = 0.03) -> dict[str, AxisMap]:
    """New units are about a mean of old ones, new layers about a copy: where LiGO's learning begins, unit by unit.

    Width ``B = [I; C]`` for writers and readers alike, with rows of C uniform in 0..1 and divided by their sum; depth
    ``u / sum(u)`` with ``u ~ U(0, noise)``, but 1 at ``l mod L`` (Wang et al., ICLR 2023, the published code's start). What is
    new begins small, about ``1 / sqrt(n)`` of a unit where it is a mean of n, and no two are alike. Does not keep the
    function. Deviation: a mean is of 32 random units, of all where there are no more, so that it grows models of any size.

    Where queries share keys, new heads are means over groups, each of the heads at its place.

    Args:
      sizes: the size of every axis of the model (`jaxgrow.sizes`).
      target: the new sizes of the axes that grow, ``layers`` too.
      seed: of the rows that are drawn.
      noise: what of the other layers is mixed into a copied one.

    Returns:
      One map for each axis of ``target``.

    Raises:
      ValueError: a smaller size, or query heads that cannot share the keys.

    Example:
      >>> rows = dense(average({"mlp": 2}, {"mlp": 3})["mlp"].write)
      >>> rows[:2].tolist(), round(float(rows[2].sum()), 6)
      ([[1.0, 0.0], [0.0, 1.0]], 1.0)

    References:
      Wang et al., `LiGO <https://arxiv.org/abs/2303.00980>`_, ICLR 2023
    """
    rng = np.random.default_rng(seed)
    layers = depth(sizes)
    found = grown("average", (LAYERS, *WIDTHS), sizes, target)
    growth = {}
    for axis in layers:
        if axis not in found:
            continue
        old, new = found[axis]
        weights = rng.uniform(0, noise, (new, old))
        weights[np.arange(new), np.arange(new) % old] = 1
        rows = weights / weights.sum(1, keepdims=True)
        growth[axis] = AxisMap(rows, rows)
    for axis, index in sources("average", sizes, {a: found[a] for a in found if a not in layers}).items():
        group = sizes[HEADS] // sizes[KV_HEADS] if axis == HEADS and KV_HEADS in sizes else 1
        growth[axis] = _averaged(index, sizes[axis], group, rng)
    return growth


# --- parts of maps ---


def _averaged(index: np.ndarray, old: int, group: int, rng: np.random.Generator) -> AxisMap:
    """``[I; C]``: first copies are the old units, others a mean of some at the same place of a group."""
    count = min(MEANS, old // group)
    of, weight = np.repeat(index[:, None], count, 1), np.zeros((len(index), count))
    weight[:, 0] = 1
    for i in np.flatnonzero(~first(index)):
        of[i] = np.sort(rng.choice(old // group, count, replace=False)) * group + index[i] % group
        drawn = rng.uniform(size=count)
        weight[i] = drawn / drawn.sum()
    rows = Rows(of, weight, old)
    return AxisMap(rows, rows)


def _top(old: int, new: int) -> np.ndarray:
    """The sources of ``[I; 0]``; of the zeros, any."""
    return np.minimum(np.arange(new), old - 1)


def _halves(m: AxisMap) -> tuple[np.ndarray, np.ndarray]:
    """The old units, and the new ones, as masks."""
    assert isinstance(m.write, Rows)
    old = first(m.write.index[:, 0])
    return old, ~old


def _some(m: Matrix, keep: np.ndarray) -> Rows:
    """The rows of ``m`` that are kept; the others are zero."""
    assert isinstance(m, Rows)
    return Rows(m.index, m.weight * keep[:, None], m.old)
