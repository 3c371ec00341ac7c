"""Configs are Python files that return a frozen dataclass, and ``--set`` overrides its fields."""

import dataclasses
import importlib
import shutil
from pathlib import Path

import pytest
from cases import cases

from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import BERTConfig, GPT2Config
from train.common.errors import UserError
from train.config.experiment import (
    Experiment,
    check_experiment,
    experiment_json,
    experiment_names,
    listed_experiments,
    load_experiment,
)
from train.extras.effect import refuse_unused
from train.extras.fine_tune import FineTune
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.task import Labelled
from train.plan.training import Train

ROOT = Path(__file__).parents[2]
CONFIGS = [p.relative_to(ROOT) for p in sorted((ROOT / "configs").rglob("*.py"))]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    # Configs import each other, as under `python -m` at the repository root.
    monkeypatch.syspath_prepend(str(ROOT))


def module(path: Path):
    return importlib.import_module(".".join(path.with_suffix("").parts))


# The plans of the other configs are of the kinds of `demo`.
@pytest.mark.parametrize("path", cases({p.stem: p for p in CONFIGS}, ["demo"], []))
def test_every_experiment_loads_by_its_name(path):
    for name in experiment_names(module(path)):
        made = getattr(module(path), name)()
        # The corpora of the papers are not here.
        changes = ["steps=100_000"] if made.epochs else []
        experiment = load_experiment(f"{ROOT / path}:{name}", changes)
        assert experiment.name.endswith(name)
        last = experiment.plan[-1]
        assert isinstance(last, Train)
        # LEMON scales the eps of the norms.
        assert dataclasses.replace(last.config, eps=experiment.model.eps) == experiment.model


def test_no_two_experiments_have_one_name_and_none_has_a_setting_without_effect():
    every = []
    for path in CONFIGS:
        made = [getattr(module(path), name)() for name in experiment_names(module(path))]
        tuned = experiment_names(module(path), FineTuning)
        for one in (*made, *(getattr(module(path), name)() for name in tuned)):
            refuse_unused(one)
        every += [one.name for one in made]
    assert len(set(every)) == len(every) == 223


def test_dropped_layers_of_padded_texts_are_refused():
    sizes = dict(layers=2, embed=4, heads=1, head_dim=4, mlp=4, vocab=8, context=8)
    how = dict(data=Labelled("cola", "x", length=8), method=FineTune("x", drop=LayerDrop()))
    encoder = Experiment("task", BERTConfig(**sizes, head="classes"), steps=4, batch=4, **how)
    with pytest.raises(ValueError, match=r"drops layers .* instead of a BERTConfig"):
        check_experiment(encoder)
    check_experiment(dataclasses.replace(encoder, model=GPT2Config(**sizes, head="classes")))


DEFERRED = """
from __future__ import annotations
from dataclasses import dataclass, replace
from configs import demo
from train.config.experiment import Experiment
from train.plan.modifiers import Modifier
from train.plan.methods import Scratch

@dataclass(frozen=True)
class Own(Modifier, key='own_deferred'):
    size: int = 1

def mine() -> Experiment:
    return replace(demo.scratch(), name='mine', method=Scratch((Own(2),)))

def other() -> Elsewhere:
    return None
"""


def test_annotations_may_be_deferred(tmp_path):
    file = tmp_path / "deferred.py"
    file.write_text(DEFERRED)
    assert list(listed_experiments(file)) == ["mine"]
    mine = load_experiment(f"{file}:mine")
    assert mine.method.modifiers[0].size == 2
    # Loading it again executes the file again.
    again = load_experiment(f"{file}:mine", ["method.own_deferred=3"])
    assert again.method.modifiers[0].size == 3
    assert experiment_json(mine)["method"]["Scratch"]["own_deferred"] == 2
    # Another file must not replace the class.
    shutil.copy(file, tmp_path / "copied.py")
    message = r"copied.py, line 10: .* modifier own_deferred is registered"
    with pytest.raises(UserError, match=message):
        load_experiment(tmp_path / "copied.py:mine")
