"""Any setting and any command line is accepted or rejected with one line.

The tests never accept a traceback or a long wait.
"""

import importlib
import io
import random
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import runs

from train.common.errors import UserError, exits_cleanly
from train.config.experiment import experiment_json
from train.config.overrides import all_settings, with_overrides, wrong_types

NUMBERS = "-1 0 1 -0.5 1.5 1e3 1e308 1e999 -inf nan 1000000000000 10**9 2**64 0x10 1j"
TEXTS = "a 'a' é \x00 � a=b None True true ... b'x' __import__('os') [] () (1,) 1,2 {} {[]} {1:2} {1,[]} ["
LONG = ("(" * 2000, "-" * 3000 + "1", "9" * 5000)
VALUES = (*NUMBERS.split(), *TEXTS.split(" "), "", "lambda: 1", *LONG)


def experiments(folder):
    growing = runs.GrowTo((runs.TrainStage(0.25),), runs.DOUBLED)
    return [
        runs.experiment(folder),
        runs.experiment(folder, method=runs.VCYCLE),
        runs.growing(folder, growing, source=runs.TrainStage(0.25)),
    ]


def test_1000_settings(tmp_path):
    """A random override ``a.b=c`` gives an experiment with a plan or a `UserError`.

    Each override takes less than two seconds.
    """
    bases, chance, accepted = experiments(tmp_path), random.Random(0), 0
    names = [[setting.name for setting in all_settings(base, unset=True)] for base in bases]
    for i in range(1000):
        base = bases[i % len(bases)]
        setting = f"{chance.choice(names[i % len(bases)])}={chance.choice(VALUES)}"
        begin = time.process_time()
        try:
            made = with_overrides(base, [setting])
            assert not wrong_types(made), setting
            experiment_json(made)
            _ = made.plan
            accepted += 1
        except UserError as error:
            assert str(error).strip(), setting
        except (ValueError, ArithmeticError):
            pass  # The plan raises these, and `load_experiment` converts them to a `UserError`.
        except Exception as error:
            error.add_note(setting[:80])
            raise
        assert time.process_time() - begin < 2, setting
    assert 50 < accepted < 500  # Some settings are rejected and some are accepted.


# For each command: valid arguments, and options that take a value. The test makes one or two of
# them invalid.
CONFIG, ABSENT, FILE = "{config}", "{folder}/absent", "{folder}/a.txt"
SET = ["steps", "batch", "optim.peak_lr", "model.layers", "data", "a.b"]
COMMANDS = {
    "pretrain": ([CONFIG], ["--set", "--coordinator", "--processes", "--process", "--workdir"]),
    "compare": ([CONFIG, CONFIG], ["--set", "--seeds", "--frontier", "--evaluate", "--data", "--finetune"]),
    "sweep": ([CONFIG], ["--set", "--seeds", "--frontier", "--halving"]),
    "race": ([CONFIG, ABSENT], ["--set", "--seeds", "--steps", "--by"]),
    "finetune": ([CONFIG, "--model", ABSENT], ["--set", "--seeds", "--lr"]),
    "advise": ([CONFIG], ["--set", "--budget", "--write"]),
    "generate": ([ABSENT, "--prompt", "a"],
        ["--prompt", "--max-new", "--temperature", "--top-k", "--min-p", "--repetition-penalty", "--samples", "--tokenizer"]),
    "evaluate": ([ABSENT, "--tasks", "wikitext2"], ["--tasks", "--data", "--stride", "--few-shot", "--limit"]),
    "ligo_maps": ([FILE], ["--plot", "--apply", "--out"]),
    "preflight": ([CONFIG, "--on", "nothing"], ["--set", "--on", "--utilisation"]),
    "scaling": ([ABSENT], ["--at"]),
    "show": ([ABSENT, "--out", "{folder}/a.png"], ["--out"]),
    "variance": ([ABSENT, ABSENT], []),
}  # fmt: skip


class Reached(BaseException):
    """A command has accepted its arguments and is about to start its work."""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run a command until its work would start; return its exit code, or None, and its output."""
    config = runs.script(tmp_path, runs.experiment(tmp_path))
    (tmp_path / "a.txt").write_text("no numpy file")
    monkeypatch.chdir(tmp_path)
    experiment = importlib.import_module("train.config.experiment")
    # It takes about a second per call, and other tests cover its errors.
    monkeypatch.setattr(experiment, "shapes", lambda *_: None)
    joining = importlib.import_module("train.common.hosts").JOINING._added
    monkeypatch.setitem(joining, "processes", lambda *given: None)

    def reached(*_, **__):
        raise Reached

    for name in ("pretrain", "compare", "sweep", "race", "finetune", "advise"):
        module = importlib.import_module(f"train.{name}")
        for work in ("run_experiment", "run_comparison", "tune_model"):
            monkeypatch.setattr(module, work, reached, raising=False)
    monkeypatch.setattr(importlib.import_module("train.advise"), "full_report", reached)
    monkeypatch.setattr(importlib.import_module("train.preflight"), "AotRun", reached)

    def call(name: str, arguments: list[str]) -> tuple[int | None, str]:
        filled = (a.replace("{config}", config) for a in arguments)
        filled = (a.replace("{folder}", str(tmp_path)) for a in filled)
        monkeypatch.setattr(sys, "argv", [name, *filled])
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(said):
            try:
                exits_cleanly(importlib.import_module(f"train.{name}").main)
            except SystemExit as exit:
                return int(exit.code or 0), said.getvalue()
            except Reached:
                pass
        return None, said.getvalue()

    return call


def test_300_command_lines(command):
    chance, codes = random.Random(0), []
    for i in range(300):
        name = list(COMMANDS)[i % len(COMMANDS)]
        right, options = COMMANDS[name]
        arguments = list(right)
        for option in chance.sample(options, min(len(options), chance.randint(1, 2))):
            value = chance.choice(VALUES)
            if option == "--set":
                value = f"{chance.choice(SET)}={value}"
            arguments.append(f"{option}={value}")
        if chance.random() < 0.2:
            others = [*VALUES, ABSENT, FILE, "{config}:x", "{config}:"]
            arguments[chance.randrange(len(right))] = chance.choice(others)
        try:
            code, said = command(name, arguments)
        except Exception as error:
            error.add_note(f"{[a[:60] for a in [name, *arguments]]}")
            raise
        assert code in (None, 0, 2), (name, arguments, said)
        assert "Traceback" not in said
        codes.append(code)
    assert 5 < codes.count(None) < 150
