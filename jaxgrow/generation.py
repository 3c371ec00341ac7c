"""Text from a model: a prompt is read at once, then a token at a time, over keys and values that are kept.

Shapes in names: B prompts, P places of the longest one, R of the longest continuation, V vocab.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxgrow.axes import Params
from jaxgrow.models.config import Config
from jaxgrow.models.layers import Past

LEAST = 16  # places of a program, which serves all shorter prompts and continuations too


@struct.dataclass
class Sampling:
    """How a token is drawn. Numbers, not constants of a program: another temperature compiles nothing. None: not done."""

    temperature: Any = None  # None: the likeliest token
    top_k: Any = None
    top_p: Any = None


def generate(
    config: Config,
    params: Params,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end: int | None = None,
) -> list[np.ndarray]:
    """Continues prompts, each by as many tokens as asked for, up to the model's context, or up to the token that ends a text.

    One program reads all prompts and writes all tokens. It is compiled once for a number of prompts and a range of lengths
    (to the next power of two), whatever the other arguments are.

    A token is drawn from a key of its own, that of the seed, the row of the prompt and the token's number. The text of a row
    does not depend on padding, on the other rows, or on ``max_new`` (except for rounding, which may change with their number).
    If positions depend on the length of a sequence ("longrope"), a text that grows longer than the original context is read
    again with the positions of longer sequences, as `transformers` does, by a second program.

    Args:
      config: of a decoder that predicts tokens: a `GPT2Config`, or a `LlamaConfig`, which also describes Qwen2, Qwen3, Mistral,
        Mixtral, Gemma, Gemma 2, Gemma 3, OLMo 2, Phi-3, SmolLM 3 and Pythia.
      params: its parameters, as of ``config.init`` or `jaxgrow.interop.load`; on one device, or divided over a mesh.
      prompts: tokens of each, of any lengths.
      max_new: the tokens that each gets at most.
      temperature: what logits are divided by before a token is drawn; None: the likeliest token is taken.
      top_k: draws from so many of the likeliest tokens, and those as likely as the last of them.
      top_p: draws from the fewest of the likeliest tokens that together have this probability (of what ``top_k`` left), and
        those as likely as the last of them.
      seed: of what is drawn.
      end: the token that ends a text.

    Returns:
      The new tokens of each prompt, int32. Where a text ended, ``end`` is the last of them. Where prompt and new tokens fill
      the context, there are less than ``max_new``.

    Raises:
      ValueError: a model that does not continue text, a prompt that is empty, too long, or has tokens that the model does not
        have, or a setting out of its range.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=8, context=16, layers=1, embed=4, heads=1, head_dim=4, mlp=4)
      >>> params = config.init(jax.random.key(0))
      >>> [len(new) for new in generate(config, params, [[1, 2, 3], [4]], max_new=5, temperature=0.8)]
      [5, 5]
    """
    _continues(config)
    rows = [_checked(config, i, prompt) for i, prompt in enumerate(prompts)]
    sampling = _sampling(temperature, top_k, top_p)
    if max_new < 1:
        raise ValueError(f"max_new is {max_new}, less than 1")
    if end is not None and not 0 <= end < config.sizes()["vocab"]:
        raise ValueError(f"end is {end}, but the model's tokens are those from 0 to {config.sizes()['vocab'] - 1}")
    ends, key = np.int32(-1 if end is None else end), jax.random.key(seed)
    texts = [_Text(row, np.zeros(0, np.int32), min(max_new, config.length - len(row))) for row in rows]
    for longest, reader in config.by_length():
        going = [i for i, text in enumerate(texts) if text.left and len(text.tokens) <= longest]
        if going:
            continued = _continued(reader, params, [texts[i] for i in going], longest, sampling, key, ends, going)
            for i, new in zip(going, continued, strict=True):
                texts[i] = texts[i].and_then(new, end)
    return [text.new for text in texts]


class _Text(NamedTuple):
    prompt: np.ndarray
    new: np.ndarray
    left: int  # the most tokens that it may still get

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.new])

    def and_then(self, new: np.ndarray, end: int | None) -> "_Text":
        ended = end is not None and new[-1] == end
        return _Text(self.prompt, np.concatenate([self.new, new]), 0 if ended else self.left - len(new))


def _continued(
    config: Config,
    params: Params,
    texts: list[_Text],
    longest: int,
    sampling: Sampling,
    key: jax.Array,
    ends: np.int32,
    rows: list[int],
) -> list[np.ndarray]:
    """The next tokens of each text, of which the model reads ``longest`` at most."""
    lengths_B = np.asarray([len(text.tokens) for text in texts], np.int32)
    left_B = np.asarray([text.left for text in texts], np.int32)
    most_B = np.minimum(left_B, longest + 1 - lengths_B)
    tokens_BP = np.zeros((len(texts), min(_rounded(max(lengths_B)), config.length)), np.int32)
    for tokens_P, text in zip(tokens_BP, texts, strict=True):
        tokens_P[: len(text.tokens)] = text.tokens
    drawn_B = np.asarray([len(text.new) for text in texts], np.int32)
    rows_B = np.asarray(rows, np.int32)
    found_BR, counts_B = jax.device_get(
        _generated(
            config,
            params,
            tokens_BP,
            lengths_B,
            most_B,
            sampling,
            key,
            ends,
            rows_B,
            drawn_B,
            room=_rounded(max(left_B)),
        )
    )
    return [found_R[:count] for found_R, count in zip(found_BR, counts_B, strict=True)]


def _continues(config: Config) -> None:
    if not config.causal:
        raise ValueError(
            f"a {type(config).__name__.removesuffix('Config')} does not continue text: take a GPT-2 or a Llama"
        )
    if config.predicts != "tokens":
        raise ValueError(f"this model predicts {config.predicts}, not tokens: take one with head=tokens")


def _checked(config: Config, i: int, prompt: Sequence[int] | np.ndarray) -> np.ndarray:
    """A prompt's tokens."""
    vocab, tokens = config.sizes()["vocab"], np.asarray(prompt)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"prompt {i} is {'empty' if tokens.size == 0 else 'no sequence of tokens'}: give one token at least"
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"prompt {i} has tokens of {tokens.dtype}, not integers")
    if len(tokens) >= config.length:
        raise ValueError(
            f"prompt {i} has {len(tokens)} tokens, which leaves no place in the model's context of {config.length}: shorten it"
        )
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    if len(wrong):
        raise ValueError(f"prompt {i} has the token {wrong[0]}, but the model's are those from 0 to {vocab - 1}")
    return tokens


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
    if temperature is None:
        for name, value in (("top_k", top_k), ("top_p", top_p)):
            if value is not None:
                raise ValueError(f"{name} is {value}, but the likeliest token is taken: give a temperature, too, as 1")
        return Sampling()
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, not above 0; leave it out for the likeliest tokens")
    if top_k is not None and operator.index(top_k) < 1:
        raise ValueError(f"top_k is {top_k}, less than 1; leave it out to draw from all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, not above 0 and up to 1")
    most = np.iinfo(np.int32).max
    return Sampling(
        np.float32(temperature),
        None if top_k is None else np.int32(min(top_k, most)),
        None if top_p is None else np.float32(top_p),
    )


def _rounded(size: int) -> int:
    """Up to a power of two."""
    return max(LEAST, 1 << (int(size) - 1).bit_length())


@struct.dataclass
class _State:
    """Of B rows that have ``step`` new tokens each, or less, where they ended before."""

    step: jax.Array
    tokens_BR: jax.Array
    counts_B: jax.Array  # of a row's new tokens
    going_B: jax.Array  # whether it gets more
    past: Past  # up to the token before its last one


@partial(jax.jit, static_argnums=0, static_argnames="room")
def _generated(
    config, params, tokens_BP, lengths_B, most_B, sampling, key, end, rows_B, drawn_B, *, room
) -> tuple[jax.Array, jax.Array]:
    """``(new tokens [B, R], how many of each row are meant)``.

    ``most_B``: the most that each row may get. ``rows_B``, ``drawn_B``: its number, and how many tokens it got before, which
    decide what is drawn.
    """

    def read(tokens_BT, lengths_B, past) -> tuple[jax.Array, Past]:
        inputs: Any = {"tokens": tokens_BT, "lengths": lengths_B}
        return config.module.apply({"params": params}, inputs, past=past)  # type: ignore[return-value]

    def with_next(state: Any, logits_BV) -> Any:
        token_B = drawn(logits_BV, sampling, key, rows_B, drawn_B + state.step)
        tokens_BR = state.tokens_BR.at[:, state.step].set(token_B)
        counts_B = state.counts_B + state.going_B
        going_B = state.going_B & (token_B != end) & (counts_B < most_B)
        return state.replace(step=state.step + 1, tokens_BR=tokens_BR, counts_B=counts_B, going_B=going_B)

    def step(state: Any) -> Any:
        last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BR, state.step - 1, 1, 1)
        # A row that ended reads on at the same place, and nobody looks at it.
        logits_BV, new = read(last_B1, state.going_B.astype(jnp.int32), state.past)
        return with_next(state.replace(past=state.past.and_then(new)), logits_BV)

    logits_BV, past = read(tokens_BP, lengths_B, Past())
    places = min(tokens_BP.shape[1] + room, config.length)
    begin = _State(
        jnp.zeros((), jnp.int32),
        jnp.zeros((len(tokens_BP), room), jnp.int32),
        jnp.zeros_like(lengths_B),
        jnp.ones_like(rows_B, bool),
        past.with_room(places),
    )
    done = jax.lax.while_loop(lambda state: state.going_B.any(), step, with_next(begin, logits_BV))
    return done.tokens_BR, done.counts_B


def drawn(logits_BV: jax.Array, sampling: Sampling, key: jax.Array, rows_B: jax.Array, steps_B: jax.Array) -> jax.Array:
    """A token of each row, int32 [B]: `Sampling` from its logits, with the key of this row and this step of it."""
    if sampling.temperature is None:
        return logits_BV.argmax(-1).astype(jnp.int32)
    scaled_BV = logits_BV / sampling.temperature
    left_BV = jnp.where(scaled_BV >= least_logits(scaled_BV, sampling), scaled_BV, -jnp.inf)
    keys_B = jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows_B, steps_B)
    return jax.vmap(jax.random.categorical)(keys_B, left_BV).astype(jnp.int32)


def least_logits(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """The least logit of each row that ``top_k`` and then ``top_p`` leave, [B, 1]."""
    least_B1 = jnp.full((len(logits_BV), 1), -jnp.inf, logits_BV.dtype)
    if sampling.top_k is None and sampling.top_p is None:
        return least_B1
    down_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    if sampling.top_k is not None:
        last = jnp.minimum(sampling.top_k, logits_BV.shape[1]) - 1
        least_B1 = jax.lax.dynamic_slice_in_dim(down_BV, last, 1, 1)
        down_BV = jnp.where(down_BV >= least_B1, down_BV, -jnp.inf)
    if sampling.top_p is not None:
        p_BV = jax.nn.softmax(down_BV)
        before_BV = jnp.cumsum(p_BV, -1) - p_BV
        kept_BV = (before_BV < sampling.top_p) | (sampling.top_p >= 1)  # which rounding shall not cut
        least_B1 = jnp.maximum(least_B1, jnp.where(kept_BV, down_BV, jnp.inf).min(-1, keepdims=True))
    return least_B1
