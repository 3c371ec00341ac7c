"""The measurements of ``jaxgrow suggest`` match the data file, and its commands reach the sizes."""

import json
import shlex
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from checkpoints import saved

from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.cli.methods import METHODS
from jaxgrow.cli.program import main
from jaxgrow.extras.commands import suggest
from jaxgrow.models.bert import BERTConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def said(capsys, *arguments: object) -> dict:
    assert main(["suggest", *(str(a) for a in arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_measurement_is_on_the_page():
    page = (ROOT / "docs/howto/methods.md").read_text()
    for row in suggest.marked_measurements():
        number = f"{row['mean']:.1f} %" + (f" ± {row['interval']}" if "interval" in row else "")
        assert number in page, row
    assert all(f"`{name}`" in page for name in METHODS)


def test_the_first_command_reaches_the_sizes(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(folder, tmp_path / "a model")
    found = said(capsys, folder, "--layers", 8, "--mlp", 40, "--keep-function")["targets"][0]
    assert {way["keeps"] for way in found["ways"]} == {True}
    source = open_checkpoint(folder)
    ways, _ = suggest.suggest_methods(source, {"layers": 8, "mlp": 40}, keep=True)
    for command in ways[0].commands(str(folder), "DST"):
        assert main(shlex.split(command)[1:]) == 0
    grown = open_checkpoint(tmp_path / "DST")
    assert (grown.sizes()["layers"], grown.sizes()["mlp"]) == (8, 40)
    assert grown.parameters == ways[0].parameters
    assert "the function is preserved" in capsys.readouterr().out


def test_a_factor_makes_targets(folder, capsys):
    targets = [t["target"] for t in said(capsys, folder, "--to", "2x")["targets"]]
    wide = {"embed": 24, "heads": 8, "mlp": 40}
    assert targets == [{"layers": 8}, {"layers": 8, "mlp": 40}, wide]
    sizes = {"layers": 4, "embed": 12, "heads": 3, "mlp": 20}
    assert suggest.larger_targets(sizes, Fraction(5, 4))[0] == {"layers": 5}
    # A size that stays after rounding is not a step: only the MLPs grow.
    assert suggest.larger_targets(sizes, Fraction(11, 10)) == [{"mlp": 22}]


def test_measured_methods_come_first_and_costlier_ones_last(folder, capsys):
    assert main(["suggest", str(folder), "--to", "2x"]) == 0
    out = capsys.readouterr().out
    assert "--method interleave --layers 8" in out.split("commands of the first row:")[1]
    sizes = "--layers 8 --embed 24 --heads 8 --mlp 40"
    both = said(capsys, folder, *sizes.split())["targets"][0]["ways"]
    assert both[0]["keeps"] and both[-1]["methods"] == ["average"]


def test_what_the_files_say_is_answered(tmp_path, capsys):
    sizes = {"vocab": 11, "context": 7, "layers": 4, "embed": 12, "heads": 4, "head_dim": 3}
    bert = saved(tmp_path / "bert", BERTConfig(**sizes, mlp=20))
    assert main(["suggest", str(bert), "--layers", "8", "--keep-function"]) == 0
    out = capsys.readouterr().out
    assert "Norms: after each sublayer" in out and "every method changes the function here" in out
    assert "Experts: none; experts can only be made from a dense decoder of the Llama" in out


def test_sizes_that_the_architecture_does_not_store_are_refused(folder, capsys):
    """The commands of a suggestion end with an error only if the folder is changed before."""
    [target] = said(capsys, folder, "--embed", 24)["targets"]
    assert target["ways"] == [] and "--heads 8 fits" in target["refused"]["hypercloning"]
    assert said(capsys, folder, "--embed", 24, "--heads", 8)["targets"][0]["ways"]


@pytest.mark.parametrize(
    "wrong", [("--to", "0.5x"), ("--to", "x"), ("--to", "2x", "--layers", "8"), ()]
)
def test_wrong_arguments_are_usage_errors(folder, capsys, wrong):
    try:
        status = main(["suggest", str(folder), *wrong])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
