"""With ``data.attend=document``, the corpus says where documents begin, and training obeys it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
import runs
from cases import cases
from documents import DOCUMENTS, document_data, documents_of, loss_within_documents
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import BERTConfig
from train import pretrain
from train.common.errors import UserError
from train.data.batches import training_batches, validation_batches
from train.data.text import Data
from train.extras.inherit import Inherit, divergence
from train.extras.modifiers import DropTokens, ShortContext
from train.extras.run_params import load_params
from train.extras.text.reading import read_tokens
from train.plan.methods import Growing, GrowTo, Learned, Scratch
from train.plan.modifiers import DropLayers
from train.state.mesh import Mesh
from train.state.model import TrainState, shardings
from train.step.parallel import mapped
from train.step.step import StepInputs, train_step


@pytest.fixture
def data(tmp_path):
    return document_data(tmp_path)


def test_the_tokenizer_needs_no_special_tokens(data, tmp_path):
    letters = {chr(ord("a") + i): i for i in range(26)}
    endless = Tokenizer(models.BPE(letters, []))
    endless.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    endless.save(str(tmp_path / "endless.json"))
    found = read_tokens(replace(data, tokenizer=str(tmp_path / "endless.json")))
    parts = documents_of(found.train + np.uint8(ord("a")), found.begins[0])
    assert parts == [text.encode() for text in DOCUMENTS]


def test_a_piece_that_is_held_out_divides_its_document(data, tmp_path, monkeypatch):
    """Text before and after it is not one text, and held-out pieces are not one document."""
    monkeypatch.setattr("train.extras.text.corpus.PIECE", 4)
    (tmp_path / "one.txt").write_text("aaaabbbbccccddddeeeeffffgg")
    held = replace(data, path=str(tmp_path / "one.txt"), valid_fraction=1 / 3)
    found = read_tokens(held)
    assert documents_of(found.train, found.begins[0]) == [b"aaaabbbb", b"ddddeeee", b"gg\0"]
    assert documents_of(found.valid, found.begins[1]) == [b"cccc", b"ffff"]


@pytest.mark.parametrize(("roles", "row", "expected"), [
    ({"bos_token": "<s>", "eos_token": "</s>"}, [2, 2, 1, 0, 2, 1], [0, 3, 6]),
    ({"eos_token": "</s>"}, [2, 2, 1, 2, 2, 1], [0, 3, 6]),
    ({"bos_token": "<s>"}, [2, 2, 0, 2, 2, 0, 2], [0, 2, 5, 7]),
    ({"bos_token": "</s>", "eos_token": "</s>"}, [2, 1, 2, 2, 1, 2], [0, 2, 5, 6]),
], ids=["both", "end", "begin", "same"])  # fmt: skip
def test_token_ids_are_divided_by_the_tokens_of_the_tokenizer(tmp_path, roles, row, expected):
    """Rows of a table are documents, and begin and end tokens divide them further."""
    made = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "a"))
    made.add_special_tokens(sorted(set(roles.values())))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    lines = [json.dumps({"input_ids": ids}) for ids in (row, [2, 2, 2])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    paths = {"path": str(tmp_path / "a.jsonl"), "valid_path": str(tmp_path / "a.jsonl")}
    how = {"attend": "document", "tokenizer": str(tmp_path / "tokenizer.json")}
    found = read_tokens(Data("tokens", **paths, cache=str(tmp_path / "cache"), **how))  # type: ignore[arg-type]
    assert found.begins[0].tolist() == expected


def test_a_file_of_tokens_is_divided_although_its_pieces_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("train.extras.text.corpus.PIECE", 3)
    for name in ("train", "val"):
        np.array([5, 5, 0, 5, 5, 5, 5, 0, 0, 5], np.uint16).tofile(tmp_path / f"{name}.bin")
    data = Data("tokens", str(tmp_path), cache=str(tmp_path / "cache"), attend="document")
    assert read_tokens(data).begins[0].tolist() == [0, 3, 8, 9]
    with pytest.raises(UserError, match="has no effect, because the training text is one document"):
        replace(data, tokenizer="none").report()


BERT = BERTConfig(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
LR = np.float32(0.5)


WAYS = {
    "mesh": ("mesh", 4, Mesh()),
    "pmap": ("pmap", 2, Mesh()),
    "fsdp": ("mesh", 2, Mesh(fsdp=4)),
    "context": ("mesh", 2, Mesh(fsdp=2, context=2)),
    "once": ("once", 2, Mesh(fsdp=4)),
}


@pytest.mark.parametrize(("how", "accumulate", "mesh"), cases(WAYS, ["mesh"], []))
def test_every_division_of_a_batch_trains_alike(data, how, accumulate, mesh):
    """Micro-batches and devices have different numbers of targets."""
    tx = optax.with_extra_args_support(optax.identity())
    batch = next(training_batches(data.sources(runs.MODEL)[0], 16, 0))
    params = runs.fresh(runs.MODEL)
    alone = TrainState(params, tx.init(params), runs.MODEL)

    def loss(params):
        return loss_within_documents(replace(alone, params=params), batch)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    lies = mesh.over(jax.devices())
    make = partial(train_step, tx, accumulate, once=how == "once")
    run = mapped(make, "pmap" if how == "pmap" else "mesh", lies)
    model = jax.device_put(alone, shardings(alone, lies)) if how != "pmap" else alone
    after, metrics = run(model, batch, StepInputs(LR))
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    expected = jax.tree.map(lambda p, g: p - LR * g, params, jax.device_get(grads))
    chex.assert_trees_all_close(jax.device_get(after.params), expected, rtol=1e-4, atol=1e-6)


def test_a_teacher_does_not_teach_the_next_document():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 2, 3, 5))
    weights = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    kept = [x[weights > 0][None] for x in (student, teacher)]
    found = divergence(student, teacher, 2.0, weights)
    assert float(found) == pytest.approx(float(divergence(*kept, 2.0)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"method": runs.VCYCLE},
    {"method": Inherit(runs.SMALL)},
    {"method": Scratch((DropLayers(LayerDrop(theta=0.5)),))},
    {"method": Scratch((DropTokens(TokenDrop(0.25)),)), "model": replace(runs.MODEL, layers=4)},
    {"method": Scratch((ShortContext(2),))},
    {"method": Growing(runs.SMALL, to=(GrowTo(by=Learned(steps=4, warmup=1)),))},
    {"model": BERT},
], ids=["vcycle", "teacher", "layers", "tokens", "windows", "learned", "bert"])  # fmt: skip
def test_every_method_trains_by_documents(data, tmp_path, changes):
    experiment = runs.experiment(tmp_path, data=data, **changes)
    result = pretrain.run_experiment(experiment, tmp_path / "run")
    assert 0 < result["val_loss"] < 6


@pytest.fixture
def two_sources(data, tmp_path) -> tuple[Data, dict[str, Data]]:
    """Return a mixture with two validation sets, and each of the four texts alone."""
    upper = [text.upper() for text in DOCUMENTS[1::2] + DOCUMENTS[::2]]
    texts = {"low": DOCUMENTS, "high": upper, "v": ["x", "yzw"] * 18, "w": ["klmnop"] * 11}
    for name, documents in texts.items():
        rows = (json.dumps({"text": text}) for text in documents)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in texts}
    alone = {name: replace(data, path=path, valid_path=path) for name, path in paths.items()}
    sets = {name: paths[name] for name in ("v", "w")}
    return replace(data, path={paths["low"]: 0.7, paths["high"]: 0.3}, valid_path=sets), alone


def rows_of(batches: Iterable[Any]) -> list[tuple[bytes, ...]]:
    """The bytes of the tokens, targets, segments and weights of each sample."""
    names = ("tokens", "segments", "weights")
    parts = ((targets, *(inputs[name] for name in names)) for inputs, targets in batches)
    return [tuple(x.tobytes() for x in row) for part in parts for row in zip(*part, strict=True)]


def test_the_rows_of_a_mixture_are_those_of_its_sources(two_sources):
    data, alone = two_sources
    train, sets = data.sources(runs.MODEL)
    valid = {name: one.sources(runs.MODEL)[1][""] for name, one in alone.items()}
    low, high = ({*rows_of(validation_batches(valid[name], 1, 99))} for name in ("low", "high"))
    stream = training_batches(train, 10, 0)
    rows = rows_of(next(stream) for _ in range(12))
    # Every row of each source is read, with its share.
    assert {*rows} == low | high and not low & high
    assert sum(row in low for row in rows) == 84
    resumed = training_batches(train, 10, 0)
    resumed.set_state({"next_index": 50})
    assert rows_of(next(resumed) for _ in range(7)) == rows[50:]
    assert [*sets] == ["v", "w"]
    for name, source in sets.items():
        found, expected = (rows_of(validation_batches(x, 4, 9)) for x in (source, valid[name]))
        assert found == expected


def test_a_mixture_validates_by_documents_and_resumes_exactly(two_sources, tmp_path, capsys):
    experiment = runs.experiment(tmp_path, data=two_sources[0], checkpoint_every=1)
    result = pretrain.run_experiment(experiment, tmp_path / "whole")
    said = capsys.readouterr().err
    assert said.count("attention stops at the ends of 90 training documents") == 1
    model = TrainState(load_params(tmp_path / "whole"), None, runs.MODEL)
    for name, source in two_sources[0].sources(runs.MODEL)[1].items():
        batches = validation_batches(source, experiment.batch, experiment.eval_batches)
        joined = jax.tree.map(lambda *x: np.concatenate(x), *batches)
        expected = float(loss_within_documents(model, joined))
        assert result[f"val_loss/{name}"] == pytest.approx(expected, rel=1e-5)
    runs.stopped(experiment, tmp_path / "killed", 3, 5)
    runs.assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_sources_may_be_one_document_unless_all_are(two_sources, tmp_path):
    one, two, three = (str(tmp_path / f"{name}.txt") for name in "xyz")
    for path in (one, two, three):
        Path(path).write_text(Path(path).stem * 90)
    low = str(tmp_path / "low.jsonl")
    for path in ({one: 1, low: 2}, low):
        some = replace(two_sources[0], path=path, valid_path={"two": two, "three": three})
        train, sets = some.sources(runs.MODEL)
        inputs, _ = next(training_batches(train, 8, 0))
        assert inputs["segments"].any() and len(sets["three"]) == 11
        samples = [sets["two"].sample(i, np.random.default_rng(0))[0] for i in range(11)]
        assert not any(sample["segments"].any() for sample in samples)
    with pytest.raises(UserError, match=r"training text is one document: set data.attend=row"):
        replace(some, path=[one, two], valid_path=three).report()
