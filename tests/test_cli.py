"""The command ``jaxgrow``, mostly in process: what it writes is loaded again, what is wrong ends with 2 and one message."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chex
import numpy as np
import pytest
import runs
import tiny
from checkpoints import CONFIG, contents, saved

from jaxgrow import grow, interop, operators
from jaxgrow.cli import METHODS, main
from jaxgrow.merge import interpolate
from jaxgrow.models import GPT2Config

SIZES = {"layers": 4, "embed": 12, "heads": 4, "mlp": 20}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waiting for the disk and compiling are what these tests would cost."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with runs.quick():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def run(*arguments: object) -> None:
    assert main([str(a) for a in arguments]) == 0


def refused(capsys, *arguments: object) -> str:
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


def test_a_v_cycle_by_hand(tmp_path, folder, capsys):
    groups = ("--heads", "0+2,1+3", "--layers", "0+1,2+3")
    run("coalesce", folder, tmp_path / "small", *groups)
    run("decoalesce", tmp_path / "small", tmp_path / "up", *groups)
    run("interpolate", folder, tmp_path / "up", tmp_path / "mix", "--alpha", "0.25")
    up = operators.decoalesce(SIZES, heads=((0, 2), (1, 3)), layers=((0, 1), (2, 3)))
    down = operators.coalesce(SIZES, heads=((0, 2), (1, 3)), layers=((0, 1), (2, 3)))
    before, axes = tiny.params(CONFIG, dtype="float32"), CONFIG.axes()
    small = grow(down, before, axes)
    expected = interpolate(before, grow(up, small, axes), 0.25)
    config, params = interop.load(tmp_path / "small")
    assert config == replace(CONFIG, layers=2, embed=6, heads=2, mlp=10)
    chex.assert_trees_all_close(params, small, rtol=1e-6, atol=1e-6)
    config, params = interop.load(tmp_path / "mix")
    assert config == CONFIG
    chex.assert_trees_all_close(params, expected, rtol=1e-6, atol=1e-6)
    assert "peak memory" in capsys.readouterr().out
    record = json.loads((tmp_path / "up/jaxgrow.json").read_text())
    assert record["operator"] == "decoalesce"
    assert record["arguments"] == {"heads": [[0, 2], [1, 3]], "layers": [[0, 1], [2, 3]], "tied": "norm"}
    assert len(json.loads((tmp_path / "mix/jaxgrow.json").read_text())["sources"]) == 2


@pytest.mark.parametrize("tied", ["norm", "paper"])
@pytest.mark.parametrize("groups", ["far", "adjacent"])
def test_pairs_by_name_and_what_a_tied_head_keeps(tmp_path, folder, capsys, tied, groups):
    run("decoalesce", folder, tmp_path / "up", "--heads", groups, "--tied", tied)
    assert interop.load(tmp_path / "up")[0] == replace(CONFIG, embed=24, heads=8, mlp=40)
    capsys.readouterr()
    run("report", folder, tmp_path / "up")
    largest = float(capsys.readouterr().out.split("max |a - b| ")[1].split(",")[0])
    assert (largest < 1e-4) == (tied == "norm")
    run("coalesce", tmp_path / "up", tmp_path / "down", "--heads", groups, "--tied", tied)
    chex.assert_trees_all_equal(interop.load(tmp_path / "down")[1], interop.load(folder)[1])


def test_uneven_groups(tmp_path, folder):
    run("coalesce", folder, tmp_path / "small", "--heads", "0+1+2,3", "--layers", "3,0+1+2")
    run("decoalesce", tmp_path / "small", tmp_path / "up", "--heads", "0+1+2,3", "--layers", "3,0+1+2")
    assert interop.load(tmp_path / "up")[0] == CONFIG


TARGETS = {
    "g_stack": {"layers": 8},
    "solar": {"layers": 6},
    "staged": {"embed": 24, "heads": 8, "mlp": 40},
    "hypercloning": {"embed": 24, "heads": 8, "mlp": 40},
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_grows_a_folder(tmp_path, folder, method):
    default = {"layers": 6} if method in operators.DEPTH else {"embed": 18, "heads": 6, "mlp": 30}
    target = TARGETS.get(method, default)
    seed = ["--seed", "3"] if method in ("fpi", "net2net", "aki", "lemon") else []
    options = [text for axis, size in target.items() for text in (f"--{axis}", size)]
    run("grow", folder, tmp_path / "b", "--method", method, *options, *seed)
    growth = METHODS[method](SIZES, target, *([3] if seed else []))
    config, params = interop.load(tmp_path / "b")
    assert config == CONFIG.resized(growth)
    expected = grow(growth, tiny.params(CONFIG, dtype="float32"), CONFIG.axes())
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    record = json.loads((tmp_path / "b/jaxgrow.json").read_text())
    norm = {"norm": "layer"} if method == "lemon" else {}
    assert record["arguments"] == {"method": method, "target": target, **norm, **({"seed": 3} if seed else {})}


def test_convert_there_and_back(tmp_path, folder):
    run("convert", folder, tmp_path / "o", "--to", "orbax")
    run("grow", tmp_path / "o", tmp_path / "deep", "--method", "stack", "--layers", "6")  # Orbax again
    assert (tmp_path / "deep/params").is_dir()
    run("convert", tmp_path / "deep", tmp_path / "b", "--to", "hf")
    run("grow", folder, tmp_path / "c", "--method", "stack", "--layers", "6")
    one, two = (contents(tmp_path / n) for n in "bc")
    assert one.pop("jaxgrow.json") != two.pop("jaxgrow.json")
    assert {k: v for k, v in one.items() if k != "config.json"} == {k: v for k, v in two.items() if k != "config.json"}
    assert json.loads(one["config.json"]) == json.loads(two["config.json"])


def test_a_model_that_no_architecture_stores_goes_to_orbax(tmp_path, folder, capsys):
    arguments = ("grow", folder, tmp_path / "b", "--method", "hypercloning", "--embed", "24")
    assert "--to orbax writes any model" in refused(capsys, *arguments)
    run(*arguments, "--to", "orbax")
    run("report", folder, tmp_path / "b")
    assert float(capsys.readouterr().out.split("max |a - b| ")[1].split(",")[0]) < 1e-4


@pytest.mark.xdist_group("growing")
def test_a_run_is_a_source(tmp_path, small_run, capsys):
    from train.checkpoint import load

    run("inspect", small_run)
    assert "GPT2Config" in capsys.readouterr().out
    run("convert", small_run, tmp_path / "hf", "--to", "hf")
    config, params = interop.load(tmp_path / "hf")
    assert isinstance(config, GPT2Config)
    chex.assert_trees_all_equal(params, load(small_run))
    assert not (tmp_path / "hf/metrics.jsonl").exists()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "no finished run" in refused(capsys, "inspect", tmp_path / "run")


def test_inspect(folder, capsys):
    run("inspect", folder)
    out = capsys.readouterr().out
    assert "GPT2LMHeadModel" in out
    assert "context=7 embed=12 head_dim=3 heads=4 layers=4 mlp=20 vocab=11" in out
    (key,) = [line.split() for line in out.splitlines() if line.startswith("blocks/attention/key/kernel")]
    assert " ".join(key[1:9]) == "(4, 12, 4, 3) layers embed.in heads head_dim.in"
    assert "transformer.h.{layers}.attn.c_attn.weight" in key
    block = 4 * (12 * 12 + 12) + (12 * 20 + 20) + (20 * 12 + 12) + 2 * 24
    assert out.splitlines()[-1] == f"{(11 + 7) * 12 + 4 * block + 24:,} parameters, 0.0 MB"


def test_report_on_tokens_of_a_file(tmp_path, folder, capsys):
    (tmp_path / "ids.txt").write_text("1 2 3\n4 5 6 7 8 9 10 0 1 2 3\n")
    np.save(tmp_path / "ids.npy", np.arange(10, dtype=np.uint16).reshape(2, 5))
    for name, shape in (("ids.txt", "2 x 7"), ("ids.npy", "1 x 7")):
        run("report", folder, folder, "--tokens", tmp_path / name)
        out = capsys.readouterr().out
        assert f"the first {shape} tokens" in out
        assert "max |a - b| 0.00e+00" in out


@pytest.mark.parametrize("text", ["", "a b", "11", "-1 2", "0.5"])
def test_tokens_that_are_none(tmp_path, folder, capsys, text):
    (tmp_path / "ids.txt").write_text(text)
    assert "ids.txt" in refused(capsys, "report", folder, folder, "--tokens", tmp_path / "ids.txt")


def test_report_needs_one_vocabulary(tmp_path, folder, capsys):
    other = saved(tmp_path / "b", replace(CONFIG, vocab=13))
    assert "vocabularies differ, 11 and 13" in refused(capsys, "report", folder, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("coalesce",), "no groups: give --heads, --layers or both"),
        (("coalesce", "--heads", "0+1,1+2"), "axis 'heads': the groups must hold each of its 4 units exactly once"),
        (("coalesce", "--heads", "0+1+4,2+3"), "outside 0 .. 3: [4]"),
        (("decoalesce", "--heads", "0+1,2+3"), "--heads: 2 groups, but the source has 4 heads"),
        (("decoalesce", "--layers", "0,1,2"), "--layers: 3 groups, but the source has 4 layers"),
        (("grow", "--method", "stack"), "nothing to grow"),
        (("grow", "--method", "stack", "--layers", "3"), "stack cannot take 4 to 3"),
        (("grow", "--method", "stack", "--embed", "24"), "axis 'embed': stack grows layers"),
        (("grow", "--method", "stack", "--layers", "8", "--seed", "1"), "--seed: stack draws nothing"),
        (("grow", "--method", "hypercloning", "--kv-heads", "8"), "axis 'kv_heads'"),
        (("convert",), "convert needs --to"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_written(tmp_path, folder, capsys, arguments, message):
    command, *options = arguments
    assert message in refused(capsys, command, folder, tmp_path / "b", *options)
    assert not list(tmp_path.iterdir())


def test_models_and_weights_that_do_not_go_together(tmp_path, folder, capsys):
    deep = saved(tmp_path / "deep", replace(CONFIG, layers=5))
    arguments = ("interpolate", folder, deep, tmp_path / "b", "--alpha")
    assert "the two models differ: layers 4 and 5" in refused(capsys, *arguments, "0.5")
    assert "--alpha nan is no weight" in refused(capsys, *arguments, "nan")
    assert "there is no folder" in refused(capsys, "inspect", tmp_path / "nowhere")


def test_groups_that_are_none(capsys):
    with pytest.raises(SystemExit):
        main(["coalesce", "a", "b", "--heads", "0-1"])
    assert "a comma between new units" in capsys.readouterr().err


def test_as_a_process(tmp_path, folder):
    """Starts, transforms and ends; no traceback for what is wrong."""
    command = [sys.executable, "-m", "jaxgrow.cli", "grow", str(folder), str(tmp_path / "b"), "--method", "stack"]
    root = str(Path(interop.__file__).parents[2])
    done = subprocess.run([*command, "--layers", "6"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert interop.load(tmp_path / "b")[0].layers == 6
    again = subprocess.run([*command, "--layers", "6"], cwd=root, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.strip() == f"error: {tmp_path / 'b'} exists; --overwrite replaces it"
