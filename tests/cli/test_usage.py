"""Help and usage errors of ``jaxgrow``: they are immediate, short, and propose the nearest name."""

import subprocess
import sys
from typing import get_args

import jax
import pytest

from jaxgrow.checkpoints import save
from jaxgrow.cli import methods
from jaxgrow.cli.arguments import COMMANDS, described_methods
from jaxgrow.cli.program import main
from jaxgrow.extras.integrations.formats import FORMATS
from jaxgrow.extras.integrations.torch_optimizer import Policy
from jaxgrow.models import GPT2Config
from jaxgrow.operators import EXPERTS

CODE = """
import sys, jaxgrow_command
sys.argv[1:] = sys.argv[1].split()
try:
    jaxgrow_command.main()
finally:
    heavy = {"jax", "flax", "orbax", "numpy", "rich"} & sys.modules.keys()
    extras = {name for name in sys.modules if name.startswith("jaxgrow.extras.")}
    print(sorted(heavy | extras), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("--help", 0), ("--version", 0), ("grow --help", 0), ("grow a b --method nope", 2), ("x", 2)],
)
def test_help_and_usage_errors_import_neither_jax_nor_extras(arguments, status):
    done = subprocess.run([sys.executable, "-c", CODE, arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (status, "[]")


@pytest.mark.parametrize(("arguments", "said"), [
    ("grwo a b", "'grwo' does not exist; did you mean grow"),
    ("grow a b --method hyperclone", "'hyperclone' does not exist; did you mean hypercloning"),
    ("grow a b --method zzz", "'zzz' does not exist; choose from aki, average, "),
    ("grow a b", "one of the arguments --method --layers-from --vocab --like-tokens is required"),
    ("inspect a --format maxtext --names b.json", "--names: not allowed with argument --format"),
    ("grow a b --method stack --layers 4 --overwite", "--overwite; did you mean --overwrite"),
])  # fmt: skip
def test_a_usage_error_is_one_line_with_the_nearest_name(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("error: ") and said in line
    assert "--help lists the options" in line


def test_an_error_of_the_file_system_has_a_way_out(tmp_path, capsys):
    folder = tmp_path / "model"
    config = GPT2Config(vocab=8, context=4, layers=1, embed=4, heads=1, head_dim=4, mlp=4)
    save(folder, config, config.init(jax.random.key(0)))
    missing = tmp_path / "missing.txt"
    assert main(["report", str(folder), str(folder), "--data", str(missing)]) == 1
    said = f"error: {missing}: no such file or directory; check the path\n"
    assert capsys.readouterr().err == said
    # Almost equal models do not have a negative KL, and a small model does not have 0.0 MB.
    assert main(["report", str(folder), str(folder)]) == 0
    assert "KL(a || b): 0.00e+00" in capsys.readouterr().out
    assert main(["convert", str(folder), str(tmp_path / "b"), "--to", "orbax"]) == 0
    assert "parameters, 0.0 MB" not in capsys.readouterr().out


def test_the_table_for_the_arguments_comes_from_the_registries():
    assert described_methods() == methods.METHODS, "python docs/tables.py writes it again"
    assert tuple(EXPERTS) == methods.EXPERTS
    assert tuple(sorted(FORMATS)) == methods.FORMATS
    assert get_args(Policy) == methods.OPTIMIZER_POLICIES


def test_a_command_of_an_extra_has_the_help_of_the_table(capsys):
    """Its module is imported if the command is among the words, and does not wait for JAX."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, "prune --help"], capture_output=True, text=True
    )
    found = done.stderr.splitlines()[-1]
    assert "jaxgrow.extras.commands.arguments" in found and "'jax'" not in found
    assert " ".join(COMMANDS.describe("prune").split()) in " ".join(done.stdout.split())
