"""The advice of a message on too few data fits the settings, and the second attempt succeeds."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train.common.errors import UserError, explained_error
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.run.run_data import RunData, fitting_mesh
from train.store.workdir import Workdir

TEXT = "abcd efgh\n" * 30


def corpus(folder: Path, valid: str = "", **files: str) -> Data:
    """Write files of text and, if given, a text that judges; ``_`` in a name stands for a dot."""
    (folder / "corpus").mkdir()
    for name, text in files.items():
        (folder / "corpus" / name.replace("_", ".")).write_text(text)
    data = Data("text", str(folder / "corpus"), cache=str(folder / "cache"))
    return replace(data, valid_path=lengthened(folder / "valid.txt", valid)) if valid else data


def lengthened(file: str | Path, text: str = TEXT) -> str:
    Path(file).write_text(text)
    return str(file)


def with_data(experiment: Experiment, **changes: Any) -> Experiment:
    return replace(experiment, data=replace(experiment.data, **changes))


def measured(batches: int) -> Scratch:
    return Scratch((DropLayers(LayerDrop(sensitivity=Sensitivity(batches=batches))),))


# Settings, the advice of their message, and how an experiment follows it.
Case = tuple[Callable[[Path], dict[str, Any]], str, Callable[[Experiment, re.Match], Any]]
CASES: dict[str, Case] = {
    "own validation": (lambda p: {"data": corpus(p, "abc", a_txt=TEXT)},
        r"lower batch, or give more of them in data\.valid_path=(\S+)$",
        lambda e, said: lengthened(said[1]) and e),
    "held out": (lambda p: {"batch": 40, "eval_batches": 1,
        "data": replace(corpus(p, **{f"a{i}_txt": TEXT for i in range(4)}), valid_fraction=0.25)},
        r"or raise data\.valid_fraction=0\.25 \(at most (\S+)\)$",
        lambda e, said: with_data(e, valid_fraction=float(said[1]))),
    "held out as much as possible": (
        lambda p: {"batch": 40, "data": replace(corpus(p, a_txt=TEXT, b_txt=TEXT), valid_fraction=0.5)},
        r"has \d+ .*: lower batch, or give more data$", lambda e, said: replace(e, batch=8)),
    "named split": (lambda p: {"data": corpus(p, train_txt=TEXT, validation_txt="abc")},
        r"lower batch, or give more of them in the validation split",
        lambda e, said: lengthened(f"{e.data.path}/validation.txt") and e),
    "small corpus": (lambda p: {"batch": 64, "data": corpus(p, TEXT * 4, a_txt=TEXT)},
        r"training data has (\d+) .*: lower batch, or", lambda e, said: replace(e, batch=int(said[1]) // 4 * 4)),
    "micro-batches": (lambda p: {"accumulate": 4}, r"a multiple of 16, or a smaller accumulate, such as (\d+)$",
        lambda e, said: replace(e, accumulate=int(said[1]))),
    "measurement": (lambda p: {"method": measured(64)},
        r"lower eval_batches or the batches of the measurement, or raise .* \(at most (\S+)\)$",
        lambda e, said: with_data(replace(e, method=measured(2)), valid_fraction=float(said[1]))),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "says", "fixed"), CASES.values(), ids=CASES)
def test_a_run_that_follows_the_advice_has_its_data(tmp_path, settings, says, fixed):
    experiment = runs.experiment(tmp_path / "own", steps=2, **settings(tmp_path))
    workdir = Workdir(tmp_path / "run")

    def read(e):
        RunData(e, fitting_mesh(e, jax.devices(), "mesh"), workdir)

    with pytest.raises(UserError) as error:
        read(experiment)
    said = re.search(says, str(error.value))
    assert said, str(error.value)
    read(fixed(experiment, said))


def test_half_a_character_is_not_an_encoding_of_files():
    text = "a\ud83d"
    with pytest.raises(UnicodeEncodeError) as error:
        text.encode()
    said = explained_error(error.value)
    assert said is not None and "half of a character" in said and "iconv" not in said
    advice = re.search(r"text\.encode\(errors='ignore'\)\.decode\(\)", said)
    assert advice and eval(advice[0], {"text": text}) == "a"
