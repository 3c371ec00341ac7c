"""Runs the plan of a config: ``python -m train.pretrain CONFIG [--workdir DIR] [--set a.b=c ...]``.

A run that was stopped, however, goes on with the same command and ends as if it had never been stopped. What does not decide
what it computes may differ then: log_every, checkpoint_every, parallel, data.cache.

The exit code is 0 when the run has finished, 75 (EX_TEMPFAIL) when SIGTERM stopped it and it has saved, 2 when something is
wrong: a config, data, a number that is not finite, a full disk; 130 on Ctrl-C, and 1 with a traceback on a fault of ours.
"""

import argparse
import fcntl
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from tqdm import tqdm

from jaxgrow import flops
from jaxgrow.drop import block_list
from jaxgrow.models import Config
from jaxgrow.moments import clock
from train import batches, programs
from train.checkpoint import Checkpoints
from train.checkpoint import load as load_checkpoint
from train.config import Experiment, as_json, conflicts, differences, load
from train.errors import Diverged, Preempted, UserError, exits_cleanly
from train.gates import Gates
from train.identity import comparable, same
from train.ledger import Ledger
from train.maps import save as save_maps
from train.optim import learning_rate, transformation
from train.parallel import local_batch, replicated
from train.plan import Learn, Measure, Train, Transform, after, describe, shapes
from train.progress import Progress
from train.step import Model, Now
from train.transforms import Coalesce, Correct, Decoalesce, Import

# Step, totals then, metrics on the device, keep probabilities.
_Unread: TypeAlias = tuple[int, dict[str, float], dict[str, Any], np.ndarray | None]


def run(experiment: Experiment, workdir: str | Path) -> dict[str, Any]:
    """Runs the plan, or what is left of it, in ``workdir``; returns what is in ``workdir/result.json``.

    Raises:
      UserError: bad input, a loss that is not finite, or another process in ``workdir``.
      Preempted: SIGTERM came; what was reached is saved.
    """
    folder = claim(workdir, experiment)
    if (folder / "result.json").exists():
        _say(f"the run in {folder} has finished: nothing is left to do")
        return json.loads((folder / "result.json").read_text())
    with _alone(folder):
        return _run(experiment, folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A job that was started again while the one before still saves must not write into its checkpoints."""
    if jax.process_index() != 0:
        yield
        return
    with (folder / ".lock").open("w") as lock:  # the system opens it again, however a process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process runs in {folder}; wait until it has saved, or give another --workdir"
            ) from error
        yield


def _run(experiment: Experiment, folder: Path) -> dict[str, Any]:
    source, judge = batches.sources(experiment.data, experiment.model)
    try:
        mine = local_batch(experiment.batch // experiment.accumulate) * experiment.accumulate
    except ValueError as error:
        raise UserError(str(error)) from error
    data = batches.training(source, mine, experiment.seed)
    held_out = batches.validation(judge, experiment.batch, experiment.eval_batches)
    plan = experiment.plan
    probes = max((p.sensitivity.batches for p in plan if isinstance(p, Measure)), default=0)
    micro = experiment.batch // experiment.accumulate // jax.device_count()
    probe = batches.probe(judge, experiment.batch, experiment.eval_batches, micro, probes)
    corpus, config = batches.identity(experiment.data), folder / "config.json"
    if _begun(folder):
        same(json.loads(config.read_text()).get("corpus", corpus), corpus, folder)
    _write(config, as_json(experiment) | {"corpus": corpus})  # only now: what cannot begin is no run

    tx = transformation(experiment.optim)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore(lambda r: shapes(plan, r["phase"] + 1, tx), data, replicated())
        models, record = found or ({}, {"phase": 0, "step": 0, "ledger": None, "judged": {}})
        same(record.get("corpus", corpus), corpus, folder)
        if found:
            _say(f"resuming at step {record['step']} of {describe(plan[record['phase']])}")
        with closing(Ledger(folder, record["ledger"])) as ledger, closing(data):
            judged = record["judged"]
            work = _Work(folder, experiment, corpus, checkpoints, ledger, data, held_out, probe, tx, models, judged)
            with work.bar, work.stop:
                for i in range(record["phase"], len(plan)):
                    phase = plan[i]
                    if isinstance(phase, Train):
                        result = work.train(i, phase, record["step"] if i == record["phase"] else 0)
                    else:
                        result = work.transform(phase)
                    work.models = after(plan, i, work.models, result)
            checkpoints.wait()
            model = work.models[plan[-1].writes].config.as_json()
            result = ledger.record() | {"name": experiment.name, **work.judged, "model": model, "corpus": corpus}
    _write(folder / "result.json", result)
    return result


def _begun(folder: Path) -> bool:
    """Whether a run got as far as a line of its log."""
    log = folder / "metrics.jsonl"
    some = (log.exists() and log.stat().st_size) or [*folder.glob("result.json"), *folder.glob("checkpoints/*")]
    return bool(some) and (folder / "config.json").exists()


def claim(workdir: str | Path, experiment: Experiment) -> Path:
    """``workdir``, made if need be, which is free for ``experiment``: its own, or one where no run got as far as a line.

    Raises:
      UserError: it holds a run that computes something else, or one that has ended with other data.
    """
    folder = Path(workdir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if _begun(folder):
        there, mine = json.loads((folder / "config.json").read_text()), as_json(experiment)
        known = "corpus" in there
        other = conflicts(comparable(there, known), comparable(mine, known))
        if other:
            raise UserError(
                f"{folder} belongs to another config, there and here: {'; '.join(other[:8])}; give another --workdir"
            )
        if known and comparable(there, False) != comparable(mine, False) and (folder / "result.json").exists():
            same(there["corpus"], batches.identity(experiment.data), folder)
    return folder


@dataclass
class _Work:
    """A run in progress: what the phases share."""

    folder: Path
    experiment: Experiment
    corpus: dict[str, Any]  # what it is trained on, by content
    checkpoints: Checkpoints
    ledger: Ledger
    data: Any
    held_out: list[batches.Batch]
    probe: batches.Batch | None
    tx: Any
    models: dict[str, Model]
    judged: dict[str, float]  # what the last validation said

    def __post_init__(self):
        e = self.experiment
        self.stop = Stop()
        tokens = e.batch * e.model.length
        total = sum((p.end - p.begin) * (tokens * p.cost + p.once) for p in e.plan if isinstance(p, Train))
        self.bar = Progress(total, self.ledger.flops)

    def train(self, i: int, phase: Train, done: int) -> Model:
        """Trains ``phase.name``, from step ``done`` of phase ``i`` of the plan."""
        e, tokens = self.experiment, self.experiment.batch * phase.config.length
        name = describe(phase)
        self.bar.phase(f"{e.name}: {name}")
        if done == 0:
            key = jax.random.fold_in(jax.random.key(e.seed), i)
            fresh = programs.start(phase, self.tx, self.models, key)
            self.ledger.begin(name, phase.writes, _count(fresh.out_info))
            model = jax.device_put(fresh.compile()(self.models, key), replicated())
            if isinstance(phase, Learn):
                self.validate(0, model)  # the model as its maps begin
        else:
            model = self.models[phase.name]
        self.models.pop(phase.name, None)
        layers, gates, never = phase.config.layers, None, []
        if phase.drop is not None:
            gates = Gates(phase.drop, layers, phase.steps, e.accumulate, e.seed, model.sensitivity)
            if phase.drop.sensitivity is not None:
                never = np.flatnonzero(block_list(model.sensitivity, phase.drop.sensitivity)).tolist()
        run = programs.step(self.tx, e.accumulate, phase.passes, e.parallel)
        teacher = replace(self.models[phase.teacher.name], opt=None) if phase.teacher else None
        birth = clock(model.opt).count - max(done, phase.begin) if phase.rewarm else None  # the count at its step 0
        unread: _Unread | None = None
        for step in range(max(done, phase.begin), phase.end):
            lr = learning_rate(phase.optim, phase.steps, step)
            probs, kept, ran = (None, None, layers) if gates is None else gates(step)
            now = Now(np.float32(lr), np.uint32(self.ledger.steps), kept, seed=np.uint32(e.seed))
            cost = phase.flops(tokens, ran) + phase.once
            if teacher and phase.teacher and (lesson := phase.teacher.weight(step, phase.steps)):
                now = replace(now, teacher=teacher, lesson=np.float32(lesson))
                cost += flops.forward(teacher.config, tokens)
            if phase.rewarm:
                now = replace(now, rewarm=(np.float32(phase.rewarm.rate(phase.optim, phase.steps, step)), birth))
            model, metrics = run(model, next(self.data), now)
            self.ledger.add(flops=cost, tokens=tokens, steps=1, layers=ran)
            step += 1
            last, stop = step == phase.end, self.stop.asked
            if step % e.log_every == 0 or last:
                self._log(unread)  # the one before: the device need not wait for the host
                unread = (step, self.ledger.totals(), metrics | {"lr": lr, "layers": ran}, probs)
            if step % e.eval_every == 0 or last:
                unread = self._log(unread)
                self.validate(step, model)
                tqdm.write(f"{name}: step {step}, validation loss {self.judged['val_loss']:.4f}", file=sys.stderr)
            if step % e.checkpoint_every == 0 or last or stop:
                unread = self._log(unread)
                self._finite(step, metrics | {"parameter_norm": programs.norm(model.params)})
                record = {"phase": i, "step": step, "ledger": self.ledger.record(), "judged": self.judged}
                record["groups"] = {
                    describe(p): asdict(p.grouping) for p in e.plan if isinstance(p, Coalesce | Decoalesce | Correct)
                }
                record |= {"block_list": never, "corpus": self.corpus}
                self.checkpoints.save(self.ledger.steps, after(e.plan, i, self.models, model), self.data, record)
            if stop:
                self.checkpoints.wait()
                raise Preempted(f"stopped by SIGTERM, saved at step {step} of {name}; the same command continues")
        if isinstance(phase, Learn):
            save_maps(self.folder / "maps.npz", phase, model.params)
        return model

    def transform(self, phase: Transform) -> Model:
        name = describe(phase)
        self.bar.phase(f"{self.experiment.name}: {name}")
        if isinstance(phase, Import):
            self.ledger.begin(name, phase.writes, _count(jax.eval_shape(phase.shapes)))
            model, cost = load_run(self.folder.parent / phase.run.format(seed=self.experiment.seed), phase.config)
            layers = sum(p["layers"] for p in cost["phases"])
            self.ledger.add(**{k: cost[k] for k in ("flops", "tokens", "steps")}, layers=layers)
            self.ledger.charge(cost["seconds"], cost.get("compile_seconds", 0.0))
            self.validate(0, model)
            return model
        probe = None
        if isinstance(phase, Measure):
            probe = jax.tree.map(lambda x: x[: phase.sensitivity.batches], self.probe)
        lowered = programs.transformed.lower(phase, self.tx, self.models, probe)
        self.ledger.begin(name, phase.writes, _count(lowered.out_info))
        if isinstance(phase, Measure):
            result = programs.transformed(phase, self.tx, self.models, probe)
            rows = jax.tree.leaves(probe)[0]
            self.ledger.add(flops=phase.cost(result.config, rows.shape[0] * rows.shape[1]))
            found = self._finite(
                0, {f"sensitivity of layer {i}": s for i, s in enumerate(np.asarray(result.sensitivity))}
            )
            self.ledger.log(0, self.ledger.totals(), sensitivity=list(found.values()))
            return result
        program = lowered.compile()
        result = program(self.models, probe)
        cost = program.cost_analysis() or {}
        self.ledger.add(flops=max(0.0, cost.get("flops", 0.0)))
        self.validate(0, result)
        return result

    def validate(self, step: int, model: Model) -> None:
        judge = programs.evaluation(self.experiment.parallel)
        model = jax.block_until_ready(replace(model, opt=None))  # what still runs is a cost, what follows is none
        with self.ledger.paused():
            found = [jax.device_get(judge(model, batch)) for batch in self.held_out]
        self.judged = self._finite(step, jax.tree.map(lambda *values: np.mean(values), *found))
        self.ledger.log(step, self.ledger.totals(), **self.judged)

    def _log(self, unread: _Unread | None) -> None:
        if unread is None:
            return
        step, totals, metrics, probs = unread
        values = self._finite(step, metrics)
        self.ledger.log(
            step, totals, **values, **({} if probs is None else {"keep": [round(float(p), 4) for p in probs]})
        )
        self.bar.show(step, totals, values["loss"])

    def _finite(self, step: int, metrics: dict[str, Any]) -> dict[str, float]:
        """The metrics as numbers.

        Raises:
          Diverged: one of them is NaN or infinite.
        """
        values = {k: float(v) for k, v in metrics.items()}
        bad = [f"{k} is {v}" for k, v in values.items() if not math.isfinite(v)]
        if bad:
            raise Diverged(
                f"{' and '.join(bad)} at step {step} of {self.ledger.phases[-1]['phase']}; the last good checkpoint is kept in "
                f"{self.checkpoints.folder}; lower optim.peak_lr or optim.clip, or raise optim.warmup, in a new --workdir"
            )
        return values


def load_run(folder: Path, config: Config) -> tuple[Model, dict[str, Any]]:
    """The last model of a run that has ended, and what the run cost.

    Raises:
      UserError: there is no such run, it has not ended, its model is another than ``config``, or damaged.
    """
    if not (folder / "result.json").exists():
        raise UserError(f"there is no finished run in {folder}; run its config first, with the same seed")
    result = json.loads((folder / "result.json").read_text())
    alike = {name: getattr(config, name) for name in ("dtype", "remat")}  # how it is run, not what it is
    wrong = differences(result["model"] | alike, config.as_json())
    if wrong:
        raise UserError(f"the model in {folder} is another than the one asked for, there and here: {'; '.join(wrong)}")
    params = load_checkpoint(folder, step=result["steps"])  # what the run cost is what this one cost
    return Model(jax.device_put(params, replicated()), None, config), result


class Stop:
    """Whether SIGTERM came: preemption, or a polite kill. Outside of the block it is again what it was."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_):
        self.asked = True


def _say(message: str) -> None:
    if jax.process_index() == 0:
        print(message, file=sys.stderr)


def _count(model: Model) -> int:
    return sum(x.size for x in jax.tree.leaves(model.params))


def _write(path: Path, content: Any) -> None:
    """Writes JSON; the file appears whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a Python file with config() -> Experiment")
    parser.add_argument("--workdir", help="where the run lives (default: runs/<name of the experiment>)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the config")
    arguments = parser.parse_args()
    experiment = load(arguments.config, arguments.set)
    run(experiment, arguments.workdir or Path("runs") / experiment.name)


if __name__ == "__main__":
    exits_cleanly(main)
