"""Settings of the execution may change while a run is stopped; those of the objective may not."""

import json
import re
from dataclasses import replace

import chex
import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import LlamaConfig, ViTConfig
from train import pretrain
from train.common.errors import UserError
from train.config.experiment import experiment_json
from train.config.resuming import binding_settings, class_of, resume_conflicts
from train.extras.images.images import Images
from train.extras.labelled.task import Labelled
from train.extras.run_params import load_params
from train.plan.methods import Growing, Scratch
from train.plan.modifiers import DropLayers
from train.store.workdir import Workdir

VIT = ViTConfig(
    **dict(image=8, patch=4, channels=3, classes=7, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
)
# Gradients are summed in another order, in float32.
ROUNDING = 1e-5


def test_execution_changes_on_resume_and_the_record_lists_it(tmp_path, capsys, whole_run):
    experiment, run = whole_run[0], tmp_path / "run"
    runs.killed(experiment, run, 2)
    model = replace(experiment.model, remat="full", scan_layers=False)
    other = replace(experiment, model=model, accumulate=2, eval_every=2, keep_every=2)
    runs.killed(other, run, 4)
    assert "accumulate is 2 from step 2 on; it was 1" in capsys.readouterr().err
    result = pretrain.run_experiment(replace(other, eval_every=4), run)
    changed = {(c["step"], c["setting"]): (c["before"], c["after"]) for c in result["changes"]}
    assert changed == {
        (2, "accumulate"): (1, 2),
        (2, "eval_every"): (4, 2),
        (2, "keep_every"): (1, 2),
        (2, "model.remat"): ("products", "full"),
        (2, "model.scan_layers"): (True, False),
        (4, "eval_every"): (2, 4),
    }
    assert json.loads((run / "config.json").read_text())["changes"] == result["changes"]
    chex.assert_trees_all_close(load_params(run), load_params(whole_run[1]), atol=ROUNDING)


def test_a_change_that_is_lost_with_its_steps_is_listed_at_the_step_of_the_next_start(
    tmp_path, whole_run
):
    runs.killed(whole_run[0], tmp_path / "run", 2)
    run = Workdir(tmp_path / "run")
    corpus = run.config["corpus"]
    for accumulate in (4, 2):
        run.begin(replace(whole_run[0], accumulate=accumulate), corpus, {}, 2)
    (change,) = run.config["changes"]
    assert change == {"step": 2, "setting": "accumulate", "before": 1, "after": 2}
    run.begin(whole_run[0], corpus, {}, 2)
    assert "changes" not in run.config


def with_value(node, name, value):
    """Return a copy of a ``config.json`` with another value of one setting."""
    key, _, rest = name.partition(".")
    copy = list(node) if isinstance(node, list) else dict(node)
    at = int(key) if isinstance(node, list) else key
    copy[at] = with_value(node[at], rest, value) if rest else value
    return copy


EXPERTS = LlamaConfig(
    **dict(vocab=256, context=8, layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=16),
    **dict(experts=2, active=1),
)
MEASURED = Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity())),))
OF_ALL_KINDS = [
    {},
    {"data": Images("folder", "pictures"), "model": VIT},
    {"data": Labelled("cola", "texts")},
    {"method": runs.VCYCLE},
    {"method": Growing(runs.MODEL), "model": runs.LARGE},
    {"method": MEASURED},
    {"model": replace(EXPERTS, capacity=1.25)},
]


@pytest.mark.parametrize("changes", OF_ALL_KINDS)
def test_every_setting_does_on_resume_what_its_class_says(tmp_path, monkeypatch, changes):
    """The objective is refused; another setting is recorded with the step of its change."""
    experiment = runs.experiment(tmp_path, **changes)
    run, there = Workdir(tmp_path / "run"), experiment_json(experiment)
    run.folder.mkdir()
    run.log.write_text("{}\n")
    found = set()
    for name, before in runs.setting_values(there):
        after = f"{before} changed"
        other = with_value(there, name, after)
        (run.folder / "config.json").write_text(json.dumps(there | {"corpus": {"name": "x"}}))
        monkeypatch.setattr("train.store.workdir.experiment_json", lambda _, other=other: other)
        kind = "objective" if name in binding_settings(experiment) else class_of(name, there)
        found.add(kind)
        if kind == "objective":
            with pytest.raises(UserError, match=re.escape(f"there and here: {name}: ")):
                run.claim(experiment)
            continue
        run.claim(experiment)
        (line,) = run.begin(experiment, {"name": "x"}, {}, 3)
        assert line == f"{name} is {after!r} from step 3 on; it was {before!r}"
        (change,) = run.config["changes"]
        assert change == {"step": 3, "setting": name, "before": before, "after": after}
    assert found == {"objective", "execution", "observation", "place"}


def test_moved_data_are_free_only_if_they_are_known_to_be_the_same(tmp_path, whole_run):
    there = experiment_json(whole_run[0])
    other = with_value(there, "data.Data.path", "elsewhere")
    assert resume_conflicts(there, other, known=True) == []
    assert resume_conflicts(there, other) != []


def test_execution_of_the_small_models_of_a_method_is_free(tmp_path):
    one, *others = (
        experiment_json(runs.experiment(tmp_path, method=Growing(replace(runs.SMALL, **change))))
        for change in ({}, {"remat": "full"}, {"eps": 1e-3})
    )
    assert [resume_conflicts(one, other) for other in others] == [
        *([], ["method.Growing.small.eps: 1e-05 and 0.001"])
    ]


@pytest.mark.parametrize(("change", "setting"), [
    ({"method": Scratch((DropLayers(LayerDrop()),))}, "accumulate"),
    ({"method": MEASURED}, "eval_batches"),
    ({"model": EXPERTS}, "accumulate"),
])  # fmt: skip
def test_execution_that_changes_the_computation_is_refused_with_the_reason(
    tmp_path, change, setting
):
    one = runs.experiment(tmp_path, **change)
    other = replace(one, **{setting: 4})
    both = map(experiment_json, (one, other))
    (line,) = resume_conflicts(*both, binding_settings(other))
    assert line.startswith(f"{setting}: ") and line.endswith(f"({binding_settings(one)[setting]})")
