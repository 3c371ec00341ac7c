"""Configs are Python files that return a frozen dataclass, and ``--set`` overrides its fields."""

import dataclasses
import importlib
import shutil
from pathlib import Path

import pytest

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


FAST = ("demo",)  # The plans of the other configs are of these kinds.


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem not in FAST), id=p.stem) for p in CONFIGS],
)
def test_every_experiment_loads_by_its_name(path):
    for name in experiment_names(module(path)):
        made = getattr(module(path), name)()
        # The corpora of the papers are not here.
        experiment = load_experiment(
            f"{ROOT / path}:{name}", ["steps=100_000"] if made.epochs else []
        )
        assert experiment.name.endswith(name)
        last = experiment.plan[-1]
        assert isinstance(last, Train)
        # LEMON scales the eps of the norms.
        assert dataclasses.replace(last.config, eps=experiment.model.eps) == experiment.model


def test_no_two_experiments_have_one_name():
    every = [
        getattr(module(path), name)().name
        for path in CONFIGS
        for name in experiment_names(module(path))
    ]
    assert len(set(every)) == len(every) == 223


def test_no_experiment_has_a_setting_without_effect():
    for path in CONFIGS:
        for name in experiment_names(module(path)):
            refuse_unused(getattr(module(path), name)())
        for name in experiment_names(module(path), FineTuning):
            refuse_unused(getattr(module(path), name)())


def test_labelled_samples_have_the_length_that_the_ledger_counts():
    sizes = dict(layers=1, embed=4, heads=1, head_dim=4, mlp=4, vocab=8, context=8)
    model = BERTConfig(**sizes, head="classes")
    data = Labelled("cola", "x", length=8)
    experiment = Experiment("task", model, steps=4, batch=4, data=data)
    check_experiment(experiment)
    short = dataclasses.replace(data, length=4)
    with pytest.raises(ValueError, match=r"counted with 8 positions, but .* data.length=4"):
        check_experiment(dataclasses.replace(experiment, data=short))
    method = FineTune("x", length=4)  # as in train.finetune
    check_experiment(dataclasses.replace(experiment, data=short, method=method))


def test_dropped_layers_of_padded_texts_are_refused():
    sizes = dict(layers=2, embed=4, heads=1, head_dim=4, mlp=4, vocab=8, context=8)
    data = Labelled("cola", "x", length=8)
    method = FineTune("x", drop=LayerDrop())
    model = BERTConfig(**sizes, head="classes")
    encoder = Experiment("task", model, steps=4, batch=4, data=data, method=method)
    with pytest.raises(ValueError, match=r"drops layers .* instead of a BERTConfig"):
        check_experiment(encoder)
    check_experiment(dataclasses.replace(encoder, model=GPT2Config(**sizes, head="classes")))


def test_annotations_may_be_deferred(tmp_path):
    (tmp_path / "deferred.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, replace\n"
        "from configs import demo\n"
        "from train.config.experiment import Experiment\n"
        "from train.plan.modifiers import Modifier\n"
        "from train.plan.methods import Scratch\n\n"
        "@dataclass(frozen=True)\n"
        "class Own(Modifier, key='own_deferred'):\n"
        "    size: int = 1\n\n"
        "def mine() -> Experiment:\n"
        "    return replace(demo.scratch(), name='mine', method=Scratch((Own(2),)))\n\n"
        "def other() -> Elsewhere:\n"
        "    return None\n"
    )
    assert list(listed_experiments(tmp_path / "deferred.py")) == ["mine"]
    config = f"{tmp_path / 'deferred.py'}:mine"
    mine = load_experiment(config)
    assert mine.method.modifiers[0].size == 2
    # Loading it again executes the file again.
    assert load_experiment(config, ["method.own_deferred=3"]).method.modifiers[0].size == 3
    assert experiment_json(mine)["method"]["Scratch"]["own_deferred"] == 2
    # Another file must not replace the class.
    shutil.copy(tmp_path / "deferred.py", tmp_path / "copied.py")
    with pytest.raises(
        UserError, match=r"copied.py, line 9: .* modifier own_deferred is registered"
    ):
        load_experiment(tmp_path / "copied.py:mine")
