"""The files of a run of a stranger may have wrong types, which are one line that names the file."""

import json
import re

import entrances_runs as valid
import jax
import numpy as np
import pytest
import tiny
from checkpoints import CONFIG
from orbax.checkpoint import v1 as ocp
from PIL import Image

from jaxgrow.checkpoints.io.checksums import seal
from train import predict, scaling, show
from train.common.errors import UserError
from train.extras.evaluation import published
from train.state.mesh import Mesh
from train.state.model import TrainState
from train.store import checkpoint
from train.store.workdir import Workdir


def changed(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("phases", [3, [3], [{}], [{"phase": 1, "parameters": 2, "flops": 3}]])
def test_wrong_phases_are_refused(tmp_path, phases):
    changed(valid._run("result.json")(tmp_path), phases=phases)
    with pytest.raises(UserError, match=r"result\.json"):
        show.plan_row(str(tmp_path / "run"))


@pytest.mark.parametrize("values", [{"steps": "1"}, {"bytes": "1"}, {"model": []}])
def test_wrong_values_of_a_result_are_refused(tmp_path, values):
    file = valid._run("result.json")(tmp_path)
    changed(file, **values)
    with pytest.raises(UserError, match=r"result\.json is damaged"):
        _ = Workdir(file.parent).result


@pytest.mark.parametrize("data", [3, {"Labelled": 3}])
def test_wrong_data_of_a_config_are_refused(tmp_path, data):
    file = valid._run("config.json")(tmp_path)
    changed(file, data=data)
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        _ = Workdir(file.parent).config


@pytest.mark.parametrize(
    "values",
    [{"parameters": "9"}, {"parameters": -1}, {"saved_frontier": "ab"}, {"below_frontier": 3}],
)
def test_wrong_values_of_a_comparison_are_refused(tmp_path, values):
    file = valid._compared(tmp_path)
    (run,) = json.loads(file.read_text())["rows"]
    changed(file, rows=[run | values])
    with pytest.raises(UserError, match=r"is not a compare\.json"):
        scaling.read_savings(f"a={file}")


@pytest.mark.parametrize("values", [{}, {"task": 3}, {"task": "sst2", "path": "a", "length": "9"}])
def test_wrong_settings_of_a_fine_tuning_are_refused(tmp_path, values):
    file = valid._run("config.json")(tmp_path)
    changed(file, data={"Labelled": values})
    with pytest.raises(UserError, match=r"config\.json"):
        predict._data(file.parent)


def test_a_wrong_record_of_a_checkpoint_is_refused(tmp_path):
    ocp.save_checkpointables(
        str(tmp_path / "1"), {"models": {"a": np.zeros(2)}}, custom_metadata={"phase": 0}
    )
    seal(tmp_path / "1")  # a stranger can do this as well
    with pytest.raises(UserError, match=r"the record of the checkpoint .* is damaged"):
        checkpoint.checkpoint_record(tmp_path / "1")


@pytest.mark.parametrize(("change", "says"), [
    (lambda x: x[..., :1], "cannot be read"),
    (lambda x: {"a": x}, "cannot be read"),
    (lambda x: x.astype("complex64"), "cannot be read|complex"),
], ids=["shape", "structure", "complex"])  # fmt: skip
def test_wrong_arrays_of_a_checkpoint_are_refused(tmp_path, change, says):
    params = tiny.params(CONFIG, 0, "float32")
    wrong = params | {"token_embedding": change(params["token_embedding"])}
    models = {"large": {"params": wrong}}
    ocp.save_checkpointables(
        str(tmp_path / "1"), {"models": models}, custom_metadata={"data": {"step": 1}}
    )
    seal(tmp_path / "1")
    expected = {"large": TrainState(jax.tree.map(jax.numpy.asarray, params), None, CONFIG)}
    mesh = Mesh().over(jax.devices()[:1])
    with pytest.raises(UserError, match=f"^the checkpoint .*({says})"):
        checkpoint.read_models(tmp_path / "1", expected, mesh)


@pytest.mark.interop
@pytest.mark.parametrize(("path", "says"), [
    ("{}/secret.jsonl", "which is not in this folder; correct data_files in its README.md"),
    ("../../../secret.jsonl", "is not the name of a file in this folder"),
    ("file://{}/secret.jsonl", "which is not a file in this folder"),
    ("http://127.0.0.1:9/a.jsonl", "'http://127.0.0.1:9/a.jsonl', which is not a file in this"),
    ("zip://*::{}/secret.zip", "which is not a file in this folder; correct data_files in"),
    ("linked.jsonl", "outside the folder. Replace the link by the file"),
    ("own.jsonl", None),
])  # fmt: skip
def test_a_copied_dataset_names_no_files_outside(tmp_path, monkeypatch, path, says):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "data" / "nyu-mll" / "blimp"
    copy.mkdir(parents=True)
    for file in (tmp_path / "secret.jsonl", copy / "own.jsonl"):
        file.write_text(json.dumps({"sentence_good": file.name}) + "\n")
    (copy / "linked.jsonl").symlink_to(tmp_path / "secret.jsonl")
    about = f"- config_name: n\n  data_files:\n  - split: train\n    path: {path}\n"
    (copy / "README.md").write_text(f"---\nconfigs:\n{about.format(tmp_path)}---\n")
    if path != "linked.jsonl":
        (copy / "linked.jsonl").unlink()
    arguments = ("nyu-mll/blimp", "n", "blimp_n", ["train"], tmp_path / "data")
    if says is None:
        found, _ = published.local_dataset(*arguments)
        assert found["train"]["sentence_good"] == ["own.jsonl"]
    else:
        with pytest.raises(UserError, match=re.escape(says)):
            published.local_dataset(*arguments)


@pytest.mark.interop
@pytest.mark.parametrize(
    ("name", "says"),
    [("a.parquet", "'picture' has values of type Image"), ("a.png", "imagefolder")],
)
def test_a_copied_dataset_has_no_images_that_are_decoded(tmp_path, monkeypatch, name, says):
    """A row of images may name a file outside, or start Ghostscript."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "data" / "nyu-mll" / "blimp"
    copy.mkdir(parents=True)
    if name == "a.png":
        Image.new("RGB", (4, 4)).save(copy / name)
    else:
        rows = datasets.Dataset.from_list([{"picture": {"path": "/etc/hostname", "bytes": None}}])
        rows.cast_column("picture", datasets.Image()).to_parquet(copy / name)
    with pytest.raises(UserError, match=says):
        published.local_dataset("nyu-mll/blimp", None, "blimp_n", ["train"], tmp_path / "data")
