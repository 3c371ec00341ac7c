"""Which layers does each step of layer dropping run?

The keep masks are arguments of the step, and the host knows them before the step starts.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxgrow.layerdrop import (
    KeepMask,
    LayerDrop,
    keep_masks,
    output_divisors,
    padded,
    program_counts,
)

# Number of steps whose masks one jitted call samples, so that the host rarely waits for the device.
CHUNK = 1024


class KeepMasks:
    """Keep masks for the steps 0 to steps - 1 of a training with layer dropping.

    ``keep_masks(step)`` returns the keep probabilities [layers], the keep masks of the step, and the
    mean number of layers that run. It is a pure function of (seed, step, micro-step) and of the
    sensitivities, and is the same in every process. If all keep probabilities are 1, the keep masks
    are None, and the step is a normal dense step.

    Args:
      drop: settings of layer dropping.
      layers: number of layers, or of the layers of each stage, as for `jaxgrow.layerdrop.keep_masks`.
      steps: number of steps of the schedule.
      micro: number of micro-batches in a step.
      seed: random seed of the masks.
      sensitivity: measured sensitivity of each layer, or None.
      weights: relative cost of each layer (`jaxgrow.flops.layer_weights`). The number of layers that run
        is the sum of their weights, including the padding of `jaxgrow.layerdrop.counts`. None: 1
        for each layer.
    """

    def __init__(
        self,
        drop: LayerDrop,
        layers: int | tuple[int, ...],
        steps: int,
        micro: int,
        seed: int,
        sensitivity: jax.Array | None,
        weights: np.ndarray | None = None,
    ):
        self._drop = drop
        self._first = -1
        depths = (layers,) if isinstance(layers, int) else layers
        self._weights = np.ones(sum(depths)) if weights is None else weights
        self._cuts = np.cumsum(depths)[:-1]
        self._chunk: Any = None
        measured = None if sensitivity is None else tuple(np.asarray(sensitivity).tolist())
        self._counts = None
        if drop.execution != "cond":
            # All layers of a stage have the same cost.
            costs = tuple(float(part.mean()) for part in np.split(self._weights, self._cuts))
            self._counts = _counts(drop, depths, steps, measured, costs)
        self._draw = _drawing(drop, depths, steps, micro, seed, measured)
        if jax.process_count() > 1:
            multihost_utils.assert_equal(
                self._draw(jnp.arange(1, 3)),
                "the processes sampled different keep masks, because they measured different sensitivities",
            )

    def __call__(self, step: int) -> tuple[np.ndarray, KeepMask | None, float]:
        first = step // CHUNK * CHUNK
        if first != self._first:
            self._chunk = jax.device_get(self._draw(jnp.arange(first + 1, first + CHUNK + 1)))
            self._first = first
        probs, divisors, open_ = (x[step - first] for x in self._chunk)
        if (probs >= 1).all():
            return probs, None, float(len(probs))
        scale = None if self._drop.scale == "none" else (1 / divisors).astype(np.float32)
        scaling = "sublayer" if self._drop.scale == "sublayer" else "block"
        if self._counts is not None:
            layers, ran = self._padded(open_)
            own = np.where(open_, 1 if scale is None else scale, 0).astype(np.float32)
            return probs, KeepMask(layers, own, scaling), ran
        if scale is not None:
            scale = np.broadcast_to(scale, open_.shape)
        return probs, KeepMask(open_, scale, scaling), float((open_ @ self._weights).mean())

    def _padded(self, open_: np.ndarray) -> tuple[Any, float]:
        """Select the layers that the program of a step runs.

        Returns:
          The indices of the layers (for each stage), and the mean number of layers that run.
        """
        assert self._counts is not None
        parts = np.split(open_, self._cuts, axis=-1)
        enough = (self._counts >= [part.sum(-1).max() for part in parts]).all(1)
        numbers = self._counts[enough.argmax()]
        stages = [padded(part, n) for part, n in zip(parts, numbers, strict=True)]
        weights = np.split(self._weights, self._cuts)
        ran = sum(float(w[x].sum(-1).mean()) for w, x in zip(weights, stages, strict=True))
        return tuple(stages) if len(stages) > 1 else stages[0], ran


@cache
def _counts(
    drop: LayerDrop,
    depths: tuple[int, ...],
    steps: int,
    sensitivity: tuple[float, ...] | None,
    costs: tuple[float, ...],
) -> np.ndarray:
    """Compute `jaxgrow.layerdrop.program_counts` once for all runs with the same masks."""
    measured = None if sensitivity is None else np.asarray(sensitivity, np.float32)
    return program_counts(drop, depths, steps, measured, costs)


@cache
def _drawing(
    drop: LayerDrop,
    depths: tuple[int, ...],
    steps: int,
    micro: int,
    seed: int,
    sensitivity: tuple[float, ...] | None,
) -> Callable:
    """Return the program that samples keep masks, shared by all runs with the same masks."""
    measured = None if sensitivity is None else np.asarray(sensitivity, np.float32)

    def draw(t):
        probs, masks = keep_masks(
            drop, depths, steps, t, seed=seed, micro=micro, sensitivity=measured
        )
        return probs, output_divisors(drop, sum(depths), t, steps, measured), masks

    return jax.jit(jax.vmap(draw))
