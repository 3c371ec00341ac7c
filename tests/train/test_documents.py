"""With ``data.attend=document``, the corpus says where documents begin, and training obeys it."""

import dataclasses
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs
from documents import DOCUMENTS, document_data, documents_of, loss_within_documents

from jaxgrow import flops
from jaxgrow.models import BERTConfig, GPT2Config
from train import pretrain
from train.common.errors import UserError
from train.config.overrides import with_overrides
from train.data.batches import validation_batches
from train.data.windows import Windows
from train.extras.images.images import Images
from train.extras.labelled.task import Labelled
from train.extras.run_params import load_params
from train.extras.text.reading import read_tokens
from train.state.model import TrainState
from train.step import programs


@pytest.fixture
def data(tmp_path):
    return document_data(tmp_path)


# --- where documents begin ---


def test_documents_begin_where_the_corpus_says(data):
    found, texts = read_tokens(data), [t.encode() + b"\0" for t in DOCUMENTS]
    assert documents_of(found.train, found.begins[0]) == texts
    assert documents_of(found.valid, found.begins[1]) == texts[:15]
    (line,) = (line for line in data.report() if "attention stops" in line)
    assert "ends of 45 training documents; their last tokens predict nothing" in line
    assert read_tokens(replace(data, attend="row")).train.filename == found.train.filename  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1, 7, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_windows_have_the_documents_of_their_tokens(data, length, masked):
    model = replace(BERT if masked else runs.MODEL, context=length)
    corpus = read_tokens(data)
    number = np.cumsum(np.isin(np.arange(len(corpus.train)), corpus.begins[0]))
    for i in range(len(source := data.sources(model)[0])):
        inputs, targets = source.sample(i, np.random.default_rng(0))
        own = number[i * length : (i + 1) * length + 1]
        assert inputs["segments"].tolist() == (own[:length] - own[0]).tolist()
        if not masked:
            assert inputs["weights"].tolist() == (own[1:] == own[:-1]).tolist()
            plain = Windows(corpus.train, length).sample(i, np.random.default_rng(0))
            chex.assert_trees_all_equal((inputs["tokens"], targets), plain)
    expected, found = data.shapes(model, 1), jax.tree.map(lambda x: x[None], (inputs, targets))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)


# --- training ---

BERT = BERTConfig(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)


def test_a_run_validates_by_documents_and_cannot_change_it_on_resume(data, tmp_path, capsys):
    before = programs.step.cache_info().misses
    one = runs.experiment(tmp_path, data=data, accumulate=2)
    result = pretrain.run_experiment(one, tmp_path / "run")
    assert programs.step.cache_info().misses - before <= 1
    assert "attention stops at the ends of 45 training documents" in capsys.readouterr().err
    model = TrainState(load_params(tmp_path / "run"), None, runs.MODEL)
    batches = validation_batches(data.sources(runs.MODEL)[1][""], one.batch, one.eval_batches)
    joined = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    expected = float(loss_within_documents(model, joined))
    assert result["val_loss"] == pytest.approx(expected, rel=1e-5)
    # The last tokens of documents count, and the attention costs as much as without documents.
    assert result["tokens"] == 8 * 8 * 8
    assert result["flops"] == 8 * flops.train_flops(runs.MODEL, 8 * 8)
    plain = replace(one, data=replace(data, attend="row"))
    with pytest.raises(UserError, match=r"data\.Data\.attend: 'document' and 'row'"):
        pretrain.run_experiment(plain, tmp_path / "run")


# --- refusals ---


def test_data_without_documents_and_models_without_segments_are_refused(data, tmp_path):
    (tmp_path / "one.txt").write_text("abc" * 30)
    alone = replace(data, path=str(tmp_path / "one.txt"), valid_path=str(tmp_path / "one.txt"))
    with pytest.raises(UserError, match=r"the training text is one document: set data.attend=row"):
        alone.report()
    assert len(read_tokens(replace(alone, attend="row")).train)

    class Other(GPT2Config):
        segments = False

    with pytest.raises(UserError, match=r"attention of a Other cannot stop at .*data\.attend=row"):
        data.sources(Other(**dataclasses.asdict(runs.MODEL)))
    for other in (Images(), Labelled("cola", str(tmp_path), length=8)):
        with pytest.raises(UserError, match="attend"):
            with_overrides(runs.experiment(tmp_path, data=other), ["data.attend=document"])
