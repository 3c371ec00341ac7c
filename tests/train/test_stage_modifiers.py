"""The modifiers of a method are settings, and a new one needs no change of the methods."""

from dataclasses import dataclass

import pytest
import runs

from jaxgrow.extras.freeze import Freeze
from jaxgrow.layerdrop import LayerDrop
from train.common.errors import UserError
from train.config.experiment import experiment_json
from train.config.overrides import all_settings, with_overrides, wrong_types
from train.extras.modifiers import FreezeParts, Ramp, Rewarm, ShortContext
from train.plan.methods import Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.training import MODIFIERS, Modifier
from train.state.optim import Optim


def test_a_new_modifier_is_a_setting_of_each_stage(monkeypatch, tmp_path):
    monkeypatch.setattr(MODIFIERS, "_added", {**MODIFIERS._added})  # restored after the test

    @dataclass(frozen=True)
    class Scaled(Modifier, key="scaled"):
        factor: float = 1.0
        steps: int = 10

        def __post_init__(self):
            if self.factor <= 0:
                raise ValueError(f"factor must be positive, but is {self.factor}")

    base = runs.experiment(tmp_path, method=VCycle(down=(TrainStage(0.1),)))
    found = with_overrides(base, ["method.down.0.scaled.factor=2"])
    assert found.method.down[0].modifiers == found.plan[0].modifiers == (Scaled(2.0),)
    down = experiment_json(found)["method"]["VCycle"]["down"]
    assert down[0]["scaled"] == {"factor": 2.0, "steps": 10}
    rows = {setting.name: setting.value for setting in all_settings(found)}
    assert rows["method.down.0.scaled.factor"] == 2.0 and rows["method.up.0.scaled"] is None
    for wrong, says in (
        ("factor=0", r"--set method.up.0.scaled.factor=0: factor must be posit"),
        ("steps=1.5", r"scaled.steps: expected int, but got '1.5'"),
    ):
        with pytest.raises(UserError, match=says):
            with_overrides(base, [f"method.up.0.scaled.{wrong}"])


def test_modifiers_keep_their_form_in_config_json(tmp_path):
    """The form is unchanged, with a key for each modifier, so that existing runs can be continued."""
    modifiers = FreezeParts(Freeze((0,))), ShortContext(2), Ramp((1, 2)), Rewarm(2.0)
    up = TrainStage(0.5, modifiers=modifiers), TrainStage(0.4)
    method = VCycle((TrainStage(0.1),), up)
    first, second = experiment_json(runs.experiment(tmp_path, method=method))["method"]["VCycle"][
        "up"
    ]
    plain = {"lr": 1.0, "warmup": None, "floor": None, "schedule": None}
    none = {"drop": None, "tokens": None, "freeze": None, "rewarm": None}
    assert second == {"steps": 0.4} | plain | none
    own = {"freeze": {"layers": [0], "below": True, "paths": []}, "ramp": [1, 2], "windows": 2}
    own |= {"drop": None, "tokens": None, "rewarm": {"peak": 2.0, "steps": 250}}
    assert first == {"steps": 0.5} | plain | own
    assert experiment_json(runs.experiment(tmp_path))["method"] == {"Scratch": {"drop": None}}


def test_set_changes_adds_and_removes_modifiers():
    dropping, other = (Scratch((DropLayers(LayerDrop(theta=t)),)) for t in (0.5, 0.7))
    assert with_overrides(dropping, ["drop.theta=0.7"]) == other
    with pytest.raises(UserError, match="Scratch has no field 'modifiers'"):
        with_overrides(dropping, ["modifiers.0.drop.theta=0.7"])
    assert with_overrides(Scratch(), ["drop.theta=0.5"]) == dropping
    assert with_overrides(dropping, ["drop=None"]) == Scratch()
    both = with_overrides(dropping, ["windows=4"]).modifiers
    assert both == (*dropping.modifiers, ShortContext(4))


def test_modifiers_that_are_none_are_refused():
    (wrong,) = wrong_types(Scratch((LayerDrop(),)))  # type: ignore[arg-type]
    assert wrong.startswith("modifiers: expected tuple[Modifier, ...], but got (LayerDrop(")
    twice = Scratch((Ramp((1, 1)), Ramp((2, 2))))
    with pytest.raises(ValueError, match="modifiers has Ramp more than once: keep one of them"):
        twice.plan(runs.MODEL, Optim(), 8)
