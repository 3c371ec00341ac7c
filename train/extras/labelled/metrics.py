"""Metrics that compare predictions with labels: ``(predictions [N], labels [N]) -> float``."""

import re
import string
from collections import Counter
from collections.abc import Iterable

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The fraction of correct predictions."""
    return float(np.mean(predictions == labels))


def f1_score(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 without true positives."""
    correct = int(np.sum((predictions == 1) & (labels == 1)))
    predicted = int(np.sum(predictions == 1))
    actual = int(np.sum(labels == 1))
    return 2 * correct / (predicted + actual) if correct else 0.0


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The mean F1 score over all classes that occur in the predictions or the labels."""
    present = np.union1d(predictions, labels)
    return float(np.mean([f1_score(predictions == name, labels == name) for name in present]))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of two binary variables (Matthews, 1975); 0 if one of them is constant."""
    return pearson(predictions == 1, labels == 1)


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The linear correlation; 0 if one side is constant."""
    a, b = (np.asarray(x, np.float64) for x in (predictions, labels))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    # Scale to ranges of one, so that squares neither overflow nor underflow.
    a, b = ((x - x.mean()) / np.ptp(x) for x in (a, b))
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1, 1))


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of ranks, with mean ranks for ties; 0 if one side is constant."""
    # Imported here, because the import takes a second, a third of the start of a run.
    from scipy.stats import rankdata

    return pearson(rankdata(predictions), rankdata(labels))


# --- metrics of answers, as in SQuAD (Rajpurkar et al., 2016) ---

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_answer(answer: str) -> str:
    """Convert to lower case and remove ASCII punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Iterable[str]) -> float:
    """1 if the answer equals one of the given answers, else 0. `normalised_answer` is applied to all.

    If there are no given answers, the correct answer is "".
    """
    return float(
        normalised_answer(answer) in {normalised_answer(gold) for gold in _usable_answers(golds)}
    )


def answer_f1(answer: str, golds: Iterable[str]) -> float:
    """The best F1 score of words over the given answers.

    F1 is the harmonic mean of precision and recall of the shared words, counted with multiplicity.
    If one of two answers is empty, it is 1 if both are empty, else 0.
    """
    return max(
        _words_f1(normalised_answer(answer).split(), normalised_answer(gold).split())
        for gold in _usable_answers(golds)
    )


def _usable_answers(golds: Iterable[str]) -> list[str]:
    """The given answers that have a word, or [""] if there is none."""
    return [gold for gold in golds if normalised_answer(gold)] or [""]


def _words_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    shared = (Counter(predicted) & Counter(gold)).total()
    return 2 * shared / (len(predicted) + len(gold))
