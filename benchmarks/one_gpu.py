"""Train GPTs of 10 and 20 million parameters on one GPU, whenever there is one for some minutes.

    python -m benchmarks.one_gpu --dry-run             # what is carried and run, and how long it takes
    python -m benchmarks.one_gpu --prepare build/gpu   # the corpus, and the packages that a GPU lacks
    python -m benchmarks.one_gpu --minutes 9           # on the GPU: the next experiments without results
    python -m benchmarks.one_gpu --rehearse            # all of it at tiny sizes, on any device

The experiments E1 to E7 are in ``benchmarks/gpu_plan.py``, the most valuable first. The command
continues where it stopped: results in ``benchmarks/results/one_gpu`` are not measured again. It times
the training step first, and starts a run only if it fits into the remaining minutes. One run trains at
a time. Each result is written when it exists. The results of each card are in their own folder, and an
experiment that was begun on another card is begun again, so that all times of a table are from one
card.

Every run compiles its programs again, so that its seconds include the whole compilation. With
``--out DIR``, new results are written to the archive ``DIR/one_gpu.tar`` instead of the repository;
``--collect`` adds an archive to the repository. ``python docs/tables.py`` then writes the tables of
docs/results/gpu.md.
"""

import argparse
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_plan
from benchmarks.carried import DATA, carried, prepare
from benchmarks.common import alone, environment, refuse_unused
from benchmarks.gpu_measurements import measurements
from benchmarks.gpu_plan import EXPERIMENTS, Cost, Store, Training
from benchmarks.gpu_tables import summary
from benchmarks.scale import Loop
from jaxgrow.tables import align_columns
from train.analysis.comparing import attempt_run
from train.common.errors import UserError, exits_cleanly
from train.extras.sharing import branch_run
from train.plan.methods import Scratch
from train.store.workdir import Workdir

ROOT = Path(__file__).parents[1]
# Steps that are run to time a step.
TIMED = 20
# A run is expected to take this much longer than by its FLOPs and the timed step.
MARGIN = 1.1
# A shorter time does not suffice for any run or measurement.
LEAST = 20.0


@dataclass(frozen=True)
class Session:
    """The settings that all experiments of one call share.

    Attributes:
      store: where the results are.
      end: time (`time.time`) at which everything must have ended.
      rehearse: tiny sizes.
    """

    store: Store
    end: float
    rehearse: bool

    @property
    def left(self) -> float:
        return self.end - time.time()

    def made(self, training: Training, rate: float | None) -> Any:
        cache = self.store.work / "data"
        settings = gpu_plan.tiny(training.row, cache) if self.rehearse else []
        return gpu_plan.experiment(training, rate, settings)


# --- trainings ---


def train_all(name: str, session: Session) -> str:
    """Train the runs of an experiment that have no result and fit into the time that is left.

    Returns:
      Why it stopped, in words.
    """
    if not session.rehearse:
        # Triton's products are chosen by measurements, which take longer than these runs gain.
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    store = session.store
    card = card_here()
    store.restore(card, ["E1", name])
    todo = [t for t in EXPERIMENTS[name] if not store.has(card, name, t.name)]
    if not todo:
        return "all of its results exist"
    folder = store.work / card / name
    cost = Cost(timed_speed(session.made(todo[0], None)))
    print(f"{name} on {card}: {cost.speed:.3g} FLOP/s", flush=True)
    for training in todo:
        rate = store.best_rate(training.sweep)
        if training.rate is None and rate is None and not session.rehearse:
            return f"{training.name} needs the learning rate of a finished sweep (E1)"
        e = session.made(training, rate)
        if training.seconds is not None:
            e = by_time(training, e, session)
        whole = session.made(replace(training, fraction=1.0), rate)
        keep = kept_steps(training, e, EXPERIMENTS[name], session, rate)
        # Continuing an interrupted run would count its compilation twice.
        shutil.rmtree(folder / training.name, ignore_errors=True)
        skipped = kept_step(training, e, whole, folder)
        needed = MARGIN * cost.seconds(e, skipped)
        if needed > session.left:
            return f"{training.name} takes about {needed:.0f} s, and {session.left:.0f} s are left"
        if skipped:
            source = Workdir(folder / whole_run(whole, training))
            branch_run(Workdir(folder / training.name), source, skipped, e)
        about = trained(training, e, folder, keep, session)
        store.keep(card, name, training.name, about | {"card": card})
        cost = measured(cost, about)
        print(f"{training.name}: {json.dumps(brief(about))}; {session.left:.0f} s left", flush=True)
    return "all of its results exist"


def timed_speed(e: Any) -> float:
    """The FLOP/s of the first phase of a run."""
    first = gpu_plan.phases(e)[0]
    _, seconds = stepped(first.config, e)
    return first.cost(e.batch, e.accumulate) / first.steps / seconds


def stepped(model: Any, e: Any) -> tuple[float, float]:
    """The seconds of compiling the step of a model, and of one step."""
    start = time.perf_counter()
    loop = Loop(replace(e, model=model, method=Scratch()), jax.devices())
    compiling = time.perf_counter() - start
    loop.seconds(2)
    return compiling, min(loop.seconds(TIMED // 2) for _ in range(2))


def by_time(training: Training, e: Any, session: Session) -> Any:
    """The experiment with the steps that fit into its seconds."""
    each = gpu_plan.phases(e)
    if session.rehearse:
        few = replace(training, seconds=1.0 * len(each))
        return gpu_plan.timed(few, e, [(0.9, 0.01)] * len(each))
    steps = []
    for phase in each:
        jax.clear_caches()  # the run also compiles its programs again
        steps.append(stepped(phase.config, e))
    return gpu_plan.timed(training, e, steps)


def kept_steps(
    training: Training, e: Any, runs: tuple[Training, ...], session: Session, rate: float | None
) -> set[int]:
    """The steps of a full run from which the shorter runs of its seed begin."""
    found = set()
    for other in runs:
        if (other.row, other.seed) == (training.row, training.seed) and training.fraction == 1:
            found.add(gpu_plan.shared(other, session.made(other, rate), e))
    return found - {0}


def kept_step(training: Training, e: Any, whole: Any, folder: Path) -> int:
    """The step of the full run whose checkpoint a shorter run begins with; 0 if it was not kept."""
    step = gpu_plan.shared(training, e, whole)
    source = Workdir(folder / whole_run(whole, training))
    return step if step and (source.checkpoints / str(step)).is_dir() else 0


def whole_run(whole: Any, training: Training) -> str:
    """The folder name of the full run that a shorter run belongs to."""
    return f"{whole.name}-seed{training.seed}"


def trained(
    training: Training, e: Any, folder: Path, keep: set[int], session: Session
) -> dict[str, Any]:
    """Train one run with programs that are compiled again."""
    if not session.rehearse:
        jax.clear_caches()
    start = time.perf_counter()
    diverged: dict[str, list[int]] = {}
    found = attempt_run(e, training.seed, folder, diverged, keep)
    wall = time.perf_counter() - start
    # Final parameters and checkpoints are large. Only those for shorter runs are needed again.
    if not keep:
        for name in ("checkpoints", "params"):
            shutil.rmtree(folder / training.name / name, ignore_errors=True)
    about = environment("jax", "jaxlib", "flax", "optax") | {"wall_seconds": round(wall, 1)}
    if found is None:
        return about | {"diverged": True}
    corpus = found.result["corpus"]["tokens"][0]
    about |= {"epochs": round(found.result["tokens"] / corpus, 3), "loss": found.loss}
    spent = {key: found.result[key] for key in ("flops", "seconds", "compile_seconds")}
    return about | spent | {"training_seconds": sum(_training(found.result))}


def _training(result: dict[str, Any]) -> list[float]:
    """The seconds of the training phases without compilation."""
    phases = (p for p in result["phases"] if p["kind"] == "train")
    return [p["seconds"] - p["compile_seconds"] for p in phases]


def brief(about: dict[str, Any]) -> dict[str, Any]:
    return {
        k: about[k] for k in ("loss", "seconds", "compile_seconds", "wall_seconds") if k in about
    }


def measured(cost: Cost, about: dict[str, Any]) -> Cost:
    """The cost of the next runs, from the slower of the timed step and the finished run."""
    if "flops" not in about or about["training_seconds"] <= 0:
        return cost
    return replace(cost, speed=min(cost.speed, about["flops"] / about["training_seconds"]))


# --- measurements ---


def measure_all(name: str, session: Session) -> str:
    """Take the measurements that have no result and fit into the time that is left."""
    stopped = "all of its results exist"
    card = apart(card_here, session, 60)
    for what, seconds, function, arguments in measurements(session.rehearse, session.store.work):
        if session.store.has(card, name, what):
            continue
        if seconds > session.left:
            stopped = f"{what} may take {seconds} s, and {session.left:.0f} s are left"
            continue
        try:
            row = apart(partial(function, *arguments), session, seconds)
        except (TimeoutError, RuntimeError) as error:
            row = {"failed": str(error)}
        # A measurement without a result is tried again by the next call.
        if {"failed", "skipped"} & row.keys():
            stopped = "some measurements have no result"
        else:
            about = environment("jax", "jaxlib") | {"card": card, "row": row}
            session.store.keep(card, name, what, about)
        shown = {key: value for key, value in row.items() if key != "xla"}
        print(f"{what}: {json.dumps(shown)[:300]}", flush=True)
    return stopped


def apart(function: Callable[[], Any], session: Session, seconds: float) -> Any:
    """Call a function in a new process; a rehearsal calls it in this process."""
    return function() if session.rehearse else alone(function, seconds=seconds)


def card_here() -> str:
    """The name of the first device."""
    return gpu_plan.card_name(jax.devices()[0].device_kind)


def runs_of(name: str, rehearse: bool = False) -> tuple[str, ...]:
    """The names of the results of an experiment."""
    if EXPERIMENTS[name]:
        return tuple(training.name for training in EXPERIMENTS[name])
    return tuple(what for what, *_ in measurements(rehearse, Path()))


def proceed(session: Session) -> None:
    """Run the experiments that are not finished, in their order, until the time has ended."""
    for name in EXPERIMENTS:
        if session.store.finished(name, runs_of(name, session.rehearse)):
            print(f"{name}: all of its results exist", flush=True)
            continue
        if session.left < LEAST:
            print(f"{name}: not started, {max(0, session.left):.0f} s are left", flush=True)
            break
        try:
            # Each measurement has a separate process. The trainings share one.
            why = (
                apart(partial(train_all, name, session), session, session.left)
                if EXPERIMENTS[name]
                else measure_all(name, session)
            )
        except (TimeoutError, RuntimeError) as error:
            why = f"stopped: {error}"
        print(f"{name}: {why}", flush=True)


# --- the command ---


def rehearsed(out: Path | None) -> None:
    """Run everything at tiny sizes, and show the tables of the results."""
    with tempfile.TemporaryDirectory() as place:
        work, results = Path(place) / "work", Path(place) / "results"
        archive = out or Path(place) / "out"
        session = Session(Store(results, work, archive), time.time() + 600, True)
        start = time.monotonic()
        proceed(session)
        collect(archive / gpu_plan.ARCHIVE, results)
        proceed(Session(Store(results, Path(place) / "again"), time.time() + 600, True))
        print(summary(results))
        print(f"rehearsed in {time.monotonic() - start:.0f} s")


def collect(archive: Path, results: Path) -> None:
    """Add the results of an archive to the repository."""
    if not archive.is_file():
        raise UserError(f"there is no archive {archive}; give the {gpu_plan.ARCHIVE} of --out")
    with tarfile.open(archive) as found:
        found.extractall(results, filter="data")
        print(f"{len(found.getnames())} files of {archive} are in {results}")


def planned(store: Store) -> str:
    """The runs without results, with their expected seconds."""
    rows = []
    for name, trainings in EXPERIMENTS.items():
        total, left = 0.0, 0
        for training in trainings:
            if store.finished(name, (training.name,)):
                continue
            e = gpu_plan.experiment(training, None, [])
            cost = Cost(gpu_plan.ASSUMED[training.model])
            whole = gpu_plan.experiment(replace(training, fraction=1.0), None, [])
            seconds = training.seconds or cost.seconds(e, gpu_plan.shared(training, e, whole))
            flops = "" if training.seconds else f"{e.cost:.3g}"
            rows.append((name, training.name, f"{e.steps:,}", flops, f"{seconds:.0f}"))
            total, left = total + seconds, left + 1
        if not trainings:
            todo = [m for m in measurements(False, Path()) if not store.finished(name, (m[0],))]
            # A measurement usually takes less than half of its limit.
            total, left = sum(limit for _, limit, *_ in todo) * 0.4, len(todo)
        rows.append((name, f"{left} without results", "", "", f"{total:.0f}"))
    head = ("experiment", "run", "steps", "FLOPs", "seconds")
    return align_columns(head, rows, right=(2, 3, 4))


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of this call (default: 9)"
    )
    p.add_argument("--out", type=Path, help="folder for an archive of the new results")
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--rehearse", action="store_true", help="all experiments at tiny sizes")
    mode.add_argument("--dry-run", action="store_true", help="list what would be carried and run")
    mode.add_argument(
        "--prepare", type=Path, metavar="DIR", help="write the corpus and the packages to DIR"
    )
    mode.add_argument(
        "--collect", type=Path, metavar="TAR", help="add an archive to the repository"
    )
    a = p.parse_args()
    for name in ("prepare", "collect", "dry_run", "rehearse"):
        if getattr(a, name):
            unused = ("minutes",) if name == "rehearse" else ("minutes", "out")
            refuse_unused(p, a, f"with --{name.replace('_', '-')}", *unused)
    return a


def main() -> None:
    a = _arguments()
    if a.prepare:
        prepare(a.prepare)
    elif a.collect:
        collect(a.collect, gpu_plan.RESULTS)
    elif a.rehearse:
        # Compilation takes most of the time, so XLA does not optimise programs that run once.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        rehearsed(a.out)
    elif a.dry_run:
        print(carried(), planned(Store(gpu_plan.RESULTS, gpu_plan.RESULTS)), sep="\n\n")
    else:
        if not Path(str(DATA.path)).is_file():
            raise UserError(
                f"there is no corpus at {DATA.path}; set the environment variable WIKIPEDIA_2013 to the folder with "
                "train.txt.xz and valid.txt.xz, such as build/gpu/corpus after --prepare build/gpu"
            )
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # in the processes of the runs
        store = Store(gpu_plan.RESULTS, ROOT / "runs" / "one_gpu", a.out)
        proceed(Session(store, time.time() + 60 * a.minutes, False))


if __name__ == "__main__":
    exits_cleanly(main)
