"""Train a tokenizer on a corpus: its training text, its coverage, and a model on its tokens."""

import sys

import pytest
import runs
from tokenizers import Tokenizer

from jaxgrow.models import BERTConfig
from train import tokenizer as command
from train.config.experiment import load_experiment
from train.extras.text.mixing import training_text
from train.extras.text.reading import read_tokens

BERT = BERTConfig(vocab=280, context=8, layers=1, embed=8, heads=2, head_dim=4, mlp=16)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Train a tokenizer on the corpus of an experiment."""

    def run(*options, **changes):
        config = runs.script(tmp_path, runs.experiment(tmp_path, **changes))
        monkeypatch.setattr(sys, "argv", ["tokenizer", str(config), *map(str, options)])
        command.main()
        return config, capsys.readouterr().out

    return run


def test_a_trained_tokenizer_serves_a_run(tmp_path, run):
    out = tmp_path / "own.json"
    config, said = run("--vocab", 280, "--out", out)
    setting = f"data.tokenizer={out} model.vocab=280"
    assert said == f"{out}: 280 tokens; --set {setting}\n"
    made = Tokenizer.from_file(str(out))
    for text in ("abcd efgh\n", "ä € 😀\r\n\t<|endoftext|>", " a  b "):
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text
    assert len(made.encode("<|endoftext|>").ids) == 1
    experiment = load_experiment(config, setting.split())
    found = read_tokens(experiment.data)
    assert found.vocab == experiment.model.vocab == 280
    letters = sum(len(f.read_text()) for f in runs.corpus(tmp_path).iterdir())
    assert len(found.train) + len(found.valid) < 0.8 * letters  # merges are used


def test_a_new_folder_is_created_before_the_training(tmp_path, run):
    run("--vocab", 258, "--out", tmp_path / "new" / "own.json")
    assert Tokenizer.from_file(str(tmp_path / "new" / "own.json")).get_vocab_size() == 258


def test_held_out_text_is_not_seen(tmp_path):
    data = runs.experiment(tmp_path).data
    every = [f.read_text() for f in sorted(runs.corpus(tmp_path).iterdir())]
    assert list(training_text(data)) == [text for i, text in enumerate(every, 1) if i % 4]


def test_an_encoders_tokenizer_has_what_masking_needs(tmp_path, run):
    run("--vocab", 280, "--out", tmp_path / "own.json", model=BERT)
    made = Tokenizer.from_file(str(tmp_path / "own.json"))
    first, *inner, last = made.encode("abcd efgh").tokens
    assert (first, last) == ("[CLS]", "[SEP]") and "[CLS]" not in inner
    assert [made.token_to_id(token) for token in command.MASKED] == [0, 1, 2, 3, 4]
