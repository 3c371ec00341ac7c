"""The classes of a head, as ``config.json`` says them: by their labels.

A decoder classifies a text by its last token. We are told its place; `transformers` takes the last one that is not
``pad_token_id``, and refuses several texts at once where that is null, as it is in what we write of our own. Both give the same
logits if padding comes after the text and has an id with which no text ends: where texts end with end-of-text, any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxgrow.models import Config


def classes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """As many as there are labels, or else ``num_labels``, which is two where it is left out."""
    labels = theirs.get("id2label")
    return {"classes": theirs.get("num_labels", 2) if labels is None else len(labels)}


def labelled(config: Config) -> dict[str, Any]:
    """Labels for as many classes as a model has."""
    return named([f"LABEL_{i}" for i in range(config.integers()["classes"])])


def named(labels: Sequence[str]) -> dict[str, Any]:
    """Labels of classes by their numbers, and the other way round; nothing, if there are none."""
    if not labels:
        return {}
    return {"id2label": {str(i): x for i, x in enumerate(labels)}, "label2id": {x: i for i, x in enumerate(labels)}}


def problem(config: Config) -> dict[str, Any]:
    """Labels, and what `transformers` takes them for: with one class, a number."""
    kind = "regression" if config.integers()["classes"] == 1 else "single_label_classification"
    return labelled(config) | {"problem_type": kind}
