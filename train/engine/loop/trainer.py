"""Runs a plan: phase after phase, step after step, and every so often a line, an evaluation, a checkpoint."""

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
    """Runs the plan, or what is left of it, in ``folder``; returns the result, which is in its ``result.json`` then.

    ``profile``: how many steps to trace (`train.engine.xla.Profile`).

    Raises:
      UserError: bad input, a loss that is not finite, or another process in the folder.
      Preempted: SIGTERM or Ctrl-C came, and a checkpoint was saved.
    """
    workdir = Workdir(folder)
    _same("configs", as_json(experiment))
    once(lambda: workdir.claim(experiment))
    if result := once(lambda: workdir.result if workdir.finished else None):
        _say(f"the run in {workdir.folder} has finished: nothing is left to do")
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
    """What an experiment trains on, is validated on, and measures sensitivities on; the same samples always.

    Of each batch this process reads what lies on its devices.
    """

    def __init__(self, experiment: Experiment, mesh: Mesh):
        e = experiment
        source, held_out = batches.sources(e.data, e.model)
        probes, micro = max(phase.probes for phase in e.plan), e.batch // e.accumulate
        try:
            few, mine = rows(micro, mesh), rows(e.batch, mesh)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.training = batches.training(source, e.batch, e.seed, mine)
        self.validation = batches.validation(held_out, e.batch, e.eval_batches, mine)
        self.probe = put(
            batches.probe(held_out, e.batch, e.eval_batches, micro, probes, few), mesh, dim=1
        )
        self.identity = batches.identity(e.data, e.model)
        self.labels = batches.labels(e.data)
        self.head = batches.head(e.data, e.model)
        self.report = batches.report(e.data)


class Trainer:
    """A run in progress: what its phases share (`train.plan.phase.Context`)."""

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
        self.models = models  # those that are still needed
        self.number, self.first = (
            record["phase"],
            record["step"],
        )  # of the phase, and of the step in it that comes next
        self.validation: dict[str, float] = record["judged"]  # the last one
        self.best: dict[str, Any] = record.get("best", {})
        self.saved = time.monotonic()  # when the last checkpoint was begun

    def run(self) -> Model:
        """Every phase that is left; returns the model that the plan is for."""
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
        """``model`` after the steps of ``phase`` that are left."""
        e, tokens, first = (
            self.experiment,
            self.experiment.batch * phase.length,
            max(self.first, phase.begin),
        )
        self.recorder.progress.phase(phase.label, phase.end)
        self.models.pop(phase.name, None)  # the step takes its memory
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
                said = f"stopped by {self.stop.reason}, saved at step {done} of {phase.label}; the same command continues"
                raise Preempted(said, self.stop.code)
        return model

    def overdue(self, step: int) -> bool:
        """Whether ``checkpoint_minutes`` have passed since the last checkpoint, the same in every process.

        Several processes have to agree on it, so they look only when they also write a line of the
        log.
        """
        e = self.experiment
        if not e.checkpoint_minutes or (jax.process_count() > 1 and step % e.log_every):
            return False
        return once(lambda: time.monotonic() - self.saved >= 60 * e.checkpoint_minutes)

    def validate(self, step: int, model: Model) -> None:
        """Evaluates ``model`` on the held-out batches, at no cost, and logs it."""
        evaluate = programs.evaluation(
            self.experiment.accumulate, self.experiment.parallel, self.mesh
        )
        model = jax.block_until_ready(
            replace(model, opt=None)
        )  # what still runs is a cost, what follows is none
        with self.ledger.paused():
            values = [jax.device_get(evaluate(model, batch)) for batch in self.data.validation]
        self.validation = self.finite(step, jax.tree.map(lambda *x: np.mean(x), *values))
        self.log(step, **self.validation)

    def save(self, step: int, model: Model, notes: Mapping[str, Any]) -> None:
        """A checkpoint at ``step`` of the phase."""
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

    # --- what else phases ask for ---

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

    def held_out(self, batches: int) -> Any:
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
                f"{where} is no run of ours: what its model has cost is not known, and not counted"
            )
        return model, result


def _mesh(experiment: Experiment) -> Mesh:
    if experiment.parallel == "pmap" and jax.process_count() > 1:
        raise UserError(
            f"pmap is for one process, but this run has {jax.process_count()}: set parallel=mesh"
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
    """Raises:
    UserError: processes have other values, as JSON; it names what differs.
    """
    values = gathered(value)
    for process, other in enumerate(values):
        if wrong := differences(values[0], other):
            raise UserError(
                f"processes 0 and {process} have other {what}: {'; '.join(wrong[:8])}; start all by the same command"
            )


def _say(message: str) -> None:
    if is_first():
        tqdm.write(message, file=sys.stderr)
