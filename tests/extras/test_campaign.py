"""Kills and signals in every phase of a command lose nothing: repeating it ends with the same bits."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
from handlers import wait_for_handlers

from jaxgrow.checkpoints import open_checkpoint
from train import pretrain
from train.common.errors import UserError
from train.plan.methods import GrowTo, TrainStage
from train.store import intact

ROOT = Path(__file__).parents[2]
TIMES = int(os.environ.get("JAXGROW_KILLS", "16"))
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# For each phase of a run: a number that becomes larger when the phase begins.
PHASES: dict[str, Callable[[Path], float]] = {
    "start": lambda folder: time.monotonic(),
    "tokenise": lambda folder: any(folder.glob("cache/.unfinished-*/*/train")),
    "compile": lambda folder: _changed(folder / "run" / "config.json"),
    "train": lambda folder: _log(folder).count("step"),
    "save": lambda folder: any(folder.glob("run/checkpoints/.saving-*")),
    "growth": lambda folder: _log(folder).count('"train small", "step": 4'),
    "export": lambda folder: any(folder.glob("run/.exporting-*")),
    "finish": lambda folder: _changed(folder / "run" / "jaxgrow.json"),
}
# For each other command: its arguments, and such a number. It writes to ``out``.
COMMANDS: dict[str, tuple[str, Callable[[Path], float]]] = {
    "grow": ("jaxgrow_command grow RUN out --method stack --layers 8 --overwrite",
     lambda folder: any(folder.glob(".jaxgrow-*"))),
    "convert": ("jaxgrow_command convert RUN out --to hf --overwrite", lambda folder: any(folder.glob(".jaxgrow-*"))),
    "evaluate": ("train.evaluate RUN --tasks bits_per_byte --data TEXT --json out/scores.json",
     lambda folder: time.monotonic()),
}  # fmt: skip
# Seconds after the beginning of a phase in which the signal is sent.
LATEST = 1.0
LATE = 8  # attempts for one signal, because a process may end before it arrives


def _log(folder: Path) -> str:
    log = folder / "run" / "metrics.jsonl"
    return log.read_text(errors="replace") if log.exists() else ""


def _changed(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment that grows, and a folder in which it has run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    often = {"checkpoint_every": 1, "eval_every": 2, "source": TrainStage(0.5)}
    to = GrowTo((TrainStage(1.0),), by=runs.DOUBLED)
    experiment = runs.growing(folder, to, **often)
    runs.corpus(folder, files=200)
    pretrain.run_experiment(experiment, folder / "run")
    shutil.rmtree(folder / "cache")
    return experiment, folder


def attempt(
    arguments: list[str], begins: Callable[[], float], latest: float, rng: random.Random
) -> tuple[str, int]:
    """Start a command and send a signal at most ``latest`` seconds after ``begins`` becomes larger.

    Return the name of the signal and the exit status.
    """
    before = begins()
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, text=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )  # fmt: skip
    if arguments[0].startswith("train."):
        wait_for_handlers(process)
    while process.poll() is None and (now := begins()) <= before:
        before = now
        time.sleep(0.002)
    time.sleep(rng.random() * rng.choice([0.01, 0.1, 1.0]) * latest)
    number = rng.choice(SIGNALS)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said, said
    expected = (0, -number, 128 + number, *((75,) if number != signal.SIGKILL else ()))
    assert process.returncode in expected, (arguments, number.name, process.returncode, said)
    return number.name, process.returncode


def kept(folder: Path) -> int:
    """The newest intact checkpoint. No checkpoint may be damaged."""
    where = folder / "run" / "checkpoints"
    if not where.exists():
        return 0
    step, damaged = intact.newest_intact(where, intact.checkpoint_steps(where))
    assert damaged == []
    return step or 0


class Campaign:
    """Sends signals to commands, and counts those that arrived before the end of the process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seed = random.randrange(1 << 32)
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(self.seed)

    def send(self, phase: str, arguments: list[str], fresh: Path | None) -> None:
        """Send a signal in a phase. ``fresh`` is deleted sometimes, and if the phase is over."""
        begins = PHASES[phase] if phase in PHASES else COMMANDS[phase][1]
        latest = LATEST
        if fresh is not None and self._rng.random() < 0.3:
            shutil.rmtree(fresh, ignore_errors=True)
        for _ in range(LATE):
            if phase == "tokenise":
                shutil.rmtree(self.folder / "cache", ignore_errors=True)
            before = kept(self.folder)
            name, status = attempt(arguments, lambda: begins(self.folder), latest, self._rng)
            assert kept(self.folder) >= before, (self.seed, phase, name)
            if status != 0:
                self.counts[f"{phase} {name} {status}"] += 1
                return
            latest /= 4
            if fresh is not None:
                shutil.rmtree(fresh, ignore_errors=True)

    def report(self, complete: int) -> None:
        assert self.counts
        print(f"seed {self.seed}: {self.counts.total()} signals, {complete} checks, 0 losses")
        print(json.dumps(self.counts, indent=1, sort_keys=True))


@pytest.mark.slow
def test_signals_in_every_phase_of_a_run_lose_nothing(whole, tmp_path):
    """The counts of each phase are printed; set ``JAXGROW_KILLS`` for another number of signals."""
    experiment, folder = whole
    experiment = replace(experiment, data=replace(experiment.data, cache=str(tmp_path / "cache")))
    campaign = Campaign(tmp_path)
    run = tmp_path / "run"
    arguments = ["train.pretrain", runs.script(tmp_path, experiment), "--workdir", str(run)]
    for i, phase in enumerate([*PHASES] * -(-TIMES // len(PHASES))):
        campaign.send(phase, arguments, run)
        if i % len(PHASES) == len(PHASES) - 1:
            finished(experiment, tmp_path, folder, campaign.seed)
    campaign.report(-(-TIMES // len(PHASES)))


def result(folder: Path) -> Any:
    """The complete result of a command, None if there is none."""
    scores = folder / "scores.json"
    if scores.exists() or not folder.exists():
        return scores.read_bytes() if scores.exists() else None
    if all(path.name.endswith(".part") for path in folder.iterdir()):
        return None  # the folder of the scores
    source = open_checkpoint(folder)
    return {path: source.read(path).tobytes() for path in source.leaves}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_signals_to_a_command_leave_the_old_or_the_new_result(whole, tmp_path, name):
    _, folder = whole
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("a text " * 500)
    places = {"RUN": str(folder / "run"), "TEXT": str(text), "out": str(tmp_path / "out")}
    words = COMMANDS[name][0].replace("out/", f"{tmp_path}/out/").split()
    arguments = [places.get(word, word) for word in words]

    def run() -> Any:
        command = [sys.executable, "-m", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return result(tmp_path / "out")

    new = run()
    campaign = Campaign(tmp_path)
    times = max(2, TIMES // 8)
    for _ in range(times):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        campaign.send(name, arguments, None)
        assert result(tmp_path / "out") in (None, new), campaign.seed
        # The same command cleans up what a killed process has left.
        assert run() == new, campaign.seed
        assert not [*tmp_path.glob(".jaxgrow-*")]
    campaign.report(times)


def finished(experiment, tmp_path: Path, folder: Path, seed: int) -> None:
    """Continue the run to its end, and check that it equals an uninterrupted run."""
    try:
        pretrain.run_experiment(experiment, tmp_path / "run")
    except UserError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    runs.assert_same_end(tmp_path / "run", folder / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not [name for name in names if name.endswith(".part") or "exporting" in name]
