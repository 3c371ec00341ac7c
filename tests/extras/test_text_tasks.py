"""A small model learns every task of GLUE from files in the published layout."""

from pathlib import Path

import numpy as np
import pytest
from finetunings import FAMILIES, checkpoint, tuning

from train.extras.labelled import glue
from train.extras.labelled.task import Labelled
from train.extras.labelled.tuning import tune_model

LETTERS = "abd"


def cells(about: glue.Glue, rng: np.random.Generator) -> dict[str | int, str]:
    """Return a row, whose last text alone determines the label."""
    count = len(about.columns.texts)
    classes = rng.integers(0, len(about.labels) or 3, count)
    texts = ("".join(rng.choice([*(3 * LETTERS[of]), *" c"], 5)) for of in classes)
    last = int(classes[-1])
    label = about.spelled[last] if about.labels else f"{2.5 * last}"
    return dict(zip(about.columns.texts, texts, strict=True)) | {about.columns.label: label}


def published(folder: Path, about: glue.Glue) -> Path:
    """Write the files of all splits."""
    for seed, (split, name) in enumerate(about.files[0].items()):
        rng, lines = np.random.default_rng(seed), []
        for _ in range(1024 if split == "train" else 128):
            row = cells(about, rng)
            places = range(4) if glue.is_numbered(about) else row
            lines.append("\t".join(row.get(place, "") for place in places))
        if not glue.is_numbered(about):
            lines.insert(0, "\t".join(map(str, row)))
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow  # `test_finetune` and `test_adapting` learn CoLA.
@pytest.mark.parametrize("name", glue.TASKS)
def test_a_task_is_learned(tmp_path, name):
    about = glue.TASKS[name]
    checkpoint(tmp_path / "bert", FAMILIES["bert"])
    data = Labelled(name, str(published(tmp_path, about)), length=14)
    tune = tuning(tmp_path, name=name, data=data, epochs=2)
    [scores] = tune_model(tune, tmp_path / "bert", tmp_path / "runs")[1e-2]
    assert [*scores] == [*about.files[0]][1:]
    for found in scores.values():
        assert [*found] == [*about.metrics] and next(iter(found.values())) > 0.85
