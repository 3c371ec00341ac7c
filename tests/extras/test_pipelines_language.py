"""Exported language models score, continue and fill in raw text in `transformers` as in their run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from finetunings import FAMILIES, pieces

from train.config.experiment import Experiment
from train.data import batches
from train.data.text import Data
from train.extras.pretrained import open_text_model
from train.generate import Asked, sample_texts
from train.run.trainer import run_experiment

pytestmark = pytest.mark.interop
hf, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")


KINDS = ["gpt2-bytes", "llama-pieces", "bert-bytes", "modernbert-pieces"]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """Train a model, and return the experiment, the folder of the run, its result, and the export."""
    family, kind = request.param.split("-")
    home = tmp_path_factory.mktemp("home")
    valid = runs.corpus(home / "held", 1) / "0.txt"
    name = "bytes" if kind == "bytes" else pieces(home, family)
    paths = {"path": str(runs.corpus(home)), "valid_path": str(valid)}
    data = Data("text", **paths, tokenizer=name, cache=str(home / "cache"))
    config = replace(FAMILIES[family], vocab=256 if kind == "bytes" else 300)
    if family == "modernbert":  # saved only if the number of layers is a multiple of the period
        config = replace(config, layers=3)
    experiment = runs.experiment(home, model=config, data=data, batch=4, eval_batches=1)
    result = run_experiment(experiment, home / "run")
    runs.export(home / "run", home / "hf")
    return experiment, home / "run", result, home / "hf", valid.read_text()


def is_masked(experiment: Experiment) -> bool:
    return experiment.model.masked > 0


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def scores(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(each, targets[..., None], -1)
    return {"val_loss": losses.mean(), "val_accuracy": (logits.argmax(-1) == targets).mean()}


def test_the_export_has_the_loss_and_the_accuracy_of_the_run(trained):
    """Validate on the tokens that the exported tokenizer makes of the raw text."""
    experiment, _, result, folder, text = trained
    tokenizer, model = hf.AutoTokenizer.from_pretrained(folder), experiment.model
    end = tokenizer.sep_token_id if is_masked(experiment) else tokenizer.eos_token_id
    source = experiment.data.sources(model)[1][""]
    tokens = np.array([*tokenizer(text, add_special_tokens=False)["input_ids"], end or 0])
    np.testing.assert_array_equal(source.tokens[: len(tokens)], tokens)
    [(inputs, targets)] = batches.validation_batches(source, experiment.batch, 1)
    if is_masked(experiment):
        every = logits(hf.AutoModelForMaskedLM.from_pretrained(folder), inputs["tokens"])
        found = np.take_along_axis(every, inputs["positions"][..., None], 1)
    else:
        found = logits(hf.AutoModelForCausalLM.from_pretrained(folder), inputs)
    for name, value in scores(found, targets).items():
        assert value == pytest.approx(result[name], abs=1e-5)


def test_a_pipeline_continues_or_fills_raw_text_as_the_run(trained):
    experiment, own, _, folder, _ = trained
    if is_masked(experiment):
        fills(own, folder)
    else:
        continues(own, folder)


def continues(own: Path, folder: Path) -> None:
    generator = hf.pipeline("text-generation", model=str(folder), device="cpu")
    prompts = ["abcd", "e f", "h"]
    expected = [one["text"] for one in sample_texts(own, prompts, Asked(), max_new=6)[0]]
    for batch in (1, 3):
        said = generator(prompts, do_sample=False, max_new_tokens=6, batch_size=batch)
        assert [one["generated_text"] for [one] in said] == expected


def fills(own: Path, folder: Path) -> None:
    fill = hf.pipeline("fill-mask", model=str(folder), device="cpu")
    mask = fill.tokenizer.mask_token
    said = fill(f"ab{mask}d ef", top_k=5)
    model = open_text_model(own)
    encode = model.tokenizer.encode
    tokens = np.array([[*encode("ab").ids, fill.tokenizer.mask_token_id, *encode("d ef").ids]])
    assert fill.tokenizer(f"ab{mask}d ef")["input_ids"] == tokens[0].tolist()
    inputs = {"tokens": tokens, "mask": np.ones(tokens.shape, bool)}
    place = tokens[0].tolist().index(fill.tokenizer.mask_token_id)
    found = np.asarray(model.config.module.apply({"params": model.params}, inputs))[0, place]
    chances = np.exp(found) / np.exp(found).sum()
    best = np.argsort(-chances)[:5]
    assert [one["token"] for one in said] == best.tolist()
    assert [one["score"] for one in said] == pytest.approx(chances[best].tolist(), abs=1e-5)
