"""GLUE (Wang et al., 2019): nine tasks on one text or two.

The rows are read from the published files or from tensorflow-datasets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.common.errors import UserError
from train.extras.decoding import stored_file
from train.extras.labelled.metrics import accuracy, f1_score, matthews, pearson, spearman
from train.extras.text import formats
from train.extras.text.tfds import prepared_dataset, tfds_split

Metric = Callable[[np.ndarray, np.ndarray], float]
_NO_NAMES_IN_COLA = (
    "the files of CoLA have no line of column names: delete the line if it has names"
)
# The largest fraction of incomplete rows that is accepted if published files have such rows.
_TORN = 0.01


class Columns(NamedTuple):
    """The columns of texts and label: names from the first line, or numbers from 0.

    Files without a line of names have numbers.
    """

    texts: tuple[str | int, ...]
    label: str | int


@dataclass(frozen=True)
class Glue:
    """A task: its files, labels and metrics."""

    title: str  # the name of the folder of its files
    labels: tuple[str, ...]  # in GLUE's order; empty: the label is a number
    columns: Columns
    metrics: Mapping[str, Metric]  # the main metric of the task comes first
    # The names of the texts in the datasets of Hugging Face and of tensorflow-datasets; empty: they are
    # named like the columns.
    features: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ("0", "1")  # the labels as they are written in files
    # The files of each publication, beginning with GLUE's.
    files: tuple[Mapping[str, str], ...] = ({"train": "train.tsv", "dev": "dev.tsv"},)
    torn: bool = False  # whether published files have incomplete rows, which are left out

    def number(self, label: str | float) -> float | None:
        """The class or the number that a label stands for; None if the label is invalid."""
        if self.labels:
            if isinstance(label, str):
                return self.spelled.index(label) if label in self.spelled else None
            return label if 0 <= label < len(self.labels) else None
        return label_number(label)


def label_number(label: str | float) -> float | None:
    """The finite number that a label stands for; None if there is none.

    Labels are stored in float32, in which a larger number would become infinite.
    """
    try:
        return float(label) if abs(float(label)) <= float(np.finfo(np.float32).max) else None
    except ValueError:
        return None


class Rows(NamedTuple):
    """The first and perhaps the second texts of all rows, and the labels, int32 or float32 [N]."""

    texts: tuple[list[str], ...]
    labels: np.ndarray

    def select(self, indices: np.ndarray) -> "Rows":
        """The rows with these indices."""
        texts = tuple([column[i] for i in indices] for column in self.texts)
        return Rows(texts, self.labels[indices])


_PAIR = ("sentence1", "sentence2")
_ACCURACY: Mapping[str, Metric] = {"accuracy": accuracy}
_BOTH: Mapping[str, Metric] = {"accuracy": accuracy, "f1": f1_score}
_ENTAILED = ("entailment", "not_entailment")

TASKS: dict[str, Glue] = {
    "cola": Glue(
        "CoLA",
        ("unacceptable", "acceptable"),
        Columns((3,), 1),
        {"matthews": matthews},
        features=("sentence",),
        files=(
            {"train": "train.tsv", "dev": "dev.tsv"},
            # the files that Warstadt et al. published
            {"train": "in_domain_train.tsv", "dev": "in_domain_dev.tsv"},
        ),
    ),
    "sst2": Glue("SST-2", ("negative", "positive"), Columns(("sentence",), "label"), _ACCURACY),
    "mrpc": Glue(
        "MRPC",
        ("not_equivalent", "equivalent"),
        Columns(("#1 String", "#2 String"), "Quality"),
        _BOTH,
        features=_PAIR,
    ),
    "stsb": Glue("STS-B", (), Columns(_PAIR, "score"), {"pearson": pearson, "spearman": spearman}),
    "qqp": Glue(
        "QQP",
        ("not_duplicate", "duplicate"),
        Columns(("question1", "question2"), "is_duplicate"),
        _BOTH,
        torn=True,
    ),
    "mnli": Glue(
        "MNLI",
        ("entailment", "neutral", "contradiction"),
        Columns(_PAIR, "gold_label"),
        _ACCURACY,
        features=("premise", "hypothesis"),
        spelled=("entailment", "neutral", "contradiction"),
        files=(
            {
                "train": "train.tsv",
                "matched": "dev_matched.tsv",
                "mismatched": "dev_mismatched.tsv",
            },
        ),
    ),
    "qnli": Glue(
        "QNLI", _ENTAILED, Columns(("question", "sentence"), "label"), _ACCURACY, spelled=_ENTAILED
    ),
    "rte": Glue("RTE", _ENTAILED, Columns(_PAIR, "label"), _ACCURACY, spelled=_ENTAILED),
    "wnli": Glue("WNLI", ("not_entailment", "entailment"), Columns(_PAIR, "label"), _ACCURACY),
}


def glue_rows(task: Glue, path: Path) -> dict[str, Rows]:
    """Training and validation rows from files in a folder or in its subfolder ``task.title``.

    The files may be compressed (.gz, .xz, .zst).

    Raises:
      UserError: files are missing or belong to a different task; the message names the file, the
        line and the value.
    """
    return {
        split: rows_of(task, file)
        for split, file in published_files(task.files, path, task.title).items()
    }


def published_files(
    publications: Sequence[Mapping[str, str]], path: Path, title: str
) -> dict[str, Path]:
    """The files of the first complete publication in ``path`` or ``path/title``, compressed or not.

    Raises:
      UserError: no publication is complete.
    """
    wanted = " or ".join(" and ".join(files.values()) for files in publications)
    where = f"{path} or {path / title}"
    missing = f"there is no {next(iter(publications[0].values()))}"
    for files in publications:
        for folder in (path, path / title):
            found = {split: stored_file(folder / name) for split, name in files.items()}
            there = {split: file for split, file in found.items() if file is not None}
            if len(there) == len(files):
                return there
            if there:
                lacking = next(name for split, name in files.items() if split not in there)
                where = str(folder)
                missing = f"{next(iter(there.values())).name} is there, but no {lacking}"
    raise UserError(
        f"{missing} in {where}: download {title} as it was published, and name the folder of {wanted} (plain, .gz, .xz or "
        ".zst) in data.path"
    )


def is_numbered(task: Glue) -> bool:
    """Whether the published files of a task have no line of column names."""
    return isinstance(task.columns.label, int)


def is_unnamed(task: Glue, file: Path) -> bool:
    """Whether a file has the published layout of a task without column names.

    Raises:
      UserError: the file cannot be read, or has another encoding.
    """
    if not is_numbered(task) or not file.is_file() or ".tsv" not in file.suffixes[-2:]:
        return False
    first = formats.read_text(file).partition("\n")[0].removesuffix("\r").split("\t")
    least = max(int(place) for place in (*task.columns.texts, task.columns.label)) + 1
    return len(first) >= least and not {*task.features} & {*first}


def rows_of(task: Glue, file: Path) -> Rows:
    """The rows of one published file.

    Raises:
      UserError: as for `glue_rows`.
    """
    lines = formats.read_text(file).split("\n")
    rows = [(n, line.removesuffix("\r").split("\t")) for n, line in enumerate(lines, 1)]
    (*texts, label), first = _places(rows[0][1], task.columns, file)
    least = max(*texts, label) + 1
    rows = [(n, row) for n, row in rows[first:] if row != [""]]
    torn = [(n, len(row)) for n, row in rows if len(row) < least]
    if torn and len(torn) > _TORN * len(rows) * task.torn:
        raise UserError(
            f"{file}, line {torn[0][0]} has {torn[0][1]} columns, but {task.title} has at least {least}, separated by tabs; "
            + (
                "its first line looks like column names, but " + _NO_NAMES_IN_COLA
                if task.title == "CoLA" and torn[0][0] == 1 and "label" in lines[0]
                else "correct or delete the line"
            )
        )
    rows = [(n, row) for n, row in rows if len(row) >= least]
    labels = ((f"{file}, line {n}", row[label]) for n, row in rows)
    columns = tuple([row[t] for _, row in rows] for t in texts)
    return Rows(columns, label_targets(task, labels, file))


def _places(first: list[str], columns: Columns, file: Path) -> tuple[list[int], int]:
    """The column numbers of texts and label, and the number of the first row of data."""
    wanted = [*columns.texts, columns.label]
    numbers = [name for name in wanted if isinstance(name, int)]
    if numbers:
        return numbers, 0
    if lacking := [name for name in wanted if name not in first]:
        raise UserError(
            f"{file} has no column {lacking[0]!r} in its first line, only "
            f"{', '.join(map(repr, first))[:200]}, so it is not the published file; download it again"
        )
    return [first.index(str(name)) for name in wanted], 1


def label_targets(
    task: Glue, labels: Iterable[tuple[str, str | float]], where: object
) -> np.ndarray:
    """Convert labels, each given with its place, to numbers.

    Raises:
      UserError: a label is wrong, or there is none.
    """
    out = []
    for place, label in labels:
        number = task.number(label)
        if number is None and is_numbered(task) and place.endswith("line 1"):
            raise UserError(f"{place}: the label {label!r} is not 0 or 1; {_NO_NAMES_IN_COLA}")
        if number is None:
            kind = f"one of {', '.join(task.spelled)}"[:200] if task.labels else "a number"
            raise UserError(f"{place}: the label {label!r} is not {kind}; correct or delete it")
        out.append(number)
    if not out:
        raise UserError(f"{where} has no rows, so it is not the published file; download it again")
    return np.array(out, np.int32 if task.labels else np.float32)


def glue_of_tfds(name: str, task: Glue, path: str) -> dict[str, Rows]:
    """Training and validation rows of ``glue/<name>`` of tensorflow-datasets, prepared under ``path``.

    Raises:
      UserError: the dataset cannot be prepared, or has other features.
    """
    builder = prepared_dataset(f"glue/{name}", path)
    texts = task.features or tuple(map(str, task.columns.texts))
    if lacking := [each for each in (*texts, "label") if each not in builder.info.features]:
        raise UserError(
            f"glue/{name} has no feature {lacking[0]!r}, only {', '.join(builder.info.features)}"
        )
    out = {}
    for split in task.files[0]:
        theirs = {"train": "train", "dev": "validation"}.get(split, f"validation_{split}")
        records = [*tfds_split(builder, theirs)]
        where = f"split {theirs} of glue/{name}"
        given = (
            (f"{where}, row {i}", np.asarray(r["label"]).item()) for i, r in enumerate(records)
        )
        columns = ([r[text].decode("utf-8", "replace") for r in records] for text in texts)
        out[split] = Rows(tuple(columns), label_targets(task, given, where))
    return out
