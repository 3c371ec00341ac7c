"""Configs are Python files that return a frozen dataclass, and ``--set`` overrides its fields."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from train.common.errors import UserError
from train.config.experiment import described_differences, experiment_json, load_experiment
from train.config.resuming import resume_conflicts
from train.data.text import Data
from train.extras.images.images import Images
from train.plan.methods import Scratch, TrainStage, VCycle
from train.state.mesh import Mesh
from train.state.optim import Optim

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    # Configs import each other, as under `python -m` at the repository root.
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def path(tmp_path):
    return runs.script(tmp_path, runs.experiment(tmp_path, method=runs.VCYCLE))


def test_an_experiment_has_settings_of_its_own_after_its_name():
    demo = f"{ROOT / 'configs' / 'demo.py'}:scratch"
    made = load_experiment(f"{demo}:optim.peak_lr=2e-2:name=again", ["optim.peak_lr=1", "steps=7"])
    assert (made.optim.peak_lr, made.name, made.steps) == (2e-2, "again", 7)


def test_an_unknown_experiment_is_refused_with_known_names():
    path = ROOT / "configs" / "wikipedia.py"
    others = "scratch, muon, muon_deepen, vcycle, vcycle_paper, bert_scratch, bert_vcycle"
    for text, wrong, near in (
        (f"{path}:nothing", "has no experiment 'nothing'", ""),
        (f"{path}:munn", "has no experiment 'munn'", "; did you mean muon?"),
        (str(path), "has 7 experiments", ""),
    ):
        with pytest.raises(UserError) as found:
            load_experiment(text)
        said = f"{path} {wrong}; give one, such as {path}:scratch, of {others}{near}"
        assert str(found.value) == said


def test_a_config_in_another_place_is_proposed(monkeypatch, tmp_path):
    for folder, config, near in (
        (ROOT, "configs/demo:muon", "configs/demo.py?"),
        (tmp_path, "configs/demo.py:muon", f"{ROOT}/configs/demo.py?"),
    ):
        monkeypatch.chdir(folder)
        says = rf"there is no config configs/demo.* Did you mean {re.escape(near)}"
        with pytest.raises(UserError, match=says):
            load_experiment(config)


def test_an_experiment_survives_its_file(tmp_path):
    experiment = runs.experiment(tmp_path, method=runs.VCYCLE)
    assert load_experiment(runs.script(tmp_path, experiment)) == experiment


@pytest.mark.parametrize(("override", "value"), [
    ("seed=3", 3),
    ("name=7", "7"),
    ("name=true", "true"),
    ("parallel=pmap", "pmap"),
    ("mesh.fsdp=2", 2),
    ("optim.peak_lr=3e-4", 3e-4),
    ("optim.peak_lr=1", 1.0),
    ("data.path=a=b", "a=b"),
    ("data.path=None", None),
    ("method.alpha=0.5", 0.5),
    ("method.up.1.lr=3", 3.0),
    ("method.up.0.warmup=5", 5),
    ("method.groupings.0.mlp=((0, 3), (1, 2))", ((0, 3), (1, 2))),
    ("steps=1e3", 1000),
    ("model.tied=false", False),
    ("method.correction=true", True),
])  # fmt: skip
def test_set_overrides_one_field(tmp_path, override, value):
    base = runs.experiment(tmp_path, method=runs.VCYCLE)
    base = replace(base, model=replace(base.model, mlp=4))
    if override == "data.path=None":  # the only source without a path
        base = replace(base, data=replace(base.data, source="stdlib"))
    found = experiment = load_experiment(runs.script(tmp_path, base), [override])
    for key in override.partition("=")[0].split("."):
        found = found[int(key)] if key.isdigit() else getattr(found, key)
    assert found == value and type(found) is type(value)
    assert len(described_differences(experiment_json(base), experiment_json(experiment))) == 1


def test_overrides_are_applied_in_order(path):
    made = load_experiment(path, ["steps=3", "steps=5", "method.up.0.lr=3"])
    assert made.steps == 5
    assert made.plan[2].optim.peak_lr == 3 * load_experiment(path).optim.peak_lr


def test_overrides_are_checked_together_in_any_order(tmp_path, path):
    """Each override alone is invalid, and all of them together are valid."""
    stdlib = runs.experiment(tmp_path, data=Data(), name="stdlib")
    config = runs.script(tmp_path, stdlib)
    expected = replace(stdlib, data=replace(stdlib.data, source="text", path="there"))
    text = ["data.source=text", "data.path=there"]
    there_and_back = ["data.source=tfds", "data.name=a", *text, "data.name=None"]
    for overrides in (text, there_and_back):
        assert load_experiment(config, overrides) == expected
    made = load_experiment(config, ["batch=6", "accumulate=3", *reversed(text)])
    assert made == replace(expected, batch=6, accumulate=3)
    deep = load_experiment(
        path, ["method.up.0.lr=-1", "method.up.1.warmup=3", "method.up.0.lr=3", "model.mlp=32"]
    )
    first = load_experiment(path).method.up[0]
    assert [(s.lr, s.warmup) for s in deep.method.up] == [(3, first.warmup), (1, 3)]


def test_an_error_names_the_overrides_that_it_is_about(tmp_path):
    config = runs.script(tmp_path, runs.experiment(tmp_path, data=Data()))
    for overrides, about, says in (
        ("steps=3 data.source=text", "data.source=text", "data.source=text needs data.path"),
        ("data.source=tfds seed=2 data.path=x", "data.source=tfds data.path=x", "data.source=tfds needs data.name"),
        ("batch=9 model.mlp=8 accumulate=2", "batch=9 accumulate=2", "a batch of 9 cannot be divided into 2"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(f"--set {about}: {says}")):
            load_experiment(config, overrides.split())


def test_a_small_model_that_runs_differently_is_said(capsys):
    """`--set model.dtype` does not change the small model that the config has built."""
    large, small = (f"{name}.dtype=bfloat16" for name in ("model", "method.small"))
    load_experiment("configs/demo.py:muon_deepen", [large, small])
    assert capsys.readouterr().err == ""
    load_experiment("configs/demo.py:muon_deepen", [large])
    said = capsys.readouterr().err
    assert "its model has dtype=float32, but model.dtype=bfloat16" in said
    assert said.count("\n") == 1 and "such as method.small" in said


def test_a_warm_up_longer_than_its_phase_is_said(tmp_path, path, capsys):
    scratch = runs.script(tmp_path, runs.experiment(tmp_path, name="scratch"))
    says = "tiny: train large has 2 steps, but a warm-up of 3 steps: its learning rate never reaches the peak\n"
    # The phases of the first config have 2, 4 and 4 steps, and the phase of the second one has 8.
    for config, warmup, said in ((path, 2, ""), (path, 3, says), (scratch, 8, "")):
        load_experiment(config, [f"optim.warmup={warmup}"])
        assert capsys.readouterr().err == said
    load_experiment(scratch, ["optim.warmup=9"])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("override", "says"), [
    ("optim.peak_rl=1", "Optim has no field 'peak_rl'; did you mean optim.peak_lr?"),
    ("optim.warmu=1", "did you mean optim.warmup or"),
    ("stepz=1", "Experiment has no field 'stepz'; did you mean steps"),
    ("lr=1", "Experiment has no field 'lr'; did you mean optim.peak_lr or method.down.0.lr or method.up.0.lr"),
    ("optim.lr=1", "Optim has no field 'lr'; did you mean optim.peak_lr or"),
    ("model.fsdp=1", "GPT2Config has no field 'fsdp'; did you mean mesh.fsdp?"),
    ("theta=1", "Experiment has no field 'theta'; did you mean method.down.0.drop.theta or"),
    ("model.qqqqq=1", "no field has a similar name; `python -m train.pretrain CONFIG --show` prints all fields"),
    ("method.dwon.0.lr=1", "VCycle has no field 'dwon'; did you mean method.down"),
    ("method.up.2.lr=1", "'2' is not an index from 0 to 1"),
    ("method.up.first.lr=1", "'first' is not an index from 0 to 1"),
    ("name.first=1", "the value 'tiny' has no field 'first'"),
    ("steps", "--set takes a.b=c, not 'steps'"),
    ("steps=many", "--set steps: expected int, but got 'many'"),
    ("steps=1.5", "expected int, but got '1.5'"),
    ("steps=1e999", "expected int, but got '1e999'"),
    ("steps=True", "expected int, but got 'True'"),
    ("steps={[]}", "expected int, but got '{[]}'"),
    ("model.tied=1", "expected bool, but got '1'"),
    ("optim.peak_lr=fast", "expected float, but got 'fast'"),
    ("parallel=tpu", "expected 'mesh' or 'pmap', but got 'tpu'"),
    ("method=VCycle",
     "expected Continue or FineTune or Growing or Inherit or Scratch or VCycle, but got 'VCycle'; set it to one of them"),
    ("data=Images", "expected Data or Images or Labelled, but got 'Images'; set it to one of them"),
    ("method.up=(1, 2)", "expected tuple[TrainStage, ...], but got '(1, 2)'"),
    ("steps=0", "steps must be at least 1, but is 0"),
    ("seed=-1", "seed must be between 0 and 2^32 - 1, but is -1"),
    ("optim.b1=2", "b1 must be at least 0 and less than 1, but is 2.0"),
    ("optim.b2=1", "b2 must be at least 0 and less than 1, but is 1.0"),
    ("optim.muon_momentum=1", "muon_momentum must be at least 0 and less than 1, but is 1.0"),
    ("optim.peak_lr=-1", "peak_lr must be positive and finite, but is -1.0"),
    ("optim.peak_lr=1e999", "peak_lr must be positive and finite, but is inf"),
    ("optim.clip=0", "clip must be positive and finite, but is 0.0"),
    ("optim.muon_rms=1e999", "muon_rms must be positive and finite, but is inf"),
    ("optim.weight_decay=-1", "weight_decay must be finite and not negative, but is -1.0"),
    ("optim.weight_decay=1e999", "weight_decay must be finite and not negative, but is inf"),
    ("optim.eps=-1e-8", "eps must be finite and not negative, but is -1e-08"),
    ("optim.warmup=-1", "warmup must be finite and not negative, but is -1"),
    ("model.layers=1000000000000", "model.layers must be at most 16,384, but is 1,000,000,000,000"),
    ("optim.decay=-1", "decay must be between 0 and 1, but is -1.0"),
    ("optim.floor=1.5", "floor must be between 0 and 1, but is 1.5"),
    ("method.down.0.steps=-0.5", "at least 0, but are -0.5"),
    ("method.down.0.steps=1e999", "at least 0, but are inf"),
    ("data.valid_fraction=0.7", "valid_fraction must be between 0 and 0.5, but is 0.7"),
    ("model.layers=0", "layers is 0, less than 1"),
    ("model.heads=7", "axis 'heads': far pairs: 7 is not a multiple of 2"),
    ("model.layers=3", "axis 'layers': adjacent pairs: 3 is not a multiple of 2"),
    ("method.groupings.0.mlp=((0, 1), (1, 2))", "in two groups: [1]"),
    ("method.moments_down=asymmetric",
     "axis 'heads': policy 'asymmetric' needs a growth that copies units, but the map from 2 to 1 units"),
])  # fmt: skip
def test_set_refuses(path, override, says):
    with pytest.raises(UserError, match=re.escape(says)):
        load_experiment(path, [override])


@pytest.mark.parametrize(("text", "says"), [
    ("def config(:", "SyntaxError: "),
    ("x = 1", "defines no experiment; write a function config() -> Experiment"),
    ("def config(): return {'steps': 3}", "config() must return an Experiment, not dict"),
    ("def config():\n    return 1 / 0", "broken.py, line 2: ZeroDivisionError: "),
    ("import no_such_module", "broken.py, line 1: ModuleNotFoundError: "),
    ("from train.state.optim import Optim\nconfig = lambda: Optim(peak_rl=1)", "line 2: TypeError: "),
    ("from train.state.optim import Optim\nconfig = lambda: Optim(peak_lr='x')", "line 2: TypeError: "),
])  # fmt: skip
def test_a_broken_config_is_named_with_its_line(tmp_path, text, says):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        load_experiment(tmp_path / "broken.py")
    assert str(tmp_path / "broken.py") in str(error.value)


def test_wrong_types_are_refused_in_files(tmp_path):
    method = VCycle(down=(TrainStage("half"),))
    wrong = runs.experiment(tmp_path, name=3, method=method, parallel="tpu")
    with pytest.raises(UserError) as error:
        load_experiment(runs.script(tmp_path, wrong))
    for says in (
        "name: expected str, but got 3",
        "parallel: expected 'mesh' or 'pmap', but got 'tpu'",
        "method.down.0.steps: expected float, but got 'half'",
    ):
        assert says in str(error.value)


def test_differences_name_fields_and_methods(tmp_path):
    one = runs.experiment(tmp_path)
    assert experiment_json(one)["optim"].keys() == {f.name for f in dataclasses.fields(one.optim)}

    def differences(**changes):
        return described_differences(experiment_json(one), experiment_json(replace(one, **changes)))

    assert differences() == differences(method=Scratch()) == []
    optim = replace(one.optim, peak_lr=0.5, name="muon")
    assert differences(steps=9, optim=optim) == [
        *("optim.name: 'adamw' and 'muon'", "optim.peak_lr: 0.01 and 0.5", "steps: 8 and 9")
    ]
    assert differences(method=VCycle())


def test_of_all_fields_those_that_decide_nothing_may_differ(tmp_path):
    """Each field of the experiment and of its data is changed separately."""
    one = runs.experiment(tmp_path)
    other = {"parallel": "pmap", "mesh": Mesh(fsdp=2), "name": "other", "accumulate": 2}
    other |= {"method": VCycle(), "data": Images(), "optim": Optim(), "attend": "document"}
    other |= {"model": replace(one.model, mlp=8), "source": "stdlib", "whole_words": True}
    other |= {"valid_fraction": 0.3, "checkpoint_minutes": 0.5, "epochs": 2.0, "seconds": 2.0}
    other |= {"ids": "uint32", "keep_every": 2, "on_nan": "skip", "ramp": (0.5,), "seed": 1}
    # Settings without which a field has no effect, or is refused.
    needed = {"epochs": {"steps": 0}, "seconds": {"steps": 0}, "ids": {"source": "tokens"}}

    def free(node, put):
        kept = set()
        for f in dataclasses.fields(node):
            old = getattr(node, f.name)
            new = other.get(f.name, old * 2 if isinstance(old, int) and old else f"{old}x")
            changed = put(replace(node, **{f.name: new} | needed.get(f.name, {})))
            both = experiment_json(one), experiment_json(changed)
            assert described_differences(*both), f.name
            kept |= set() if resume_conflicts(*both) else {f.name}
        return kept

    changing = "accumulate eval_every eval_batches log_every checkpoint_every checkpoint_minutes"
    changing += " keep_every on_nan most_skipped parallel mesh loggers"
    assert free(one, lambda e: e) == {*changing.split()}
    assert free(one.data, lambda data: replace(one, data=data)) == {"cache"}


def test_nothing_in_an_experiment_can_be_changed_in_place(path):
    experiment = load_experiment(path)
    for part in (
        experiment,
        experiment.model,
        experiment.data,
        experiment.optim,
        experiment.method,
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)
