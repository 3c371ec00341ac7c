"""The advice of a message fits the settings that led to it, and the second attempt succeeds."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train import pretrain
from train.common.errors import UserError, explained_error
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.store.workdir import Workdir

TEXT = "abcd efgh\n" * 30
Case = tuple[dict[str, Any], str, Callable[[Experiment, re.Match], Experiment]]


def write(folder: Path, **files: str) -> Data:
    """Write files of text and return them as a corpus; ``_`` in a name stands for a dot."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return Data("text", str(folder), cache=str(folder.parent / "cache"))


def with_data(experiment: Experiment, **changes: Any) -> Experiment:
    return replace(experiment, data=replace(experiment.data, **changes))


def own_validation(folder: Path) -> Case:
    data = write(folder / "corpus", a_txt=TEXT)
    (folder / "valid.txt").write_text("abc")

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        (folder / "valid.txt").write_text(TEXT)
        assert said[1] == str(folder / "valid.txt")
        return e

    data = replace(data, valid_path=str(folder / "valid.txt"))
    return {"data": data}, r"lower batch, or give more of them in data\.valid_path=(\S+)$", fixed


def held_out(folder: Path) -> Case:
    data = write(folder / "corpus", **{f"a{i}_txt": TEXT for i in range(4)})

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        assert float(said[1]) == e.data.valid_fraction
        return with_data(e, valid_fraction=float(said[2]))

    changes = {"data": replace(data, valid_fraction=0.25), "batch": 40, "eval_batches": 1}
    return changes, r"or raise data\.valid_fraction=(\S+) \(at most (\S+)\)$", fixed


def held_out_as_much_as_possible(folder: Path) -> Case:
    data = replace(write(folder / "corpus", a_txt=TEXT, b_txt=TEXT), valid_fraction=0.5)

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        return replace(e, batch=8)

    return {"data": data, "batch": 40}, r"has \d+ .*: (lower batch), or give more data$", fixed


def named_split(folder: Path) -> Case:
    data = write(folder / "corpus", train_txt=TEXT, validation_txt="abc")

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        (folder / "corpus" / "validation.txt").write_text(TEXT)
        return e

    return {"data": data}, r"lower batch, or give more of them in the validation split", fixed


def small_corpus(folder: Path) -> Case:
    data = write(folder / "corpus", a_txt=TEXT)
    (folder / "valid.txt").write_text(TEXT * 4)

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        return replace(e, batch=int(said[1]) // 4 * 4)

    data = replace(data, valid_path=str(folder / "valid.txt"))
    return {"data": data, "batch": 64}, r"training data has (\d+) .*: lower batch, or", fixed


def micro_batches(folder: Path) -> Case:
    def fixed(e: Experiment, said: re.Match) -> Experiment:
        assert int(said[1]) == 16
        return replace(e, accumulate=int(said[2]))

    return {"accumulate": 4}, r"a multiple of (\d+), or a smaller accumulate, such as (\d+)$", fixed


def larger_batch(folder: Path) -> Case:
    def fixed(e: Experiment, said: re.Match) -> Experiment:
        return replace(e, batch=int(said[1]))

    return {"batch": 6}, r"a multiple of (\d+)$", fixed


def measurement(folder: Path) -> Case:
    drop = LayerDrop(sensitivity=Sensitivity(batches=64))

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        few = DropLayers(replace(drop, sensitivity=Sensitivity(batches=2)))
        return with_data(replace(e, method=Scratch((few,))), valid_fraction=float(said[1]))

    changes = {"method": Scratch((DropLayers(drop),))}
    says = r"lower eval_batches or the batches of the measurement, or raise .* \(at most (\S+)\)$"
    return changes, says, fixed


def empty_validation(folder: Path) -> Case:
    data = write(folder / "corpus", a_txt=TEXT)
    (folder / "valid.txt").write_text(TEXT)

    def fixed(e: Experiment, said: re.Match) -> Experiment:
        return with_data(e, valid_path=str(folder / "valid.txt"))

    return {"data": data}, r"give more text, or set data\.valid_path$", fixed


CASES = [
    own_validation, held_out, held_out_as_much_as_possible, named_split, small_corpus,
    micro_batches, larger_batch, measurement, empty_validation,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_a_run_that_follows_the_advice_succeeds(tmp_path, case):
    changes, says, fixed = case(tmp_path)
    experiment = runs.experiment(tmp_path / "own", steps=2, **changes)
    with pytest.raises(UserError) as error:
        pretrain.run_experiment(experiment, tmp_path / "run")
    said = re.search(says, str(error.value))
    assert said, str(error.value)
    assert pretrain.run_experiment(fixed(experiment, said), tmp_path / "run")["steps"] == 2


def test_a_batch_that_accumulate_does_not_divide():
    message = "batch to a multiple of 3, or accumulate to a divisor of 8"
    with pytest.raises(ValueError, match=message):
        runs.experiment(Path("/tmp"), accumulate=3)


def test_after_a_divergence_without_a_checkpoint_none_is_named(tmp_path):
    experiment = runs.experiment(tmp_path, log_every=1)
    optim = replace(experiment.optim, peak_lr=1e38)
    message = r"no checkpoint was saved before it; lower optim.peak_lr"
    with pytest.raises(UserError, match=message) as e:
        pretrain.run_experiment(replace(experiment, optim=optim), tmp_path / "run")
    assert str(Workdir(tmp_path / "run").checkpoints) not in str(e.value)
    assert pretrain.run_experiment(experiment, tmp_path / "new")["steps"] == 8


def test_half_a_character_is_not_an_encoding_of_files():
    text = "a\ud83d"
    with pytest.raises(UnicodeEncodeError) as error:
        text.encode()
    said = explained_error(error.value)
    assert said is not None and "half of a character" in said and "iconv" not in said
    advice = re.search(r"text\.encode\(errors='ignore'\)\.decode\(\)", said)
    assert advice and eval(advice[0], {"text": text}) == "a"
