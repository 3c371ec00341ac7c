"""The task and the labels of a head, which decide whether other data can use it."""

from pathlib import Path

import numpy as np

from jaxgrow.extras.head_labels import Head, read_head, same_name
from train.common.errors import UserError
from train.extras.pretrained import opened_model


def learned_head(folder: Path) -> Head:
    """Return the task and labels of the head of the model in ``folder``, as far as they are known.

    Raises:
      UserError: the folder does not contain a model.
    """
    return read_head(opened_model(folder, notes=False).head)


def keeps_head(there: Head, wanted: Head, kind: str) -> bool:
    """Whether the existing head of a model is kept for new data.

    Args:
      there: the head of the model.
      wanted: the head that the data need, of the same size.
      kind: the kind of the predictions of both heads. Heads for spans without a recorded task are
        kept; heads for classes or numbers without labels are not.
    """
    same = _class_places(there, wanted) == [*range(len(wanted.labels))]
    if there.task is not None and wanted.task is not None:
        return there.task == wanted.task and (same or not there.labels)
    if there.labels or wanted.labels:
        return same
    return kind == "spans"


def class_order(there: Head, wanted: Head, folder: Path) -> np.ndarray | None:
    """Return the permutation that puts the classes of ``there`` into the order of ``wanted``.

    Classes are matched by name.

    Args:
      there: the head of the model.
      wanted: the head that the data need.
      folder: folder of the model, for messages.

    Returns:
      For each class of ``wanted`` its index in ``there``, int [classes]; None if one of the heads
      has no class names.

    Raises:
      UserError: the head of the model was trained for another task, or has other classes.
    """
    if there.task is not None and wanted.task is not None and there.task != wanted.task:
        raise UserError(
            f"the head of the model in {folder} was trained on {there.task}, but the data are {wanted.task}: evaluate it on "
            f"{there.task}, or fine-tune it on {wanted.task} first"
        )
    if not there.labels or not wanted.labels:
        return None
    places = _class_places(there, wanted)
    if places is None:
        raise UserError(
            f"the model in {folder} has the classes {', '.join(there.labels)}, but the data have {', '.join(wanted.labels)}: "
            "rename the labels of the model (id2label of config.json) or of the data, or fine-tune it on these data first"
        )
    return np.array(places)


def _class_places(there: Head, wanted: Head) -> list[int] | None:
    """For each class of ``wanted`` its index in ``there``; None if the classes differ.

    The labels are compared as they are, so that -1 and 1 are two classes, and then without case and
    separators.
    """
    for name in (str, same_name):
        mine, theirs = ([name(label) for label in of.labels] for of in (wanted, there))
        if set(mine) == set(theirs) and len(mine) == len(theirs) == len(set(mine)):
            return [theirs.index(label) for label in mine]
    return None
