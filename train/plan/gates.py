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
    certain to be kept, what the step runs is None: the dense step.
    """

    def __init__(self, drop: LayerDrop, layers: int, steps: int, micro: int, seed: int, sensitivity: jax.Array | None):
        self._drop, self._first = drop, -1
        self._chunk: Any = None
        measured = None if sensitivity is None else tuple(np.asarray(sensitivity).tolist())
        self._draw = _drawing(drop, layers, steps, micro, seed, measured)
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
        layers = (
            np.stack([np.flatnonzero(g) for g in open_]).astype(np.int32) if self._drop.execution == "gather" else open_
        )
        scale = None
        if self._drop.scale != "none":
            scale = np.broadcast_to((1 / probs).astype(np.float32), open_.shape)
        kept = Kept(layers, scale, "sublayer" if self._drop.scale == "sublayer" else "block")
        return probs, kept, float(open_.sum(-1).mean())


@cache
def _drawing(
    drop: LayerDrop, layers: int, steps: int, micro: int, seed: int, sensitivity: tuple[float, ...] | None
) -> Callable:
    """The program that draws the gates of steps; one for all runs that draw the same."""
    measured = None if sensitivity is None else np.asarray(sensitivity, np.float32)

    def draw(t):
        return gates(drop, layers, steps, t, seed=seed, micro=micro, sensitivity=measured)

    return jax.jit(jax.vmap(draw))
