"""Which task and which labels does a ``config.json`` give to the head of a model?"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxgrow.checkpoints.hf.labels import TASK

# `transformers` gives these names to classes without names.
_UNNAMED = re.compile(r"LABEL_\d+")


class Head(NamedTuple):
    """The task and the labels of the head of a model.

    ``task`` is the name of the task that the head was trained for, or None if it is unknown.
    ``labels`` are the names of its classes in their order; they are empty if the classes have no
    names.
    """

    task: str | None = None
    labels: tuple[str, ...] = ()


def read_head(settings: Mapping[str, object]) -> Head:
    """The head that a ``config.json`` describes.

    Example:
      >>> read_head({"id2label": {"0": "no", "1": "yes"}, "finetuning_task": "mine"})
      Head(task='mine', labels=('no', 'yes'))
      >>> read_head({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}})
      Head(task=None, labels=())
    """
    task = settings.get(TASK)
    names = settings.get("id2label")
    if not isinstance(names, Mapping):
        names = {}
    labels = tuple(
        str(names[key])
        for key in sorted(names, key=lambda key: int(key) if str(key).isdigit() else 0)
    )
    unnamed = all(_UNNAMED.fullmatch(label) for label in labels)
    return Head(task if isinstance(task, str) else None, () if unnamed else labels)


def same_name(label: str) -> str:
    """Normalize a label, so that labels that differ only in case and separators become equal.

    Example:
      >>> same_name("Not-Entailment")
      'notentailment'
    """
    return re.sub(r"[\s_-]", "", label).casefold() or label
