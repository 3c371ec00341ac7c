"""Tasks without training: perplexities of texts, the last word of a passage, the better of two sentences, the right ending.

The formats of questions, and what is counted, are those of the lm-evaluation-harness (Gao et al., 2023), so that numbers may be
compared. Data are local files, found by the names that they are published with, or a folder of tensorflow-datasets. Of the
latter, HellaSwag is not read: it has both parts of a context as one, of which the harness writes the second with a capital.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from train.data import formats
from train.errors import UserError
from train.tasks.scoring import Scorer

Result = dict[str, Any]  # name of a number -> the number


class Question(NamedTuple):
    context: str
    choices: tuple[str, ...]  # what may follow
    right: int
    group: str = ""  # of which a mean is told, too


class Task(Protocol):
    @property
    def patterns(self) -> tuple[str, ...]:
        """Of its files, in the order in which they are looked for."""
        ...

    def judge(self, scorer: Scorer, files: list[Path], stride: int | None) -> Result: ...


@dataclass(frozen=True)
class Text:
    """How well a text is predicted, as it stands in its file.

    ============== =========================================================================
    perplexity     ``exp(nats / tokens)``, which no two tokenizers can be compared by
    by word        ``exp(nats / words)``; words are what blanks divide
    bits per byte  ``nats / (bytes ln 2)``, of UTF-8
    ============== =========================================================================
    """

    patterns: tuple[str, ...]

    def judge(self, scorer: Scorer, files: list[Path], stride: int | None) -> Result:
        if scorer.masked:
            raise UserError("a masked model has no perplexity of running text; blimp and questions judge it")
        nats, tokens, words, size = 0.0, 0, 0, 0
        for file in files:
            text = "".join(formats.text(file))
            requests = scorer.windows(text, stride)
            nats += sum(score.loss for score in scorer(requests))
            tokens += sum(r.end - r.begin for r in requests)
            words, size = words + len(text.split()), size + len(text.encode())
        if not tokens or not words:
            raise UserError(f"there is no text in {', '.join(map(str, files))}")
        return {
            "perplexity": _exp(nats / tokens),
            "perplexity_by_word": _exp(nats / words),
            "bits_per_byte": nats / (size * math.log(2)),
            "tokens": tokens,
            "words": words,
            "bytes": size,
        }


@dataclass(frozen=True)
class LastWord:
    """The last word of a passage: whether it is the likeliest continuation, token by token, and its perplexity."""

    patterns: tuple[str, ...]

    def judge(self, scorer: Scorer, files: list[Path], stride: int | None) -> Result:
        records = _some([r for file in files for r in formats.records(file)], files)
        questions = [_last_word(*record) for record in records]
        scores = scorer([scorer.continuation(q.context, q.choices[0]) for q in questions])
        return {
            "accuracy": float(np.mean([s.greedy for s in scores])),
            "perplexity": _exp(float(np.mean([s.loss for s in scores]))),
            "questions": len(questions),
        }


@dataclass(frozen=True)
class Choice:
    """Whether the right continuation is the likeliest; ``accuracy_normalised``: by its likelihood per character."""

    patterns: tuple[str, ...]
    read: Callable[[Path], Iterator[Question]]
    normalised: bool = True

    def judge(self, scorer: Scorer, files: list[Path], stride: int | None) -> Result:
        questions = _some([question for file in files for question in self.read(file)], files)
        requests = [scorer.continuation(q.context, choice) for q in questions for choice in q.choices]
        scores = iter(scorer(requests))
        right, normalised, groups = [], [], {}
        for question in questions:
            loss = np.array([next(scores).loss for _ in question.choices])
            right.append(int(loss.argmin()) == question.right)
            lengths = np.array([len(choice.strip()) for choice in question.choices])
            normalised.append(int((loss / np.maximum(lengths, 1)).argmin()) == question.right)
            groups.setdefault(question.group, []).append(right[-1])
        each = {name: float(np.mean(of)) for name, of in sorted(groups.items())}
        result: Result = {"accuracy": float(np.mean(list(each.values()))), "questions": len(questions)}
        if self.normalised:
            result["accuracy_normalised"] = float(np.mean(normalised))
        return result | ({"by": each} if len(each) > 1 else {})


# --- files ---


def _some(questions: list[Any], files: list[Path]) -> list[Any]:
    if not questions:
        raise UserError(f"{', '.join(map(str, files))} has no questions")
    return questions


def _last_word(where: str, record: dict[str, Any]) -> Question:
    before, blank, word = _field(where, record, "passage" if "passage" in record else "text").rpartition(" ")
    if not blank:
        raise UserError(f"{where} is one word: it has no last one to predict")
    return Question(before, (blank + word,), 0)


def _blimp(file: Path) -> Iterator[Question]:
    for where, r in formats.records(file):
        pair = (_field(where, r, "sentence_good"), _field(where, r, "sentence_bad"))
        yield Question("", pair, 0, str(r.get("UID", file.stem)))


def _piqa(file: Path) -> Iterator[Question]:
    """``valid.jsonl``, whose labels are in ``valid-labels.lst`` beside it, or in a column."""
    answers = file.with_name(f"{file.name.partition('.')[0]}-labels.lst")
    labels = answers.read_text().split() if answers.exists() else None
    for i, (where, r) in enumerate(formats.records(file)):
        if labels is not None and i >= len(labels):
            raise UserError(f"{answers} has {len(labels)} labels, less than there are questions in {file}")
        label = labels[i] if labels is not None else _field(where, r, "label", int)
        choices = [f" {_field(where, r, name)}" for name in ("sol1", "sol2")]
        yield _question(where, f"Question: {_field(where, r, 'goal')}\nAnswer:", choices, label)


def _hellaswag(file: Path) -> Iterator[Question]:
    for where, r in formats.records(file):
        before = f"{_field(where, r, 'ctx_a')} {_field(where, r, 'ctx_b').capitalize()}"
        endings = [f" {_swag(ending)}" for ending in _field(where, r, "endings", list)]
        context = _swag(f"{_field(where, r, 'activity_label')}: {before}")
        yield _question(where, context, endings, _field(where, r, "label", (int, str)))


def _swag(text: str) -> str:
    """Without the brackets that WikiHow's part has left."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(file: Path) -> Iterator[Question]:
    """``{"question": {"stem": .., "choices": [{"text", "label"}]}, "answerKey"}``, or with columns of all choices."""
    for where, r in formats.records(file):
        question = _field(where, r, "question", (str, dict))
        if isinstance(question, dict):
            stem, options = _field(where, question, "stem"), _field(where, question, "choices", list)
            texts, labels = [o["text"] for o in options], [o["label"] for o in options]
        else:
            choices = _field(where, r, "choices", dict)
            stem, texts, labels = question, choices["text"], choices["label"]
        key = _field(where, r, "answerKey", (str, int))
        if key not in labels:
            raise UserError(f"{where}: the answer is {key!r}, but the choices are {', '.join(map(str, labels))}")
        yield _question(where, f"Question: {stem}\nAnswer:", [f" {t}" for t in texts], labels.index(key))


def _question(where: str, context: str, choices: list[str], label: Any) -> Question:
    right = int(label) if str(label).isdigit() else -1
    if not 0 <= right < len(choices):
        raise UserError(f"{where}: the label is {label!r}, but there are {len(choices)} choices")
    return Question(context, tuple(choices), right)


def _field(where: str, record: dict[str, Any], name: str, kind: Any = str) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        what = f"is {value!r:.60}" if name in record else f"is missing; there are {', '.join(record) or 'no fields'}"
        raise UserError(f"{where}: {name} {what}")
    return value


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


_TFDS = "array_record-00000-of-*"  # a split's first file; the others are read with it

TASKS: dict[str, Task] = {
    "wikitext2": Text(("wiki.test.raw", "wiki.valid.raw")),
    "wikitext103": Text(("wiki.test.raw", "wiki.valid.raw")),
    "ptb": Text(("ptb.test.txt", "ptb.valid.txt")),
    "bits_per_byte": Text(("*.txt",)),
    "lambada": LastWord(("lambada_test*.jsonl", "*.jsonl", "*.parquet", f"*/lambada-test.{_TFDS}")),
    "blimp": Choice(("*.jsonl", "*.parquet", f"*/*/blimp-train.{_TFDS}"), _blimp, normalised=False),
    "piqa": Choice(("valid.jsonl", "validation*.parquet", f"*/piqa-validation.{_TFDS}"), _piqa),
    "hellaswag": Choice(("hellaswag_val.jsonl", "validation*.parquet"), _hellaswag),
    "arc_easy": Choice(("ARC-Easy-Test.jsonl", "test*.parquet", f"ai2_arc/ARC-Easy/*/ai2_arc-test.{_TFDS}"), _arc),
    "arc_challenge": Choice(
        ("ARC-Challenge-Test.jsonl", "test*.parquet", f"ai2_arc/ARC-Challenge/*/ai2_arc-test.{_TFDS}"), _arc
    ),
}


def evaluate(scorer: Scorer, names: Iterable[str], folder: Path, stride: int | None = None) -> dict[str, Result]:
    """What the model scores in each task. A name is one of `TASKS`, or a file of text.

    Raises:
      UserError: before any is judged: there is no such task, or none of its files in ``folder``, or in its subfolder of the
        task's name.
    """
    if stride is not None and not 1 <= stride <= scorer.config.length:
        raise UserError(f"a stride lies between 1 and the context of {scorer.config.length} tokens, but is {stride}")
    return {
        name: task.judge(scorer, files, stride) | {"files": [str(f) for f in files]}
        for name, (task, files) in found(names, folder).items()
    }


def found(names: Iterable[str], folder: Path) -> dict[str, tuple[Task, list[Path]]]:
    """The tasks of these names, and their files; raises as `evaluate`."""
    return {name: _found(name, folder) for name in names}


def _found(name: str, folder: Path) -> tuple[Task, list[Path]]:
    if name not in TASKS:
        if Path(name).is_file():
            return Text(()), [Path(name)]
        raise UserError(f"there is no task {name!r}, nor a file of text of that name; tasks: {', '.join(TASKS)}")
    task = TASKS[name]
    for pattern in task.patterns:
        for where in (folder / name, folder):
            if files := sorted({f for end in ("", ".gz", ".xz", ".zst") for f in where.glob(pattern + end)}):
                return task, files
    raise UserError(
        f"{name} needs {' or '.join(task.patterns)}, perhaps compressed, in {folder / name} or {folder}; nothing is "
        "downloaded: put it there, or name another folder by --data"
    )
