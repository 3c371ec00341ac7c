"""The likelihood of given tokens under a model.

A causal model predicts each token from the tokens before it. A masked model predicts each token from
all other tokens. Requests are padded to one of a few lengths, and grouped into batches with about
the same number of positions, so that a few compiled programs serve all requests.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jaxgrow.axes import Tree
from jaxgrow.extras.models.generation import configs_by_length
from jaxgrow.models import Config
from train.extras.pretrained import TextModel
from train.extras.text import formats
from train.extras.tokenizers.cutting import TextEncoder, cut_document
from train.extras.tokenizers.special import added_tokens, masking_vocabulary
from train.state.mesh import batch_devices, put, rows

POSITIONS = 1 << 14  # maximum positions of a batch
SHORTEST = 16  # the shortest padded length


class Request(NamedTuple):
    """Tokens, of which ``begin .. end - 1`` are scored."""

    tokens: np.ndarray  # int [n]
    begin: int
    end: int


class Score(NamedTuple):
    # The sum of the cross-entropies of the tokens, in nats: minus the log of their probability.
    loss: float
    greedy: bool  # whether each token was the most likely one


class Scorer:
    """Scores tokens under a model.

    A causal model sees at most ``context`` tokens before a token. A masked model has the
    pseudo-likelihood of Salazar et al. (ACL 2020): the tokens are masked one at a time.
    """

    def __init__(self, model: TextModel, progress: bool = False):
        self.model = model
        self.config = model.config
        self.progress = progress
        self.masked = model.config.masked > 0
        self.special = model.special
        self.mask = masking_vocabulary(model.tokenizer).mask_id if self.masked else None

    # --- requests ---

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.model.texts)

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, without special tokens at its start and end.

        A long text is encoded in pieces, which have the same tokens as the whole text, so that the
        memory of the tokenizer is bounded.
        """
        pieces = cut_document(formats.cut_pieces(text), lambda: self._encoder)
        tokens = [self._encoder([piece], [i == 0])[0] for i, piece in enumerate(pieces)]
        return np.concatenate([np.zeros(0, np.uint32), *tokens])

    def after(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
        """A request for the tokens of ``continuation`` after ``context``.

        If both together are longer than the model's context, the beginning is cut off. For a masked
        model, the tokens that begin and end its texts are added. A causal model does not score the
        first token of the request.
        """
        before, end = self._around() if self.masked else ([], [])
        both = [*context, *continuation]
        room = self.config.length + (not self.masked) - len(before) - len(end)
        cut = max(0, len(both) - room)
        begin = len(before) + max(0, len(context) - cut)
        tokens = np.array([*before, *both[cut:], *end], np.int32)
        return Request(tokens, max(begin, 0 if self.masked else 1), len(tokens) - len(end))

    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens around the texts of a masked model."""
        before, after = added_tokens(self.model.tokenizer)
        return (
            before or ([] if self.special.begin is None else [self.special.begin]),
            after or ([] if self.special.end is None else [self.special.end]),
        )

    def windows(self, text: str, stride: int | None = None) -> list[Request]:
        """Requests that score each token of a text once, in windows of the model's context length.

        Windows advance by ``stride`` tokens (None: the context length), so that after the first
        window each token has at least ``context - stride`` tokens before it. The text follows the
        token that begins texts; if the tokenizer has no such token, the first token is not scored.
        """
        length = self.config.length
        begin = self.special.begin
        stride = stride or length
        before = np.array([] if begin is None else [begin], np.int32)
        tokens = np.concatenate([before, self.encode(text).astype(np.int32)])
        requests = []
        done = 1
        while done < len(tokens):
            end = min(len(tokens), length + 1 if done == 1 else done + stride)
            first = max(0, end - length - 1)
            requests.append(Request(tokens[first:end], done - first, end - first))
            done = end
        return requests

    # --- scores ---

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        """Score requests, in their order."""
        lines = [line for i, request in enumerate(requests) for line in self._lines(i, request)]
        loss = np.zeros(len(requests))
        greedy = np.ones(len(requests), bool)
        lines.sort(key=lambda line: -len(line.tokens))
        bar = tqdm(
            total=len(lines), desc="score", disable=None if self.progress else True, leave=False
        )
        with bar, jax.set_mesh(self.model.mesh):
            for config, batch in self._batches(lines):
                each, right = self._scored(config, batch)
                for line, losses, rights in zip(batch, each, right, strict=False):
                    loss[line.request] += losses[line.begin : line.end].sum(dtype=np.float64)
                    greedy[line.request] &= rights[line.begin : line.end].all()
                bar.update(len(batch))
        return [Score(float(x), bool(g)) for x, g in zip(loss, greedy, strict=True)]

    def _lines(self, number: int, request: Request) -> "Iterable[_Line]":
        tokens, begin, end = request
        if not self.masked:
            return [_Line(number, tokens[:-1], tokens[1:], begin - 1, end - 1)]
        return [
            _Line(number, _hidden(tokens, i, self.mask), tokens[i : i + 1], 0, 1, i)
            for i in range(begin, end)
        ]

    def _batches(self, lines: "list[_Line]") -> "Iterable[tuple[Config, list[_Line]]]":
        """Yield batches, each with the config for its lengths (`configs_by_length`).

        A score thus does not depend on the other lines of its batch.
        """
        for longest, config in configs_by_length(self.config):
            left = [line for line in lines if len(line.tokens) <= longest]
            lines = [line for line in lines if len(line.tokens) > longest]
            while left:
                size = min(self._samples(len(left[0].tokens)), _at_least(len(left)))
                yield config, left[:size]
                left = left[size:]
        assert not lines  # requests are not longer than the context

    def _samples(self, length: int) -> int:
        return max(1, POSITIONS // _padded(length, self.config))

    def _scored(self, config: Config, batch: "list[_Line]") -> tuple[np.ndarray, np.ndarray]:
        """The cross-entropy of the targets of each line, and whether each is the most likely token.

        Both are [lines, targets].
        """
        mesh = self.model.mesh
        parts = batch_devices(mesh)
        samples = (
            -(-min(self._samples(len(batch[0].tokens)), _at_least(len(batch))) // parts) * parts
        )
        length = _padded(len(batch[0].tokens), self.config)
        tokens = np.zeros((samples, length), np.int32)
        targets = np.zeros((samples, 1 if self.masked else length), np.int32)
        mask = np.zeros((samples, length), bool)
        positions = np.zeros((samples, 1), np.int32)
        mask[:, 0] = True  # a padding row needs at least one visible token
        for i, line in enumerate(batch):
            tokens[i, : len(line.tokens)] = line.tokens
            targets[i, : len(line.targets)] = line.targets
            mask[i, : len(line.tokens)] = True
            positions[i] = line.position
        inputs: Any = (
            {"tokens": tokens, "mask": mask, "positions": positions} if self.masked else tokens
        )
        mine = rows(samples, mesh)
        inputs, targets = put(jax.tree.map(lambda x: x[mine], (inputs, targets)), mesh)
        return jax.device_get(_loss_program(config, self.model.params, inputs, targets))


class _Line(NamedTuple):
    """One sample. Its targets ``begin .. end - 1`` belong to the request."""

    request: int
    tokens: np.ndarray
    targets: np.ndarray
    begin: int
    end: int
    position: int = 0  # the position of the token that a masked model predicts


@partial(jax.jit, static_argnums=0)
def _loss_program(config: Config, params: Tree, inputs: Tree, targets: jax.Array) -> Any:
    return config.module.apply({"params": params}, inputs, targets=targets, each=True)


def _hidden(tokens: np.ndarray, i: int, mask: int | None) -> np.ndarray:
    out = tokens.copy()
    out[i] = mask
    return out


def _at_least(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _padded(length: int, config: Config) -> int:
    """Round up to a power of two, or to one and a half times a power of two."""
    power = _at_least(length)
    return min(max(SHORTEST, power * 3 // 4 if length <= power * 3 // 4 else power), config.length)
