"""How does ``config.json`` describe the classes of a head, and the task it was trained for?

A decoder classifies a text by its last token. In jaxgrow the caller passes the position of that
token. `transformers` takes the last token that is not ``pad_token_id``. If that key is null, as in
models that jaxgrow writes itself, `transformers` does not accept batches of several texts. Both
give the same logits if the padding comes after the text and its id is never the last token of a
text. If texts end with end-of-text, any other id has this property.
"""

from collections.abc import Sequence

from jaxgrow.models import Config
from jaxgrow.typed import Json

# The key of ``config.json`` that names the task.
TASK = "finetuning_task"


def class_count(hf_config: Json) -> Json:
    """Return the number of classes that a ``config.json`` describes, as a field of the config.

    It is the number of labels, or else ``num_labels``. The default is two.
    """
    labels = hf_config.get("id2label")
    return {"classes": hf_config.get("num_labels", 2) if labels is None else len(labels)}


def numbered_labels(config: Config) -> Json:
    """Return labels ``LABEL_0``, ``LABEL_1``, ... for the classes of a model."""
    return label_keys([f"LABEL_{i}" for i in range(config.integers()["classes"])])


def label_keys(labels: Sequence[str], task: str | None = None) -> Json:
    """Return the keys of ``config.json`` for labels and a task.

    Args:
      labels: the labels of the classes in their order; empty: no labels are written.
      task: the name of the task; None: no task is written.
    """
    out: Json = {} if task is None else {TASK: task}
    if labels:
        out |= {
            "id2label": {str(i): x for i, x in enumerate(labels)},
            "label2id": {x: i for i, x in enumerate(labels)},
        }
    return out


def problem_keys(config: Config) -> Json:
    """Return labels, and the ``problem_type`` from which `transformers` chooses the loss.

    A head with one class predicts a number.
    """
    kind = "regression" if config.integers()["classes"] == 1 else "single_label_classification"
    return numbered_labels(config) | {"problem_type": kind}
