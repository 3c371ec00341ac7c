"""The experiments of `benchmarks.one_gpu`: which runs, where their results are, and their costs."""

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from train.analysis.runs import Run
from train.config.experiment import Experiment, load_experiment
from train.extras.sharing import shared_steps
from train.plan.training import Train

CONFIG = "configs/wikipedia_gpu.py"
RESULTS = Path(__file__).parent / "results" / "one_gpu"
# Files of a run that are kept: enough for `train.compare` and the tables, without parameters.
KEPT = ("config.json", "metrics.jsonl", "result.json", "about.json")
ARCHIVE = "one_gpu.tar"
# FLOP/s that the dry run assumes before a step was timed, as on an H200.
ASSUMED = {"m10": 1.27e14, "m20": 1.82e14}
# Assumed seconds for compiling a phase, and for everything else of a run: validation, saving.
COMPILING = 6.0
BESIDES = 4.0


@dataclass(frozen=True)
class Training:
    """One training run.

    Attributes:
      row: name of the experiment in `CONFIG`.
      seed: seed of the run.
      fraction: fraction of the steps.
      rate: learning rate of a sweep; None: the best one of the sweep.
      seconds: time of the run on this card, compilation included; None: the steps are given.
    """

    row: str
    seed: int = 0
    fraction: float = 1.0
    rate: float | None = None
    seconds: float | None = None

    @property
    def label(self) -> str:
        """The name of the run without its seed."""
        parts = [self.row]
        parts += [f"x{self.fraction:g}"] if self.fraction < 1 else []
        parts += [f"rate{self.rate:g}"] if self.rate is not None else []
        parts += [f"{self.seconds:g}s"] if self.seconds is not None else []
        return "-".join(parts)

    @property
    def name(self) -> str:
        """The name of the folder of the run."""
        return f"{self.label}-seed{self.seed}"

    @property
    def model(self) -> str:
        return self.row.partition("_")[0]

    @property
    def sweep(self) -> str:
        """The row whose sweep gives the learning rate. Larger models use the rates of 10 million."""
        return "m10_deepen" if self.row.endswith("_deepen") else "m10"


RATES = {"m10": (1.25e-3, 2.5e-3, 5e-3), "m10_deepen": (2.5e-3, 5e-3)}
SWEEPS = tuple(Training(row, 0, 0.3, rate) for row, rates in RATES.items() for rate in rates)


def _seeds(model: str, *seeds: int, rows: tuple[str, ...]) -> tuple[Training, ...]:
    """For each seed: from scratch with all and 0.75 of the steps, and other rows."""
    runs: list[Training] = []
    for seed in seeds:
        runs += [Training(model, seed), Training(model, seed, 0.75)]
        runs += [Training(f"{model}_{row}", seed) for row in rows]
    return tuple(runs)


# The experiments in the order of their value. E3 has measurements instead of trainings.
EXPERIMENTS: dict[str, tuple[Training, ...]] = {
    "E1": (
        *SWEEPS,
        Training("m10"),
        Training("m10", 0, 0.75),
        Training("m10", 0, 0.55),
        Training("m10_deepen"),
        Training("m10_vcycle"),
    ),
    "E2": _seeds("m10", 1, 2, rows=("deepen", "vcycle")),
    "E3": (),
    "E4": _seeds("m20", 0, rows=("deepen",)),
    "E5": (Training("m10", seconds=120.0), Training("m10_deepen", seconds=120.0)),
    "E6": tuple(Training(f"m10_{row}") for row in ("pld", "sbld", "uniform", "ligo")),
    "E7": (*_seeds("m20", 1, rows=("deepen",)), Training("m20_vcycle")),
}

# A model of a rehearsal. Every model gets the same sizes, so that they share their programs.
TINY = {"layers": 2, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 32, "context": 16}
TINY_RUN = ("steps=20", "batch=4", "eval_every=20", "eval_batches=2", "log_every=2")
TINY_RUN += ("optim.warmup=1", "checkpoint_every=20")


def tiny(row: str, folder: Path) -> list[str]:
    """The settings of a rehearsal: tiny sizes, and two pages of this repository as a corpus."""
    pages = Path(__file__).parents[1] / "docs" / "results"
    settings = [f"model.{name}={size}" for name, size in TINY.items()]
    settings += [*TINY_RUN, "model.dtype=float32", f"data.cache={folder}"]
    settings += [f"data.path={pages / 'muon.md'}", f"data.valid_path={pages / 'lag.md'}"]
    if row.endswith(("_deepen", "_ligo")):
        small = TINY | {"layers": 1}
        small |= {"embed": 8, "heads": 1, "mlp": 16} if row.endswith("_ligo") else {}
        settings += [f"method.small.{name}={size}" for name, size in small.items()]
        settings.append("method.small.dtype=float32")
    return settings + (["method.to.0.by.steps=2"] if row.endswith("_ligo") else [])


def experiment(training: Training, rate: float | None, settings: list[str]) -> Experiment:
    """The experiment of a run whose number of steps is given.

    Args:
      training: the run.
      rate: the best learning rate of the sweep; None: the one of the config.
      settings: further settings, as for ``--set``.
    """
    e = load_experiment(f"{CONFIG}:{training.row}", settings)
    rate = training.rate or rate or e.optim.peak_lr
    warmup = e.optim.warmup
    if training.rate is not None:  # a shorter run of a frontier keeps the warm-up of the full run
        warmup = round(training.fraction * warmup)
    optim = replace(e.optim, peak_lr=rate, warmup=warmup)
    steps = max(1, round(training.fraction * e.steps))
    return replace(e, name=training.label, steps=steps, optim=optim, seed=training.seed)


def timed(training: Training, e: Experiment, steps: list[tuple[float, float]]) -> Experiment:
    """The experiment of a run whose time is given: each phase gets the same part of it.

    Args:
      training: the run.
      e: its experiment with any number of steps.
      steps: for each phase, the seconds of compiling it, and of one step.
    """
    assert training.seconds is not None
    each = training.seconds / len(steps)
    counts = [max(4, round((each - compiling) / step)) for compiling, step in steps]
    total = sum(counts)
    e = replace(
        e,
        steps=total,
        optim=replace(e.optim, warmup=max(1, total * e.optim.warmup // e.steps)),
        eval_every=max(1, total // 4),
        checkpoint_every=total,
    )
    if len(counts) == 1:
        return e
    method: Any = e.method
    source = replace(method.source, steps=counts[0] / total)
    last = replace(method.to[0].stages[0], steps=counts[1] / total)
    return replace(
        e, method=replace(method, source=source, to=(replace(method.to[0], stages=(last,)),))
    )


def phases(e: Experiment) -> list[Train]:
    return [phase for phase in e.plan if isinstance(phase, Train)]


def shared(training: Training, e: Experiment, full: Experiment) -> int:
    """The steps that a shorter run shares with the full run, and therefore does not train."""
    is_shorter = training.fraction < 1 and training.rate is None
    return shared_steps(full, e) if is_shorter else 0


@dataclass(frozen=True)
class Store:
    """Results by card, experiment and run.

    Attributes:
      results: folder with the results of earlier calls, such as the one of the repository.
      work: folder in which runs train. It also has the results of this call.
      out: folder for an archive of the new results; None: they are written to ``results``.
    """

    results: Path
    work: Path
    out: Path | None = None

    def folders(self, name: str) -> Iterator[Path]:
        """The folders with results of an experiment, one for each card."""
        for place in dict.fromkeys((self.work, self.results)):
            yield from sorted(place.glob(f"*/{name}"))

    def finished(self, name: str, runs: tuple[str, ...]) -> bool:
        """Whether one card has all results of an experiment."""
        return any(
            all((folder / run / "about.json").exists() for run in runs)
            for folder in self.folders(name)
        )

    def has(self, card: str, name: str, run: str) -> bool:
        return any(
            (p / card / name / run / "about.json").exists() for p in (self.work, self.results)
        )

    def restore(self, card: str, names: list[str]) -> None:
        """Copy the earlier results of experiments on this card to the work folder."""
        for name in names:
            there = self.results / card / name
            if there.is_dir() and self.results != self.work:
                shutil.copytree(there, self.work / card / name, dirs_exist_ok=True)

    def keep(self, card: str, name: str, run: str, about: dict[str, Any]) -> None:
        """Write the result of a run. It is complete from this moment on."""
        folder = self.work / card / name / run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        files = [folder / file for file in KEPT if (folder / file).exists()]
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            with tarfile.open(self.out / ARCHIVE, "a") as archive:
                for file in files:
                    archive.add(file, f"{card}/{name}/{run}/{file.name}")
            return
        there = self.results / card / name / run
        if there != folder:
            there.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(file, there / file.name)

    def best_rate(self, row: str) -> float | None:
        """The best learning rate of a sweep; None if no card has all of its runs."""
        sweep = [t for t in SWEEPS if t.row == row]
        for folder in self.folders("E1"):
            runs = [Run(t.label, t.seed, folder / t.name) for t in sweep]
            if all((run.folder / "about.json").exists() for run in runs):
                losses = {
                    t.rate: run.loss
                    for t, run in zip(sweep, runs, strict=True)
                    if (run.folder / "result.json").exists()  # a run that diverged has none
                }
                return min(losses, key=lambda rate: losses[rate]) if losses else None
        return None


def card_name(kind: str) -> str:
    """The name of a device as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", kind)


@dataclass(frozen=True)
class Cost:
    """Expected seconds of runs, from a measured or an assumed speed."""

    speed: float  # FLOP/s
    compiling: float = COMPILING  # seconds for each phase
    besides: float = BESIDES  # seconds for each run

    def seconds(self, e: Experiment, skipped: int = 0) -> float:
        cost = e.cost * (1 - skipped / e.steps)
        return cost / self.speed + self.compiling * len(phases(e)) + self.besides
