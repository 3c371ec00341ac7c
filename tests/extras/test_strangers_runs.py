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

READERS = {
    "a row": (lambda run: show.plan_row(str(run)), r"result\.json"),
    "a result": (lambda run: Workdir(run).result, r"result\.json is damaged"),
    "a config": (lambda run: Workdir(run).config, r"config\.json is damaged"),
    "data": (lambda run: predict._data(run), r"config\.json"),
}
WRONG = [
    *(
        ("a row", {"phases": x})
        for x in (3, [3], [{}], [{"phase": 1, "parameters": 2, "flops": 3}])
    ),
    *(("a result", values) for values in ({"steps": "1"}, {"bytes": "1"}, {"model": []})),
    *(("a config", {"data": x}) for x in (3, {"Labelled": 3})),
    ("data", {"data": {"Labelled": {}}}),
    ("data", {"data": {"Labelled": {"task": 3}}}),
    ("data", {"data": {"Labelled": {"task": "sst2", "path": "a", "length": "9"}}}),
]


@pytest.mark.parametrize(("reader", "values"), WRONG)
def test_wrong_values_of_a_run_are_refused(tmp_path, reader, values):
    read, says = READERS[reader]
    file = valid._run("result.json" if "result" in says else "config.json")(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(UserError, match=says):
        read(file.parent)


def test_wrong_values_of_a_comparison_are_refused(tmp_path):
    file = valid._compared(tmp_path)
    (run,) = json.loads(file.read_text())["rows"]
    wrong = [{"parameters": "9"}, {"parameters": -1}, {"saved_frontier": "ab"}]
    for values in (*wrong, {"below_frontier": 3}):
        file.write_text(json.dumps({"rows": [run | values]}))
        with pytest.raises(UserError, match=r"is not a compare\.json"):
            scaling.read_savings(f"a={file}")


def saved_step(folder, models, **record):
    """Save and seal a checkpoint, as a stranger can do as well."""
    ocp.save_checkpointables(str(folder), {"models": models}, custom_metadata=record)
    seal(folder)
    return folder


def test_a_wrong_record_of_a_checkpoint_is_refused(tmp_path):
    step = saved_step(tmp_path / "1", {"a": np.zeros(2)}, phase=0)
    with pytest.raises(UserError, match=r"the record of the checkpoint .* is damaged"):
        checkpoint.checkpoint_record(step)


@pytest.mark.parametrize(("change", "says"), [
    (lambda x: x[..., :1], "cannot be read"),
    (lambda x: {"a": x}, "cannot be read"),
    (lambda x: x.astype("complex64"), "cannot be read|complex"),
], ids=["shape", "structure", "complex"])  # fmt: skip
def test_wrong_arrays_of_a_checkpoint_are_refused(tmp_path, change, says):
    params = tiny.params(CONFIG, 0, "float32")
    wrong = params | {"token_embedding": change(params["token_embedding"])}
    step = saved_step(tmp_path / "1", {"large": {"params": wrong}}, data={"step": 1})
    expected = {"large": TrainState(jax.tree.map(jax.numpy.asarray, params), None, CONFIG)}
    mesh = Mesh().over(jax.devices()[:1])
    with pytest.raises(UserError, match=f"^the checkpoint .*({says})"):
        checkpoint.read_models(step, expected, mesh)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Return an empty folder for a copy of a dataset."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data" / "nyu-mll" / "blimp"
    folder.mkdir(parents=True)
    return folder


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
def test_a_copied_dataset_names_no_files_outside(tmp_path, copy, path, says):
    for file in (tmp_path / "secret.jsonl", copy / "own.jsonl"):
        file.write_text(json.dumps({"sentence_good": file.name}) + "\n")
    if path == "linked.jsonl":
        (copy / path).symlink_to(tmp_path / "secret.jsonl")
    about = f"- config_name: n\n  data_files:\n  - split: train\n    path: {path}\n"
    (copy / "README.md").write_text(f"---\nconfigs:\n{about.format(tmp_path)}---\n")
    arguments = ("nyu-mll/blimp", "n", "blimp_n", ["train"], tmp_path / "data")
    if says is None:
        found, _ = published.local_dataset(*arguments)
        assert found["train"]["sentence_good"] == ["own.jsonl"]
    else:
        with pytest.raises(UserError, match=re.escape(says)):
            published.local_dataset(*arguments)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["a.parquet", "a.png"])
def test_a_copied_dataset_has_no_images_that_are_decoded(tmp_path, copy, name):
    """A row of images may name a file outside, or start Ghostscript."""
    datasets = pytest.importorskip("datasets")
    if name == "a.png":
        Image.new("RGB", (4, 4)).save(copy / name)
    else:
        rows = datasets.Dataset.from_list([{"picture": {"path": "/etc/hostname", "bytes": None}}])
        rows.cast_column("picture", datasets.Image()).to_parquet(copy / name)
    says = "imagefolder" if name == "a.png" else "'picture' has values of type Image"
    with pytest.raises(UserError, match=says):
        published.local_dataset("nyu-mll/blimp", None, "blimp_n", ["train"], tmp_path / "data")
