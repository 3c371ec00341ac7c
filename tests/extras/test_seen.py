"""Does a run go on in the data where its source stopped?"""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import runs
from checkpoints import CONFIG, saved
from published import store
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from jaxgrow import checkpoints
from jaxgrow.checkpoints import save
from train import generate, pretrain
from train.plan.methods import Continue, Growing, GrowTo, TrainStage
from train.state.mesh import Mesh


def said(capsys):
    return "".join(capsys.readouterr())


def started(home, **changes):
    experiment = runs.experiment(home, steps=4, **changes)
    pretrain.run_experiment(experiment, home / "first")
    return experiment


def test_a_grown_run_goes_on_and_resumes_without_its_source(tmp_path, monkeypatch, capsys):
    started(tmp_path, model=runs.SMALL)
    to = GrowTo((TrainStage(1.0),), runs.DOUBLED)
    grown = runs.growing(tmp_path, to, source="first", steps=4, checkpoint_every=2)
    drawn = runs.recorded_inputs(monkeypatch)
    pretrain.run_experiment(grown, tmp_path / "grown")
    whole = list(drawn)
    assert "go on at sample 32" in said(capsys)
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert config["order"] == {"seed": 0, "first": 32, "samples": 225}
    # As if it had been killed after its first checkpoint, and the source were deleted.
    (tmp_path / "grown" / "result.json").unlink()
    (tmp_path / "first").rename(tmp_path / "moved")
    drawn.clear()
    pretrain.run_experiment(grown, tmp_path / "grown")
    assert len(drawn) < len(whole)


def test_another_corpus_or_length_of_samples_is_read_from_its_beginning(tmp_path, capsys):
    second = replace(started(tmp_path), method=Continue("first"))
    file = tmp_path / "first" / "result.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"order": about["order"] | {"samples": 7}}))
    pretrain.run_experiment(second, tmp_path / "second")
    assert "has read the same corpus in 7 samples, but this run has 225" in said(capsys)
    file.write_text(json.dumps(about))
    (tmp_path / "corpus" / "9.txt").write_text("another document of this corpus")
    pretrain.run_experiment(second, tmp_path / "third")
    out = said(capsys)
    assert "go on at sample" not in out and "does not record" not in out


def test_for_other_models_a_note_names_the_seed(tmp_path, capsys):
    save(tmp_path / "hf", runs.MODEL, runs.fresh(runs.MODEL))
    experiment = runs.experiment(tmp_path, steps=2, method=Continue("hf"))
    pretrain.run_experiment(experiment, tmp_path / "continued")
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
    out = []
    for bos in (False, True):
        said(capsys)
        framed = replace(experiment, data=replace(data, bos=bos))
        pretrain.run_experiment(framed, tmp_path / str(bos))
        out.append(said(capsys))
    assert "have the form '<s> .. </s>', but those of this run have '.. </s>'" in out[0]
    assert "set data.bos=true" in out[0] and "WARNING" not in out[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a Hugging Face folder in bfloat16."""
    config = replace(CONFIG, vocab=256, context=8)
    return saved(tmp_path_factory.mktemp("theirs") / "gpt", config, dtype="bfloat16")


def test_the_notes_of_a_checkpoint_are_printed(folder, tmp_path, capsys, monkeypatch):
    found = {f"module.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    store(shutil.copytree(folder, tmp_path / "notes"), found)
    (tmp_path / "notes/model.gguf").write_bytes(b"other")
    config = checkpoints.load(folder)[0]
    notes = (
        "note: model.safetensors were read; these other weights were not: model.gguf",
        "note: removed from the names of the tensors: module.",
    )
    e = runs.experiment(tmp_path, model=config, method=Continue("notes"), steps=1)
    words = ["generate", str(tmp_path / "notes"), "--tokenizer", "bytes", "--max-new", "1"]
    monkeypatch.setattr("sys.argv", [*words, "--prompt", "a"])
    for command in (partial(pretrain.run_experiment, e, tmp_path / "run"), generate.main):
        command()
        err = capsys.readouterr().err
        assert [err.count(note) for note in notes] == [1, 1]


def test_a_growth_may_begin_from_it(folder, tmp_path):
    small = checkpoints.load(folder)[0]
    large = replace(small, layers=2 * small.layers)
    method = Growing(small, str(folder), (GrowTo(),))
    e = runs.experiment(tmp_path, model=large, method=method, steps=2, mesh=Mesh(2, 2))
    phases = pretrain.run_experiment(e, tmp_path / "run")["phases"]
    assert [phase["kind"] for phase in phases] == ["import", "grow", "train"]
