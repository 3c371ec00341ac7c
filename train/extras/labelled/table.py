"""Labelled text of the user: rows with named columns.

The formats are TSV, CSV, JSON Lines, Parquet, or a folder of Hugging Face `datasets`. A path is a
file, or a folder with a file for each split, such as ``train.csv`` and ``dev.csv``. Without a
validation split, some of the rows are held out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from train.common.errors import UserError
from train.extras.decoding import in_folder, json_object, readable_file, stored_file
from train.extras.labelled.glue import Columns, Glue, Rows, label_targets
from train.extras.labelled.metrics import accuracy, macro_f1, pearson, spearman
from train.extras.splitting import held_out_rows
from train.extras.text import formats
from train.extras.text.corpora import dataset_shards, dataset_splits

# Names of the validation split; the first one that exists is used.
VALIDATION = ("validation", "valid", "dev", "test")
_SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
OF_CLASSES = {"accuracy": accuracy, "macro_f1": macro_f1}
OF_NUMBERS = {"pearson": pearson, "spearman": spearman}
_KNOWN = ", ".join(_SUFFIXES)


class LabelledRows(Protocol):
    """The settings of a table, which `train.extras.labelled.task.Labelled` describes."""

    @property
    def path(self) -> str: ...

    @property
    def valid_path(self) -> str | None: ...

    @property
    def text(self) -> tuple[str, ...]: ...

    @property
    def label(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def number(self) -> bool: ...

    @property
    def valid_fraction(self) -> float: ...


class Row(NamedTuple):
    """One row, and its place in words."""

    where: str
    fields: Mapping[str, object]


def read_labelled_table(data: LabelledRows) -> tuple[dict[str, Rows], Glue]:
    """Read the training and the validation rows, and describe them as a task.

    Raises:
      UserError: a file, a column or a label is missing or is something else; the message names the
        file and the row.
    """
    parts = {split: list(file_rows(path)) for split, path in _split_files(data).items()}
    labels = () if data.number else data.labels or _names(parts["train"], data)
    title = Path(data.path).name
    metrics = OF_NUMBERS if data.number else OF_CLASSES
    about = Glue(title, labels, Columns(data.text, data.label), metrics, spelled=labels)
    found = {
        split: Rows(column_texts(part, data.text), _label_targets(part, data, about))
        for split, part in parts.items()
    }
    if len(found) == 1:
        found = _validation_rows(found["train"], data)
    return found, about


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of one file, or of a folder that `datasets` saved.

    Class numbers of `datasets` are converted to class names.

    Raises:
      UserError: the file is missing, has another format, or is damaged.
    """
    if not path.exists():
        raise UserError(f"the file {path} does not exist; name an existing table")
    if arrows := dataset_shards(path) if path.is_dir() else []:
        yield from _dataset_rows(path, arrows)
        return
    kind = formats.inner_suffix(path)
    if path.is_dir() or kind not in _SUFFIXES:
        raise UserError(
            f"{path} is not a table: it should be {_KNOWN}, or a folder that datasets saved"
        )
    yield from (Row(*record) for record in formats.table_records(path, strict=True))


def _dataset_rows(folder: Path, arrows: Sequence[Path]) -> Iterator[Row]:
    info = folder / "dataset_info.json"
    with readable_file(info, "save the dataset again"):
        features = json_object(in_folder(folder, info), "save the dataset again").get("features")
        names = {
            key: [*of["names"]]
            for key, of in (features or {}).items()
            if isinstance(of, dict) and of.get("names") is not None
        }
    number = 0
    for file in arrows:
        for _, row in formats.table_records(file):
            number += 1
            yield Row(
                f"{folder}, row {number}",
                row | {k: _class(row.get(k), of) for k, of in names.items()},
            )


def _class(value: Any, names: Sequence[str]) -> Any:
    """The name of a class; -1 marks a row without a label."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def column_texts(
    part: Sequence[Row], columns: Sequence[str], advice: str = "set data.text"
) -> tuple[list[str], ...]:
    """The texts of all rows, for each column.

    Args:
      part: the rows.
      columns: the names of the columns.
      advice: the last part of the error message.

    Raises:
      UserError: a row does not have the column, or a cell is not text.
    """
    return tuple([_cell_text(row, column, advice) for row in part] for column in columns)


def _cell_text(row: Row, column: str, advice: str) -> str:
    value = _cell(row, column, advice)
    if not isinstance(value, str):
        raise UserError(
            f"{row.where}: column {column!r} has {value!r:.40}, but should have text; {advice}"
        )
    # JSON may contain half a character, such as a lone \ud83d, which is replaced.
    return value.encode("utf-8", "replace").decode()


def _cell(row: Row, column: str, advice: str) -> Any:
    if column not in row.fields:
        names = ", ".join(map(repr, row.fields))[:200]
        raise UserError(f"{row.where} has no column {column!r}, only {names}; {advice}")
    return row.fields[column]


def row_label(row: Row, column: str) -> str | None:
    """The label of a row as text; None if it has no label."""
    value = _cell(row, column, "set data.label")
    if isinstance(value, bool):
        return str(value).lower()
    # NaN in a column of numbers is how pandas marks a missing value.
    return None if value is None or value == "" or value != value else str(value)


def _label(row: Row, column: str) -> str:
    found = row_label(row, column)
    if found is None:
        raise UserError(
            f"{row.where} has no label in column {column!r}; delete the row (train.predict labels such rows)"
        )
    return found


def _names(part: Sequence[Row], data: LabelledRows) -> tuple[str, ...]:
    """The distinct labels, sorted; integers are sorted by value."""
    found = {_label(row, data.label) for row in part}
    if len(found) < 2:
        raise UserError(
            f"all rows of {data.path} have the label {', '.join(found) or 'none'}, but training needs at least two"
        )
    if len(found) > len(part) // 2 and len(found) > 20:
        raise UserError(
            f"column {data.label!r} of {data.path} has {len(found)} different labels in {len(part)} rows; set data.label, or "
            "data.number=true if the labels are numbers"
        )
    digits = all(re.fullmatch("-?[0-9]+", name) for name in found)
    return tuple(sorted(found, key=lambda name: (int(name), name) if digits else (0, name)))


def _label_targets(part: Sequence[Row], data: LabelledRows, about: Glue) -> np.ndarray:
    if not part:
        raise UserError(f"{data.path} has no rows; name another table in data.path")
    labels = ((row.where, _label(row, data.label)) for row in part)
    return label_targets(about, labels, data.path)


def _validation_rows(every: Rows, data: LabelledRows) -> dict[str, Rows]:
    mine, held = held_out_rows(len(every.labels), data.valid_fraction)
    if not len(mine):
        raise UserError(
            f"{data.path} has {len(every.labels)} rows, not enough for a validation set; name a file of "
            "validation rows in data.valid_path"
        )
    return {"train": every.select(mine), "valid": every.select(held)}


# --- files ---


def _split_files(data: LabelledRows) -> dict[str, Path]:
    """The file, or the folder, of each split."""
    path = Path(data.path).expanduser()
    named = {} if data.valid_path is None else {"valid": Path(data.valid_path).expanduser()}
    if not path.exists():
        raise UserError(
            f"the file or folder {path} does not exist; data.path names the labelled rows"
        )
    if not path.is_dir() or dataset_shards(path):
        return {"train": path} | named
    several = {name: path / name for name in dataset_splits(path)} or _by_split(path)
    if "train" not in several:
        there = ", ".join(sorted(f.name for f in path.iterdir()))[:200] or "nothing"
        raise UserError(
            f"{path} has no split train ({_KNOWN}), only {there}; name a file in data.path"
        )
    validation = {name: several[name] for name in VALIDATION if name in several}
    return {"train": several["train"]} | (named or dict(list(validation.items())[:1]))


def _by_split(folder: Path) -> dict[str, Path]:
    names = ("train", *VALIDATION)
    files = {}
    for name, kind in product(names, _SUFFIXES):
        if file := stored_file(folder / f"{name}{kind}"):
            files[name] = file
    return files
