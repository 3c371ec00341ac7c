"""How do shorter runs from scratch take their first steps from the run of the complete budget?"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from train.analysis.comparing import SHARING, Sharing
from train.analysis.runs import Run
from train.common.files import read_own, write_bytes, write_record
from train.common.output import say
from train.config.experiment import Experiment, described_differences, experiment_json
from train.plan.training import Train
from train.state.optim import learning_rate
from train.store import checkpoint
from train.store.workdir import Workdir


def shared_steps(experiment: Experiment, shorter: Experiment) -> int:
    """Return the number of first steps that two runs have in common.

    If the experiments differ only in their numbers of steps, these are the steps with equal
    learning rates. With ``optim.schedule=wsd``, they end where the shorter run begins to decay.
    Runs with other differences, several phases or modifiers have 0 steps in common.
    """
    changed = {
        d.partition(": ")[0]
        for d in described_differences(experiment_json(experiment), experiment_json(shorter))
    }
    (long, *later), short = experiment.plan, shorter.plan[0]
    if not (changed <= {"name", "steps"} and isinstance(long, Train) and isinstance(short, Train)):
        return 0
    if later or long.modifiers:
        return 0

    def same(step: int) -> bool:
        rates = [learning_rate(phase.optim, phase.steps, step) for phase in (long, short)]
        return rates[0] == rates[1]

    last = short.steps - 1  # every run computes its last step itself, because it is validated there
    return next((step for step in range(last) if not same(step)), last)


def begin_at_checkpoint(shorter: Experiment, baseline: Run, step: int, workdir: Path) -> None:
    """Let a shorter run begin at the checkpoint that the baseline has kept for it."""
    new = Workdir(workdir / f"{shorter.name}-seed{baseline.seed}")
    if branch_run(new, Workdir(baseline.folder), step, replace(shorter, seed=baseline.seed)):
        say(
            f"{new.folder.name} shares its first {step} steps with {baseline.folder.name}",
            file=sys.stderr,
        )


def branch_run(new: Workdir, source: Workdir, step: int, experiment: Experiment) -> bool:
    """Let a new run begin at a checkpoint of another run that has the same first steps.

    The log is copied, and the checkpoint moves. Nothing happens if the new run has begun, if the
    other run has not kept the checkpoint (`train.store.checkpoint.Checkpoints.keep`), or if a link
    leads to it.

    Args:
      new: folder of the new run.
      source: folder of the other run.
      step: step of the checkpoint.
      experiment: experiment of the new run.

    Returns:
      Whether the new run begins there.
    """
    kept = source.checkpoints / str(step)
    if new.begun or not kept.is_dir():
        return False
    with source.alone(), new.alone():
        return not new.begun and kept.is_dir() and _take(new, source, kept, experiment)


def _take(new: Workdir, source: Workdir, kept: Path, experiment: Experiment) -> bool:
    # The runs of a comparison are in one folder. Behind a link out of it, the checkpoint may belong
    # to somebody else.
    if kept.resolve().parents[2] != new.folder.parent:
        return False
    new.check_unused()
    new.checkpoints.mkdir(exist_ok=True)
    order = {key: source.config[key] for key in ("order",) if key in source.config}
    write_record(new.folder / "config.json", experiment_json(experiment) | order)
    # The lines after the checkpoint are cut off when the run starts.
    copy_board(new, source, checkpoint.checkpoint_record(kept).cost.events)
    write_bytes(new.log, read_own(source.log))
    kept.rename(new.checkpoints / kept.name)
    return True


def copy_board(new: Workdir, source: Workdir, names: Iterable[str]) -> None:
    """Copy TensorBoard's files of these names. People delete them, and no run needs them."""
    new.board.mkdir(exist_ok=True)
    wanted = set(names)  # from a file, so they are only compared with the names in the folder
    for path in source.board.glob("*"):
        if path.name in wanted and path.is_file():
            write_bytes(new.board / path.name, read_own(path))


SHARING.add("steps", Sharing(shared_steps, begin_at_checkpoint))
