"""`--set steps=N` in a comparison keeps the relative costs of its configs, or says that they changed."""

import json
import sys
from dataclasses import replace

import pytest
import runs

from train import compare
from train.extras.lengths import load_alike
from train.plan.methods import Growing, GrowTo, Learned, TrainStage

DEEP = replace(runs.MODEL, layers=4)
GROWING = Growing(runs.MODEL, TrainStage(0.5), (GrowTo((TrainStage(0.5, warmup=3),)),))


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A baseline of 400 steps, and a growth with 300 steps."""
    folder = tmp_path_factory.mktemp("configs")
    base = runs.experiment(folder, name="base", model=DEEP, steps=400)
    grown = replace(base, name="grown", steps=300, method=GROWING)
    return [runs.script(folder, e) for e in (base, grown)]


@pytest.fixture(scope="module")
def whole(configs):
    found, notes = load_alike(configs, [])
    assert notes == []
    return found


def relative(experiments):
    return experiments[1].cost / experiments[0].cost


@pytest.mark.parametrize("overrides", [["steps=1e3"], ["steps=5", "steps=200"]])
def test_a_derived_config_keeps_its_fraction_of_the_steps(configs, whole, overrides):
    found, notes = load_alike(configs, overrides)
    assert found[1].steps == found[0].steps * 3 / 4
    assert relative(found) == pytest.approx(relative(whole), rel=0.01)
    [note] = notes
    assert "base has" in note and "steps instead of 400" in note
    assert "optim.warmup=2" in note and "method.to.0.stages.0.warmup=3" in note


def test_epochs_are_scaled_as_steps(tmp_path):
    base = runs.experiment(tmp_path, name="base", steps=0, epochs=4.0)
    grown = replace(base, name="grown", epochs=2.0, method=Growing(replace(runs.MODEL, layers=1)))
    texts = [runs.script(tmp_path, e) for e in (base, grown)]
    for override, steps in (("epochs=8", None), ("steps=100", 50)):
        found, _ = load_alike(texts, [override])
        assert found[1].steps == (steps or round(found[0].steps / 2))


@pytest.mark.parametrize(("first", "second"), [
    ({"steps": 400}, {"epochs": 2.0}),
    ({"epochs": 2.0}, {"steps": 400}),
    # As many samples in half of the steps.
    ({"epochs": 2.0}, {"epochs": 2.0, "batch": 16, "eval_batches": 1}),
    ({"epochs": 2.0}, {"epochs": 2.0, "ramp": (0.5,)}),
])  # fmt: skip
def test_without_settings_no_cost_has_changed(tmp_path, first, second):
    made = [runs.experiment(tmp_path, **{"steps": 0} | of) for of in (first, second)]
    texts = [runs.script(tmp_path, replace(e, name=n)) for e, n in zip(made, "ab", strict=True)]
    assert load_alike(texts, [])[1] == []


@pytest.mark.parametrize(("own", "overrides"), [
    (":steps=400", []), ("", ["model.layers=8"]), (":method.source.steps=0.2", ["steps=200"]),
])  # fmt: skip
def test_a_changed_relative_cost_is_said(configs, whole, own, overrides):
    was = relative(whole)
    found, notes = load_alike([configs[0], f"{configs[1]}{own}"], overrides)
    [note] = [note for note in notes if "of the FLOPs" in note]
    assert f"grown costs {relative(found):.0%} of the FLOPs of base, but {was:.0%} in the" in note


def test_a_step_count_of_a_method_that_changes_the_cost_is_said(tmp_path, configs):
    learned = replace(GROWING, to=(GrowTo((TrainStage(0.5),), by=Learned(steps=100)),))
    base = runs.experiment(tmp_path, name="base", model=DEEP, steps=400)
    text = runs.script(tmp_path, replace(base, name="learned", method=learned))
    _, notes = load_alike([configs[0], text], ["steps=40"])
    assert "learned costs" in notes[0] and "method.to.0.by.steps=100" in notes[1]


def test_the_report_has_the_notes(tmp_path, monkeypatch, configs):
    folder = tmp_path / "runs"
    arguments = [*configs, "--set", "steps=8", "optim.warmup=1", "--workdir", str(folder)]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    compare.main()
    found = json.loads((folder / "compare.json").read_text())
    assert any("base has 8 steps instead of 400" in doubt for doubt in found["doubts"])
    assert "base has 8 steps instead of 400" in (folder / "compare.md").read_text()
    [short] = [row for row in found["rows"] if row["run"] == "grown"]
    assert json.loads((folder / "grown-seed0" / "result.json").read_text())["steps"] == 6
    assert 0.5 < short["flops"] < 0.75
