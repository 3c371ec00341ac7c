"""How does a run start from a checkpoint of another run (``--from RUN[@STEP]``)?

The new run has its own folder and config. It takes over the models with their optimizer state, the
cost so far, the log up to the checkpoint, and the position in the data if the order of the data is
the same. ``config.json`` records the other run and the step. Until the new run has saved its first
checkpoint, which it does before its first step, each start reads the other run again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jaxgrow.axes import Tree
from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.typed import Json
from jaxgrow.untrusted import checked_path
from train.common.errors import UserError
from train.common.files import read_own, write_bytes
from train.config.experiment import Experiment, experiment_json
from train.extras.sharing import copy_board
from train.plan.lifetimes import Plan, shapes
from train.plan.record import RunRecord
from train.plan.training import Train
from train.state.model import TrainState
from train.store import checkpoint, intact
from train.store.origin import ORIGINS
from train.store.seen import Order
from train.store.workdir import Workdir

if TYPE_CHECKING:  # its import takes seconds
    from train.data.batches import Stream


@dataclass(frozen=True)
class Origin:
    """A checkpoint of a run.

    Attributes:
      folder: folder of the run.
      step: step of the checkpoint; None: the newest intact one.
    """

    folder: Path
    step: int | None = None

    def as_json(self) -> Json:
        return {"run": str(self.folder), "step": self.step}

    def record(self) -> RunRecord:
        return checkpoint.checkpoint_record(Workdir(self.folder).checkpoints / str(self.step))

    def restore(
        self, experiment: Experiment, data: "Stream", identity: Json, mesh: Mesh, order: Order
    ) -> tuple[dict[str, TrainState], RunRecord, list[str]]:
        source = Workdir(self.folder)
        where = source.checkpoints / str(self.step)
        saved = self.record()
        label = saved.cost.phases[-1].phase
        number = _phase(experiment.plan, saved, label, self)
        expected = shapes(experiment.plan, number + 1, experiment.tx)
        _check_models(checkpoint.saved_models(where), expected, self)
        models, position = checkpoint.read_models(where, expected, mesh, partial=True)
        lines = [
            f"starting from checkpoint {self.step} of {self.folder}, step {saved.step} of {label}"
        ]
        here = experiment_json(experiment) | ({"order": order.as_json()} if order.goes_on else {})
        new = _other_order(source.config, here, saved.corpus, identity)
        if new == "the corpus" and order.goes_on:
            pass  # texts of both corpora continue, and the log lines of the order report it
        elif new:
            lines.append(
                f"the data start from the beginning, because {new} differs from {self.folder}"
            )
        else:
            data.set_state(position)
        record = replace(saved, phase=number, corpus=dict(identity))
        return models, _unless_stale(record, source.config, experiment.plan), lines

    def copy_log(self, workdir: Workdir, record: RunRecord) -> None:
        source = Workdir(self.folder)
        name = f"{self.step}/{intact.LOG}"
        copied = (source.checkpoints / name).exists()
        log = checked_path(source.checkpoints, name, deep=True).path if copied else source.log
        copy_board(workdir, source, record.cost.events)
        write_bytes(workdir.log, read_own(log)[: record.cost.bytes])


def parsed_origin(text: str) -> Origin:
    """Read ``RUN`` or ``RUN@STEP``."""
    folder, step = at_step(Path(text).expanduser())
    return Origin(Workdir(folder).folder, step)


def chosen_origin(text: str | None, workdir: Workdir) -> Origin | None:
    """Return the checkpoint that the run in ``workdir`` starts from, if any.

    A run that has begun keeps its checkpoint, even if the other run has saved newer ones.

    Raises:
      UserError: the checkpoint does not exist, or the run did not begin from it.
    """
    asked = None if text is None else parsed_origin(text)
    begun = workdir.begun
    recorded = workdir.config.get("from") if begun else None
    if asked is None:
        return Origin(Path(recorded["run"]), recorded["step"]) if recorded else None
    if asked.folder == workdir.folder:
        raise UserError(
            f"--from {asked.folder} is also the folder of the new run: give another --workdir"
        )
    if not begun:
        return replace(asked, step=_origin_step(asked))
    if (
        recorded is None
        or recorded["run"] != str(asked.folder)
        or asked.step
        not in (
            None,
            recorded["step"],
        )
    ):
        how = f"with --from {recorded['run']}@{recorded['step']}" if recorded else "without --from"
        raise UserError(
            f"the run in {workdir.folder} has begun {how}: give the same again to continue it, or another --workdir"
        )
    return Origin(asked.folder, recorded["step"])


def _origin_step(asked: Origin) -> int:
    """Return the given step, or the step of the newest intact checkpoint."""
    where = Workdir(asked.folder).checkpoints
    there = intact.checkpoint_steps(where)
    if not there:
        raise UserError(
            f"there is no checkpoint in {where}: give the folder of a run that has saved one"
        )
    if asked.step is not None and asked.step not in there:
        raise UserError(
            f"no checkpoint of step {asked.step} in {where}, only of {', '.join(map(str, there))}: give one of "
            "them. The next run keeps more of them with keep_every"
        )
    steps = there if asked.step is None else [asked.step]
    return intact.newest_intact(where, steps)[0] or 0


def _unless_stale(record: RunRecord, there: Json, plan: Plan) -> RunRecord:
    """Drop the last validation if the new run ends at the checkpoint and it is of an earlier step."""
    step, phase = record.step, plan[record.phase]
    ends = isinstance(phase, Train) and step == phase.end
    if not ends or step % there["eval_every"] == 0 or step == there["steps"]:
        return record
    return replace(record, validation={})


def _phase(plan: Plan, saved: RunRecord, label: str, origin: Origin) -> int:
    """Return the index of the phase of ``plan`` in which a checkpoint lies."""
    found = {i: p for i, p in enumerate(plan) if isinstance(p, Train) and p.label == label}
    if not found:
        raise UserError(
            f"checkpoint {origin.step} of {origin.folder} is in the phase {label!r}, but the config has only the phases "
            f"{', '.join(phase.label for phase in plan)}: use a config with this phase, or method Continue, which "
            "starts from the parameters alone"
        )
    fitting = [i for i, phase in found.items() if phase.begin < saved.step <= phase.end]
    if not fitting:
        last = max(phase.end for phase in found.values())
        raise UserError(
            f"checkpoint {origin.step} of {origin.folder} is at step {saved.step} of {label}, but this phase has only {last} "
            "steps here: raise steps, or give an earlier checkpoint as RUN@STEP"
        )
    return saved.phase if saved.phase in fitting else fitting[-1]


def _check_models(saved: Json, expected: Mapping[str, TrainState], origin: Origin) -> None:
    """Check that a checkpoint has the expected models with their optimizer state.

    Args:
      saved: shapes of the saved models, by name.
      expected: shapes of the expected models, by name.
      origin: the checkpoint.
    """
    for name, model in expected.items():
        trees = checkpoint.stored_trees(model)
        what = f"model {name!r} in checkpoint {origin.step} of {origin.folder}"
        if name not in saved:
            raise UserError(
                f"there is no {what}, only {', '.join(saved)}: use the method of that run"
            )
        there, here = _leaf_shapes(saved[name]["params"]), _leaf_shapes(trees["params"])
        if wrong := [
            f"{path}: {there.get(path)} and {here.get(path)}"
            for path in sorted(there.keys() | here.keys())
            if there.get(path) != here.get(path)
        ]:
            raise UserError(
                f"the {what} has other parameters than the model of the config (there and here: {'; '.join(wrong[:8])}): "
                "set model as in that run"
            )
        if model.average is not None and "average" not in saved[name]:
            raise UserError(
                f"the {what} has no average of its weights: set optim.ema=0, or use method Continue, which starts a new "
                "average"
            )
        states = [sorted(_leaf_shapes(t.get("opt")).values()) for t in (saved[name], trees)]
        if states[0] != states[1]:
            raise UserError(
                f"the {what} has the optimizer state of another optimizer: set optim.name as in that run, or use method "
                "Continue, which starts with a fresh state"
            )


def _leaf_shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape) for path, x in leaves
    }


def _other_order(
    there: Json,
    here: Json,
    corpus: Json | None,
    identity: Json,
) -> str | None:
    """Name the setting because of which two runs read other samples, or the same in another order."""
    if corpus is not None and any(corpus.get(k) != identity.get(k) for k in ("train", "tokenizer")):
        return "the corpus"
    orders = [config.get("order", {"seed": config["seed"]}) for config in (there, here)]
    if orders[0]["seed"] != orders[1]["seed"]:
        return "seed"
    if orders[0].get("parts") != orders[1].get("parts"):
        return "the order of a source"
    if there["data"].keys() != here["data"].keys():
        return "data"
    context = [config["model"].get("context") for config in (there, here)]
    return None if context[0] == context[1] else "model.context"


ORIGINS.add("run", chosen_origin)
