"""The training loop of a run: phases, steps, and periodic logging, evaluation and checkpoints."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxgrow import flops, sharding
from jaxgrow.models import Config
from train.aot.estimate import settled
from train.aot.machines import present
from train.common.errors import Preempted, UserError
from train.config.experiment import Experiment, as_json, differences
from train.data import batches
from train.engine import xla
from train.engine.hosts import connect, everywhere, gathered, is_first, once
from train.engine.loop import memory, programs
from train.engine.loop.inputs import step_plans
from train.engine.run import trackers
from train.engine.run.checkpoint import Checkpoints
from train.engine.run.recorder import Recorder
from train.engine.run.stop import Stop
from train.engine.run.workdir import Workdir, imported
from train.engine.state.mesh import batch_devices, put, rows
from train.engine.state.model import Model
from train.plan.lifetimes import after, shapes
from train.plan.modifiers import Setting
from train.plan.phase import Phase
from train.plan.training import Train


def run(experiment: Experiment, folder: str | Path, profile: int = 0) -> dict[str, Any]:
    """Run the plan of ``experiment`` in ``folder``, or continue it from the last checkpoint.

    Args:
      experiment: experiment to run.
      folder: folder of the run.
      profile: number of steps to trace (`train.engine.xla.Profile`).

    Returns:
      The result, which is then also in ``result.json`` of the folder.

    Raises:
      UserError: the input is invalid, a loss is not finite, or another process runs in the folder.
      Preempted: the run was stopped by SIGTERM or Ctrl-C, and a checkpoint was saved.
    """
    workdir = Workdir(folder)
    _same("configs", as_json(experiment))
    once(lambda: workdir.claim(experiment))
    if result := once(lambda: workdir.result if workdir.finished else None):
        _say(f"the run in {workdir.folder} has already finished: there is nothing to do")
        return result
    with workdir.alone():
        return _run(experiment, workdir, profile)


def _run(asked: Experiment, workdir: Workdir, profile: int) -> dict[str, Any]:
    xla.keep_programs()
    experiment, _ = settled(asked, present(), _say)
    mesh = _mesh(experiment)
    data = everywhere(lambda: _Data(experiment, mesh))
    _same("data", data.identity)
    once(lambda: workdir.begin(asked, data.identity))
    plan, tx = experiment.plan, experiment.tx
    with Checkpoints(workdir.checkpoints, workdir.log) as checkpoints, closing(data.training):
        restored = checkpoints.restore(
            lambda r: shapes(plan, r["phase"] + 1, tx), data.training, mesh
        )
        models, record = restored or ({}, {"phase": 0, "step": 0, "ledger": None, "judged": {}})
        workdir.same_data(record.get("corpus", data.identity), data.identity)
        if restored:
            _say(f"resuming at step {record['step']} of {plan[record['phase']].label}")
        for line in data.report:
            _say(line)
        flops = sum(phase.cost(experiment.batch) for phase in plan)
        tracked = trackers.opened(asked, workdir.folder) if is_first() else []
        name = {"run": experiment.name, "seed": experiment.seed}
        recording = Recorder(
            workdir.folder, record["ledger"], flops=flops, trackers=tracked, run=name
        )
        tracing = xla.Profile(profile if is_first() else 0, workdir.folder / "profile", _say)
        with closing(recording) as recorder, Stop() as stop, closing(tracing):
            trainer = Trainer(
                experiment,
                workdir.folder,
                mesh,
                data,
                checkpoints,
                recorder,
                stop,
                models,
                record,
                tracing,
            )
            model = trainer.run()
            checkpoints.wait()
            about = {"name": experiment.name, **trainer.validation, "model": model.config.as_json()}
            about["xla"] = xla.recorded(mesh)
            result = recorder.record() | about | {"corpus": data.identity}
            if data.labels:
                result |= {"labels": data.labels}
    workdir.finish(
        result, model.config, model.params, getattr(experiment.data, "tokenizer", None), data.head
    )
    return once(lambda: result)


class _Data:
    """The training data, validation data and sensitivity batches of an experiment.

    The samples of each batch are the same in every run. This process reads only the samples of a
    batch that belong to its devices.
    """

    def __init__(self, experiment: Experiment, mesh: Mesh):
        e = experiment
        training, validation = batches.sources(e.data, e.model)
        probes, micro = max(phase.probes for phase in e.plan), e.batch // e.accumulate
        try:
            few, mine = rows(micro, mesh), rows(e.batch, mesh)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.training = batches.training(training, e.batch, e.seed, mine)
        self.validation = batches.validation(validation, e.batch, e.eval_batches, mine)
        self.probe = put(
            batches.probe(validation, e.batch, e.eval_batches, micro, probes, few), mesh, dim=1
        )
        self.identity = batches.identity(e.data, e.model)
        self.labels = batches.labels(e.data)
        self.head = batches.head(e.data, e.model)
        self.report = batches.report(e.data)


class Trainer:
    """A run in progress: the state that its phases share (`train.plan.phase.Context`)."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        mesh: Mesh,
        data: _Data,
        checkpoints: Checkpoints,
        recorder: Recorder,
        stop: Stop,
        models: dict[str, Model],
        record: dict[str, Any],
        profile: xla.Profile,
    ):
        self.experiment, self.folder, self.mesh, self.seed = (
            experiment,
            folder,
            mesh,
            experiment.seed,
        )
        self.plan, self.tx = experiment.plan, experiment.tx
        self.data, self.checkpoints, self.recorder, self.stop = data, checkpoints, recorder, stop
        self.profile = profile
        self.ledger, self.log, self.finite = recorder.ledger, recorder.log, recorder.finite
        self.models = models  # the models that later phases still need
        # The index of the current phase, and of its next step.
        self.number, self.first = (
            record["phase"],
            record["step"],
        )
        self.validation: dict[str, float] = record["judged"]  # the last validation
        self.best: dict[str, Any] = record.get("best", {})
        self.saved = time.monotonic()  # time at which the last checkpoint was started

    def run(self) -> Model:
        """Run all remaining phases, and return the model that the plan trains."""
        while self.number < len(self.plan):
            phase = self.plan[self.number]
            self.recorder.progress.phase(phase.label)
            model = phase.run(self)
            self.models = after(self.plan, self.number, self.models, model)
            self.number, self.first = self.number + 1, 0
            if phase.stops(self):
                self.number += [p.after_early_stop for p in self.plan[self.number :]].index(True)
        return self.models[self.plan[-1].writes]

    # --- training ---

    def train(self, phase: Train, model: Model) -> Model:
        """Run the remaining steps of ``phase`` on ``model``, and return the trained model."""
        e, tokens, first = (
            self.experiment,
            self.experiment.batch * phase.length,
            max(self.first, phase.begin),
        )
        self.recorder.progress.phase(phase.label, phase.end)
        # The step donates the memory of the model, so nothing else may refer to it.
        self.models.pop(phase.name, None)
        modifiers = tuple(m.program() for m in phase.modifiers)
        step = programs.step(self.tx, e.accumulate, modifiers, e.parallel, self.mesh, e.mesh.once)
        plans = step_plans(
            phase,
            model,
            Setting(self.models, first, e.batch, e.accumulate, e.seed, batch_devices(self.mesh)),
        )
        notes = {name: note for m in phase.modifiers for name, note in m.notes(model).items()}
        for done in range(first + 1, phase.end + 1):
            plan = plans(done - 1, self.ledger.steps)
            model, metrics = step(model, next(self.data.training), plan.inputs)
            self.profile.step(metrics)
            self.ledger.add(flops=plan.flops, tokens=tokens, steps=1, layers=plan.layers)
            last, stopping = done == phase.end, self.stop.asked(self.ledger.steps)
            if done % e.log_every == 0 or last:
                self.recorder.step(done, metrics, plan.log)
            if done % e.eval_every == 0 or last:
                self.recorder.flush()
                self.validate(done, model)
                self.recorder.progress.say(
                    done, self.ledger.totals(), val_loss=self.validation["val_loss"]
                )
            if done % e.checkpoint_every == 0 or last or stopping or self.overdue(done):
                self.recorder.flush()
                self.finite(done, {**metrics, "parameter_norm": programs.norm(model.params)})
                self.save(done, model, notes)
            if stopping:
                self.checkpoints.wait()
                raise Preempted(
                    f"stopped by {self.stop.reason}; saved a checkpoint at step {done} of {phase.label}; "
                    "run the same command to continue",
                    self.stop.code,
                )
        return model

    def overdue(self, step: int) -> bool:
        """Whether ``checkpoint_minutes`` have passed since the last checkpoint.

        Several processes have to agree on the answer, so they check it only at steps that write a
        line of the log.
        """
        e = self.experiment
        if not e.checkpoint_minutes or (jax.process_count() > 1 and step % e.log_every):
            return False
        return once(lambda: time.monotonic() - self.saved >= 60 * e.checkpoint_minutes)

    def validate(self, step: int, model: Model) -> None:
        """Evaluate ``model`` on the validation batches, at no cost in the ledger, and log it."""
        evaluate = programs.evaluation(
            self.experiment.accumulate, self.experiment.parallel, self.mesh
        )
        # The training steps that are still running must count towards the cost, so the host waits
        # for them before it pauses the ledger.
        model = jax.block_until_ready(replace(model, opt=None))
        with self.ledger.paused():
            values = [jax.device_get(evaluate(model, batch)) for batch in self.data.validation]
        self.validation = self.finite(step, jax.tree.map(lambda *x: np.mean(x), *values))
        self.log(step, **self.validation)

    def save(self, step: int, model: Model, notes: Mapping[str, Any]) -> None:
        """Save a checkpoint at ``step`` of the phase."""
        record = {
            "phase": self.number,
            "step": step,
            "ledger": self.recorder.record(),
            "judged": self.validation,
        }
        record["groups"] = {
            phase.label: phase.notes for phase in self.plan if phase.notes is not None
        }
        record |= {"corpus": self.data.identity, **notes} | (
            {"best": self.best} if self.best else {}
        )
        models = after(self.plan, self.number, self.models, model)
        self.saved = time.monotonic()
        self.checkpoints.save(self.ledger.steps, models, self.data.training, record)

    # --- the other methods that phases use ---

    @property
    def key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.seed), self.number)

    @property
    def resumed(self) -> bool:
        return self.first > 0

    def begin(self, phase: Phase, made: Any) -> None:
        params = made.params if isinstance(made, Model) else made
        count = sum(x.size for x in jax.tree.leaves(params))
        self.ledger.begin(phase.label, phase.kind, phase.writes, count)

    def compute(
        self, phase: Phase, function: Callable[..., Model], *arguments: Any
    ) -> tuple[Model, float]:
        with jax.set_mesh(self.mesh):
            traced = programs.made(function, phase, self.tx).trace(*arguments)
            self.begin(phase, traced.out_info)
            model = traced.lower().compile()(*arguments)
        return model, flops.counted(traced.jaxpr.jaxpr).total

    def validation_batches(self, batches: int) -> Any:
        return jax.tree.map(lambda x: x[:batches], self.data.probe)

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        if is_first():
            write(self.folder / name)

    def imported(
        self, folder: str, config: Config, headless: bool = False
    ) -> tuple[Model, dict[str, Any] | None]:
        where = self.folder.parent / Path(folder).expanduser()
        model, result = everywhere(lambda: imported(where, config, self.mesh, headless))
        if result is None:
            _say(
                f"{where} was not trained by jaxgrow: the cost of its model is unknown and therefore not counted"
            )
        return model, result


def _mesh(experiment: Experiment) -> Mesh:
    if experiment.parallel == "pmap" and jax.process_count() > 1:
        raise UserError(
            f"parallel=pmap supports only one process, but this run has {jax.process_count()}: set parallel=mesh"
        )
    try:
        mesh = experiment.mesh.over(jax.devices(), experiment.parallel)
    except ValueError as error:
        raise UserError(str(error)) from error
    for line in sharding.whole(experiment.model.sizes(), mesh):
        _say(f"{experiment.name}: {line}")
    memory.check(experiment, mesh)
    connect(mesh)
    return mesh


def _same(what: str, value: Any) -> None:
    """Check that all processes have the same ``value``.

    Args:
      what: noun for the value in the message.
      value: JSON value of this process.

    Raises:
      UserError: the value differs between processes. The message lists the differences.
    """
    values = gathered(value)
    for process, other in enumerate(values):
        if wrong := differences(values[0], other):
            raise UserError(
                f"processes 0 and {process} have different {what}: {'; '.join(wrong[:8])}; "
                "start all processes with the same command"
            )


def _say(message: str) -> None:
    if is_first():
        tqdm.write(message, file=sys.stderr)
