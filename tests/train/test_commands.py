"""The commands of ``python -m train`` print help, parse ``--set``, and describe a config."""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from train import pretrain
from train.arguments import COMMANDS, command_parser
from train.common.commands import Arguments, Parser, argument, set_argument
from train.common.errors import UserError
from train.config.experiment import load_experiment
from train.config.overrides import with_overrides
from train.extras.modifiers import Ramp
from train.plan.methods import TrainStage, VCycle

ROOT = Path(__file__).parents[2]
HEAVY = {"jax", "flax", "optax", "orbax", "grain", "scipy", "matplotlib", "pyarrow", "numpy"}


class Parsed(Exception):
    """Carries the parser of a command, raised instead of running the command."""


@pytest.fixture
def parser(monkeypatch):
    def given(self, *_):
        raise Parsed(self)

    def of(command: str) -> argparse.ArgumentParser:
        with monkeypatch.context() as patch, pytest.raises(Parsed) as stop:
            patch.setattr(argparse.ArgumentParser, "parse_args", given)
            importlib.import_module(f"train.{command}").main()
        return stop.value.args[0]

    return of


@pytest.fixture
def path(tmp_path):
    return runs.script(tmp_path, runs.experiment(tmp_path, method=runs.VCYCLE))


def python(*arguments: str) -> tuple[int, list[str], set[str]]:
    """Run ``python -m``; return its status, its messages, and the heavy packages that it imported."""
    command = [sys.executable, "-X", "importtime", "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    times = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    messages = [line for line in done.stderr.splitlines() if line not in times]
    return done.returncode, messages, HEAVY & {line.rpartition("|")[2].strip() for line in times}


def test_every_command_is_found():
    files = [*(ROOT / "train").glob("*.py")]
    assert sorted(COMMANDS) == sorted(f.stem for f in files if "__main__" in f.read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_errors_do_not_wait_for_jax(command):
    status, [line], heavy = python(f"train.{command}", "--nope")
    assert (status, heavy) == (2, set())
    assert line.startswith("error: ") and f"python -m train.{command} --help" in line


def test_help_does_not_wait_for_jax():
    assert python("train.pretrain", "--help") == (0, [], set())


DEMO = "configs/demo.py:muon"


@pytest.mark.parametrize(("arguments", "says"), [
    ("comprae x", "train.comprae is not a command; did you mean train.compare?"),
    ("arguments", "train.arguments is not a command"),
    ("finetune configs/finetune.py:sst3 --model x", "did you mean sst2?"),
    ("compare README.md", "the config README.md does not end in .py; a config is"),
    ("compare configs", "the config configs is a folder; a config is"),
    (f"compare {DEMO} --frontier 50", "--frontier takes fractions between 0 and 1, not 50"),
    (f"compare {DEMO} --frontier 0.4:steps=9", "--frontier 0.4 and its setting steps=9 both set the length"),
    (f"compare {DEMO} --seeds 1,1", "--seeds names 1 more than once"),
    (f"compare {DEMO} --finetune x.py:y", "there is no config x.py"),
    (f"compare {DEMO} --data x", "--data x has no effect without a task with a name, such as wikitext2: name"),
    (f"compare {DEMO} --evaluate ,", "--evaluate names no task; give at least one, such as wikitext2"),
    (f"compare {DEMO} --evaluate README.md --data x", "such as wikitext2: name one with --evaluate, or leave out --data"),
    (f"sweep {DEMO} --halving 0.5,0.2", "--halving takes increasing fractions"),
    (f"sweep {DEMO} --set optim.peak_lr", "a sweep needs --set with a field and values"),
    (f"finetune {DEMO} --model x --lr fast", "--lr takes numbers separated by commas"),
    (f"advise {DEMO} --write x", "--write takes the name of a config file"),
    (f"preflight {DEMO} --on h101:8", "--on must be kind:size"),
    (f"preflight {DEMO} --on h100:many", "--on must be kind:size, such as h100:8"),
    (f"preflight {DEMO} --on h100:2x4x2", "--on must be kind:size, such as h100:8"),
    (f"preflight {DEMO} --on cpu:2x4", "--on must be kind:size, such as h100:8"),
    (f"preflight {DEMO} --on cpu:4 --utilisation 2", "--utilisation must be greater than 0"),
    (f"pretrain {DEMO} --profile -1", "--profile must be a number of steps"),
    (f"race {DEMO} x --steps 3", "--steps must be at least 20, but is 3"),
    ("scaling a=b --at 1e9", "--at takes parameters and tokens per parameter"),
    ("generate x --prompt a --samples 0", "--samples is 0, but must be at least 1"),
    ("ligo_maps x --apply y", "--apply and --out must be given together"),
    (f"tokenizer {DEMO} --vocab 300 --out README.md", "README.md exists already"),
])  # fmt: skip
def test_arguments_are_checked_before_jax_is_imported(arguments, says):
    status, [line], heavy = python(*f"train.{arguments}".split())
    assert (status, heavy) == (2, set()) and line.startswith("error: ") and says in line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_texts_keep_paragraphs_and_show_defaults(command, parser):
    found, doc = parser(command), str(importlib.import_module(f"train.{command}").__doc__)
    text = found.format_help()
    assert f"usage: python -m train.{command}" in text and "`" not in text
    assert "\n\n".join(doc.replace("`", "").split("\n\n")).strip() in text
    for action in found._actions:
        optional = action.option_strings and not action.required and action.nargs != 0
        assert not optional or "(default: " in action.help, (command, action.option_strings)
        assert action.help, (command, action.dest)


@pytest.mark.parametrize(("command", "option"), [
    ("compare configs/demo.py:muon", "workdir"), ("sweep configs/demo.py:muon --set steps=2", "workdir"),
    ("evaluate gpt --tasks piqa", "json"), ("tokenizer configs/demo.py:muon --vocab 300", "out"),
])  # fmt: skip
def test_a_tilde_in_an_option_is_the_home_folder(tmp_path, monkeypatch, command, option):
    """A shell expands ``--workdir ~/runs``, but not ``--workdir=~/runs``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    name, *given = command.split()
    found = command_parser(name).parse_args([*given, f"--{option}=~/new"])
    assert getattr(found, option) == tmp_path / "new"
    if option == "out":
        (tmp_path / "new").touch()
        with pytest.raises(UserError, match="exists already; give another --out"):
            command_parser(name).parse_args([*given, f"--{option}=~/new"])


@pytest.mark.parametrize("command", ["race", "sweep", "finetune"])
def test_commands_of_several_runs_name_their_work_directory(command, parser):
    text = " ".join(parser(command).format_help().split())
    says = f"The work directory (--workdir, default: runs/{command}) contains one folder for each"
    assert says in text


@pytest.mark.parametrize(("given", "settings", "config"), [
    (["c.py", "--set", "a=1", "b.c=2"], ["a=1", "b.c=2"], "c.py"),
    (["--set", "a=1", "b=2", "c.py"], ["a=1", "b=2"], "c.py"),
    (["--set", "a=1", "c.py:x:b=2", "--set", "d=(1, 2)", "e=x=y", "--flag"], ["a=1", "d=(1, 2)", "e=x=y"], "c.py:x:b=2"),
    (["c.py", "--set=a=1", "--set", "--flag"], None, None),
    (["c.py", "--set", "a"], ["a"], "c.py"),
    (["c.py"], [], "c.py"),
])  # fmt: skip
def test_one_set_takes_several_settings_and_leaves_the_config(given, settings, config, capsys):
    flag = argument("--flag", action="store_true")
    parser = Parser("test", None, Arguments((argument("config"), flag, set_argument())))
    if settings is None:
        with pytest.raises(SystemExit):
            parser.parse_args(given)
        assert "--set: expected one argument" in capsys.readouterr().err
        return
    found = parser.parse_args(given)
    assert (found.set, found.config) == (settings, config)


# --- pretrain: list configs and settings ---


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*options) -> str:
        monkeypatch.setattr(sys, "argv", ["pretrain", *map(str, options)])
        pretrain.main()
        return capsys.readouterr().out

    return run


def test_show_prints_every_field_with_value_default_and_type(path, run):
    lines = run(path, "--show", "--set", "steps=1e1", "seed=7").splitlines()
    found = {name: rest for name, *rest in (line.split(maxsplit=3) for line in lines)}
    expected = {
        "setting": ["value", "default", "type"],
        "steps": ["10", "0", "int"],
        "batch": ["8", "required", "int"],
        "seed": ["7", "0", "int"],
        "method.up.0.drop": ["None", "None", "LayerDrop or None"],
    }
    assert found.items() >= expected.items() and found["method"][0] == "VCycle"
    assert found["optim.schedule"][2] == "'cosine' or 'linear' or 'wsd'"
    assert "[GPT2Config" not in str(found) and "collections" not in str(found)


def test_what_show_prints_can_be_set(path, run):
    """Each printed line names an existing field with a value of the right type."""
    experiment = load_experiment(path)
    lines = [line.split("  ") for line in run(path, "--show").splitlines()[1:]]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    leaves = [
        f"{name}={value}"
        for name, value, *_ in rows
        if value[0] != "(" and not value.endswith(("Config", "Cycle"))
        if not any(other.startswith(f"{name}.") for other, *_ in rows)
    ]
    assert len(leaves) > 50 and with_overrides(experiment, leaves) == experiment


def test_list_prints_the_experiments_of_a_file(run, tmp_path):
    path = ROOT / "configs" / "wikipedia.py"
    lines = run(path, "--list").splitlines()
    assert lines[0].split(maxsplit=1) == [f"{path}:scratch", "Train the GPT from scratch."]
    assert len(lines) == 7
    (tmp_path / "one.py").write_text("from configs.demo import muon as config\n")
    assert run(tmp_path / "one.py", "--list").startswith(f"{tmp_path / 'one.py'}  ")
    (tmp_path / "none.py").write_text("x = 1")
    says = r"none.py has no experiments: functions whose return annotation"
    with pytest.raises(UserError, match=says):
        run(tmp_path / "none.py", "--list")


def test_one_value_is_a_tuple_of_one():
    method = VCycle(down=(TrainStage(0.1),))
    for text, value in (("8", (8,)), ("1e1", (10,)), ("(4, 8)", (4, 8))):
        found = with_overrides(method, [f"down.0.ramp={text}"])
        assert found.down[0].modifiers == (Ramp(value),)
    assert with_overrides(found, ["down.0.ramp=None"]) == method
