"""The documents of the tokens in a window, for attention that stops at document ends."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from train.common.errors import UserError


def window_segments(begins: np.ndarray, first: int, length: int) -> np.ndarray:
    """The segment ids of a window: 0 for its first document, 1 for the next one, and so on.

    Args:
      begins: the positions at which documents begin, ascending.
      first: the position of the first token of the window.
      length: the number of tokens of the window.

    Returns:
      int32 [length].
    """
    low, high = np.searchsorted(begins, [first + 1, first + length])
    new = np.zeros(length, np.int32)
    new[begins[low:high] - first] = 1
    return np.cumsum(new, dtype=np.int32)


def next_tokens_of_documents(tokens: np.ndarray, segments: np.ndarray) -> tuple[Any, np.ndarray]:
    """Split a window [T + 1] into inputs and targets.

    The weight of a target is 0 if it is the first token of the next document, and otherwise 1.
    """
    weights = (segments[1:] == segments[:-1]).astype(np.float32)
    inputs = {"tokens": tokens[:-1], "segments": segments[:-1], "weights": weights}
    return inputs, tokens[1:]


def report_documents(begins: Mapping[str, np.ndarray], tokens: Mapping[str, int]) -> str:
    """A line about the documents of the training text.

    Args:
      begins: the positions at which the documents of each source begin, ascending.
      tokens: the number of tokens of each source.

    Raises:
      UserError: each source is only one document, whose ends attention never reaches.
    """
    inner = [np.searchsorted(begins[name], [1, count]) for name, count in tokens.items()]
    ends = sum(int(high - low) for low, high in inner)
    if not ends:
        raise UserError(
            "data.attend=document has no effect, because the training text is one document: set data.attend=row, or give "
            "one document in each file, line or row; token ids are also divided by the end of text of data.tokenizer"
        )
    return (
        f"data: attention stops at the ends of {ends + len(inner):,} training documents; their last tokens predict nothing, "
        "but count as tokens and FLOPs"
    )
