"""What a step of layer dropping is given: which layers to run, as arguments, known on the host before the step starts."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxgrow.drop import Kept, LayerDrop, gates

CHUNK = 1024  # steps drawn at once, by one jitted call: the host waits for the device once in so many steps


class Gates:
    """``gates(step) -> (keep probabilities [layers], what the step runs, mean layers run)``, for steps 0 .. steps - 1.

    A pure function of (seed, step, micro-step) and of the sensitivities, the same in every process. Where every layer is
    certain to be kept, what the step runs is None: the dense step. ``layers`` as of `jaxgrow.drop.gates`; those that ran are
    counted by their ``weights`` (`jaxgrow.flops.weights`).
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
        self._drop, self._first = drop, -1
        depths = (layers,) if isinstance(layers, int) else layers
        self._weights = np.ones(sum(depths)) if weights is None else weights
        self._cuts = np.cumsum(depths)[:-1]
        self._chunk: Any = None
        measured = None if sensitivity is None else tuple(np.asarray(sensitivity).tolist())
        self._draw = _drawing(drop, depths, steps, micro, seed, measured)
        if jax.process_count() > 1:
            multihost_utils.assert_equal(
                self._draw(jnp.arange(1, 3)), "processes draw different gates: they measured different sensitivities"
            )

    def __call__(self, step: int) -> tuple[np.ndarray, Kept | None, float]:
        first = step // CHUNK * CHUNK
        if first != self._first:
            self._first, self._chunk = first, jax.device_get(self._draw(jnp.arange(first + 1, first + CHUNK + 1)))
        probs, open_ = (x[step - first] for x in self._chunk)
        if (probs >= 1).all():
            return probs, None, float(len(probs))
        layers = open_
        if self._drop.execution == "gather":
            stages = [_indices(part) for part in np.split(open_, self._cuts, axis=-1)]
            layers = tuple(stages) if len(stages) > 1 else stages[0]
        scale = None
        if self._drop.scale != "none":
            scale = np.broadcast_to((1 / probs).astype(np.float32), open_.shape)
        kept = Kept(layers, scale, "sublayer" if self._drop.scale == "sublayer" else "block")
        return probs, kept, float((open_ @ self._weights).mean())


def _indices(open_: np.ndarray) -> np.ndarray:
    """Of the open gates, int32 [micro, kept]: each micro-step has as many."""
    return np.stack([np.flatnonzero(g) for g in open_]).astype(np.int32)


@cache
def _drawing(
    drop: LayerDrop, depths: tuple[int, ...], steps: int, micro: int, seed: int, sensitivity: tuple[float, ...] | None
) -> Callable:
    """The program that draws the gates of steps; one for all runs that draw the same."""
    measured = None if sensitivity is None else np.asarray(sensitivity, np.float32)

    def draw(t):
        return gates(drop, depths, steps, t, seed=seed, micro=micro, sensitivity=measured)

    return jax.jit(jax.vmap(draw))
