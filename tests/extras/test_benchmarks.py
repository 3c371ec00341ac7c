"""The benchmark helpers work, and benchmarks for absent machines are runnable.

The tests do not measure times.
"""

import json
import math
import os
import re
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks import anatomy, first_hour, on_device, one_gpu, scale, tokenise, transform
from benchmarks.common import Rows, alone
from train.config.experiment import load_experiment
from train.extras.aot.machines import CHIPS, present_machine


def test_what_runs_alone_answers_fails_dies_or_is_ended():
    assert alone(math.sqrt, 4.0, seconds=60) == 2.0
    with pytest.raises(RuntimeError, match="ValueError: "):
        alone(math.sqrt, -1.0, seconds=60)
    with pytest.raises(RuntimeError, match="its process died, with code 3"):
        alone(os._exit, 3, seconds=60)
    with pytest.raises(TimeoutError, match="not done in 1 s"):
        alone(time.sleep, 60, seconds=1)


def test_the_directions_that_matrices_use():
    orthogonal = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    copied = np.repeat(orthogonal[:2], 2, 0)  # two copies of each row
    found = anatomy.used(np.stack([orthogonal, 3 * orthogonal, copied]))
    np.testing.assert_allclose(found, [1, 1, 0.5])
    # rank 1 of 2
    np.testing.assert_allclose(anatomy.used(np.outer([1.0, 2.0], [1.0, 1.0, 3.0])[None]), 0.5)


@pytest.mark.slow
def test_the_anatomy_of_a_model_is_told_layer_by_layer(small_run, tmp_path):
    (tmp_path / "text.txt").write_text("abcd efgh\n" * 200)
    found = anatomy.anatomy(small_run, tmp_path / "text.txt")
    assert found == anatomy.anatomy(small_run, tmp_path / "text.txt")
    layers = {len(found[key]) for key in anatomy.PANELS}
    assert len(layers) == 1 and sum(found["gradient"]) == pytest.approx(1)
    assert all(0 < part <= 1 for part in found["directions"]) and min(found["matters"]) >= 0


def test_rows_are_available_when_added_and_after_reloading(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    for i in range(2):
        found = Rows(path, {"date": i})
        assert ("0" in found) == (i == 1)
        found.add(str(i), {"seconds": 0.123456})
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows = [{"name": name, "seconds": 0.1235} for name in "01"]
    assert lines == [{"date": 0}, rows[0], {"date": 1}, rows[1]]
    assert found["0"]["seconds"] == 0.1235 and Rows(None, {}).add("x", {}) is None


def test_a_failed_measurement_is_taken_again(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    Rows(path, {}).add("step", {"failed": "TimeoutError"})
    again = Rows(path, {})
    assert "step" not in again
    again.add("step", {"seconds": 1})
    assert Rows(path, {})["step"]["seconds"] == 1


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        (one_gpu, "--dry-run --out x", "--out has no effect with --dry-run"),
        (one_gpu, "--prepare x --out x", "--out has no effect with --prepare"),
        (one_gpu, "--collect x --out x", "--out has no effect with --collect"),
        (one_gpu, "--rehearse --minutes 3", "--minutes has no effect with --rehearse"),
        (one_gpu, "--collect x --minutes 3", "--minutes has no effect with --collect"),
        (one_gpu, "--prepare x --collect x", "not allowed with argument --prepare"),
        (one_gpu, "--rehearse --dry-run", "not allowed with argument --rehearse"),
        (scale, "--here --only h100", "--only has no effect with --here"),
        (scale, "--rounds 3", "--rounds has no effect without --here"),
        (scale, "--only h10:", "no row contains h10:"),
        (scale, "--here --rounds 1", "1 has no quartiles; give 2 or more"),
        (scale, "--here --rounds x", "x has no quartiles; give 2 or more"),
        (tokenise, "a.txt bytes --gigabytes 1 --rounds 4", "--rounds has no effect with --giga"),
        (tokenise, "a.txt bytes --gigabytes 1 --megabytes 4", "--megabytes has no effect with"),
        (transform, "--only hyperclone", "no transform contains hyperclone: the transforms are"),
        (transform, "--json missing/x.json", "there is no folder missing"),
        (anatomy, "a=b --text c --plot missing/x.png", "there is no folder missing"),
        (anatomy, "runs/a --text c", "give each model with its label"),
    ],
)
def test_an_option_without_effect_is_a_usage_error(module, words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert said in capsys.readouterr().err


def test_the_devices_that_are_here_are_a_machine():
    here = present_machine()
    assert here.name == "cpu:4" and here.chip is CHIPS["cpu"]
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(("config", "on"), scale.ROWS)
def test_rows_are_experiments_whose_meshes_their_machines_have(config, on):
    devices = math.prod(int(n) for n in on.partition(":")[2].split("x"))
    e = load_experiment(config)
    found = [Mock(platform="gpu", slice_index=0) for _ in range(devices)]
    assert e.mesh.over(found).size == devices
    assert e.batch % (e.accumulate * devices // e.mesh.tensor) == 0


def test_the_parts_on_a_device_fit_into_its_minutes():
    names, seconds, *_ = zip(*on_device.measurements(on_device.REAL), strict=False)
    assert sum(seconds) <= 25 * 60 and len(set(names)) == len(names)


def test_nanogpts_count():
    """A token costs six FLOPs per parameter; a layer has 12 D^2 + 13 D of them."""
    width, vocab, length = 768, 50304, 1024
    numbers = 12 * (12 * width**2 + 13 * width) + 2 * width + vocab * width
    assert on_device.nanogpt_flops(on_device.BASE, 1) == 6 * numbers + 12 * 12 * width * length


@pytest.mark.slow
def test_everything_on_a_device_is_rehearsed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"

    def rehearse(*more):
        arguments = ["on_device", "--rehearse", "--json", str(path), *more]
        monkeypatch.setattr(sys, "argv", arguments)
        on_device.main()

    rehearse()
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert len(rows) == 14 and not [row for row in rows if "failed" in row]
    assert all(row["name"].startswith("rehearsed: ") for row in rows)
    rehearse()
    assert len(path.read_text().splitlines()) == 15  # measurements are not repeated
    path.unlink()
    rehearse("--minutes", "0")
    assert not path.exists() and "left out, it may take 110 s" in capsys.readouterr().out


def test_the_first_hour_is_measured_beside_its_old_values(capsys, monkeypatch):
    """Processor time includes the children of a command, and a failure is a row of the table."""
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
    assert first_hour.spent(sys.executable, "-c", busy).cpu > 0.1
    with pytest.raises(RuntimeError, match="status 3"):
        first_hour.spent(sys.executable, "-c", "raise SystemExit(3)")

    def fails(_):
        """It fails."""
        raise RuntimeError("why")

    monkeypatch.setitem(first_hour.FIGURES, "pytest", first_hour.Figure(fails, "8", "5"))
    monkeypatch.setattr(sys, "argv", ["first_hour", "pytest"])
    first_hour.main()
    said = capsys.readouterr().out.splitlines()[-1].split()
    assert said == ["pytest", "failed", "8", "5", "It", "fails:", "why"]
    readme = (first_hour.ROOT / "README.md").read_text()
    assert len(re.findall(r"python -m train\.compare", readme)) == 1 == readme.count("```python")
