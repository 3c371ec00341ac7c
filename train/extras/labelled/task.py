"""Tasks for fine-tuning: training examples, validation examples and scores of a model's outputs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxgrow.models import Config
from jaxgrow.models.config import TextConfig
from jaxgrow.typed import Json, build_dataclass, did_you_mean
from jaxgrow.untrusted import one_line
from train.common.errors import UserError
from train.data.dataset import DATASETS, Batch
from train.extras.labelled import glue, squad, table
from train.extras.labelled.encoding import (
    Encoder,
    Examples,
    Texts,
    frame_texts,
    pair_lengths,
    write_framing,
)
from train.extras.labelled.supervised import Prepared, Score, Supervised
from train.extras.text.mixed_paths import refuse_several
from train.extras.tokenizers.loading import copy_tokenizer, write_tokenizer

NAMES = (*glue.TASKS, *squad.TASKS)
TABLE = "table"


@dataclass(frozen=True)
class Labelled(Supervised):
    """Labelled text: a task of GLUE, SQuAD, or a table of the user.

    ``task="table"`` has rows with named columns, in files or a folder of Hugging Face `datasets`
    (`train.extras.labelled.table`). ``source="files"`` reads the published files of another task,
    which may be compressed (.gz, .xz, .zst). ``source="tfds"`` reads ``glue/<task>`` or ``squad``
    of tensorflow-datasets, which is prepared under ``path`` if necessary; it is read without
    TensorFlow.
    """

    modality = "text"
    goes_on = False
    task: str  # "cola" .. "wnli", "squad1", "squad2", "table"
    path: str  # the folder of the files or of tensorflow-datasets; for a table, also a file
    source: Literal["files", "tfds"] = "files"
    tokenizer: str = "bytes"  # as in `train.data.text.Data`
    length: int = 128  # maximum tokens of a sample
    stride: int = 128  # maximum tokens from one window of a SQuAD text to the next
    examples: int | None = None  # number of training examples, from a fixed shuffle; None: all
    # The fields below are for tables only.
    text: tuple[str, ...] = ("text",)  # one or two text columns
    label: str = "label"  # the column of the label
    # The class names in order; empty: the sorted labels of the training rows.
    labels: tuple[str, ...] = ()
    number: bool = False  # whether the label is a number
    valid_path: str | None = None  # the validation rows
    # The part that is held out if there are no other validation rows.
    valid_fraction: float = 0.1

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "source": {"task": NAMES},
        "stride": {"task": tuple(squad.TASKS)},
        **{
            name: {"task": (TABLE,)}
            for name in ("text", "label", "labels", "number", "valid_path", "valid_fraction")
        },
    }

    def __post_init__(self):
        if self.task not in (*NAMES, TABLE):
            raise ValueError(
                f"there is no task {self.task!r}, only {', '.join((*glue.TASKS, TABLE, *squad.TASKS))}"
                f"{did_you_mean(self.task, (*NAMES, TABLE))}"
            )
        if not 1 <= len(self.text) <= 2:
            raise ValueError(f"text must name one column or two, but is {self.text}")
        refuse_several(self.path, "labelled data")
        refuse_several(self.valid_path, "labelled data")
        # A single class would be taken for a number.
        if self.labels and (len(self.labels) < 2 or len({*self.labels}) < len(self.labels)):
            raise ValueError(
                f"labels must name at least two classes, each of them once, but are {self.labels}"
            )
        if self.labels and self.number:
            raise ValueError(
                f"number=true is for labels that are numbers, but labels names the classes {self.labels}: leave out one of them"
            )
        if not 0 < self.valid_fraction <= 0.5:
            raise ValueError(
                f"valid_fraction must be between 0 and 0.5, but is {self.valid_fraction}"
            )
        for name in ("length", "stride", "examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")

    @property
    def padded_length(self) -> int:
        return self.length

    def prepared(self, model: Config) -> Prepared:
        """Prepare the task; the tokens are kept in memory."""
        self.check_modality(model)
        assert isinstance(model, TextConfig)
        return _task(self, model.with_head("tokens"))

    def shapes(self, model: Config, samples: int) -> Batch:
        assert isinstance(model, TextConfig)
        return model.task_shapes(samples, self.length)

    def more_validation(self, name: str = "") -> str:
        given = "path" if self.valid_path is None else f"valid_path={self.valid_path}"
        return f"give more of them in data.{given}"

    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        copy_tokenizer(self.tokenizer, run)
        about = write_tokenizer(run, config, folder)
        return about | write_framing(self.tokenizer, self.length, config, folder)


def labelled_of(about: Mapping[str, Any]) -> Labelled:
    """The labelled data of a run, from its ``config.json``.

    Raises:
      UserError: a setting is missing or wrong.
    """
    with one_line(UserError, "the labelled data in the config.json of the run are wrong"):
        return build_dataclass(Labelled, about)


@lru_cache(maxsize=2)  # all runs of a fine-tuning call this, several times each
def _task(data: Labelled, model: TextConfig) -> Prepared:
    if data.length > model.length:
        raise UserError(
            f"data.length is {data.length} tokens, but the model has {model.length} positions; "
            f"lower data.length to {model.length}"
        )
    encoder = Encoder(data.tokenizer, model)
    least = data.length - encoder.frame.room(2, data.length) + 2
    if data.length < least:
        raise UserError(
            f"data.length is {data.length}, but two texts and the tokens around them need at least {least} tokens"
        )
    if data.task in glue.TASKS or data.task == TABLE:
        return _glue(data, model, encoder)
    if model.causal:
        raise UserError(
            f"{data.task} needs a BERT, whose tokens attend in both directions, but the model is a {type(model).__name__}"
        )
    return _squad(data, model, encoder)


def _glue(data: Labelled, model: TextConfig, encoder: Encoder) -> Prepared:
    rows, about = _split_rows(data)
    train = rows["train"]
    rows["train"] = train.select(_few(len(train.labels), data.examples))
    examples = {split: examples_of(part, data, model, encoder) for split, part in rows.items()}
    scores = {split: partial(_glue_scores, about, part.labels) for split, part in rows.items()}
    return _prepared(
        data,
        encoder,
        examples,
        scores,
        tuple(about.metrics),
        "classes",
        len(about.labels) or 1,
        about.labels,
    )


def _split_rows(data: Labelled) -> tuple[dict[str, glue.Rows], glue.Glue]:
    """The rows of all splits, and the task."""
    if data.task == TABLE:
        return table.read_labelled_table(data)
    about = glue.TASKS[data.task]
    if data.source == "tfds":
        return glue.glue_of_tfds(data.task, about, data.path), about
    return glue.glue_rows(about, _task_folder(data)), about


def examples_of(rows: glue.Rows, data: Labelled, model: TextConfig, encoder: Encoder) -> Examples:
    """Rows as examples for ``model``."""
    return _examples(_texts(rows, encoder, data.length), rows.labels, data, model, encoder)


def _texts(rows: glue.Rows, encoder: Encoder, length: int) -> Texts:
    room = encoder.frame.room(len(rows.texts), length)
    first, *others = map(encoder.tokens, rows.texts)
    if not others:
        return frame_texts(encoder.frame, [a[:room] for a in first], None, encoder.dtype)
    second = others[0]
    sizes = pair_lengths(np.array(list(map(len, first))), np.array(list(map(len, second))), room)
    a = [tokens[:n] for tokens, n in zip(first, sizes[0], strict=True)]
    b = [tokens[:n] for tokens, n in zip(second, sizes[1], strict=True)]
    return frame_texts(encoder.frame, a, b, encoder.dtype)


def _glue_scores(about: glue.Glue, labels: np.ndarray, outputs: np.ndarray) -> dict[str, float]:
    predictions = outputs.argmax(-1) if about.labels else outputs[:, 0]
    return {name: metric(predictions, labels) for name, metric in about.metrics.items()}


def _squad(data: Labelled, model: TextConfig, encoder: Encoder) -> Prepared:
    about = squad.TASKS[data.task]
    questions = (
        squad.squad_of_tfds(about, data.path)
        if data.source == "tfds"
        else squad.squad_questions(about, _task_folder(data))
    )
    questions["train"] = [
        questions["train"][i] for i in _few(len(questions["train"]), data.examples)
    ]
    read = {
        split: squad.question_windows(part, encoder, data.length, data.stride)
        for split, part in questions.items()
    }
    examples = {
        split: _examples(w.texts, w.targets, data, model, encoder) for split, w in read.items()
    }

    def squad_scores(split: str, outputs: np.ndarray) -> dict[str, float]:
        found = squad.best_answers(read[split], questions[split], outputs)
        answers = found.at(0.0 if about.unanswerable else None)
        more = squad.answer_thresholds(questions[split], found) if about.unanswerable else {}
        return squad.score_answers(about, questions[split], answers) | more

    scores = {split: partial(squad_scores, split) for split in read}
    return _prepared(data, encoder, examples, scores, squad.squad_metrics(about), "spans", 2, ())


def _task_folder(data: Labelled) -> Path:
    return Path(data.path).expanduser()


def _few(count: int, wanted: int | None) -> np.ndarray:
    """The first ``wanted`` numbers of a fixed shuffle; all, in order, if ``wanted`` is None."""
    return (
        np.arange(count) if wanted is None else np.random.default_rng(0).permutation(count)[:wanted]
    )


def _examples(
    texts: Texts, targets: np.ndarray, data: Labelled, model: TextConfig, encoder: Encoder
) -> Examples:
    types = None if model.causal else model.types
    return Examples(
        texts, targets, data.length, encoder.frame.pad, types, f"examples of {data.task}"
    )


def _prepared(
    data: Labelled,
    encoder: Encoder,
    examples: dict[str, Examples],
    scores: Mapping[str, Score],
    metrics: tuple[str, ...],
    head: Literal["classes", "spans"],
    classes: int,
    labels: tuple[str, ...],
) -> Prepared:
    train = examples["train"]
    valid = {split: part for split, part in examples.items() if split != "train"}
    content = "".join(part.digest() for part in valid.values())
    known = None if data.task == TABLE else data.task
    identity = {
        "name": known or _task_folder(data).name,
        "tokenizer": encoder.identity,
        "train": train.digest(),
        "valid": hashlib.sha256(content.encode()).hexdigest(),
    }
    return Prepared(
        train,
        valid,
        head,
        classes,
        labels,
        encoder.frame.pad,
        identity,
        scores,
        metrics,
        known,
        encoder.own_pad,
    )


DATASETS.add("Labelled", Labelled)
