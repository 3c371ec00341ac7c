"""How is a trained small model merged into the large model that it was coalesced from?

By interpolation (`interpolate`), or by the multigrid correction (`correct`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxgrow.axes.names import Axes, Params, by_path
from jaxgrow.growth.apply import grow
from jaxgrow.growth.maps import Growth, swap
from jaxgrow.growth.matrices import Array, can_scale, is_traced


def interpolate(before: Params, up: Params, alpha: float) -> Params:
    """Interpolate two models: ``(1 - alpha) * before + alpha * up`` for each parameter.

    This is the interpolation of Zou et al. (2024, section 3.3) after coalescing. Results for
    ``alpha = 0`` and ``alpha = 1`` are bitwise identical to ``before`` and ``up``. The
    interpolation moves the coarse part of ``before`` (the means over coalesced units), but it also
    shrinks its fine part (the differences between these units) by ``1 - alpha``. `correct` keeps
    the fine part.

    Args:
      before: the large model as it was before coalescing.
      up: the small model, de-coalesced.
      alpha: the weight of ``up``.

    Returns:
      Parameters in the dtypes of ``before``.

    Raises:
      ValueError: the trees differ in structure or shapes, or in a leaf of integers, truth values or
        floats of 8 bits, which have no values in between.

    Example:
      >>> import numpy as np
      >>> interpolate({"b": np.array([1.0, 3.0])}, {"b": np.array([5.0, 5.0])}, alpha=0.25)["b"].tolist()
      [2.0, 3.5]

    References:
      Zou et al.,
      `A Multi-Level Framework for Accelerating Training Transformer Models <https://arxiv.org/abs/2404.07999>`_,
      ICLR 2024
    """
    _check_mixable(before, up)
    return jax.tree.map(partial(_mix, a=1 - alpha, b=alpha), before, up)


def correct(
    before: Params, small: Params, growth: Growth, axes: Axes, alpha: float = 1.0
) -> Params:
    """Apply the multigrid correction ``before + alpha * D(small - C(before))``.

    ``D = grow(growth, .)``, and ``C`` is its `swap`. At ``alpha = 1`` the coarse part of the result
    is ``small``, so ``C(result) == small``, and its fine part is the fine part of ``before``. If
    the small model did not change in training (``small == C(before)``), the result is ``before``.
    This is jaxgrow's alternative to the interpolation of Zou et al., which has neither property.

    Args:
      before: the large model as it was before coalescing.
      small: the small model after training.
      growth: the growth ``D`` from the small to the large model.
      axes: the axis names of the parameters, the same for both models.
      alpha: fraction of the small model's change that is added to the large model.

    Returns:
      Parameters in the dtypes of ``before``.

    Raises:
      ValueError: ``small`` has other shapes than ``C(before)``, or the growth does not fit
        (`jaxgrow.grow`), or a leaf of integers, truth values or floats of 8 bits has changed.

    Example:
      The mean of two units was 2 and became 5. Their difference is unchanged.

      >>> import numpy as np
      >>> from jaxgrow.growth import maps
      >>> before, small, axes = {"b": np.array([1.0, 3.0])}, {"b": np.array([5.0])}, {"b": ("mlp",)}
      >>> correct(before, small, {"mlp": maps.repeat(1, times=2)}, axes)["b"].tolist()
      [4.0, 6.0]
    """
    coarse = grow(swap(growth), before, axes)
    _check_mixable(coarse, small)
    learned = jax.tree.map(partial(_mix, a=1, b=-1), small, coarse)
    return jax.tree.map(partial(_mix, a=1, b=alpha), before, grow(growth, learned, axes))


def _mix(x: Array, y: Array, a: float, b: float) -> Array:
    if not can_scale(x.dtype):  # such leaves are equal
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (a * x.astype(wide) + b * y.astype(wide)).astype(x.dtype)


def _check_mixable(a: Params, b: Params) -> None:
    """Check that the models have the same shapes, and are equal where values cannot be averaged."""

    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        return {leaf: x.shape for leaf, x in by_path(tree).items()}

    left = shapes(a)
    right = shapes(b)
    wrong = [
        f"{p}: {left.get(p, 'absent')} and {right.get(p, 'absent')}"
        for p in {**left, **right}
        if left.get(p) != right.get(p)
    ]
    if wrong:
        raise ValueError(
            "the two models differ in shape; de-coalesce the smaller one first:\n  "
            + "\n  ".join(wrong)
        )
    others = by_path(b)
    wrong = [
        f"{leaf}: has dtype {x.dtype}, and is not known to be the same in both models"
        for leaf, x in by_path(a).items()
        if not can_scale(x.dtype)
        and (is_traced(x) or is_traced(others[leaf]) or not (x == others[leaf]).all())
    ]
    if wrong:
        raise ValueError(
            "values of these dtypes cannot be averaged; dequantize the leaves, or leave them out "
            "of both models:\n  " + "\n  ".join(wrong)
        )
