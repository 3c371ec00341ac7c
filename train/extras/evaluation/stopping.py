"""Stop strings: a generated text ends where one of them begins."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_CUT = "\ufffd"  # decoded from the first bytes of a character whose other bytes are in later tokens


class Stopping:
    """Decodes generated tokens up to the first stop string.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      strings: the stop strings.
      prompts: the tokens of each prompt, if the decoded text depends on the tokens before it; None:
        only new tokens are decoded.
    """

    def __init__(
        self, tokenizer: Any, strings: Sequence[str], prompts: Sequence[Sequence[int]] | None = None
    ):
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.strings = [string for string in strings if string]

    def watch(self, row: int, tokens: np.ndarray) -> bool:
        """Whether a stop string is in the text; an argument of `jaxgrow.extras.models.generation.generate`."""
        return self._stop(self._decoded(tokens, row)) is not None

    def text(self, tokens: np.ndarray, row: int = 0) -> str:
        """The text before the first stop string."""
        text = self._decoded(tokens, row)
        return text[: self._stop(text)]

    def tokens(self, tokens: np.ndarray, row: int = 0) -> np.ndarray:
        """The tokens up to the one that completes a stop string."""
        if self._stop(self._decoded(tokens, row)) is None:
            return tokens
        return next(part for n in range(1, len(tokens) + 1) if self.watch(row, part := tokens[:n]))

    def settled(self, tokens: np.ndarray, row: int = 0) -> str:
        """The part of the text that no later token changes."""
        text = self._decoded(tokens, row)
        stop = self._stop(text)
        if stop is not None:
            return text[:stop]
        text = text.rstrip(_CUT)
        begun = 0  # characters at the end that may begin a stop string
        for string in self.strings:
            for n in range(1, len(string)):
                if text.endswith(string[:n]):
                    begun = max(begun, n)
        return text[: len(text) - begun]

    def _stop(self, text: str) -> int | None:
        """The index of the first stop string in the text, or None."""
        found = [place for string in self.strings if (place := text.find(string)) >= 0]
        return min(found, default=None)

    def _decoded(self, tokens: np.ndarray, row: int) -> str:
        new = tokens.tolist()
        if self.prompts is None:
            return self.tokenizer.decode(new)
        prompt = list(self.prompts[row])
        before = self.tokenizer.decode(prompt)
        whole = self.tokenizer.decode([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)
