"""Heads record their tasks, and labels are matched by name."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from finetunings import FAMILIES, tuning

from jaxgrow import checkpoints, operators
from jaxgrow.checkpoints import open_checkpoint, save
from jaxgrow.checkpoints.hf.labels import label_keys
from jaxgrow.extras.head_labels import Head, read_head
from train.common.errors import UserError
from train.extras.labelled.heads import class_order, keeps_head, learned_head
from train.extras.labelled.supervised import model_outputs, score_model
from train.extras.labelled.task import Labelled
from train.extras.labelled.tuning import tune_model
from train.state.mesh import Mesh


@pytest.fixture(scope="module")
def run(home):
    """Return the folder of a fine-tuned GPT-2."""
    tune_model(tuning(home / "cola"), home / "gpt2", home / "runs")
    return home / "runs" / "cola-gpt2-lr0.01-seed0"


def published(run: Path, folder: Path, labels: list[str], swapped: bool = False) -> Path:
    """Export the fine-tuned model as a third party would, with other labels.

    With ``swapped``, the labels are in the other order.
    """
    source = open_checkpoint(run)
    params = source.params()
    if swapped:
        params["classifier"]["kernel"] = params["classifier"]["kernel"][:, ::-1]
    save(folder, source.config, params, settings=label_keys(labels) | {"pad_token_id": 0xC1})
    (folder / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    return folder


def test_a_run_records_its_task_for_later_checkpoints(run, tmp_path):
    expected = Head("cola", ("unacceptable", "acceptable"))
    assert learned_head(run) == expected
    growth = operators.stack(FAMILIES["gpt2"].sizes(), {"layers": 4})
    for kind in ("orbax", "hf"):
        checkpoints.transform(run, checkpoints.Output(tmp_path / kind, kind), growth)
        assert learned_head(tmp_path / kind) == expected
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["label2id"]["acceptable"] == 1
    grown = operators.stack(FAMILIES["gpt2"].sizes() | {"layers": 4}, {"layers": 8})
    checkpoints.transform(tmp_path / "hf", checkpoints.Output(tmp_path / "again", "orbax"), grown)
    assert learned_head(tmp_path / "again") == expected


def test_outputs_do_not_need_the_kernel_of_the_training(run, home):
    source = open_checkpoint(run)
    data = Labelled("cola", str(home / "cola"), length=14)
    examples = next(iter(data.prepared(source.config).valid.values()))
    mesh = Mesh().over(jax.devices())
    params, configs = source.shard(mesh), [source.config, replace(source.config, attention="cudnn")]
    found, other = (model_outputs(config, params, examples, mesh) for config in configs)
    np.testing.assert_array_equal(found, other)


def test_labels_in_another_order_are_matched_by_name(run, home, tmp_path, capsys):
    data = Labelled("cola", str(home / "cola"), length=14)
    expected = score_model(run, data)
    swapped = published(run, tmp_path / "swapped", ["Acceptable", "Un-acceptable"], swapped=True)
    assert score_model(swapped, data) == expected
    assert capsys.readouterr().err == ""
    unnamed = published(run, tmp_path / "unnamed", ["LABEL_0", "LABEL_1"])
    assert score_model(unnamed, data) == expected
    assert "have no names: the order unacceptable, acceptable is assumed" in capsys.readouterr().err


def test_a_model_of_other_labels_or_of_another_task_is_refused(run, home, tmp_path):
    other = published(run, tmp_path / "other", ["good", "bad"])
    message = "has the classes good, bad, but the data have unacceptable, acceptable"
    with pytest.raises(UserError, match=message):
        score_model(other, Labelled("cola", str(home / "cola"), length=14))
    message = "was trained on cola, but the data are rte: evaluate it on cola, or fine-tune"
    with pytest.raises(UserError, match=message):
        class_order(learned_head(run), Head("rte", ("entailment", "not_entailment")), run)


def test_a_head_is_kept_for_its_own_task_alone(run, home):
    again = tuning(home / "cola").of(run, 1e-3, 0)
    assert again.method.new_head is False
    table = home / "table"
    table.mkdir(exist_ok=True)
    (table / "train.tsv").write_text("text\tlabel\n" + "aaa\tyes\nbbb\tno\n" * 40)
    data = Labelled("table", str(table), length=14)
    assert tuning(home, data=data, name="mine").of(run, 1e-3, 0).method.new_head is True


@pytest.mark.parametrize(("there", "wanted", "kind", "kept"), [
    (Head("sst2", ("a", "b")), Head("mrpc", ("a", "b")), "classes", False),
    (Head("sst2"), Head("sst2", ("a", "b")), "classes", True),  # from an older run
    (Head(None, ("A", "B")), Head("sst2", ("a", "b")), "classes", True),
    (Head(None, ("b", "a")), Head("sst2", ("a", "b")), "classes", False),
    (Head(), Head("sst2", ("a", "b")), "classes", False),
    (Head(), Head("stsb"), "classes", False),
    (Head(), Head("squad1"), "spans", True),
    (Head("squad1"), Head("squad2"), "spans", False),
    (Head(None, ("-1", "1")), Head(None, ("-1", "1")), "classes", True),
    (Head(None, ("c", "C")), Head(None, ("C", "c")), "classes", False),
])  # fmt: skip
def test_which_heads_are_kept(there, wanted, kind, kept):
    assert keeps_head(there, wanted, kind) is kept


@pytest.mark.parametrize("labels", [("-1", "0", "1"), ("C", "c"), ("a b", "ab")])
def test_labels_that_differ_by_a_sign_or_by_case_are_different_classes(labels):
    order = class_order(Head(None, labels), Head(None, labels[::-1]), Path())
    assert order.tolist() == [*reversed(range(len(labels)))]
    with pytest.raises(UserError, match="but the data have"):
        class_order(Head(None, labels), Head(None, labels[1:]), Path())


def test_labels_are_read_by_their_numbers():
    many = {str(i): f"name {i}" for i in reversed(range(12))}
    assert read_head({"id2label": many}).labels == tuple(f"name {i}" for i in range(12))
    assert read_head({"id2label": "damaged", "finetuning_task": 3}) == Head()
    np.testing.assert_array_equal(
        class_order(Head(None, ("b", "a")), Head(None, ("A", "B")), Path("m")), [1, 0]
    )
