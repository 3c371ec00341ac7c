"""Windows of packed text as samples of language models: causal, masked, and within documents.

The rules of masking are those that BERT was trained with.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jaxgrow.models.encoder import masked_positions
from train.data.dataset import Batch


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


def next_tokens_of_documents(tokens: np.ndarray, segments: np.ndarray) -> Batch:
    """Split a window [T + 1] into inputs and targets.

    The weight of a target is 0 if it is the first token of the next document, and otherwise 1.
    """
    weights = (segments[1:] == segments[:-1]).astype(np.float32)
    inputs = {"tokens": tokens[:-1], "segments": segments[:-1], "weights": weights}
    return inputs, tokens[1:]


def next_tokens(windows: np.ndarray) -> Batch:
    """Split windows ``[..., length + 1]`` of text into inputs and targets."""
    return windows[..., :-1], windows[..., 1:]


class Windows:
    """Windows of ``length`` tokens, with the next token as the target of each.

    Each epoch predicts every token once. With ``begins``, the positions at which documents begin,
    attention stops at the ends of documents, and their last tokens have no target.
    """

    workers = 0

    def __init__(self, tokens: np.ndarray, length: int, begins: np.ndarray | None = None):
        self.tokens = tokens
        self.length = length
        self.begins = begins
        self.what = f"windows of {length} tokens"

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def sample(self, i: int, rng: np.random.Generator) -> Batch:
        first = i * self.length
        tokens = np.asarray(self.tokens[first : first + self.length + 1], np.int32)
        if self.begins is None:
            return next_tokens(tokens)
        segments = window_segments(self.begins, first, len(tokens))
        return next_tokens_of_documents(tokens, segments)


class Vocabulary(NamedTuple):
    """The properties of a tokenizer that masking needs.

    ``MaskedWindows(tokens, length, *vocabulary)`` uses them.
    """

    vocab: int
    mask_id: int
    special: frozenset[int]  # ids that are never masked and never sampled
    # bool [vocab]: whether an id continues a word; None: pieces are masked one by one.
    whole_word: np.ndarray | None = None


# These bytes do not occur in UTF-8 text, so one of them serves as the mask. Byte 0 ends documents.
BYTES = Vocabulary(256, 0xFF, frozenset({0x00, 0xC0, 0xC1, *range(0xF5, 0x100)}))


class MaskedWindows:
    """Adjacent windows of ``length`` tokens, some of which are masked and predicted.

    Of each window, ``round(masked * length)`` tokens, at least one, are predicted. Each of them is
    replaced by the mask token with probability 0.8, by a random token with probability 0.1, and
    left unchanged otherwise, independently (Devlin et al., 2019, section 3.1). The number is the
    same for all windows, so that the mean over a batch does not depend on how the batch is divided.

    With ``whole_word``, complete words are chosen in random order as long as they fit, and the
    remaining number is filled with single pieces. Special tokens are not masked. If a window has
    too few other tokens, special tokens are predicted without being changed.
    """

    workers = 0

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        vocab: int,
        mask_id: int,
        special: Collection[int],
        whole_word: np.ndarray | None = None,
        masked: float = 0.15,
        begins: np.ndarray | None = None,
    ):
        self.tokens = tokens
        self.length = length
        self.begins = begins
        self.mask_id = mask_id
        self.what = f"windows of {length} tokens"
        self.count = masked_positions(masked, length)
        self._ordinary = np.ones(vocab, bool)
        self._ordinary[[mask_id, *special]] = False
        self._replacements = np.flatnonzero(self._ordinary).astype(np.int32)
        self._continues = whole_word

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def sample(self, i: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The inputs and targets of window ``i``.

        Inputs are ``{"tokens": int32 [T], "positions": int32 [S], ascending}``. Targets are the
        original tokens at these positions, int32 [S]. With ``begins``, the positions at which
        documents begin, the inputs also have ``segments``.
        """
        tokens = self.tokens[i * self.length : (i + 1) * self.length].astype(np.int32)
        ordinary = self._ordinary[tokens]
        positions = self._positions(tokens, ordinary, rng)
        targets = tokens[positions]
        case = rng.random(self.count)
        case[~ordinary[positions]] = 1
        other = self._replacements[rng.integers(len(self._replacements), size=self.count)]
        tokens[positions] = np.where(case < 0.8, self.mask_id, np.where(case < 0.9, other, targets))
        inputs = {"tokens": tokens, "positions": positions.astype(np.int32)}
        if self.begins is not None:
            inputs["segments"] = window_segments(self.begins, i * self.length, self.length)
        return inputs, targets

    def _positions(
        self, tokens: np.ndarray, ordinary: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """The positions to predict: [S], ascending."""
        order = rng.permutation(self.length)
        if self._continues is not None:
            order = self._by_words(tokens, ordinary, order)
        if not ordinary.all():
            order = np.concatenate([order[ordinary[order]], order[~ordinary[order]]])
        return np.sort(order[: self.count])

    def _by_words(self, tokens: np.ndarray, ordinary: np.ndarray, order: np.ndarray) -> np.ndarray:
        """``order`` with the words that fit moved to the front.

        A word has the position of its first piece.
        """
        assert self._continues is not None
        begins = ~(self._continues[tokens] & ordinary)
        begins[0] = True
        begins[1:] |= ~ordinary[:-1]
        first = np.flatnonzero(begins)
        size = np.zeros(self.length, int)  # the size of the word that begins here
        size[first] = np.diff(first, append=self.length)
        size[~ordinary] = 0
        taken: list[int] = []
        for position in order.tolist():
            if 0 < size[position] <= self.count - len(taken):
                taken += range(position, position + size[position])
            if len(taken) == self.count:
                break
        left = np.ones(self.length, bool)
        left[taken] = False
        return np.concatenate([np.array(taken, int), order[left[order]]])
