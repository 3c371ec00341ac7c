"""Help and usage errors of ``jaxgrow``: they are immediate, short, and propose the nearest name."""

import subprocess
import sys

import pytest

from jaxgrow.cli import methods
from jaxgrow.cli.keeps import described_methods
from jaxgrow.cli.program import main
from jaxgrow.integrations.formats import FORMATS
from jaxgrow.integrations.torch_optimizer import POLICIES
from jaxgrow.operators import EXPERTS

CODE = """
import sys, jaxgrow_command
sys.argv[1:] = sys.argv[1].split()
try:
    jaxgrow_command.main()
finally:
    print(sorted({"jax", "flax", "orbax", "numpy", "rich"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("--help", 0), ("--version", 0), ("grow --help", 0), ("grow a b --method nope", 2), ("x", 2)],
)
def test_help_and_usage_errors_do_not_import_jax(arguments, status):
    done = subprocess.run([sys.executable, "-c", CODE, arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (status, "[]")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("grwo a b", "'grwo' does not exist; did you mean grow"),
        ("grow a b --method hyperclone", "'hyperclone' does not exist; did you mean hypercloning"),
        ("grow a b --method zzz", "'zzz' does not exist; choose from aki, average, "),
        ("grow a b", "the following arguments are required: --method"),
    ],
)
def test_a_usage_error_is_one_line_with_the_nearest_name(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("error: ") and said in line
    assert "--help lists the options" in line


def test_the_table_for_the_arguments_comes_from_the_registries():
    assert described_methods() == methods.METHODS, "python docs/tables.py writes it again"
    assert tuple(EXPERTS) == methods.EXPERTS
    assert tuple(sorted(FORMATS)) == methods.FORMATS
    assert methods.OPTIMIZER_POLICIES == POLICIES
