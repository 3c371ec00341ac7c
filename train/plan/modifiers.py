"""How are layers dropped from training steps? Further changes are in `train.extras.modifiers`.

The keep masks of layer dropping are arguments of the step, and the host knows them before the step
starts.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.layerdrop import (
    KeepMask,
    LayerDrop,
    block_list,
    keep_masks,
    output_divisors,
    padded,
    program_counts,
    program_odds,
    schedule,
)
from jaxgrow.layerdrop.schedules import whole_steps
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.plan.phase import Phase
from train.plan.training import (
    Measure,
    Micro,
    Modifier,
    ModifierInput,
    PhaseStart,
    Train,
)
from train.state.model import TrainState
from train.state.optim import Optim

# Number of steps whose masks one jitted call samples, so that the host rarely waits for the device.
CHUNK = 1024

# "layers" restores frozen layers and their optimizer state, from the model before and after an
# update, and whether each layer is frozen.
HOLDING: Registry[Callable[[TrainState, TrainState, jax.Array], TrainState]] = Registry(
    "holding", "train.extras"
)


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
        self._chunk: tuple[np.ndarray, np.ndarray, np.ndarray]
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

    def _padded(self, open_: np.ndarray) -> tuple[np.ndarray | tuple[np.ndarray, ...], float]:
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


def less_than_one(name: str, fraction: float, steps: int) -> list[str]:
    """A warning if a fraction of the steps is not even one step, so that it takes one step."""
    if not fraction or not steps or round(fraction * steps):
        return []
    return [
        f"{name}={fraction:g} of {steps} steps is less than one step, and takes one: the costs differ from those of a "
        f"longer run, which has at least {math.floor(0.5 / fraction) + 1} steps"
    ]


@dataclass(frozen=True)
class DropLayers(Modifier, key="drop"):
    """Each step runs only some of the layers.

    Momentum and weight decay still update the layers that did not run, as for a gradient of zero,
    unless the `LayerDrop` has another setting.
    """

    drop: LayerDrop

    def check(self, phase: Train) -> None:
        if any(m.savings(phase.config) for m in phase.modifiers):
            raise ValueError(
                "layer dropping is not supported together with token dropping or frozen layers"
            )
        if phase.config.loop is not None and self.drop.dropped == "freeze":
            raise ValueError(
                "dropped='freeze' is not supported for a model with a loop, which may run a layer again "
                "that it dropped: set dropped to 'momentum'"
            )

    def warnings(self, phase: Train) -> list[str]:
        s = self.drop.sensitivity
        if s is None:
            return []
        shares = {"sensitivity.after": s.after, "sensitivity.every": s.every}
        return [t for name, x in shares.items() for t in less_than_one(name, x, phase.steps)]

    def layers(self, phase: Train) -> float:
        weights = tuple(flops.layer_weights(phase.config).tolist())
        times = (phase.begin, phase.end, phase.steps)
        if self.drop.execution == "cond":
            return _kept_on_average(self.drop, weights, *times)
        return _run_on_average(self.drop, weights, phase.config.depths, *times)

    def notes(self, model: TrainState) -> Json:
        s = self.drop.sensitivity
        return {
            "block_list": []
            if s is None
            else np.flatnonzero(block_list(model.sensitivity, s)).tolist()
        }

    def step_inputs(
        self, phase: Train, model: TrainState, setting: PhaseStart
    ) -> Callable[[int], ModifierInput]:
        sizes = (phase.config.depths, phase.steps, setting.accumulate, setting.seed)
        masks = KeepMasks(self.drop, *sizes, model.sensitivity, flops.layer_weights(phase.config))

        def given(step: int) -> ModifierInput:
            probs, keep_mask, ran = masks(step)
            return ModifierInput(keep_mask, ran, log={"keep": probs})

        return given

    def program(self) -> "DropLayers":
        return DropLayers(LayerDrop(dropped=self.drop.dropped))

    def options(self, given: Tree, micro: Micro, config: Config) -> Mapping[str, object]:
        return (
            {} if given is None else {"keep_mask": jax.tree.map(lambda x: x[micro.number], given)}
        )

    def hold(self, before: TrainState, after: TrainState, given: Tree) -> TrainState:
        if given is None or self.drop.dropped != "freeze":
            return after
        return HOLDING["layers"](before, after, ~_ran(given, before.config.depths))


LOOKED_AT = 100  # number of evenly spaced steps that estimate the mean of a phase


@cache  # so that a copy of a run does not compile this again
def _kept_on_average(
    drop: LayerDrop, weights: tuple[float, ...], begin: int, end: int, steps: int
) -> float:
    """Return the average number of layers with `cond`, which runs only the kept layers."""
    return float(_expected(drop, weights, steps)(np.linspace(begin + 1, end, LOOKED_AT)).mean())


@cache
def _expected(drop: LayerDrop, weights: tuple[float, ...], steps: int) -> Callable:
    cost = np.array(weights, np.float32)
    # The mean does not depend on the sensitivities.
    any_sensitivity = np.zeros(len(cost), np.float32)
    return jax.jit(
        jax.vmap(lambda t: (schedule(drop, len(cost), t, steps, any_sensitivity) * cost).sum())
    )


@cache
def _run_on_average(
    drop: LayerDrop,
    weights: tuple[float, ...],
    depths: tuple[int, ...],
    begin: int,
    end: int,
    steps: int,
) -> float:
    """Return the average number of layers with gathering, which also runs some dropped layers."""
    any_sensitivity = np.zeros(len(weights), np.float32)
    # All layers of a stage have the same cost.
    costs = [part.mean() for part in np.split(np.array(weights), np.cumsum(depths)[:-1])]
    counts = program_counts(drop, depths, steps, any_sensitivity, costs)
    times = np.linspace(begin + 1, end, LOOKED_AT)
    odds = program_odds(drop, depths, steps, times, counts, any_sensitivity)
    return float((odds @ (counts @ costs)).mean())


def _ran(keep_mask: KeepMask, depths: tuple[int, ...]) -> jax.Array:
    """Return the layers that at least one micro-batch kept, as bool [layers].

    Args:
      keep_mask: the keep masks of the step.
      depths: the number of layers of each stage.
    """
    stages = keep_mask.layers if isinstance(keep_mask.layers, tuple) else (keep_mask.layers,)
    if stages[0].dtype == bool:
        return stages[0].reshape(-1, sum(depths)).any(0)
    run = [jax.nn.one_hot(x, n, dtype=bool).any(-2) for n, x in zip(depths, stages, strict=True)]
    run = jnp.concatenate(run, -1)
    if keep_mask.scale is not None:  # a scale of 0 marks a dropped layer that runs as padding
        run = run & (keep_mask.scale > 0)
    return run.reshape(-1, sum(depths)).any(0)


def train_phases(
    name: str,
    steps: int,
    optim: Optim,
    config: Config,
    modifiers: tuple[Modifier, ...] = (),
    positions: int | None = None,
    kind: Callable[..., Train] = Train,
) -> tuple[Phase, ...]:
    """Return the phases of one training, each of the class ``kind``.

    With sensitivities, this is Algorithm 2 of SBLD: train all layers, measure, drop layers, and
    measure again at regular intervals if ``every`` is set.
    """

    def train(*modifiers: Modifier, begin: int = 0, until: int | None = None) -> Train:
        return kind(name, steps, optim, config, modifiers, begin, until, positions)

    s = next((m.drop.sensitivity for m in modifiers if isinstance(m, DropLayers)), None)
    if s is None:
        return (train(*modifiers),)
    dense = [m for m in modifiers if not isinstance(m, DropLayers)]
    cuts = [whole_steps(s.after, steps)]
    if 0 < steps <= cuts[0]:
        raise ValueError(
            f"the pre-analysis of the sensitivities takes {cuts[0]} of {steps} steps, so no step drops layers: train at "
            f"least {cuts[0] + 1} steps"
        )
    while s.every and cuts[-1] + whole_steps(s.every, steps) < steps:
        cuts.append(cuts[-1] + whole_steps(s.every, steps))
    phases: list[Phase] = [train(*dense, until=cuts[0])]
    for begin, until in itertools.pairwise([*cuts, steps]):
        phases += [Measure(name, s, positions), train(*modifiers, begin=begin, until=until)]
    return tuple(phases)
