"""How many steps are a number of seconds on this machine?

An experiment with ``seconds`` in place of ``steps`` trains for this time: compilation, validation
and checkpoints are not part of it. Before the run, a rehearsal executes some steps of each stage on
models that are thrown away. With ``t_i`` seconds for a step of stage i, and ``f_i`` its fraction of
the steps of the experiment, the stage has ``n_i = seconds f_i / (t_i sum(f))`` steps. It therefore
takes the fraction ``f_i / sum(f)`` of the time, and so a growth happens at a fraction of the time.
Phases with a fixed number of steps, such as the learning of LiGO's maps, are measured as well, and
``seconds`` in this equation is the time that they leave.

The run is then an ordinary run of ``sum(n)`` steps. The alternative, a schedule that reads the
clock, would make the host wait for the devices in each step, and no run could be repeated. The price
is that the run takes another time than planned if the machine changes its speed; reports contain
both times. The numbers of the rehearsal are kept in a file, so that a run that is resumed has the
same steps, on any machine. With several processes, the numbers of process 0 count.
"""

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxgrow.models import Config
from jaxgrow.typed import Json, build_dataclass
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.common.hosts import on_process_zero, print_note
from train.common.output import note
from train.config.experiment import (
    TIMINGS,
    Experiment,
    check_experiment,
    experiment_json,
    print_warnings,
    settings_errors,
)
from train.config.overrides import all_settings, with_overrides
from train.config.resuming import resume_conflicts
from train.extras.profiling import Profile
from train.plan.methods import TrainStage
from train.plan.record import RunRecord
from train.plan.training import Train
from train.run.stop import Stop
from train.run.trainer import Trainer, set_up_run
from train.state.model import TrainState, initial, placed
from train.state.packing import Packed
from train.step.inputs import StepPlan
from train.store.checkpoint import Checkpoints
from train.store.recorder import Recorder
from train.store.workdir import Workdir

# Steps of a stage in the first rehearsal. The second one has this part of the steps, if it is more.
STEPS = 20
PART = 0.02


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step of each stage, and of each phase with a fixed number of steps."""

    experiment: dict  # the ``config.json`` of a rehearsal
    seconds: tuple[float, ...]

    def __post_init__(self):
        if not all(1e-9 < x < 1e9 for x in self.seconds):
            raise ValueError(
                f"the seconds of a step must be between 1e-9 and 1e9, but are {self.seconds}"
            )


def timed_steps(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with ``steps`` in place of ``seconds``, and print the steps.

    Args:
      experiment: experiment with ``seconds``.
      folder: folder of the run or of the comparison. The measured times are kept in it.

    Raises:
      UserError: the phases with a fixed number of steps leave no time, or the folder has the times of
        another config.
    """
    fixed = _fixed_steps(experiment)
    path = folder / f"{experiment.name}-seconds.json"
    about = experiment_json(with_overrides(_sized(experiment, [STEPS]), ["name=any", "seed=0"]))
    stages = max(1, len(_stage_fractions(experiment)))
    seconds = on_process_zero(lambda: _kept_seconds(path, about, stages + len(fixed)))
    if seconds is None:
        first = _rehearsed(experiment, STEPS)
        count = round(PART * max(_stage_steps(experiment, first)))
        seconds = _rehearsed(experiment, count) if count > STEPS else first
        folder.mkdir(parents=True, exist_ok=True)
        on_process_zero(lambda: write_record(path, {"experiment": about, "seconds": seconds}))
    counts = _stage_steps(experiment, seconds)
    found = _sized(experiment, counts)
    with settings_errors(f"{experiment.name} with seconds={experiment.seconds}"):
        check_experiment(found)
    print_warnings(found)
    every = zip([*counts, *fixed.values()], seconds, strict=True)
    parts = [f"{n:,} steps of {1000 * t:.3g} ms" for n, t in every]
    print_note(f"{experiment.name}: {experiment.seconds:g} s of training are {', '.join(parts)}")
    return found


TIMINGS.add("seconds", timed_steps)


def _fixed_steps(experiment: Experiment) -> Counter[int]:
    """Return the steps of the phases that have as many in every run: their sum, for each number.

    A single step cannot be measured, and is left out.
    """
    # A ramp of the batch may divide different phases of the two plans, so phases have no fixed place.
    with settings_errors(f"{experiment.name} with seconds={experiment.seconds}"):
        one, other = (
            Counter(
                phase.steps
                for phase in _sized(experiment, [count]).plan
                if isinstance(phase, Train) and phase.steps > 1
                for _ in range(phase.begin, phase.end)
            )
            for count in (1000, 2000)
        )
    return one & other


def _stage_fractions(experiment: Experiment) -> dict[str, float]:
    """Return the fraction of the steps of each stage, by its setting; {} if there is one training."""
    settings = all_settings(experiment.method, "method.")
    return {
        s.name: s.value
        for s in settings
        if s.owner is TrainStage and s.name.endswith(".steps") and s.value
    }


def _sized(experiment: Experiment, counts: Sequence[int]) -> Experiment:
    """Return the experiment with a number of steps for each stage, or with one number for each."""
    stages = _stage_fractions(experiment)
    each = [*counts] * max(1, len(stages)) if len(counts) == 1 else counts
    fractions = [f"{name}={n / sum(each)!r}" for name, n in zip(stages, each, strict=False)]
    return with_overrides(experiment, [f"steps={sum(each)}", *fractions])


def _stage_steps(experiment: Experiment, seconds: Sequence[float]) -> list[int]:
    """Return the number of steps of each stage, from the seconds of all steps.

    Raises:
      UserError: the phases with a fixed number of steps leave no time.
    """
    fractions = [*_stage_fractions(experiment).values()] or [1.0]
    fixed = _fixed_steps(experiment).values()
    taken = sum(n * t for n, t in zip(fixed, seconds[len(fractions) :], strict=True))
    budget = (experiment.seconds or 0.0) - taken
    if budget <= 0:
        raise UserError(
            f"{experiment.name}: its phases with a fixed number of steps take {taken:.3g} s, but seconds="
            f"{experiment.seconds:g}: give more seconds, or these phases fewer steps"
        )
    each = zip(fractions, seconds, strict=False)
    return [max(1, round(budget * f / sum(fractions) / t)) for f, t in each]


def _kept_seconds(path: Path, about: Json, phases: int) -> tuple[float, ...] | None:
    """Read the seconds of the steps; None if they are not known yet."""
    if not os.path.lexists(path):
        return None
    way_out = "delete it, and the steps are measured again"
    content = read_record(path, way_out)
    try:
        kept = build_dataclass(StepTimes, content)
        if len(kept.seconds) != phases:
            raise ValueError(
                f"it has the seconds of {len(kept.seconds)} phases instead of {phases}"
            )
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {way_out}") from error
    there = {name: kept.experiment.get(name) for name in about}
    if other := resume_conflicts(there, about, known=True):
        raise UserError(
            f"{path} has the times of another config (values there and here: {'; '.join(other[:8])}); "
            "give another --workdir"
        )
    return kept.seconds


def _rehearsed(experiment: Experiment, count: int) -> list[float]:
    """Return the seconds of a step of each stage, from a run with ``count`` steps or a few more.

    Those of the phases with a fixed number of steps follow.
    """
    # The stages have different numbers of steps, by which their phases are recognised.
    fixed = _fixed_steps(experiment)
    stages = max(1, len(_stage_fractions(experiment)))
    free = (n for n in itertools.count(count) if n not in fixed)
    counts = [*itertools.islice(free, stages)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = set_up_run(_sized(experiment, counts), Workdir(folder), {}, None)
        with (
            Checkpoints(folder / "checkpoints") as checkpoints,
            closing(setup.data.training),
            closing(Recorder(folder)) as recorder,
        ):
            profile = Profile(0, folder, note)
            run = (setup.experiment, folder, setup.mesh, setup.data)
            timer = StepTimer(*run, checkpoints, recorder, Stop(), profile, {}, RunRecord())
            timer.run()
    if not timer.measured.keys() >= {*counts}:  # all phases of a stage had a single step
        return _rehearsed(experiment, 2 * count)
    return on_process_zero(lambda: [timer.seconds(n) for n in [*counts, *fixed]])


class StepTimer(Trainer):
    """Run the phases of a plan only to measure their steps: nothing is validated or saved."""

    def __post_init__(self):
        super().__post_init__()
        self.measured: dict[int, list[tuple[float, int]]] = {}
        self.began = 0.0

    def seconds(self, steps: int) -> float:
        """Return the seconds of a step of the phases whose schedules have this number of steps."""
        seconds, counts = zip(*self.measured[steps], strict=True)
        return sum(seconds) / sum(counts)

    def between_steps(
        self,
        phase: Train,
        done: int,
        held: Packed,
        metrics: Mapping[str, jax.Array],
        plan: StepPlan,
        notes: Json,
    ) -> None:
        if done not in (phase.begin + 1, phase.end):
            return
        jax.block_until_ready(held)
        now = self.ledger.seconds - self.ledger.compile_seconds
        if done == phase.begin + 1:
            self.began = now
        else:
            timed = (now - self.began, done - phase.begin - 1)
            self.measured.setdefault(phase.steps, []).append(timed)

    def validate(self, step: int, model: TrainState) -> None: ...

    def imported(
        self, folder: str, config: Config, headless: bool = False
    ) -> tuple[TrainState, Json | None]:
        """Return a new model: the values do not change the time, and the folder may not exist yet."""
        with jax.set_mesh(self.mesh):
            model = jax.jit(lambda key: placed(TrainState(initial(config, key), None, config)))
            return model(self.key), None
