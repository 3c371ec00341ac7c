"""Text generation: one program reads the prompts and then generates tokens from a KV cache.

Shape suffixes: B prompts, P positions of the longest prompt, R positions of the longest
continuation, V vocab, E end tokens.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxgrow.axes.names import Params
from jaxgrow.extras.models.cache import Past
from jaxgrow.models.config import EXPERTS, Array, Config, Inputs
from jaxgrow.sharding import axis_parts

# The smallest number of positions that a program is compiled for. This program also serves all
# shorter prompts and continuations.
LEAST = 16
# The number of tokens between two calls of ``watch``.
WATCHED = 8
Watch: TypeAlias = Callable[[int, np.ndarray], bool]


@struct.dataclass
class Sampling:
    """The settings for sampling a token. None means that a setting is not used.

    The settings are arrays, not constants of a program, so another temperature needs no
    compilation. Without a temperature, the likeliest token is taken.
    """

    temperature: np.float32 | None = None
    top_k: np.int32 | None = None
    top_p: np.float32 | None = None
    min_p: np.float32 | None = None
    repetition_penalty: np.float32 | None = None


def generate(
    config: Config,
    params: Params,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    end: int | Sequence[int] | None = None,
    watch: Watch | None = None,
) -> list[np.ndarray]:
    """Continue each prompt by up to ``max_new`` tokens.

    A text ends earlier at an end token, or when it fills the model's context.

    One program reads all prompts and generates all tokens. It is compiled once for each number of
    prompts and each range of lengths (up to the next power of two). Other values of the remaining
    arguments do not require compilation.

    The random key of a token depends on the seed, the row of the prompt and the index of the token.
    The text of a row does not depend on padding, on the other rows, or on ``max_new`` (except for
    rounding, which may change with the number of rows). If positions depend on the length of a
    sequence ("longrope"), a text that grows longer than the original context is read again with the
    positions of longer sequences, as in `transformers`, by a second program.

    Args:
      config: config of a decoder that predicts tokens: a `GPT2Config`, or a `LlamaConfig`, which
        also describes Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Mistral, Mixtral, Gemma, Gemma 2,
        Gemma 3, OLMo, OLMo 2, OLMo 3, OLMoE, Phi-3, SmolLM 3, GPT-NeoX (Pythia), OPT, Granite,
        the dense models of Granite 4, and gpt-oss.
      params: parameters of the model, for example from ``config.init`` or
        `jaxgrow.checkpoints.load`, on one device or sharded over a mesh.
      prompts: tokens of each prompt, of any length.
      max_new: maximum number of new tokens of each prompt.
      temperature: divisor of the logits before a token is sampled; None: the likeliest token is
        taken.
      top_k: sample from the k likeliest tokens, and from tokens with the same probability as the
        last of them.
      top_p: sample from the smallest set of the likeliest tokens that together have this
        probability (among the tokens that ``top_k`` leaves), and from tokens with the same
        probability as the last of them.
      min_p: sample from the tokens with at least this fraction of the probability of the likeliest
        token.
      repetition_penalty: divisor of the positive logits, and factor of the negative logits, of
        tokens that are in the prompt or were generated (Keskar et al., 2019); values above 1 make
        repetitions less likely. Also used without a temperature.
      seed: random seed for sampling tokens.
      end: the token or tokens that end a text.
      watch: function that is called with the index of a prompt and all its new tokens so far,
        after every `WATCHED` tokens and when the text ends. If it returns True, the text ends
        there. Use it to print a text while it is generated, or to stop at a string.

    Returns:
      The new tokens of each prompt, int32. If a token of ``end`` ended the text, it is the last
      one. If prompt and new tokens fill the context, there are fewer than ``max_new``.

    Raises:
      ValueError: the model does not continue text; a prompt is empty, does not fit into the
        context, or has tokens outside of the vocabulary; or a setting is out of range.

    Example:
      >>> from jaxgrow.models import GPT2Config
      >>> config = GPT2Config(vocab=8, context=16, layers=1, embed=4, heads=1, head_dim=4, mlp=4)
      >>> params = config.init(jax.random.key(0))
      >>> [len(new) for new in generate(config, params, [[1, 2, 3], [4]], max_new=5, temperature=0.8)]
      [5, 5]
    """
    _continues(config)
    rows = [_checked_prompt(config, i, prompt) for i, prompt in enumerate(prompts)]
    sampling = _sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if max_new < 1:
        raise ValueError(f"max_new is {max_new}, less than 1")
    ends_E = _end_tokens(config, end)
    key = jax.random.key(seed)
    texts = [
        _Text(i, row, np.zeros(0, np.int32), min(max_new, config.length - len(row)))
        for i, row in enumerate(rows)
    ]
    for longest, reader in configs_by_length(config):
        going = [text for text in texts if text.left and len(text.tokens) <= longest]
        if going:
            for text in _continued_texts(
                reader, params, going, longest, sampling, key, ends_E, watch
            ):
                texts[text.row] = text
    return [text.new for text in texts]


def configs_by_length(config: Config) -> tuple[tuple[int, Config], ...]:
    """Return ``((longest, config), ..)``: the config to use for each range of sample lengths.

    An entry is for samples of up to ``longest`` positions for which the entry before is too short.
    There are two entries for "longrope" with a longer context, because all positions of a longer
    sequence use ``rope_long``. Each config ignores the length, so that padding does not change the
    result, and its experts drop no tokens.
    """
    c: Any = config
    if not hasattr(c, "rope_by"):
        return ((c.length, c),)
    # Experts that drop tokens would make a text depend on padding and on the other texts. If the
    # mesh shards experts, they need a capacity: this one has room for all tokens.
    every = c.experts / c.active if axis_parts(EXPERTS) > 1 else 0.0
    c = replace(c, capacity=every if c.capacity else 0.0)
    # Up to ``context`` tokens, the base is ``rope_theta``.
    if c.rope_by == "dynamic":
        return ((c.context, replace(c, rope_by="linear", rope_factor=1.0)),)
    if c.rope_by != "longrope":
        return ((c.length, c),)
    # `rotary_angles` receives the size of the KV cache, which may be longer than the sequence. With
    # this ``rope_context``, the size never makes it select the factors of longer sequences.
    short = replace(c, rope_context=2 * c.context)
    long = replace(short, rope_short=c.rope_long)
    if c.rope_context >= c.context:
        return ((c.context, short),)
    return ((c.rope_context, short), (c.context, long))


class _Text(NamedTuple):
    row: int
    prompt: np.ndarray
    new: np.ndarray
    left: int  # the maximum number of tokens that may still be added

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.new])

    def and_then(self, new: np.ndarray, ends_E: np.ndarray) -> "_Text":
        left = 0 if new[-1] in ends_E else self.left - len(new)
        return self._replace(new=np.concatenate([self.new, new]), left=left)


def _continued_texts(
    config: Config,
    params: Params,
    texts: list[_Text],
    longest: int,
    sampling: Sampling,
    key: jax.Array,
    ends_E: np.ndarray,
    watch: Watch | None,
) -> list[_Text]:
    """Return the texts with their next tokens, for sequences of up to ``longest`` tokens."""
    tokens_BP, lengths_B = _padded_prompts(texts, config.length)
    left_B = _integers([text.left for text in texts])
    drawing = _Drawing(
        sampling,
        key,
        ends_E,
        np.minimum(left_B, longest + 1 - lengths_B),
        _integers([text.row for text in texts]),
        _integers([len(text.new) for text in texts]),
    )
    room = _rounded(max(left_B))
    until = room if watch is None else WATCHED
    state = _generated(config, params, tokens_BP, lengths_B, drawing, np.int32(until), room=room)
    watched_B = np.ones(len(texts), bool)
    stopped_B = np.zeros(len(texts), bool)
    while True:
        going_B, now = _so_far(texts, state, ends_E)
        if watch is not None:
            for i in np.flatnonzero(watched_B):
                stopped_B[i] = watch(now[i].row, now[i].new)
        watched_B = going_B & ~stopped_B
        if not watched_B.any():
            return [
                text._replace(left=0) if stopped else text
                for text, stopped in zip(now, stopped_B, strict=True)
            ]
        until += WATCHED
        state = _resumed(config, params, state.replace(going_B=watched_B), drawing, np.int32(until))


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def _padded_prompts(texts: list[_Text], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all texts, [B, P], padded with zeros, and their lengths, [B].

    P is a power of two or ``longest``, so that few programs are compiled.
    """
    lengths_B = _integers([len(text.tokens) for text in texts])
    tokens_BP = np.zeros((len(texts), min(_rounded(max(lengths_B)), longest)), np.int32)
    for tokens_P, text in zip(tokens_BP, texts, strict=True):
        tokens_P[: len(text.tokens)] = text.tokens
    return tokens_BP, lengths_B


def _so_far(
    texts: list[_Text], state: "_State", ends_E: np.ndarray
) -> tuple[np.ndarray, list[_Text]]:
    """Return which texts are not finished, bool [B], and the texts with their new tokens."""
    going_B, found_BR, counts_B = jax.device_get((state.going_B, state.tokens_BR, state.counts_B))
    now = [
        text.and_then(found_R[:count], ends_E)
        for text, found_R, count in zip(texts, found_BR, counts_B, strict=True)
    ]
    return going_B, now


def _continues(config: Config) -> None:
    if not config.causal:
        raise ValueError(
            f"a {type(config).__name__.removesuffix('Config')} does not continue text: use a "
            "GPT-2 or a Llama"
        )
    if config.predicts != "tokens":
        raise ValueError(
            f"this model predicts {config.predicts}, not tokens: use a model with head=tokens"
        )


def _checked_prompt(config: Config, i: int, prompt: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the tokens of a prompt as an array, after validation."""
    vocab = config.sizes()["vocab"]
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"prompt {i} is {'empty' if tokens.size == 0 else 'not a sequence of tokens'}: give "
            "at least one token"
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"prompt {i} has tokens of {tokens.dtype}, not integers")
    if len(tokens) >= config.length:
        raise ValueError(
            f"prompt {i} has {len(tokens)} tokens, which leaves no room in the model's context of "
            f"{config.length}: shorten the prompt"
        )
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    if len(wrong):
        raise ValueError(
            f"prompt {i} has the token {wrong[0]}, but the model's tokens are 0 to {vocab - 1}"
        )
    return tokens


def _end_tokens(config: Config, end: int | Sequence[int] | None) -> np.ndarray:
    """Return the tokens that end a text, int32 [E]; without any, -1, which is never sampled."""
    vocab = config.sizes()["vocab"]
    ends = np.atleast_1d(np.asarray([] if end is None else end, np.int64))
    wrong = ends[(ends < 0) | (ends >= vocab)]
    if len(wrong):
        raise ValueError(f"end is {wrong[0]}, but the model's tokens are 0 to {vocab - 1}")
    return np.asarray(ends if len(ends) else [-1], np.int32)


def _sampling(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> Sampling:
    if repetition_penalty is not None and not 0 < repetition_penalty < math.inf:
        raise ValueError(
            f"repetition_penalty is {repetition_penalty}, but must be above 0; leave it out to "
            "allow repetitions"
        )
    penalty = None if repetition_penalty is None else np.float32(repetition_penalty)
    if temperature is None:
        for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            if value is not None:
                raise ValueError(
                    f"{name} is {value}, but without a temperature the likeliest token is taken: "
                    "also set temperature, for example to 1"
                )
        return Sampling(repetition_penalty=penalty)
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature is {temperature}, but must be above 0; leave it out to take the "
            "likeliest tokens"
        )
    if top_k is not None and operator.index(top_k) < 1:
        raise ValueError(f"top_k is {top_k}, less than 1; leave it out to sample from all tokens")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} is {value}, but must be above 0 and at most 1")
    most = np.iinfo(np.int32).max
    return Sampling(
        np.float32(temperature),
        None if top_k is None else np.int32(min(top_k, most)),
        None if top_p is None else np.float32(top_p),
        None if min_p is None else np.float32(min_p),
        penalty,
    )


def _rounded(size: int) -> int:
    """Return the next power of two, at least `LEAST`."""
    return max(LEAST, 1 << (int(size) - 1).bit_length())


@struct.dataclass
class _Drawing:
    """The settings for sampling the tokens of B rows, and the conditions that end a row."""

    sampling: Sampling
    key: jax.Array
    ends_E: np.ndarray
    # The maximum number of tokens of each row.
    most_B: np.ndarray
    # The index of each row's prompt, and the number of tokens that were sampled before. They
    # determine the random keys.
    rows_B: Array
    drawn_B: Array


@struct.dataclass
class _State:
    """B rows of text. Each has ``step`` new tokens, or fewer if it ended before."""

    step: jax.Array
    tokens_BR: jax.Array
    # The number of new tokens of each row.
    counts_B: jax.Array
    # Whether a row is still being continued.
    going_B: jax.Array
    # The KV cache, up to the token before the last one.
    past: Past
    # Whether a token is in the prompt or was generated. None: no setting depends on it.
    seen_BV: jax.Array | None


@partial(jax.jit, static_argnums=0, static_argnames="room")
def _generated(config, params, tokens_BP, lengths_B, drawing, until, *, room) -> _State:
    """Read the prompts and generate up to ``until`` tokens.

    Each prompt has ``lengths_B`` tokens, and there is room for ``room`` new tokens (R).
    """
    logits_BV, past = _read_tokens(config, params, tokens_BP, lengths_B, Past())
    rows_B1 = jnp.arange(len(tokens_BP))[:, None]
    in_prompt_BP = jnp.arange(tokens_BP.shape[1])[None] < lengths_B[:, None]
    seen_BV = None
    if drawing.sampling.repetition_penalty is not None:
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B1, tokens_BP].max(in_prompt_BP)
    begin = _State(
        jnp.zeros((), jnp.int32),
        jnp.zeros((len(tokens_BP), room), jnp.int32),
        jnp.zeros_like(lengths_B),
        jnp.ones_like(lengths_B, bool),
        past.with_room(min(tokens_BP.shape[1] + room, config.length)),
        seen_BV,
    )
    return _until(config, params, _with_next(begin, logits_BV, drawing), drawing, until)


def _read_tokens(config, params, tokens_BT, lengths_B, past) -> tuple[jax.Array, Past]:
    inputs: Inputs = {"tokens": tokens_BT, "lengths": lengths_B}
    return config.module.apply({"params": params}, inputs, past=past)  # type: ignore[return-value]


def _until(config, params, begin, drawing, until) -> "_State":
    def step(state: _State) -> _State:
        last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BR, state.step - 1, 1, 1)
        # A row that has ended is computed again at the same position. Its result is not used.
        logits_BV, new = _read_tokens(
            config, params, last_B1, state.going_B.astype(jnp.int32), state.past
        )
        return _with_next(replace(state, past=state.past.and_then(new)), logits_BV, drawing)

    return jax.lax.while_loop(lambda state: state.going_B.any() & (state.step < until), step, begin)


# Continues the generation up to ``until`` tokens.
_resumed = jax.jit(_until, static_argnums=0, donate_argnums=2)


def _with_next(state: _State, logits_BV: jax.Array, drawing: _Drawing) -> _State:
    """Return the state with one more token of each row."""
    penalty = drawing.sampling.repetition_penalty
    if state.seen_BV is not None and penalty is not None:
        logits_BV = penalize_repeats(logits_BV, state.seen_BV, penalty)
    token_B = draw_tokens(
        logits_BV, drawing.sampling, drawing.key, drawing.rows_B, drawing.drawn_B + state.step
    )
    ends_B = (token_B[:, None] == drawing.ends_E[None]).any(1)
    counts_B = state.counts_B + state.going_B
    return replace(
        state,
        step=state.step + 1,
        tokens_BR=state.tokens_BR.at[:, state.step].set(token_B),
        counts_B=counts_B,
        going_B=state.going_B & ~ends_B & (counts_B < drawing.most_B),
        seen_BV=None
        if state.seen_BV is None
        else state.seen_BV.at[jnp.arange(len(token_B)), token_B].set(True),
    )


def penalize_repeats(logits_BV: jax.Array, seen_BV: jax.Array, penalty: np.float32) -> jax.Array:
    """Return logits in which tokens that have occurred are less likely.

    Positive logits are divided by ``penalty``, and negative logits are multiplied by it.

    Args:
      logits_BV: logits.
      seen_BV: whether a token has occurred.
      penalty: the repetition penalty.
    """
    less_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, less_BV, logits_BV)


def draw_tokens(
    logits_BV: jax.Array, sampling: Sampling, key: jax.Array, rows_B: Array, steps_B: Array
) -> jax.Array:
    """Sample a token of each row, int32 [B].

    Args:
      logits_BV: logits.
      sampling: settings.
      key: random key. It is folded with the row and the step.
      rows_B: index of each row's prompt.
      steps_B: index of each row's token.
    """
    if sampling.temperature is None:
        return logits_BV.argmax(-1).astype(jnp.int32)
    scaled_BV = logits_BV / sampling.temperature
    left_BV = jnp.where(scaled_BV >= least_logits(scaled_BV, sampling), scaled_BV, -jnp.inf)
    keys_B = jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, row), step))(
        rows_B, steps_B
    )
    return jax.vmap(jax.random.categorical)(keys_B, left_BV).astype(jnp.int32)


def least_logits(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Return the smallest logit of each row that ``top_k``, ``top_p`` and ``min_p`` leave, [B, 1].

    ``top_p`` is applied to the tokens that ``top_k`` leaves.
    """
    least_B1 = jnp.full((len(logits_BV), 1), -jnp.inf, logits_BV.dtype)
    if sampling.min_p is not None:
        most_B1 = logits_BV.max(-1, keepdims=True)
        least_B1 = (most_B1 + jnp.log(sampling.min_p)).astype(logits_BV.dtype)
    if sampling.top_k is None and sampling.top_p is None:
        return least_B1
    down_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    if sampling.top_k is not None:
        last = jnp.minimum(sampling.top_k, logits_BV.shape[1]) - 1
        kth_B1 = jax.lax.dynamic_slice_in_dim(down_BV, last, 1, 1)
        least_B1 = jnp.maximum(least_B1, kth_B1)
        down_BV = jnp.where(down_BV >= kth_B1, down_BV, -jnp.inf)
    if sampling.top_p is not None:
        p_BV = jax.nn.softmax(down_BV)
        before_BV = jnp.cumsum(p_BV, -1) - p_BV
        # With top_p=1, rounding must not remove a token.
        kept_BV = (before_BV < sampling.top_p) | (sampling.top_p >= 1)
        least_B1 = jnp.maximum(
            least_B1, jnp.where(kept_BV, down_BV, jnp.inf).min(-1, keepdims=True)
        )
    return least_B1
