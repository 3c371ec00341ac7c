"""The classes of a head, as ``config.json`` says them: by their labels, and with the task that the head has learned.

A decoder classifies a text by its last token. We are told its place; `transformers` takes the last
one that is not ``pad_token_id``, and refuses several texts at once where that is null, as it is in
what we write of our own. Both give the same logits if padding comes after the text and has an id
with which no text ends: where texts end with end-of-text, any other.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrow.models import Config

TASK = "finetuning_task"  # the key of ``config.json`` that names the task
_UNNAMED = re.compile(r"LABEL_\d+")  # what `transformers` calls a class without a name


class Head(NamedTuple):
    """The task and the labels of the head of a model.

    Attributes:
      task: the name of the task that it has learned; None: unknown.
      labels: the names of its classes in their order; empty if they have none.
    """

    task: str | None = None
    labels: tuple[str, ...] = ()


def classes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """As many as there are labels, or else ``num_labels``, which is two where it is left out."""
    labels = theirs.get("id2label")
    return {"classes": theirs.get("num_labels", 2) if labels is None else len(labels)}


def labelled(config: Config) -> dict[str, Any]:
    """Labels for as many classes as a model has."""
    return named([f"LABEL_{i}" for i in range(config.integers()["classes"])])


def named(labels: Sequence[str], task: str | None = None) -> dict[str, Any]:
    """Labels of classes by their numbers, and the other way round, and the task; each only if it is given."""
    out: dict[str, Any] = {} if task is None else {TASK: task}
    if labels:
        out |= {
            "id2label": {str(i): x for i, x in enumerate(labels)},
            "label2id": {x: i for i, x in enumerate(labels)},
        }
    return out


def head(settings: Mapping[str, Any]) -> Head:
    """The head that a ``config.json`` describes.

    Example:
      >>> head({"id2label": {"0": "no", "1": "yes"}, "finetuning_task": "mine"})
      Head(task='mine', labels=('no', 'yes'))
      >>> head({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}})
      Head(task=None, labels=())
    """
    task, names = settings.get(TASK), settings.get("id2label")
    if not isinstance(names, Mapping):
        names = {}
    labels = tuple(
        str(names[key])
        for key in sorted(names, key=lambda key: int(key) if str(key).isdigit() else 0)
    )
    unnamed = all(_UNNAMED.fullmatch(label) for label in labels)
    return Head(task if isinstance(task, str) else None, () if unnamed else labels)


def same_name(label: str) -> str:
    """A label without the differences in case and punctuation that mean nothing: ``Not-Entailment`` is ``not_entailment``.

    Example:
      >>> same_name("Not-Entailment")
      'notentailment'
    """
    return re.sub(r"[\s_-]", "", label).casefold() or label


def problem(config: Config) -> dict[str, Any]:
    """Labels, and what `transformers` takes them for: with one class, a number."""
    kind = "regression" if config.integers()["classes"] == 1 else "single_label_classification"
    return labelled(config) | {"problem_type": kind}
