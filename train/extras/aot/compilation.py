"""Compile every program of a plan for a machine that is not present, from shapes of the models."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrow import flops
from jaxgrow.axes import Tree
from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.config.experiment import Experiment
from train.extras.aot import hlo
from train.extras.aot.machines import Machine
from train.extras.aot.memory import bytes_on_each
from train.extras.aot.roofline import Roofline, flops_beside, program_kernels, sum_kernels
from train.plan.ledger import Ledger
from train.plan.lifetimes import after
from train.plan.phase import LogValue, Phase
from train.plan.training import PhaseStart, Train
from train.run.run_data import fitting_mesh
from train.state.mesh import batch_sharding, replicated_sharding, token_devices
from train.state.model import TrainState, shardings
from train.state.packing import Packed, packed
from train.step import programs
from train.step.inputs import StepPlan, step_plans
from train.step.parallel import over_mesh
from train.step.step import eval_step, packed_step


@dataclass(frozen=True)
class Program:
    """A compiled program, and the memory, compute and exchanges of one device in one run of it.

    Attributes:
      phase: label of the phase.
      what: "step", "evaluation", "initialisation", or the kind of the phase.
      steps: number of times that the plan runs the program.
      tokens: tokens of one run on all devices.
      flops: FLOPs of one run on all devices.
      parameters: bytes of the parameters on one device.
      moments: bytes of the optimizer state on one device.
      other: bytes of the other inputs on one device, such as batches and other models.
      temporary: bytes of activations, gradients and outputs on one device.
      collectives: exchanges between devices.
      conditionals: number of conditionals in the program.
      kernels: names of the kernels that XLA did not generate.
      roofline: lower bound of the time of one run.
    """

    phase: str
    what: str
    steps: int
    tokens: int
    flops: float
    parameters: float
    moments: float
    other: float
    temporary: float
    collectives: tuple[hlo.Collective, ...]
    conditionals: int
    kernels: tuple[str, ...]
    roofline: Roofline

    @property
    def memory(self) -> float:
        return self.parameters + self.moments + self.other + self.temporary


# Number of evenly spaced steps of a phase that are examined in place of all its steps. The same
# number of steps at the beginning is also examined, because schedules change there.
LOOKED_AT = 64


def _distinct_steps(
    phase: Train, plans: Callable[[int, int], StepPlan]
) -> Iterator[tuple[int, list[StepPlan]]]:
    """Yield ``(number of steps, some of their plans)`` for each program of the phase.

    Steps whose inputs have the same shapes share a program.
    """
    if phase.begin == phase.end:
        return
    begin = phase.begin
    last = phase.end - 1
    evenly = np.linspace(begin, last, LOOKED_AT).astype(int)
    looked = np.unique([*evenly, *range(begin, min(begin + LOOKED_AT, phase.end))])
    kinds: dict[object, list[tuple[int, StepPlan]]] = {}
    for step, stands_for in zip(looked, np.diff([*looked, phase.end]), strict=True):
        plan = plans(int(step), 0)
        leaves, tree = jax.tree.flatten(plan.inputs)
        shapes = tuple((np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves)
        kinds.setdefault((tree, shapes), []).append((int(stands_for), plan))
    for same in kinds.values():
        yield sum(steps for steps, _ in same), [plan for _, plan in same]


def _program_name(plans: list[StepPlan], depth: int) -> str:
    """The name of the program of these steps, with the number of its layers if it drops some."""
    layers = {plan.layers for plan in plans}
    if min(layers) == depth:
        return "step"
    return f"step, {min(layers):g} of {depth} layers" if len(layers) == 1 else "step, dropping"


class AotRun:
    """Compile all programs of a plan for a machine that need not be present.

    It provides the interface that a run offers to its phases (`train.plan.phase.Context`).

    Args:
      experiment: experiment with the plan.
      machine: description of the machine.
      say: function that prints a line for each program.

    Raises:
      UserError: the mesh does not fit the machine, or the batch does not fit the mesh.
    """

    resumed = False
    key = jax.eval_shape(lambda: jax.random.key(0))

    def __init__(
        self, experiment: Experiment, machine: Machine, say: Callable[[str], None] = lambda _: None
    ):
        self.experiment = experiment
        self.machine = machine
        self.say = say
        self.tx = experiment.tx
        self.seed = experiment.seed
        self.mesh = fitting_mesh(experiment, machine.devices, "mesh", f"{machine.name}: ")
        self.ledger = Ledger()
        self.models = {}
        self.validation = {"val_loss": 0.0, "val_accuracy": 0.0}
        self.best = {}
        self.programs: list[Program] = []
        self._phase: Phase = experiment.plan[0]
        self._evaluated: set[Config] = set()
        self._known: dict[str, tuple[Any, str]] = {}

    def run(self) -> list[Program]:
        """Compile and return all programs of the plan, in the order of their first runs."""
        plan = self.experiment.plan
        for number, phase in enumerate(plan):
            self._phase = phase
            result = phase.run(self)
            self.models = after(plan, number, self.models, result)
        return self.programs

    # --- the interface for phases ---

    def begin(self, phase: Phase, model: object) -> None:
        self.ledger.begin(phase.label, phase.kind, phase.writes, 0)

    def compute(
        self,
        phase: Phase,
        function: Callable[..., TrainState],
        *arguments: Tree,
        donate: bool = False,
    ) -> tuple[TrainState, float]:
        self.begin(phase, None)
        arguments = tuple(self._placed(a) for a in arguments)
        program = programs.made(function, phase, self.tx, donate)
        what = "initialisation" if isinstance(self._phase, Train) else self._phase.kind
        model, cost = self._compiled(program, arguments, what, 1, 0)
        if model.sensitivity is not None:  # later phases read its values
            shape = model.sensitivity.shape
            values = np.linspace(0, 1, math.prod(shape), dtype=np.float32).reshape(shape)
            model = replace(model, sensitivity=values)
        return model, cost

    def train(self, phase: Phase) -> TrainState:
        assert isinstance(phase, Train)
        return self.compile_steps(phase, phase.init(self))

    def compile_steps(self, phase: Train, model: TrainState) -> TrainState:
        """Compile the steps of ``phase``, and return the trained model as shapes."""
        e = self.experiment
        make = partial(
            packed_step,
            self.tx,
            e.accumulate,
            tuple(m.program() for m in phase.modifiers),
            once=e.mesh.once,
            skip=e.on_nan == "skip",
        )
        program = over_mesh(make, self.mesh, donate=True)
        samples = phase.samples(e.batch)
        batch = self._batch(samples)
        # Phases read scalars of a model, such as Adam's step count. They are 0 here.
        known = jax.tree.map(lambda x: np.zeros((), x.dtype) if x.shape == () else x, model)
        setting = PhaseStart(
            self.models, phase.begin, samples, e.accumulate, e.seed, token_devices(self.mesh)
        )
        skips = np.zeros(3, np.int32) if e.on_nan == "skip" else None
        plans = step_plans(phase, known, setting)
        model = self._placed(model)
        state = self._packed(model)
        for steps, same in _distinct_steps(phase, plans):
            most = same[0]
            what = _program_name(same, phase.config.depth)
            cost = float(np.mean([plan.flops for plan in same]))
            arguments = (state, batch, self._placed(replace(most.inputs, skips=skips)))
            tokens = samples * phase.length
            self._compiled(program, arguments, what, steps, tokens, cost, models=(model,))
        self.validate(0, model)
        return model

    def scores(self, model: TrainState) -> dict[str, float]:
        task = self.experiment.data.prepared(model.config)  # type: ignore[attr-defined]
        return dict.fromkeys(task.metrics, 0.0)

    def validate(self, step: int, model: TrainState) -> None:
        if model.config in self._evaluated:
            return
        self._evaluated.add(model.config)
        e = self.experiment
        program = over_mesh(partial(eval_step, e.accumulate), self.mesh)
        arguments = (self._placed(replace(model, opt=None, average=None)), self._batch(e.batch))
        length = e.data.padded_length or model.config.length
        tokens = e.batch * length
        self._compiled(
            program,
            arguments,
            "evaluation",
            0,
            tokens,
            flops.forward_flops(model.config, tokens, length),
        )

    def validation_batches(self, batches: int) -> Tree:
        rows = self.experiment.batch // self.experiment.accumulate
        where = batch_sharding(self.mesh, 1)
        one = self._batch(rows)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batches, *x.shape), x.dtype, sharding=where), one
        )

    def imported(
        self, folder: str, config: Config, headless: bool = False
    ) -> tuple[TrainState, None]:
        return self._placed(
            TrainState(jax.eval_shape(lambda: config.init(jax.random.key(0))), None, config)
        ), None

    def keep(self, name: str, arrays: object, write: Callable[[Path, object], None]) -> None: ...

    def log(self, step: int, **values: object) -> None: ...

    def finite(self, step: int, values: Mapping[str, LogValue]) -> dict[str, float]:
        return {k: float(v) for k, v in values.items()}

    # --- compiling ---

    def _batch(self, samples: int) -> Tree:
        shapes = self.experiment.data.shapes(self.experiment.model, samples)
        where = batch_sharding(self.mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes
        )

    def _placed(self, tree: Tree) -> Tree:
        """Add the shardings on the machine's mesh to shapes.

        Models are sharded. Other arrays keep their sharding if they have one, and are replicated
        otherwise.
        """

        def where(node: object) -> Tree:
            if isinstance(node, TrainState):
                return shardings(node, self.mesh)
            return getattr(node, "sharding", None) or replicated_sharding(self.mesh)

        places = jax.tree.map(where, tree, is_leaf=lambda node: isinstance(node, TrainState))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places
        )

    def _packed(self, model: TrainState) -> Packed:
        """The shapes of a `Packed` model, with the shardings of the placed ``model``."""
        state = jax.eval_shape(packed, model)
        arrays = [x for x in jax.tree.leaves(model) if x.shape]
        return replace(state, arrays=arrays, scalars=self._placed(state.scalars))

    def _compiled(
        self,
        program: jax.stages.Wrapped,
        arguments: Tree,
        what: str,
        steps: int,
        tokens: int,
        cost: float | None = None,
        models: Sequence[TrainState] | None = None,
    ) -> tuple[Tree, float]:
        """Compile a program, record it, and return ``(shapes of the first result, FLOPs)``.

        It records the size of the parameters of ``models``; by default, of the models in
        ``arguments``.
        """
        self.say(f"compiling: {self._phase.label}, {what}")
        with jax.set_mesh(self.mesh):
            traced = program.trace(*arguments)
            lowered = traced.lower()
        if cost is None:
            cost = flops.counted(traced.jaxpr.jaxpr).total
        memory, text = self._compiled_once(lowered)
        if models is None:
            nodes = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, TrainState))
            models = [x for x in nodes if isinstance(x, TrainState)]
        use = _use(models, memory)
        work = _work(text, self.machine)
        self.programs.append(Program(self._phase.label, what, steps, tokens, cost, **use, **work))
        result = lowered.out_info
        result = result[0] if isinstance(result, tuple) else result
        return (self._placed(result) if isinstance(result, TrainState) else result), cost

    def _compiled_once(self, lowered: jax.stages.Lowered) -> tuple[Any, str]:
        """Return memory analysis and text of a program; both are cached."""
        source = lowered.as_text()
        if source not in self._known:
            compiled = lowered.compile()
            self._known[source] = compiled.memory_analysis(), compiled.as_text() or ""
        return self._known[source]


def _use(models: Sequence[TrainState], memory: Any) -> dict[str, float]:
    """The fields of a `Program` about memory."""
    parameters = sum(_device_bytes((m.params, m.base)) for m in models)
    moments = sum(_device_bytes(m.opt) for m in models)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "parameters": parameters,
        "moments": moments,
        "other": max(0.0, memory.argument_size_in_bytes - parameters - moments),
        "temporary": memory.temp_size_in_bytes + results,
    }


def _work(text: str, machine: Machine) -> Json:
    """The fields of a `Program` that follow from its text."""
    chip = machine.chip
    bounds = chip.flops or math.inf, chip.bandwidth or math.inf
    return {
        "collectives": tuple(
            hlo.program_collectives(text, len(machine.devices), machine.hosts, flops_beside(text))
        ),
        "conditionals": hlo.conditional_count(text),
        "kernels": hlo.foreign_kernels(text),
        "roofline": sum_kernels(program_kernels(text), *bounds),
    }


def _device_bytes(tree: Tree) -> float:
    """Bytes that one device holds of a tree."""
    return bytes_on_each(tree, jax.tree.map(lambda x: x.sharding, tree))
