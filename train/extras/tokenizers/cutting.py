"""Where is a long document cut, so that its pieces have the tokens of the whole document?

A cut inside a word changes tokens, and many tokenizers add a space before each text. A cut is
therefore tested: the text around it must have the same tokens with and without the cut.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from train.extras.text import corpus

WINDOW = 256  # characters before and after a cut that are encoded to test it
# Characters of a piece after which a cut is not tested, so that a document without boundaries, such
# as a file of one letter, does not have to fit into memory.
LONGEST = 1 << 22
_LEAD = "a"


class TextEncoder:
    """Encodes texts, and the continuations of texts.

    Some tokenizers add a space before each text, even if it begins with one. A continuation is then
    encoded after a letter, whose tokens are dropped.

    Args:
      tokenizer: a `train.extras.bounded.BoundedTokenizer`, or a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._lead = ""
        self._dropped = 0
        whole, first, second = self(["a b", "a", " b"], [True] * 3)
        if [*whole] != [*first, *second]:
            self._lead = _LEAD
            self._dropped = len(first)

    def __call__(self, texts: list[str], begins: list[bool]) -> list[np.ndarray]:
        """The tokens of each text; ``begins`` is False for a text that continues another one."""
        given = [
            text if first else self._lead + text for text, first in zip(texts, begins, strict=True)
        ]
        encoded = self._tokenizer.encode_batch_fast(given, add_special_tokens=False)
        return [
            np.asarray(e.ids if first else e.ids[self._dropped :], np.uint32)
            for e, first in zip(encoded, begins, strict=True)
        ]


def cut_document(document: Iterable[str], encoder: Callable[[], TextEncoder]) -> Iterator[str]:
    """Cut a document into pieces of about `train.extras.text.corpus.PIECE` characters.

    Args:
      document: the text in parts, whose edges are arbitrary.
      encoder: returns the encoder; it is called only for long documents.
    """
    held = ""
    for part in document:
        held += part
        if len(held) < corpus.PIECE + 3 * WINDOW:
            continue
        at = _boundary(held, encoder())
        if at is None and len(held) > LONGEST:
            at = len(held) - WINDOW
        if at is not None:
            yield held[:at]
            held = held[at:]
    if held:
        yield held


def _boundary(text: str, encode: TextEncoder) -> int | None:
    """The last place near the end of ``text`` at which a cut changes no token; None: there is none.

    At least `WINDOW` characters follow it.
    """
    last = len(text) - WINDOW
    places = [at for at in range(last, last - 2 * WINDOW, -1) if _may_cut(text, at)]
    # Most often the first place is one, and encoding all of them would take longer.
    for chosen in (places[:4], places[4:]):
        before = encode([text[at - WINDOW : at] for at in chosen], [False] * len(chosen))
        after = encode([text[at : at + WINDOW] for at in chosen], [False] * len(chosen))
        both = encode([text[at - WINDOW : at + WINDOW] for at in chosen], [False] * len(chosen))
        for at, left, right, whole in zip(chosen, before, after, both, strict=True):
            if [*whole] == [*left, *right]:
                return at
    return None


def _may_cut(text: str, at: int) -> bool:
    """Whether a word may end at a place: the kinds of characters differ, or a space begins a word.

    A run of characters of one kind may be grouped from its start, which the window does not contain.
    """
    before, after = text[at - 1], text[at]
    if after == " " and not text[at + 1].isspace():
        return True
    return _character_kind(before) != _character_kind(after)


def _character_kind(character: str) -> str:
    if character.isspace():
        return "space"
    return "letter" if character.isalpha() else "digit" if character.isnumeric() else character
