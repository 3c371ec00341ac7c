"""Settings of the execution may change while a run is stopped; those of the objective may not."""

import json
import re
import shutil
from dataclasses import replace

import chex
import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import LlamaConfig, ViTConfig
from train import pretrain
from train.analysis.runs import refuse_unlike
from train.common.errors import UserError
from train.config.experiment import experiment_json
from train.config.overrides import with_overrides
from train.config.resuming import binding_settings, class_of, resume_conflicts
from train.extras.images.images import Images
from train.extras.labelled.task import Labelled
from train.plan.methods import Growing, Scratch
from train.plan.modifiers import DropLayers
from train.store.workdir import Workdir, load_params

VIT = ViTConfig(
    image=8, patch=4, channels=3, classes=7, layers=2, embed=8, heads=2, head_dim=4, mlp=16
)
# Gradients are summed in another order, in float32.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    experiment = runs.experiment(folder, checkpoint_every=2)
    pretrain.run_experiment(experiment, folder / "run")
    return experiment, folder / "run"


def model(experiment, **changes):
    return replace(experiment, model=replace(experiment.model, **changes))


def test_execution_changes_on_resume_and_the_record_lists_it(tmp_path, capsys, whole):
    experiment = whole[0]
    runs.killed(experiment, tmp_path / "run", 2)
    other = replace(
        model(experiment, remat="full", scan_layers=False), accumulate=2, eval_every=2, keep_every=1
    )
    runs.killed(other, tmp_path / "run", 4)
    assert "accumulate is 2 from step 2 on; it was 1" in capsys.readouterr().err
    result = pretrain.run_experiment(replace(other, accumulate=1), tmp_path / "run")
    changed = {(c["step"], c["setting"]): (c["before"], c["after"]) for c in result["changes"]}
    assert changed == {
        (2, "accumulate"): (1, 2),
        (2, "eval_every"): (4, 2),
        (2, "keep_every"): (0, 1),
        (2, "model.remat"): ("products", "full"),
        (2, "model.scan_layers"): (True, False),
        (4, "accumulate"): (2, 1),
    }
    assert json.loads((tmp_path / "run/config.json").read_text())["changes"] == result["changes"]
    chex.assert_trees_all_close(load_params(tmp_path / "run"), load_params(whole[1]), atol=ROUNDING)


def test_remat_and_attention_change_no_bit_of_a_resumed_run(tmp_path, whole):
    runs.killed(whole[0], tmp_path / "run", 4)
    changed = model(whole[0], remat="full", attention="xla")
    pretrain.run_experiment(replace(changed, eval_every=3), tmp_path / "run")
    chex.assert_trees_all_equal(load_params(tmp_path / "run"), load_params(whole[1]))


def test_a_change_that_is_lost_with_its_steps_is_listed_at_the_step_of_the_next_start(
    tmp_path, whole
):
    runs.killed(whole[0], tmp_path / "run", 2)
    run = Workdir(tmp_path / "run")
    corpus = run.config["corpus"]
    for accumulate in (4, 2):
        run.begin(replace(whole[0], accumulate=accumulate), corpus, {}, 2)
    (change,) = run.config["changes"]
    assert change == {"step": 2, "setting": "accumulate", "before": 1, "after": 2}
    run.begin(whole[0], corpus, {}, 2)
    assert "changes" not in run.config


def leaves(node, name=""):
    """Yield the name and the value of every setting of a ``config.json``."""
    if not isinstance(node, dict | list) or not node:
        yield name, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from leaves(value, f"{name}.{key}".lstrip("."))


def with_value(node, name, value):
    """Return a copy of a ``config.json`` with another value of one setting."""
    key, _, rest = name.partition(".")
    copy = list(node) if isinstance(node, list) else dict(node)
    at = int(key) if isinstance(node, list) else key
    copy[at] = with_value(node[at], rest, value) if rest else value
    return copy


OF_ALL_KINDS = [
    {},
    {"data": Images("folder", "pictures"), "model": VIT},
    {"data": Labelled("cola", "texts")},
    {"method": runs.VCYCLE},
    {"method": Growing(runs.MODEL), "model": runs.LARGE},
    {"method": Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity())),))},
    {"model": LlamaConfig(
        vocab=256, context=8, layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=16,
        experts=2, active=1, capacity=1.25,
    )},
]  # fmt: skip


@pytest.mark.parametrize("changes", OF_ALL_KINDS)
def test_every_setting_does_on_resume_what_its_class_says(tmp_path, monkeypatch, changes):
    """The objective is refused; another setting is recorded with the step of its change."""
    experiment = runs.experiment(tmp_path, **changes)
    run, there = Workdir(tmp_path / "run"), experiment_json(experiment)
    run.folder.mkdir()
    run.log.write_text("{}\n")
    found = set()
    for name, before in leaves(there):
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


def test_moved_data_are_free_only_if_they_are_known_to_be_the_same(tmp_path, whole):
    there = experiment_json(whole[0])
    other = with_value(there, "data.Data.path", "elsewhere")
    assert resume_conflicts(there, other, known=True) == []
    assert resume_conflicts(there, other) != []


# For each setting of the execution a value that changes it, here on 8 devices.
EXECUTED = {
    "accumulate": 2,
    "parallel": "pmap",
    "mesh.data": 4,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "mesh.context": 2,
    "mesh.gradients": "layer",
    "model.remat": "full",
    "model.attention": "xla",
    "model.scan_layers": False,
    "on_nan": "skip",
    "data.cache": "other",
}
UNTRIED = {
    "mesh.expert": "the model has no experts",
    "mesh.replica": "it needs several hosts",
    "most_skipped": "it only matters after steps that are not finite",
    "model.head_positions": "it is for longer contexts",
}


def test_every_setting_of_the_execution_is_tried(whole):
    there = experiment_json(whole[0])
    own = {name for name, _ in leaves(there) if class_of(name, there) == "execution"}
    assert {name.replace("data.Data", "data") for name in own} == EXECUTED.keys() | UNTRIED.keys()


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(name, marks=[] if name in ("mesh.fsdp", "on_nan") else pytest.mark.slow)
        for name in EXECUTED
    ],
)
def test_a_run_resumed_with_another_execution_ends_alike(tmp_path, whole, setting):
    value = EXECUTED[setting]
    value = str(tmp_path / value) if setting == "data.cache" else value
    shutil.copytree(whole[1], tmp_path / "run", ignore=shutil.ignore_patterns("8", "result.json"))
    other = with_overrides(whole[0], [f"{setting}={value}"])
    result = pretrain.run_experiment(other, tmp_path / "run")
    (change,) = result["changes"]
    assert (change["step"], change["after"]) == (6, value)
    chex.assert_trees_all_close(load_params(tmp_path / "run"), load_params(whole[1]), atol=ROUNDING)


def test_the_objective_stays_refused(tmp_path, whole):
    runs.killed(whole[0], tmp_path / "run", 2)
    for other in (
        replace(whole[0], batch=4),
        replace(whole[0], seed=1),
        model(whole[0], dtype="bfloat16"),
        model(whole[0], eps=1e-4),
        replace(whole[0], optim=replace(whole[0].optim, peak_lr=0.1)),
    ):
        with pytest.raises(UserError, match="contains a run of another config"):
            pretrain.run_experiment(other, tmp_path / "run")


def test_execution_of_the_small_models_of_a_method_is_free(tmp_path):
    one = runs.experiment(tmp_path, method=Growing(runs.SMALL))
    other = replace(one, method=Growing(replace(runs.SMALL, remat="full")))
    assert resume_conflicts(experiment_json(one), experiment_json(other)) == []
    third = replace(one, method=Growing(replace(runs.SMALL, eps=1e-3)))
    assert resume_conflicts(experiment_json(one), experiment_json(third)) == [
        "method.Growing.small.eps: 1e-05 and 0.001"
    ]


@pytest.mark.parametrize(
    "change, setting",
    [
        ({"method": Scratch((DropLayers(LayerDrop()),))}, "accumulate"),
        ({"method": Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity())),))}, "eval_batches"),
        (
            {
                "model": LlamaConfig(
                    vocab=256, context=8, layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=16,
                    experts=2, active=1,
                )
            },
            "accumulate",
        ),
    ],
)  # fmt: skip
def test_execution_that_changes_the_computation_is_refused_with_the_reason(
    tmp_path, change, setting
):
    one = runs.experiment(tmp_path, **change)
    other = replace(one, **{setting: 4})
    (line,) = resume_conflicts(
        experiment_json(one), experiment_json(other), binding_settings(other)
    )
    assert line.startswith(f"{setting}: ") and line.endswith(f"({binding_settings(one)[setting]})")


def test_runs_whose_evaluation_changed_are_not_compared(tmp_path, whole):
    config = json.loads((whole[1] / "config.json").read_text())
    change = {"step": 4, "setting": "eval_batches", "before": 2, "after": 1}
    refuse_unlike([("one", config), ("two", config)])
    with pytest.raises(UserError, match="eval_batches of two changed at step 4"):
        refuse_unlike([("one", config), ("two", config | {"changes": [change]})])
