"""Kills and signals in every phase of a run lose nothing: the same command ends with the same bits."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from train import pretrain
from train.common.errors import UserError
from train.engine.run import intact
from train.plan.methods import GrowTo, Stage

ROOT = Path(__file__).parents[2]
TIMES = int(os.environ.get("JAXGROW_KILLS", "48"))
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# For each phase: a file whose appearance begins it. The process gets its signal up to a second later.
PHASES = {
    "start": lambda folder: True,
    "tokenise": lambda folder: any(folder.glob("cache/.unfinished-*/train")),
    "compile": lambda folder: (folder / "run" / "config.json").exists(),
    "train": lambda folder: "step" in _log(folder),
    "save": lambda folder: any(folder.glob("run/checkpoints/.saving-*")),
    "growth": lambda folder: "grown" in _log(folder),
    "export": lambda folder: any(folder.glob("run/.exporting-*")),
    "finish": lambda folder: (folder / "run" / "jaxgrow.json").exists(),
}


def _log(folder: Path) -> str:
    log = folder / "run" / "metrics.jsonl"
    return log.read_text(errors="replace") if log.exists() else ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment that grows, and a folder in which it has run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    experiment = runs.growing(
        folder,
        GrowTo((Stage(1.0),), by=runs.DOUBLED),
        source=Stage(0.5),
        checkpoint_every=1,
        eval_every=2,
    )
    runs.corpus(folder, files=200)
    pretrain.run(experiment, folder / "run")
    shutil.rmtree(folder / "cache")
    return experiment, folder


def attempt(config: str, folder: Path, phase: str, rng: random.Random) -> tuple[str, int | None]:
    """Start the command, and send a signal in the phase; return the signal and the exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "train.pretrain", config, "--workdir", str(folder / "run")],
        cwd=ROOT,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not PHASES[phase](folder):
        time.sleep(0.002)
    time.sleep(rng.random() * rng.choice([0.01, 0.1, 1.0]))
    number = rng.choice(SIGNALS)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said, said
    expected = {
        signal.SIGKILL: (-9, 0),
        signal.SIGINT: (130, 0, -2),  # Python ends like this before its first line
    }.get(number, (75, 0, -number))
    assert process.returncode in expected, (phase, number.name, process.returncode, said)
    return number.name, process.returncode


def kept(folder: Path) -> int:
    """The newest intact checkpoint. No checkpoint may be damaged."""
    where = folder / "run" / "checkpoints"
    step, damaged = intact.newest_intact(where, intact.steps(where)) if where.exists() else (0, [])
    assert damaged == []
    return step or 0


@pytest.mark.slow
def test_signals_in_every_phase_lose_nothing(whole, tmp_path):
    """The counts of each phase are printed; set ``JAXGROW_KILLS`` for another number of signals."""
    experiment, folder = whole
    experiment = replace(experiment, data=replace(experiment.data, cache=str(tmp_path / "cache")))
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    config = runs.script(tmp_path, experiment)
    phases = list(PHASES)
    for i in range(TIMES):
        phase = phases[i % len(phases)]
        if phase == "tokenise":
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        if rng.random() < 0.3 or (tmp_path / "run" / "result.json").exists():
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        before = kept(tmp_path)
        name, status = attempt(config, tmp_path, phase, rng)
        counts[f"{phase} {name} {status}"] += 1
        assert kept(tmp_path) >= before, (seed, phase, name)
        if i % 8 == 7:
            finished(experiment, tmp_path, folder, seed)
    print(f"seed {seed}: {sum(counts.values())} signals, {TIMES // 8} complete runs, 0 losses")
    print(json.dumps(counts, indent=1))


def finished(experiment, tmp_path: Path, folder: Path, seed: int) -> None:
    """Continue the run to its end, and check that it equals an uninterrupted run."""
    try:
        pretrain.run(experiment, tmp_path / "run")
    except UserError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    runs.assert_same_end(tmp_path / "run", folder / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not [name for name in names if name.endswith(".part") or "exporting" in name]
