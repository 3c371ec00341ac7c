"""Which sizes give a model a number of parameters? ``prune --params`` and ``suggest --to-params``."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from jaxgrow.axes.names import LAYERS, axis_kind, axis_of, is_layers, sibling_axis
from jaxgrow.checkpoints import CheckpointError, Source
from jaxgrow.checkpoints.hf.base import Heads
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.cli.writing import sizes_as_text
from jaxgrow.models.config import EXPERTS
from jaxgrow.operators.targets import HEADS, KV_HEADS, WIDTHS

# The largest relative difference from the wanted number of parameters.
TOLERANCE = 0.02
# The kinds of axes that change together, the preferred ones first.
_CHANGES = (WIDTHS, (LAYERS, *WIDTHS), (LAYERS, "mlp"), (LAYERS,))
# The widths of large models are multiples of it.
LARGEST_STEP = 64
# The factors that are tried for the sizes: from 1 to 16, or to 1 / 16.
_FACTORS = 2.0 ** (np.arange(513) / 128)


def sizes_near(source: Source, parameters: int) -> list[dict[str, int]]:
    """Find sizes at which a model has nearly a given number of parameters.

    Widths are multiples of 64; the widths of small models are multiples of the largest power of two
    that is at most an eighth of the width. Heads change in whole groups that share a key/value
    head, and ``embed`` changes with them if the architecture requires it. The number of layers is a
    multiple of the period of their kinds. Of all such sizes within 2 %, those with the most equal
    proportions are chosen. Parameters are counted as by ``jaxgrow inspect``.

    Args:
      source: the model.
      parameters: the number of parameters, more or fewer than it has.

    Returns:
      Targets that change the widths, the layers and widths, the layers and MLPs, or the layers.

    Raises:
      CheckpointError: no sizes are within 2 %. The message has the nearest ones.
    """
    tried = [_nearest_sizes(source, parameters, kinds) for kinds in _CHANGES]
    found = [
        target
        for i, (count, target) in enumerate(tried)
        if abs(count / parameters - 1) <= TOLERANCE and target and (count, target) not in tried[:i]
    ]
    if not found:
        count, target = min(tried, key=lambda x: abs(x[0] - parameters))
        raise CheckpointError(
            f"no sizes of this model have {parameters:,} parameters within {TOLERANCE:.0%}; it has "
            f"{source.parameters:,}. The nearest are {sizes_as_text(target or source.sizes())}, with "
            f"{count:,} parameters: give these sizes, or another number"
        )
    return found


def _nearest_sizes(
    source: Source, parameters: int, kinds: Collection[str]
) -> tuple[int, dict[str, int]]:
    """Return the number of parameters of the best sizes, and the sizes of the axes that change."""
    old = source.sizes()
    factors = _FACTORS if parameters > source.parameters else 1 / _FACTORS
    # MLPs change by another factor (the second dimension), which fills the gaps between the
    # coarser sizes of the other axes.
    own = factors if "mlp" in kinds else factors[:1]
    tried = _sizes_by(source, kinds, factors[:, None], own[None, :])
    count = np.asarray(-source.config.idle)
    for leaf in source.leaves.values():
        entries = np.ones(())
        for axis in map(axis_of, leaf.names):
            entries = entries * tried.get(axis, old[axis])
        count = count + entries
    count = np.broadcast_to(count, (len(factors), len(own)))
    error = np.abs(count / parameters - 1)
    unequal = abs(np.arange(len(factors))[:, None] - np.arange(len(own))) * (len(own) > 1)
    # Within the tolerance, the most equal proportions decide, and then the smallest error.
    rank = error + np.where(error <= TOLERANCE, unequal, len(factors))
    if _heads_rule(source) == "must divide embed":
        for axis in (axis for axis in tried if axis_kind(axis) == HEADS):
            embed = sibling_axis(axis, "embed")
            rank = np.where(tried.get(embed, old[embed]) % tried[axis] == 0, rank, np.inf)
    best = np.unravel_index(rank.argmin(), rank.shape)
    sizes = {axis: int(np.broadcast_to(x, rank.shape)[best]) for axis, x in tried.items()}
    return int(count[best]), without_unchanged(sizes, old)


def without_unchanged(target: Mapping[str, int], old: Mapping[str, int]) -> dict[str, int]:
    """Leave out each kind of axes of which none changes. An option has a size for each stage.

    Example:
      >>> without_unchanged({"layers.0": 2, "layers.1": 4, "mlp": 8}, {"layers.0": 2, "layers.1": 2, "mlp": 8})
      {'layers.0': 2, 'layers.1': 4}
    """
    changed = {axis_kind(axis) for axis, n in target.items() if n != old[axis]}
    return {axis: n for axis, n in target.items() if axis_kind(axis) in changed}


def _sizes_by(
    source: Source, kinds: Collection[str], factor: np.ndarray, own: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the sizes of the axes of some kinds for each factor; MLPs have their own factors."""
    old = source.sizes()
    shrinks = factor[-1] < 1
    fixed = shrinks and source.config.predicts == "states"  # the outputs are features of ``embed``
    mixture = shrinks and EXPERTS in old  # whose MLPs are not pruned, but its experts
    least = {EXPERTS: getattr(source.config, "active", 1)}

    def multiples(axis: str, by: np.ndarray, each: int = 1) -> np.ndarray:
        """The nearest multiples of a step; the old size if they are on its other side.

        The widths of the later stages keep their ratio to those of the first stage.
        """
        size = old[axis]
        first = old.get(f"{axis_kind(axis)}.0", size)
        step = each if is_layers(axis) else max(1, size // first) * min(unit_step(first), each)
        new = np.maximum(np.round(size * by / step) * step, max(step, least.get(axis, 1)))
        return np.minimum(new, size) if shrinks else np.maximum(new, size)

    found: dict[str, np.ndarray] = {}
    for axis in old:
        kind = axis_kind(axis)
        if kind == LAYERS and kind in kinds:
            found[axis] = multiples(axis, factor, source.config.traits["period"])
        elif kind == "embed" and kind in kinds and not fixed:
            found.setdefault(axis, multiples(axis, factor, LARGEST_STEP))
        elif kind == "mlp" and kind in kinds and not mixture:
            found[axis] = multiples(axis, own, LARGEST_STEP)
        elif axis == EXPERTS and "mlp" in kinds and mixture:
            found[axis] = multiples(axis, own)
        elif kind == HEADS and kind in kinds:
            found |= _heads_by(source, axis, multiples, factor, fixed)
    return found


def _heads_by(
    source: Source,
    axis: str,
    multiples: Callable[[str, np.ndarray], np.ndarray],
    factor: np.ndarray,
    fixed: bool,
) -> dict[str, np.ndarray]:
    """Return the sizes of the heads, of the key/value heads, and of ``embed`` if it follows them.

    The result is empty if ``embed`` would have to follow, but is fixed.
    """
    old = source.sizes()
    embed, keys = sibling_axis(axis, "embed"), sibling_axis(axis, KV_HEADS)
    groups = multiples(keys if keys in old else axis, factor)
    heads = groups * (old[axis] // old.get(keys, old[axis]))
    found = {axis: heads} | ({keys: groups} if keys in old else {})
    if _heads_rule(source) != "free" and old[embed] == old[axis] * source.config.head_dim:
        if fixed:
            return {}
        found[embed] = heads * source.config.head_dim
    return found


def _heads_rule(source: Source) -> Heads:
    """Return which sizes the heads may have, as `Family.heads`."""
    # The stages of a Swin are as wide as their heads.
    return (
        source.family.heads_rule(source.config)
        if isinstance(source, HuggingFace) and isinstance(source.config.heads, int)
        else "divide embed"
    )


def unit_step(size: int) -> int:
    """Return the step of a width: 64, or for small widths a power of two up to an eighth of it.

    Example:
      >>> unit_step(4096), unit_step(512), unit_step(20), unit_step(3)
      (64, 64, 2, 1)
    """
    return min(LARGEST_STEP, 1 << max(0, (size // 8).bit_length() - 1))
