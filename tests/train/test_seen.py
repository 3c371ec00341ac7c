"""Does a run go on in the data where its source stopped?"""

import json
from dataclasses import replace

import numpy as np
import pytest
import runs
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from jaxgrow.checkpoints import save
from train import pretrain
from train.data.batches import Stream
from train.plan.methods import Continue, Growing, GrowTo, TrainStage


@pytest.fixture
def drawn(monkeypatch):
    """Record the inputs of every training batch."""
    found: list[np.ndarray] = []
    following = Stream.__next__

    def recorded(self):
        batch = following(self)
        found.append(np.asarray(batch[0]))
        return batch

    monkeypatch.setattr(Stream, "__next__", recorded)
    return found


def rows(batches):
    return {row.tobytes() for batch in batches for row in batch}


def said(capsys):
    return "".join(capsys.readouterr())


def started(home, **changes):
    experiment = runs.experiment(home, steps=4, **changes)
    pretrain.run_experiment(experiment, home / "first")
    return experiment


def test_a_continued_run_reads_the_samples_after_those_of_its_source(tmp_path, drawn, capsys):
    first = started(tmp_path)
    before = list(drawn)
    drawn.clear()
    order = json.loads((tmp_path / "first" / "result.json").read_text())["order"]
    assert order == {"seed": 0, "first": 0, "samples": 225, "last": 32}
    other = replace(first, method=Continue("first"), batch=4, seed=5)
    pretrain.run_experiment(other, tmp_path / "second")
    assert rows(before).isdisjoint(rows(drawn)) and len(drawn) == 4
    assert "the data go on at sample 32 in the order of seed 0, where" in said(capsys)
    # A third run goes on after the second one, also with another config.
    drawn.clear()
    pretrain.run_experiment(replace(first, method=Continue("second")), tmp_path / "third")
    assert "go on at sample 48 in the order of seed 0" in said(capsys)
    # The runs together read what a single run reads.
    third = list(drawn)
    drawn.clear()
    pretrain.run_experiment(replace(first, steps=10), tmp_path / "whole")
    whole = np.concatenate(drawn)
    np.testing.assert_array_equal(np.concatenate(before), whole[:32])
    np.testing.assert_array_equal(np.concatenate(third), whole[48:80])


def test_a_grown_run_goes_on_and_resumes_without_its_source(tmp_path, drawn, capsys):
    started(tmp_path, model=runs.SMALL)
    grown = runs.experiment(
        tmp_path,
        steps=4,
        method=Growing(runs.SMALL, "first", (GrowTo((TrainStage(1.0),), runs.DOUBLED),)),
        model=runs.LARGE,
        checkpoint_every=2,
    )
    drawn.clear()
    pretrain.run_experiment(grown, tmp_path / "grown")
    whole = list(drawn)
    assert "go on at sample 32" in said(capsys)
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert config["order"] == {"seed": 0, "first": 32, "samples": 225}
    # As if it had been killed after its first checkpoint, and the source were deleted.
    (tmp_path / "grown" / "result.json").unlink()
    for step in (tmp_path / "grown" / "checkpoints").iterdir():
        assert step.name.isdecimal()
    (tmp_path / "first").rename(tmp_path / "moved")
    drawn.clear()
    pretrain.run_experiment(grown, tmp_path / "grown")
    assert len(drawn) < len(whole)


def test_another_corpus_is_read_from_its_beginning(tmp_path, drawn, capsys):
    first = started(tmp_path)
    (tmp_path / "corpus" / "9.txt").write_text("another document of this corpus")
    drawn.clear()
    pretrain.run_experiment(replace(first, method=Continue("first")), tmp_path / "second")
    out = said(capsys)
    assert "go on at sample" not in out and "does not record" not in out


def test_samples_of_another_length_are_said(tmp_path, capsys):
    first = started(tmp_path)
    model = replace(runs.MODEL, context=4)
    pretrain.run_experiment(runs.experiment(tmp_path, steps=2, model=model), tmp_path / "short")
    about = json.loads((tmp_path / "first" / "result.json").read_text())
    about["order"]["samples"] = 7
    (tmp_path / "first" / "result.json").write_text(json.dumps(about))
    pretrain.run_experiment(replace(first, method=Continue("first")), tmp_path / "second")
    assert "has read the same corpus in 7 samples, but this run has 225" in said(capsys)


def test_for_other_models_a_note_names_the_seed(tmp_path, capsys):
    save(tmp_path / "hf", runs.MODEL, runs.fresh(runs.MODEL))
    pretrain.run_experiment(
        runs.experiment(tmp_path, steps=2, method=Continue("hf")), tmp_path / "continued"
    )
    assert "hf does not record which data it has seen" in (out := said(capsys))
    assert "another seed than seed=0" in out


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_another_frame_of_documents_than_that_of_the_source_is_a_warning(tmp_path, capsys, kind):
    """The way out of the message works."""
    own = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<unk>": 4}, "<unk>"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    file = tmp_path / "first" / "tokenizer.json"
    if kind == "folder":
        save(file.parent, runs.MODEL, runs.fresh(runs.MODEL))
    file.parent.mkdir(exist_ok=True)
    own.save(str(file))
    data = replace(runs.experiment(tmp_path).data, tokenizer=str(tmp_path / "own.json"))
    own.save(data.tokenizer)
    if kind == "run":
        file.unlink()
        started(tmp_path, data=data)
    experiment = runs.experiment(tmp_path, steps=1, method=Continue("first"))
    said(capsys)
    pretrain.run_experiment(
        replace(experiment, data=replace(data, bos=False)), tmp_path / "without"
    )
    assert "have the form '<s> .. </s>', but those of this run have '.. </s>'" in (
        out := said(capsys)
    )
    assert "set data.bos=true" in out
    pretrain.run_experiment(replace(experiment, data=replace(data, bos=True)), tmp_path / "with")
    assert "WARNING" not in said(capsys)
