"""The training loop of a run: phases, steps, and periodic logging, evaluation and checkpoints."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxgrow import flops, sharding
from jaxgrow.axes import Tree
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.common.errors import Diverged, Preempted, UserError
from train.common.hosts import (
    connect_processes,
    gather_arrays,
    gather_values,
    is_first,
    on_all_processes,
    on_process_zero,
    print_note,
)
from train.config.experiment import (
    AUTOMATIC,
    Experiment,
    described_differences,
    experiment_json,
    with_fitting_steps,
    with_steps,
)
from train.config.resuming import binding_settings
from train.data.dataset import Batch
from train.plan.lifetimes import Plan, after, shapes
from train.plan.phase import Phase, spoken_phase
from train.plan.record import RunRecord, growth_records
from train.plan.training import PhaseStart, Train
from train.plan.transforms import LoadCheckpoint
from train.run.run_data import RunData, fitting_mesh
from train.run.stop import Stop
from train.state.mesh import Mesh as MeshSettings
from train.state.mesh import token_devices
from train.state.model import TrainState, plain, shardings
from train.state.packing import Packed, packed
from train.step import programs, xla
from train.step.inputs import StepPlan, step_plans
from train.step.step import evaluated
from train.store.checkpoint import Checkpoints
from train.store.intact import newest_step
from train.store.origin import ORIGINS, RunOrigin
from train.store.recorder import Recorder
from train.store.trackers import TRACKERS
from train.store.workdir import Workdir, imported_model, keep_inputs


class Trace(Protocol):
    """A trace of some steps of a run."""

    def step(self, results: Tree) -> None:
        """Count one step, with its outputs, and start or stop the trace when its turn has come."""
        ...

    def close(self) -> None:
        """Write the trace if it has been started."""
        ...


# "profile" makes the trace of a number of steps, in a folder, and prints a line with its location.
TRACES: Registry[Callable[[int, Path, Callable[[str], None]], Trace]] = Registry(
    "trace", "train.extras"
)
# "memory" checks that a run fits the memory of its devices, from its name, plan and optimizer, the
# mesh, and the settings of the mesh, for which it may suggest other ones.
MEMORY_CHECKS: Registry[
    Callable[[str, Plan, optax.GradientTransformationExtraArgs, Mesh, MeshSettings], None]
] = Registry("memory check", "train.extras")


def run_experiment(
    experiment: Experiment,
    folder: str | Path,
    profile: int = 0,
    keep: Collection[int] = (),
    start: str | None = None,
    stop: Stop | None = None,
) -> Json:
    """Run the plan of ``experiment`` in ``folder``, or continue it from the last checkpoint.

    Args:
      experiment: experiment to run.
      folder: folder of the run.
      profile: number of steps to trace (`train.extras.profiling.Profile`).
      keep: steps of the run whose checkpoints are saved and not deleted.
      start: checkpoint of another run that this run starts from, as ``RUN`` or ``RUN@STEP``.
      stop: decides when the run stops early; None: only after a signal or a closed output.

    Returns:
      The result, which is then also in ``result.json`` of the folder.

    Raises:
      UserError: the input is invalid, a loss is not finite, or another process runs in the folder.
      Preempted: the run was stopped by a signal or a closed output, and a checkpoint was saved.
    """
    workdir = Workdir(folder)
    experiment = on_all_processes(lambda: with_steps(experiment))
    _same("configs", experiment_json(experiment))
    experiment = with_fitting_steps(experiment, workdir.folder)
    if not on_process_zero(lambda: workdir.finished):
        # The lock comes before the first look at the files, which another process may be changing.
        with stop or Stop() as stop, workdir.alone():
            sources = _claimed(experiment, workdir)
            if not on_process_zero(lambda: workdir.finished):
                origin = on_all_processes(lambda: ORIGINS["run"](start, workdir))
                setup = set_up_run(experiment, workdir, sources, origin)
                return _run_plan(setup, stop, profile, keep)
    _claimed(experiment, workdir)
    result = on_process_zero(lambda: workdir.result)
    print_note(f"the run in {workdir.folder} has already finished: there is nothing to do")
    return result


def _claimed(experiment: Experiment, workdir: Workdir) -> dict[str, str]:
    """Check that the experiment may use the folder, and return the fingerprints of its sources."""
    on_process_zero(lambda: workdir.claim(experiment))
    # Orbax counts the operations of each process, and later expects the same number in all of them.
    sources = on_all_processes(lambda: _sources(experiment, workdir))
    on_process_zero(lambda: workdir.same_sources(sources))
    parent = workdir.folder.parent
    on_process_zero(
        lambda: workdir.close_like(
            [at_step(parent / Path(name).expanduser())[0] for name in sources]
        )
    )
    return sources


def _run_plan(setup: "RunSetup", stop: Stop, profile: int, keep: Collection[int]) -> Json:
    workdir, data = setup.workdir, setup.data
    with setup.opened(stop, profile, keep) as trainer:
        try:
            model = trainer.run()
        except Diverged as error:
            trainer.checkpoints.wait()
            raise Diverged(f"{error}; {_way_back(workdir)}") from error
        with trainer.ledger.paused("checkpoints"):
            trainer.checkpoints.wait()
        cost = trainer.recorder.record()
        growths = growth_records(cost.phases)
        result = cost.as_json() | {"name": setup.experiment.name, "growths": growths}
    result |= trainer.validation | {
        "model": model.config.as_json(),
        "xla": xla.recorded(setup.mesh),
    }
    about = on_process_zero(lambda: workdir.config)
    result |= {key: about[key] for key in ("changes", "from") if key in about} | data.as_json()
    workdir.finish(result, model, setup.experiment.data, data.head)
    # A command with several runs must not start the next one. Several processes share one run only.
    if jax.process_count() == 1 and stop.asked():
        raise Preempted(
            f"stopped by {stop.reason} after the last step: the run in {workdir.folder} has finished; "
            "run the same command to continue with other runs, if there are any",
            stop.code,
        )
    return on_process_zero(lambda: result)


def _way_back(workdir: Workdir) -> str:
    """The part of a message that says how to go on after a loss that is not finite."""
    step = newest_step(workdir.checkpoints)
    if not step:
        return "no checkpoint was saved before it; lower optim.peak_lr or raise optim.warmup, in a new --workdir"
    return (
        f"the last good checkpoint is kept in {workdir.checkpoints / str(step)}; to continue from it, add --from "
        f"{workdir.folder}@{step}, a new --workdir, and a lower optim.peak_lr to python -m train.pretrain CONFIG"
    )


def _sources(experiment: Experiment, workdir: Workdir) -> dict[str, str]:
    """Return the fingerprint of each existing model that the run starts from, by its folder."""
    found = {}
    for phase in experiment.plan:
        if isinstance(phase, LoadCheckpoint):
            folder = phase.folder_of(experiment.seed)
            try:
                source = open_checkpoint(workdir.folder.parent / Path(folder).expanduser())
            except CheckpointError:  # the phase itself reports the error
                continue
            found[folder] = source.fingerprint()
    return found


def set_up_run(
    asked: Experiment, workdir: Workdir, sources: Mapping[str, str], origin: RunOrigin | None
) -> "RunSetup":
    """Choose the automatic settings, connect the devices, and check the data of a run."""
    xla.keep_programs()
    experiment = AUTOMATIC["memory"](asked, print_note)
    mesh = _mesh(experiment)
    data = on_all_processes(lambda: RunData(experiment, mesh, workdir, origin))
    _same("data", data.identity)
    on_process_zero(lambda: workdir.check_data(data.identity))
    return RunSetup(asked, experiment, workdir, mesh, data, sources, origin)


@dataclass(frozen=True)
class RunSetup:
    """The settings, the folder and the data of a run that starts or is resumed.

    Attributes:
      asked: experiment as the user asked for it.
      experiment: experiment with the settings that "auto" chose.
      workdir: folder of the run.
      mesh: mesh of the devices.
      data: data of the run.
      sources: fingerprint of each model that the run starts from, by its folder.
      origin: checkpoint of another run that the run starts from.
    """

    asked: Experiment
    experiment: Experiment
    workdir: Workdir
    mesh: Mesh
    data: RunData
    sources: Mapping[str, str]
    origin: RunOrigin | None

    @contextmanager
    def opened(self, stop: Stop, profile: int, keep: Collection[int]) -> Iterator["Trainer"]:
        """Open the files of the run, restore its last checkpoint, and close the files at the end.

        Args:
          stop: whether a signal or a closed output ends the run.
          profile: number of steps to trace.
          keep: steps of the run whose checkpoints are saved and not deleted.
        """
        workdir, data = self.workdir, self.data
        with ExitStack() as files:
            checkpoints = files.enter_context(
                Checkpoints(workdir.checkpoints, workdir.log, keep, workdir.still_alone)
            )
            files.enter_context(closing(data.training))
            models, record = self._begin(checkpoints)
            # Only process 0 opens files and trackers. If it fails, all processes have to end.
            recorder = on_all_processes(lambda: self._recorder(record))
            files.enter_context(closing(recorder))
            tracing = TRACES["profile"](
                profile if is_first() else 0, workdir.folder / "profile", print_note
            )
            files.enter_context(closing(tracing))
            run = (self.experiment, workdir.folder, self.mesh, data)
            yield Trainer(*run, checkpoints, recorder, stop, tracing, models, record)

    def _begin(self, checkpoints: Checkpoints) -> tuple[dict[str, TrainState], RunRecord]:
        """Restore the last checkpoint, and record the start of the run in its folder."""
        workdir, data, origin = self.workdir, self.data, self.origin
        models, record, starts = self._restored(checkpoints)
        if not starts:
            workdir.same_data(record.corpus or data.identity, data.identity)
        about = None if origin is None else origin.as_json()
        order = data.order.as_json() if data.order.goes_on else None
        changes = on_process_zero(
            lambda: workdir.begin(
                self.asked,
                data.identity,
                self.sources,
                record.cost.steps,
                about,
                order,
                # mesh.data=0 takes all devices, so the settings do not tell their number.
                token_devices(self.mesh) if "mesh.data" in binding_settings(self.asked) else None,
            )
        )
        for line in changes:
            print_note(line)
        on_process_zero(
            lambda: keep_inputs(workdir.folder, self.experiment.data, self.experiment.model)
        )
        if starts and origin is not None:
            on_process_zero(lambda: origin.copy_log(workdir, record))
            record = replace(record, configs=configs_of(models), head=data.head)
            checkpoints.save(record.cost.steps, models, data.training, record)
        for line in data.report:
            _say_once(line)
        for line in data.continued:
            print_note(line)
        return models, record

    def _recorder(self, record: RunRecord) -> Recorder:
        """Open the log and the trackers of the run."""
        experiment, folder = self.experiment, self.workdir.folder
        imported = sum(
            account.flops
            for account, phase in zip(record.cost.phases, experiment.plan, strict=False)
            if isinstance(phase, LoadCheckpoint)
        )
        return Recorder(
            folder,
            record.cost,
            flops=imported + experiment.cost,
            trackers=TRACKERS["services"](self.asked, folder) if is_first() else [],
            run={"run": experiment.name, "seed": experiment.seed},
            most_skipped=experiment.most_skipped,
        )

    def _restored(self, checkpoints: Checkpoints) -> tuple[dict[str, TrainState], RunRecord, bool]:
        """Return the models and the record of the last checkpoint, and whether ``origin`` has it."""
        data, origin, plan = self.data, self.origin, self.experiment.plan
        own = checkpoints.restore(
            lambda record: shapes(plan, record.phase + 1, self.experiment.tx),
            data.training,
            self.mesh,
        )
        if own is not None:
            name = spoken_phase(plan[own[1].phase].label, [phase.label for phase in plan])
            print_note(f"resuming at step {own[1].step} of {name}")
            return *own, False
        if origin is None:
            return {}, RunRecord(), False
        models, record, lines = on_all_processes(
            lambda: origin.restore(
                self.experiment, data.training, data.identity, self.mesh, data.order
            )
        )
        for line in lines:
            print_note(line)
        return models, record, True


@dataclass
class Trainer:
    """Run the phases of a plan. A phase uses it only through `train.plan.phase.Context`.

    Attributes:
      experiment: settings of the run.
      folder: folder of the run.
      mesh: mesh of the devices.
      data: training data, validation data and sensitivity batches.
      checkpoints: checkpoints of the run.
      recorder: log and ledger of the run.
      stop: whether a signal or a closed output ends the run.
      profile: trace of some steps.
      models: models that later phases still need.
      start: position in the plan, and the values that a resumed run needs.
    """

    experiment: Experiment
    folder: Path
    mesh: Mesh
    data: RunData
    checkpoints: Checkpoints
    recorder: Recorder
    stop: Stop
    profile: Trace
    models: dict[str, TrainState]
    start: RunRecord

    def __post_init__(self):
        self.plan = self.experiment.plan
        self.seed = self.experiment.seed
        self.ledger = self.recorder.ledger
        self.log = self.recorder.log
        self.finite = self.recorder.finite
        # The index of the current phase, and of its next step.
        self.number = self.start.phase
        self.first = self.start.step
        self.validation = self.start.validation
        self.best = self.start.best
        self.last_save = time.monotonic()
        self.saved = self.start.saved  # number of checkpoints so far
        row = self.start.skipped
        # `train.step.step.skipping`; the values are on the devices after the first step
        self.skips: np.ndarray | jax.Array = np.array([self.ledger.skipped, row, row], np.int32)

    def run(self) -> TrainState:
        """Run all remaining phases, and return the model that the plan trains."""
        while self.number < len(self.plan):
            phase = self.plan[self.number]
            model = phase.run(self)
            self.models = after(self.plan, self.number, self.models, model)
            self.number += 1
            self.first = 0
            if phase.stops(self):
                print_note(
                    f"stopped early: no evaluation was better than {self.best['value']:.4f} in the last "
                    f"{self.best['waited']}"
                )
                self.number += [p.after_early_stop for p in self.plan[self.number :]].index(True)
        return self.models[self.plan[-1].writes]

    def spoken(self, phase: Phase) -> str:
        """Return the name of ``phase`` on the screen."""
        return spoken_phase(phase.label, [other.label for other in self.plan])

    # --- training ---

    def train(self, phase: Phase) -> TrainState:
        """Run the remaining steps of ``phase``, and return the trained model."""
        assert isinstance(phase, Train)
        e = self.experiment
        name = self.spoken(phase)
        modifiers = tuple(m.program() for m in phase.modifiers)
        samples = phase.samples(e.batch)
        self.data.resize(samples)
        about = (e.tx, phase.config, phase.length, samples, modifiers)
        self.recorder.progress.phase(name, phase.end, programs.unused(*about))
        model = self.models[phase.name] if self.resumed else phase.init(self)
        first = max(self.first, phase.begin)
        # The step donates the memory of the model, so nothing else may refer to it.
        self.models.pop(phase.name, None)
        skip = e.on_nan == "skip"
        step = programs.step(
            self.experiment.tx, e.accumulate, modifiers, e.parallel, self.mesh, e.mesh.once, skip
        )
        devices = token_devices(self.mesh)
        setting = PhaseStart(self.models, first, samples, e.accumulate, e.seed, devices)
        plans = step_plans(phase, model, setting)
        notes = {k: v for m in phase.modifiers for k, v in m.notes(model).items()}
        if first == phase.end and not self.validation:
            self.validate(first, model)  # as after the last step
        held = packed(model)
        compiled = self.ledger.compile_seconds
        for done in range(first + 1, phase.end + 1):
            plan = plans(done - 1, self.ledger.steps)
            inputs = replace(plan.inputs, skips=self.skips) if skip else plan.inputs
            held, metrics = step(held, next(self.data.training), inputs)
            self.skips = metrics.get("skips", self.skips)
            self.profile.step(metrics)
            self.ledger.add(
                flops=plan.flops,
                tokens=samples * phase.length,
                steps=1,
                layers=plan.layers,
                source_tokens=self.data.last_drawn(phase.length),
            )
            self.between_steps(phase, done, held, metrics, plan, notes)
        self.ledger.phases[-1].shared_compile_seconds = programs.shared_seconds(
            self.folder, self.ledger.compile_seconds - compiled, *about
        )
        return held.model

    def between_steps(
        self,
        phase: Train,
        done: int,
        held: Packed,
        metrics: Mapping[str, jax.Array],
        plan: StepPlan,
        notes: Json,
    ) -> None:
        """Log, validate and save at the steps that the experiment sets, and stop after a signal.

        Args:
          phase: current phase.
          done: number of steps of the phase that are done.
          held: model after these steps.
          metrics: metrics of the last step.
          plan: inputs of the last step, and its values in the log.
          notes: notes of the modifiers for checkpoints.

        Raises:
          Preempted: a signal or a closed output ended the run, and a checkpoint was saved.
        """
        e = self.experiment
        stop = self.stop
        last = done == phase.end
        stopping = stop.asked()
        if done % e.log_every == 0 or last:
            self.recorder.step(done, metrics, plan.log)
        if done % e.eval_every == 0 or last:
            self.recorder.flush()
            self.validate(done, held.model)
            losses = {k: v for k, v in self.validation.items() if k.startswith("val_loss")}
            self.recorder.progress.say(done, self.ledger.totals(), **losses)
        kept = self.ledger.steps in self.checkpoints.keep
        if done % e.checkpoint_every == 0 or last or stopping or kept or self.overdue(done):
            self.recorder.flush()
            model = held.model
            self.recorder.settled(done, {**metrics, "parameter_norm": programs.norm(model.params)})
            self.save(done, model, notes)
        if stopping:
            self.checkpoints.wait()
            raise Preempted(
                f"stopped by {stop.reason}; saved a checkpoint at step {done} of {phase.label}; "
                "run the same command to continue",
                stop.code,
            )

    def overdue(self, step: int) -> bool:
        """Whether ``checkpoint_minutes`` have passed since the last checkpoint.

        Several processes have to agree on the answer, so they check it only at steps that write a
        line of the log.
        """
        e = self.experiment
        if not e.checkpoint_minutes or (jax.process_count() > 1 and step % e.log_every):
            return False
        return on_process_zero(
            lambda: time.monotonic() - self.last_save >= 60 * e.checkpoint_minutes
        )

    def validate(self, step: int, model: TrainState) -> None:
        """Evaluate ``model`` on the validation batches, at no cost in the ledger, and log it.

        The average of its weights, if there is one, is evaluated as well.
        """
        evaluate = programs.evaluation(
            self.experiment.accumulate, self.experiment.parallel, self.mesh
        )
        # The training steps that are still running must count towards the cost, so the host waits
        # for them before it pauses the ledger.
        model = jax.block_until_ready(replace(model, opt=None))
        weights = {"": model.params} | ({} if model.average is None else {"_ema": model.average})
        means = {}
        with self.ledger.paused("validation"):
            for suffix, params in weights.items():
                variant = replace(model, params=params, average=None)
                # All batches are dispatched before the host waits for the first result.
                found = [[evaluate(variant, x) for x in s] for s in self.data.validation.values()]
                found = dict(zip(self.data.validation, jax.device_get(found), strict=True))
                means |= _means(found, suffix)
        self.validation = self.finite(step, means)
        self.ledger.phases[-1].val_loss = self.validation["val_loss"]
        self.log(step, **self.validation)

    def scores(self, model: TrainState) -> dict[str, float]:
        """Return the metrics of the task for ``model``, at no cost in the ledger, and log them."""
        before = self.plan[self.number - 1]
        with self.ledger.paused("validation"):
            found = self.experiment.data.scores(model.config, plain(model), self.mesh)
        step = before.end if isinstance(before, Train) else 0
        self.log(step, **found)
        print_note(
            f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        return found

    def save(self, step: int, model: TrainState, notes: Json) -> None:
        """Save a checkpoint at ``step`` of the phase."""
        models = after(self.plan, self.number, self.models, model)
        self.saved += 1
        every = self.experiment.keep_every
        record = RunRecord(
            self.number,
            step,
            self.recorder.record(),
            self.validation,
            self.best,
            self.data.identity,
            {phase.label: phase.notes for phase in self.plan if phase.notes is not None},
            dict(notes),
            int(self.skips[1]),
            self.saved,
            bool(every) and self.saved % every == 0,
            configs_of(models),
            self.data.head,
            self.data.order_so_far,
        )
        self.last_save = time.monotonic()
        # The step is complete, because its metrics have been read.
        with self.ledger.paused("checkpoints"):
            self.checkpoints.save(self.ledger.steps, models, self.data.training, record)

    # --- the other methods that phases use ---

    @property
    def key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.seed), self.number)

    @property
    def resumed(self) -> bool:
        return self.first > 0

    def begin(self, phase: Phase, model: Tree) -> None:
        params = model.params if isinstance(model, TrainState) else model
        count = sum(x.size for x in jax.tree.leaves(params))
        self.ledger.begin(phase.label, phase.kind, phase.writes, count)

    def compute(
        self,
        phase: Phase,
        function: Callable[..., TrainState],
        *arguments: Tree,
        donate: bool = False,
    ) -> tuple[TrainState, float]:
        with jax.set_mesh(self.mesh):
            traced = programs.made(function, phase, self.experiment.tx, donate).trace(*arguments)
            self.begin(phase, traced.out_info)
            model = self.resharded(traced.lower().compile()(*arguments))
        return model, flops.counted(traced.jaxpr.jaxpr).total

    def resharded(self, model: TrainState) -> TrainState:
        """Move the arrays whose sharding is not the one of their sizes, and measure the time."""
        places = jax.tree.leaves(shardings(model, self.mesh))
        pairs = zip(jax.tree.leaves(model), places, strict=True)
        if all(x.sharding.is_equivalent_to(place, x.ndim) for x, place in pairs):
            return model
        program = programs.reshard.lower(model).compile()
        jax.block_until_ready(model)
        begin = time.monotonic()
        model = jax.block_until_ready(program(model))
        self.ledger.phases[-1].resharding_seconds += time.monotonic() - begin
        return model

    def validation_batches(self, batches: int) -> Batch:
        return jax.tree.map(lambda x: x[:batches], self.data.probe)

    def keep(self, name: str, arrays: Tree, write: Callable[[Path, Tree], None]) -> None:
        arrays = gather_arrays(arrays)
        if is_first():
            write(self.folder / name, arrays)

    def imported(
        self, folder: str, config: Config, headless: bool = False
    ) -> tuple[TrainState, Json | None]:
        where = self.folder.parent / Path(folder).expanduser()
        model, result = on_all_processes(lambda: imported_model(where, config, self.mesh, headless))
        if result is None:
            print_note(
                f"{where} was not trained by jaxgrow: the cost of its model is unknown and therefore not counted"
            )
        else:
            self.recorder.progress.add(result["flops"])
        return model, result


def _means(values: Mapping[str, list[dict[str, float]]], suffix: str = "") -> dict[str, float]:
    """The mean of each metric over all batches, and over those of each named validation set.

    The suffix is appended to the names of the metrics.

    All batches have the same number of samples, so the first is the mean over all evaluated tokens.
    """
    means = {name: evaluated(of) for name, of in values.items() if name}
    total = evaluated([v for of in values.values() for v in of])
    sets = {"": total} | {f"/{name}": found for name, found in means.items()}
    return {f"{k}{suffix}{name}": v for name, found in sets.items() for k, v in found.items()}


def configs_of(models: Mapping[str, TrainState]) -> Json:
    """Return the config of each model; None if its parameters do not fit the config."""
    return {
        name: model.config.as_json() if model.parametrisation is None else None
        for name, model in models.items()
    }


def _mesh(experiment: Experiment) -> Mesh:
    if experiment.parallel == "pmap" and jax.process_count() > 1:
        raise UserError(
            f"parallel=pmap supports only one process, but this run has {jax.process_count()}: set parallel=mesh"
        )
    mesh = fitting_mesh(experiment, jax.devices(), experiment.parallel)
    for line in dict.fromkeys(
        line
        for phase in experiment.plan
        if isinstance(phase, Train)
        for line in sharding.replicated_axes(phase.config.sizes(), mesh)
    ):
        print_note(f"{experiment.name}: {line}")
    # Devices may report different limits.
    on_all_processes(
        lambda: MEMORY_CHECKS["memory"](
            experiment.name, experiment.plan, experiment.tx, mesh, experiment.mesh
        )
    )
    connect_processes(mesh)
    return mesh


def _same(what: str, value: object) -> None:
    """Check that all processes have the same ``value``.

    Args:
      what: noun for the value in the message.
      value: JSON value of this process.

    Raises:
      UserError: the value differs between processes. The message lists the differences.
    """
    values = gather_values(value)
    for process, other in enumerate(values):
        if wrong := described_differences(values[0], other):
            raise UserError(
                f"processes 0 and {process} have different {what}: {'; '.join(wrong[:8])}; "
                "start all processes with the same command"
            )


@cache
def _say_once(message: str) -> None:
    """Say it for the first of several runs with the same data."""
    print_note(message)
