"""SQuAD (Rajpurkar et al., 2016; 2018): find the answer to a question as a span of a text.

A text that is longer than the input of the model is split into windows, each after the question;
the result is the best answer of all windows. In version 2, some questions have no answer.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrow.typed import Json
from train.common.errors import UserError
from train.extras.labelled.encoding import Encoder, Texts, frame_texts
from train.extras.labelled.glue import published_files
from train.extras.labelled.metrics import answer_f1, exact_match
from train.extras.text import formats
from train.extras.text.tfds import prepared_dataset, tfds_split

# The maximum numbers of tokens. If the tokens are bytes, they are four times as large
# (`Encoder.piece`).
QUESTION = 64
ANSWER = 30
_CHUNK = 1024  # windows that are searched in one call
# Without a validation file, one article in this number is held out.
_HELD = 10
_HALF = re.compile("[\ud800-\udfff]")  # a lone escape such as \ud83d is half a character


@dataclass(frozen=True)
class Squad:
    """A version of SQuAD: its files, and whether some questions have no answer."""

    # The files of each publication. Without ``dev``, articles are held out.
    files: tuple[Mapping[str, str], ...]
    unanswerable: bool
    name: str  # the name of the dataset in tensorflow-datasets


TASKS: dict[str, Squad] = {
    "squad1": Squad(
        (
            {"train": "train-v1.1.json", "dev": "dev-v1.1.json"},
            {"train": "train-v1.1.rebuilt.json"},
        ),
        False,
        "squad/v1.1",
    ),
    "squad2": Squad(({"train": "train-v2.0.json", "dev": "dev-v2.0.json"},), True, "squad/v2.0"),
}


class Question(NamedTuple):
    text: str
    context: str
    answers: tuple[str, ...]  # the answers that people gave; empty: there is no answer
    begin: int  # the index of the first character of the first answer


def squad_questions(task: Squad, path: Path) -> dict[str, list[Question]]:
    """The questions of ``train`` and ``dev``, from JSON files in ``path`` or ``path/squad``.

    The files may be compressed (.gz, .xz, .zst).

    Raises:
      UserError: files are missing, or are not files of SQuAD; the message names the file and the
        question.
    """
    files = published_files(task.files, path, "squad")
    articles = {split: _articles(file) for split, file in files.items()}
    if "dev" not in articles:
        every = articles["train"]
        articles = {
            "train": [a for i, a in enumerate(every) if i % _HELD != _HELD - 1],
            "dev": every[_HELD - 1 :: _HELD],
        }
    out = {}
    for split, held in articles.items():
        file = files.get(split, files["train"])
        out[split] = [q for article in held for q in _questions(article, task, file)]
        if not out[split]:
            raise UserError(
                f"{file} has no questions for {split}, so it is not the published file; download it again"
            )
    return out


def squad_of_tfds(task: Squad, path: str) -> dict[str, list[Question]]:
    """The questions of tensorflow-datasets, prepared under ``path``; ``dev`` is its validation split.

    Raises:
      UserError: the dataset cannot be prepared, or differs from the published one.
    """
    builder = prepared_dataset(task.name, path)
    out = {}
    for split, theirs in (("train", "train"), ("dev", "validation")):
        articles = map(_article_of_record, tfds_split(builder, theirs))
        where = f"split {theirs} of {task.name}"
        out[split] = [q for article in articles for q in _questions(article, task, where)]
    return out


def _article_of_record(record: Any) -> Json:
    """Convert a question of tensorflow-datasets to an article of the JSON files."""
    plain = {
        name: value.decode("utf-8", "replace")
        for name, value in record.items()
        if isinstance(value, bytes)
    }
    answers = record.get("answers", {"text": (), "answer_start": ()})
    given = [
        {"text": text.decode("utf-8", "replace"), "answer_start": int(begin)}
        for text, begin in zip(answers["text"], answers["answer_start"], strict=True)
    ]
    return {"paragraphs": [{**plain, "qas": [{**plain, "answers": given}]}]}


def _articles(file: Path) -> list[Any]:
    try:
        articles = json.loads(formats.read_text(file))["data"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is not SQuAD's JSON ({type(error).__name__}: {error}); download it again"
        ) from error
    if not isinstance(articles, list):
        raise UserError(f"{file} is not SQuAD's JSON: its data is not a list; download it again")
    return articles


def _questions(article: Any, task: Squad, file: Path | str) -> Iterator[Question]:
    where = f"{file}"
    try:
        for paragraph in article["paragraphs"]:
            context = _whole(paragraph["context"])
            for entry in paragraph["qas"]:
                where = f"{file}, question {entry['id']}"
                given = [] if entry.get("is_impossible") else entry["answers"]
                answers = tuple(_whole(answer["text"]) for answer in given)
                begin = given[0]["answer_start"] if given else 0
                if not answers and not task.unanswerable:
                    raise UserError(f"{where} has no answer, as in version 2: set data.task=squad2")
                if answers and context[begin : begin + len(answers[0])] != answers[0]:
                    raise UserError(
                        f"{where}: its answer {answers[0]!r} is not at character {begin} of its text"
                    )
                yield Question(_whole(entry["question"]), context, answers, begin)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is not as in SQuAD ({type(error).__name__}: {error}); download the file again"
        ) from error


def _whole(text: str) -> str:
    return _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True)
class QuestionWindows:
    """The inputs for questions, in order: windows of the context of each question."""

    texts: Texts
    # int32 [W, 2]: the first and last token of the answer; (0, 0): it is not in the window.
    targets: np.ndarray
    question: np.ndarray  # int32 [W]: the question of each window
    skipped: np.ndarray  # int32 [W]: the number of context tokens before the window
    held: np.ndarray  # int32 [W]: the number of context tokens in the window
    longest: int  # maximum tokens of an answer
    # The character range of each context token, for each question, int32 [n, 2].
    spans: list[np.ndarray]


def question_windows(
    questions: list[Question], encoder: Encoder, length: int, stride: int
) -> QuestionWindows:
    """Split each context into windows of ``length`` tokens, which include the question.

    Windows begin ``stride`` tokens of the context apart, or less if tokens between two windows
    would be skipped. The last one ends with the context. A question is cut to `QUESTION` tokens, or
    to half of the window.
    """
    longest = min(QUESTION * encoder.piece, encoder.frame.room(2, length) // 2)
    texts = [q.text for q in questions]
    encoded = [tokens[:longest] for tokens in encoder.tokens(texts)]
    contexts = list(dict.fromkeys(q.context for q in questions))  # questions share contexts
    read = dict(zip(contexts, encoder.spans(contexts), strict=True))
    windows = []
    for i, (q, question) in enumerate(zip(questions, encoded, strict=True)):
        tokens, spans = read[q.context]
        room = encoder.frame.room(2, length) - len(question)
        before = len(encoder.frame.begin) + len(question) + len(encoder.frame.between)
        answer = _tokens_of(q, spans)
        for begin in _window_begins(len(tokens), room, stride):
            end = min(begin + room, len(tokens))
            inside = answer is not None and begin <= answer[0] and answer[1] < end
            target = (0, 0)
            if answer and inside:
                target = (answer[0] - begin + before, answer[1] - begin + before)
            windows.append((question, tokens[begin:end], target, i, begin))
    first, second, targets, whose, skipped = zip(*windows, strict=True)
    return QuestionWindows(
        frame_texts(encoder.frame, first, second, encoder.dtype),
        np.array(targets, np.int32),
        np.array(whose, np.int32),
        np.array(skipped, np.int32),
        np.array([len(part) for part in second], np.int32),
        ANSWER * encoder.piece,
        [read[q.context][1] for q in questions],
    )


def _window_begins(tokens: int, room: int, stride: int) -> range:
    """The starts of windows of ``room`` tokens, up to the first window with the last token."""
    step = min(stride, room)
    return range(0, max(tokens - room, 0) + step, step)


def _tokens_of(q: Question, spans: np.ndarray) -> tuple[int, int] | None:
    """The first and the last token that overlap the answer."""
    if not q.answers:
        return None
    end = q.begin + len(q.answers[0])
    touched = np.flatnonzero((spans[:, 1] > q.begin) & (spans[:, 0] < end))
    return (int(touched[0]), int(touched[-1])) if len(touched) else None


class Answers(NamedTuple):
    """The best answer to each question, and the score of giving no answer relative to it."""

    texts: list[str]  # spans of the contexts; "": no span fits into a window
    silence: np.ndarray  # float64 [N]: the score of no answer minus the score of the answer

    def at(self, threshold: float | None) -> list[str]:
        """The answers, with "" for questions whose ``silence`` exceeds ``threshold`` (None: never)."""
        if threshold is None:
            return self.texts
        return [
            "" if margin > threshold else text
            for text, margin in zip(self.texts, self.silence, strict=True)
        ]


def best_answers(
    windows: QuestionWindows, questions: list[Question], logits: np.ndarray
) -> Answers:
    """Find the best answer to each question, as text of its context.

    It is the span of at most `ANSWER` tokens within one window that has the largest sum of a start
    logit and an end logit. The score of no answer is the sum of both logits at the first token, in
    the window with the smallest sum.

    Deviation(BERT): all spans are compared, not only spans between the 20 best starts and the 20
    best ends. If the best of all spans is one of these spans, the result is the same.

    Args:
      windows: the windows of the questions.
      questions: the questions, in the same order.
      logits: [W, length, 2], the logits of starts and ends.

    Returns:
      An answer for each question.
    """
    score = np.full(len(questions), -np.inf)
    span = np.zeros((len(questions), 2), int)
    nothing = np.full(len(questions), np.inf)
    for some in np.array_split(np.arange(len(logits)), -(-len(logits) // _CHUNK)):
        best, found = _best(windows, logits[some].astype(np.float64), some)
        for w, q in enumerate(windows.question[some]):
            nothing[q] = min(nothing[q], logits[some[w], 0].sum(dtype=np.float64))
            if best[w] > score[q]:
                score[q] = best[w]
                span[q] = found[w]
    out = []
    for q, question in enumerate(questions):
        silent = score[q] == -np.inf
        begin, end = (
            (0, 0) if silent else (windows.spans[q][span[q, 0], 0], windows.spans[q][span[q, 1], 1])
        )
        out.append(question.context[begin:end].strip())
    return Answers(out, nothing - score)


def _best(
    windows: QuestionWindows, logits: np.ndarray, some: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The best span of each of the windows ``some``.

    Returns its score [W], and its first and last context token [W, 2].
    """
    first = windows.texts.second[some, None]
    length = logits.shape[1]
    inside = (np.arange(length) >= first) & (np.arange(length) < first + windows.held[some, None])
    begins, ends = (np.where(inside, logits[..., side], -np.inf) for side in (0, 1))
    score = np.full(len(some), -np.inf)
    span = np.zeros((len(some), 2), int)
    for further in range(min(windows.longest, length)):
        sums = begins[:, : length - further] + ends[:, further:]
        at = sums.argmax(1)
        top = sums[np.arange(len(some)), at]
        better = top > score
        score = np.where(better, top, score)
        span[better] = np.stack([at, at + further], 1)[better]
    return score, span + (windows.skipped[some, None] - first)


def answer_thresholds(questions: list[Question], found: Answers) -> dict[str, float]:
    """Find the best scores of version 2 over all thresholds of `Answers.at`.

    The method is the same as in the official script.

    Args:
      questions: the questions, some of which have no answer.
      found: the answers to them.

    Returns:
      ``best_f1`` and ``best_exact_match``, means over questions from 0 to 1, and the threshold of
      each.
    """
    order = np.argsort(found.silence, kind="stable")
    out = {}
    for name, metric in (("f1", answer_f1), ("exact_match", exact_match)):
        answered = _scores(metric, found.texts, questions)
        silent = _scores(metric, [""] * len(questions), questions)
        totals = np.concatenate([[0.0], np.cumsum((answered - silent)[order])]) + silent.sum()
        # a threshold separates two different margins
        after = np.append(np.diff(found.silence[order]) > 0, True)
        allowed = np.flatnonzero(np.concatenate([[True], after]))
        best = allowed[totals[allowed].argmax()]
        below = found.silence[order[best - 1]] if best else found.silence[order[0]] - 1.0
        out |= {
            f"best_{name}": float(totals[best] / len(questions)),
            f"best_{name}_threshold": float(below),
        }
    return out


def _scores(
    metric: Callable[[str, Iterable[str]], float], texts: list[str], questions: list[Question]
) -> np.ndarray:
    """The metric of each text as the answer to its question, float [N]."""
    return np.array([metric(text, q.answers) for text, q in zip(texts, questions, strict=True)])


def squad_metrics(task: Squad) -> tuple[str, ...]:
    """The names of the metrics of a task, the main one first."""
    names = ("f1", "exact_match")
    return names + (("best_f1", "best_exact_match") if task.unanswerable else ())


def score_answers(task: Squad, questions: list[Question], predicted: list[str]) -> dict[str, float]:
    """F1 and exact match, means over questions, from 0 to 1.

    Version 2 also has both for the questions with and without an answer, if there are any.
    """
    f1 = np.array([answer_f1(a, q.answers) for a, q in zip(predicted, questions, strict=True)])
    exact = np.array([exact_match(a, q.answers) for a, q in zip(predicted, questions, strict=True)])
    has = np.array([bool(q.answers) for q in questions])
    out = {"f1": float(f1.mean()), "exact_match": float(exact.mean())}
    for name, part in (("answer", has), ("no_answer", ~has)) if task.unanswerable else ():
        if part.any():
            out |= {
                f"{name}_f1": float(f1[part].mean()),
                f"{name}_exact_match": float(exact[part].mean()),
            }
    return out
