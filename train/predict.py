"""Write the predictions of a fine-tuned model: ``python -m train.predict RUN FILE [--out FILE]``

RUN is the folder of a finished fine-tuning (`train.finetune`) on a task of classes or numbers. FILE
is a table with the same text columns as the training data of the run: .tsv, .csv, .jsonl, .parquet,
or a folder of Hugging Face `datasets`. For a task of GLUE, it may also have the columns of the
published files, or those of tensorflow-datasets. It needs no labels. If it has the label column,
the command also prints the metrics of the rows that have a label. Rows with a label that the model
does not know are left out of the metrics, and their number is printed.

The output has a line for each row, in the same order: the predicted label (or number) and the
probability of each class. It is written as TSV to ``--out`` (default: to the terminal).
"""

import sys
from collections.abc import Set
from pathlib import Path

import jax
import numpy as np

from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.extras.head_labels import read_head
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import write_text
from train.common.output import say
from train.extras.labelled import glue, table
from train.extras.labelled.encoding import Encoder
from train.extras.labelled.supervised import model_outputs
from train.extras.labelled.task import Labelled, examples_of, labelled_of
from train.extras.pretrained import opened_model
from train.state.mesh import Mesh
from train.store.workdir import Workdir


def predict_labels(run: Path, file: Path) -> tuple[str, dict[str, float]]:
    """Predict every row of a table.

    Args:
      run: the folder of a finished fine-tuning.
      file: the table.

    Returns:
      The predictions as TSV, and the metrics of the rows that have a label that the model knows.

    Raises:
      UserError: the run is not a finished fine-tuning on classes or numbers, or the table lacks a
        column.
    """
    data = _data(run)
    source = opened_model(run)
    texts, given = labelled_rows(file, data)
    config = source.config
    # Names such as LABEL_0 do not count as names of classes, but here they are the user's own.
    labels = read_head(source.head).labels or tuple(source.head.get("id2label", {}).values())
    unlabelled = glue.Rows(texts, np.zeros(len(given), np.int32))
    examples = examples_of(unlabelled, data, config, Encoder(data.tokenizer, config))  # type: ignore[arg-type]
    mesh = Mesh().over(jax.devices())
    found = model_outputs(config, source.shard(mesh), examples, mesh)
    return _tsv(found, labels), _known_metrics(found, given, labels)


def _data(run: Path) -> Labelled:
    """Return the data of the run."""
    home, _ = at_step(run)
    workdir = Workdir(home)
    about = workdir.config["data"].get("Labelled") if workdir.finished else None
    if about is None or str(about.get("task")).startswith("squad"):
        raise UserError(
            f"{run} is not the folder of a finished fine-tuning of a text model on classes or numbers"
        )
    return labelled_of(
        about
        | {
            "tokenizer": "bytes"
            if about.get("tokenizer") == "bytes"
            else str(home / "tokenizer.json")
        }
    )


def labelled_rows(file: Path, data: Labelled) -> tuple[tuple[list[str], ...], list[str | None]]:
    """Return the texts of a table, and the name of the label of each row (None: no label).

    Args:
      file: the table.
      data: the training data, which determine the columns.

    Raises:
      UserError: the table is damaged, has no rows, or lacks a column.
    """
    own = glue.TASKS.get(data.task)
    if own is not None and glue.is_unnamed(own, file):
        texts, numbers = glue.rows_of(own, file)
        return texts, [own.labels[number] for number in numbers]
    rows = list(table.file_rows(file))
    if not rows:
        raise UserError(f"{file} has no rows, so there is nothing to predict")
    columns = _columns({name for row in rows for name in row.fields}, data)
    advice = "give the column the name that it has in the training data"
    texts = table.column_texts(rows, columns.texts, advice)  # type: ignore[arg-type]
    return texts, _given(rows, data, columns)


def _columns(names: Set[str], data: Labelled) -> glue.Columns:
    """Return the columns to read from a table with the columns ``names``.

    For a task of GLUE, they are the columns of the published files or of tensorflow-datasets,
    depending on which of them exist. In some tasks, only the names of their labels differ.
    """
    own = glue.TASKS.get(data.task)
    if own is None:
        return glue.Columns(data.text, data.label)
    of_features = glue.Columns(own.features or own.columns.texts, "label")
    published = of_features if glue.is_numbered(own) else own.columns
    there = [known for known in (published, of_features) if {*known.texts} <= names] or [published]
    return next((known for known in there if known.label in names), there[0])


def _tsv(found: np.ndarray, labels: tuple[str, ...]) -> str:
    if not labels:
        return "prediction\n" + "".join(f"{x:.6g}\n" for x in found[:, 0])
    chances = np.asarray(jax.nn.softmax(found, -1))
    lines = ["\t".join(["prediction", *labels])]
    for best, row in zip(found.argmax(-1), chances, strict=True):
        lines.append("\t".join([labels[best], *(f"{x:.6f}" for x in row)]))
    return "\n".join(lines) + "\n"


def _given(rows: list[table.Row], data: Labelled, columns: glue.Columns) -> list[str | None]:
    """Return the name of the label of each row, None for rows without one.

    The published files of a task, and tensorflow-datasets, may have numbers of classes in place of
    names.
    """
    column = str(columns.label)
    own = glue.TASKS.get(data.task)
    given = [table.row_label(row, column) if column in row.fields else None for row in rows]
    if own is None or not own.labels:
        return given
    return [None if label is None else _class_name(own, label) for label in given]


def _class_name(task: glue.Glue, label: str) -> str:
    """Return the name of a class that a label names or numbers; other labels are returned unchanged."""
    number = task.number(label)
    if number is None and label.isdecimal():
        number = task.number(int(label))
    return label if number is None else task.labels[int(number)]


def _known_metrics(
    found: np.ndarray, given: list[str | None], labels: tuple[str, ...]
) -> dict[str, float]:
    """Return the metrics of the rows whose label the model knows."""
    gold = [_gold(label, labels) for label in given]
    some = [i for i, target in enumerate(gold) if target is not None]
    pairs = zip(given, gold, strict=True)
    unknown = [label for label, target in pairs if label is not None and target is None]
    if unknown:
        say(
            f"rows with a label that the model does not know: {len(unknown)} of {len(given)}, such as {unknown[0]!r}; "
            f"the metrics leave them out (known labels: {', '.join(labels) or 'numbers'})",
            file=sys.stderr,
        )
    if not some:
        return {}
    said = found[some].argmax(-1) if labels else found[some, 0]
    expected = np.array([gold[i] for i in some])
    metrics = table.OF_CLASSES if labels else table.OF_NUMBERS
    return {name: metric(said, expected) for name, metric in metrics.items()}


def _gold(label: str | None, labels: tuple[str, ...]) -> float | None:
    """Return the class or the number of a label, None if there is none or the model lacks it."""
    if label is None:
        return None
    if not labels:
        return glue.label_number(label)
    return labels.index(label) if label in labels else None


def main() -> None:
    arguments = command_parser("predict").parse_args()
    if arguments.out is not None:  # an error here comes before the work
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text, metrics = predict_labels(arguments.run, arguments.file)
    if arguments.out is None:
        say(text, end="")
    else:
        write_text(arguments.out, text)
    for name, value in metrics.items():
        say(f"{name.replace('_', ' ')}: {value:.4f}", file=sys.stderr)


if __name__ == "__main__":
    exits_cleanly(main)
