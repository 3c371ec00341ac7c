"""Metrics: how well predictions agree with labels. Each is a function ``(predictions [N], labels [N]) -> float``."""

import re
import string
from collections import Counter
from collections.abc import Iterable

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The part that is right."""
    return float(np.mean(predictions == labels))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Of class 1: the harmonic mean of precision and recall; 0 where nothing of that class was found."""
    found = int(np.sum((predictions == 1) & (labels == 1)))
    said, there = int(np.sum(predictions == 1)), int(np.sum(labels == 1))
    return 2 * found / (said + there) if found else 0.0


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The mean of the F1 scores of all classes that were predicted or are there."""
    present = np.union1d(predictions, labels)
    return float(np.mean([f1(predictions == name, labels == name) for name in present]))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of two binary variables (Matthews, 1975); 0 where one of them is constant."""
    return pearson(predictions == 1, labels == 1)


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The linear correlation; 0 where one side is constant."""
    a, b = (np.asarray(x, np.float64) for x in (predictions, labels))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    a, b = (
        (x - x.mean()) / np.ptp(x) for x in (a, b)
    )  # ranges of one: squares neither overflow nor vanish
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1, 1))


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of ranks, of which equal numbers share the mean; 0 where one side is constant."""
    from scipy.stats import rankdata  # takes a second, a third of what a run takes to start

    return pearson(rankdata(predictions), rankdata(labels))


# --- answers, as SQuAD compares them (Rajpurkar et al., 2016) ---

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """In lower case, without punctuation (ASCII's) and articles, words one blank apart."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Iterable[str]) -> float:
    """1 if the answer is one of those that were given, both `normalised`, else 0. Where none was given, the right one is ""."""
    return float(normalised(answer) in {normalised(gold) for gold in _known(golds)})


def answer_f1(answer: str, golds: Iterable[str]) -> float:
    """The best over the answers that were given: the harmonic mean of precision and recall of the
    words that both have, as often as both have them. Where one of the two is empty, 1 if both are.
    """
    return max(
        _words_f1(normalised(answer).split(), normalised(gold).split()) for gold in _known(golds)
    )


def _known(golds: Iterable[str]) -> list[str]:
    """Answers that are nothing but articles and punctuation are none."""
    return [gold for gold in golds if normalised(gold)] or [""]


def _words_f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    shared = (Counter(said) & Counter(gold)).total()
    return 2 * shared / (len(said) + len(gold))
