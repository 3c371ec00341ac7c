"""Attention: by XLA's products, or by a kernel of the devices (`jaxgrow.extras.models.kernels`).

Shape suffixes: B batch, T queries, S keys, H query heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrow.axes.names import Tree
from jaxgrow.registry import Registry
from jaxgrow.sharding import current_platform, sequence_parts

# Which keys each query sees; None: all of them.
Mask: TypeAlias = jax.Array | np.ndarray | None
By: TypeAlias = Literal["auto", "cudnn", "xla", "splash"]

# The number of queries in a block of causal attention in XLA.
QUERIES = 128
# The kernel that "auto" prefers to XLA's products, by platform.
PREFERRED = {"gpu": "cudnn", "tpu": "splash"}


# How a model continues a text: "attention" of tokens that follow a KV cache, and "layers", which run
# the blocks after one.
CONTINUING: Registry[Callable[..., Tree]] = Registry("generation")
# The collection and the name under which attention sows its keys and values for a KV cache. They are
# stored only if the collection is mutable.
KEPT = ("intermediates", "keys_and_values")


class Unsupported(ValueError):
    """The chosen kernel, or the mesh, does not support the attention of a model."""


class ScoreForm(NamedTuple):
    """The scores of attention: ``softmax(c tanh(scale q k / c)) v``, with an optional window.

    Attributes:
      scale: factor of the scores; None: 1 / sqrt(K).
      cap: soft cap of the scores, c; 0: none.
      window: the number of positions that a query sees, counted backwards from its own position
        and, if attention is not causal, also forwards: a number or an int32 array. None: all
        positions.
      positions_BT: positions of the tokens in their text, for the window; None: 0, 1, 2, ...
      sinks_H: one additional score of each head in the softmax, which has no value (gpt-oss).
      bias_BHTS: added to the scores after ``scale``, if attention is not causal (DeBERTa).
      segments_BT: segment ids, int32: a token sees only the tokens with its number. The keys have
        the same ones. None: all tokens are in one segment.
    """

    scale: float | None = None
    cap: float = 0.0
    window: int | jax.Array | None = None
    positions_BT: jax.Array | None = None
    sinks_H: jax.Array | None = None
    bias_BHTS: jax.Array | None = None
    segments_BT: jax.Array | None = None

    @property
    def plain(self) -> bool:
        """Whether the scores are ``q k / sqrt(K)``, without changes, for all keys of a segment."""
        others = (self.scale, self.window, self.sinks_H, self.bias_BHTS)
        return not self.cap and all(x is None for x in others)


PLAIN = ScoreForm()


class Kernel(NamedTuple):
    """A kernel that computes `attention`.

    Attributes:
      run: ``(queries, keys, values, causal, masked, form) -> weighted sums of values``.
      reasons: ``(queries, keys, masked, form) -> reasons why the kernel does not support them``, for
        the devices that the traced code is for; ``masked``: whether some keys are masked.
    """

    run: Callable[[jax.Array, jax.Array, jax.Array, bool, bool, ScoreForm], jax.Array]
    reasons: Callable[[jax.Array, jax.Array, bool, ScoreForm], list[str]]


KERNELS: Registry[Kernel] = Registry("attention kernel")
# Operations that are fused on GPUs (`jaxgrow.extras.models.fused`): "norm", "log sum" of the loss,
# "projections" to queries, keys and values, and hidden "units" of an MLP.
FUSED_OPERATIONS: Registry[Callable[..., Tree]] = Registry("fused operation")


def attention(
    q_BTHK, k_BSGK, v_BSGK, *, causal: bool, mask_BS=None, by: By = "auto", form: ScoreForm = PLAIN
):
    """``softmax(q k / sqrt(K)) v``, with the softmax in float32 or better.

    In XLA, causal queries are computed in blocks of `QUERIES` queries. Each block uses only the keys
    up to its last query, so that up to half of the scores are never computed. The function
    `jax.nn.dot_product_attention` rounds scores to float32. Float64 models serve to check the
    mathematics, so they use a separate implementation.

    Args:
      q_BTHK: queries of H heads.
      k_BSGK: keys of G heads, each shared by neighbouring query heads. If causal, S equals T.
      v_BSGK: values.
      causal: whether a query sees only the keys up to its own position.
      mask_BS: True for the keys that are visible; None: all of them.
      by: the kernel; ``"auto"``: a kernel that the program's devices have and that supports these
        shapes.
      form: another scale, a soft cap, a window, sinks or a bias, which run in XLA. A window does not
        reduce the FLOPs: keys before the window are computed and masked. The same holds for keys of
        other segments, in every kernel that supports segments.

    Raises:
      Unsupported: the chosen kernel does not support these shapes or these devices.
    """
    masked = mask_BS is not None
    length = q_BTHK.shape[1]
    kernel = _chosen_kernel(by, q_BTHK, k_BSGK, masked, form)
    if sequence_parts(length) > 1:
        kernel = "ring"
    if kernel != "xla":
        return KERNELS[kernel].run(q_BTHK, k_BSGK, v_BSGK, causal, masked, form)
    seen_BHTS = _seen(length, causal, mask_BS, form)
    if not causal or q_BTHK.dtype == jnp.float64:
        seen_BHTS = _in_segment(seen_BHTS, form.segments_BT, 0, length)
        return attention_by_xla(q_BTHK, k_BSGK, v_BSGK, seen_BHTS, form)
    assert seen_BHTS is not None  # causal
    blocks = []
    for begin, end in query_blocks(length):
        mask = _in_segment(seen_BHTS[:, :, begin:end, :end], form.segments_BT, begin, end)
        blocks.append(
            attention_by_xla(q_BTHK[:, begin:end], k_BSGK[:, :end], v_BSGK[:, :end], mask, form)
        )
    return jnp.concatenate(blocks, 1) if len(blocks) > 1 else blocks[0]


def _chosen_kernel(by: By, q_BTHK, k_BSGK, masked: bool, form: ScoreForm) -> str:
    """Return the kernel to use; "auto" is replaced by a kernel that supports the inputs.

    Raises:
      Unsupported: the kernel does not support these shapes or these devices.
    """
    kernel = PREFERRED.get(current_platform(), "xla") if by == "auto" else by
    why = [] if kernel == "xla" else KERNELS[kernel].reasons(q_BTHK, k_BSGK, masked, form)
    if why and by != "auto":
        raise Unsupported(
            f"attention={by} does not support this model: {'; '.join(why)}; set attention=auto"
        )
    return "xla" if why else kernel


def _seen(length: int, causal: bool, mask_BS: jax.Array | None, form: ScoreForm) -> Mask:
    """Return which keys each query sees, bool, broadcastable to [B, H, T, S]; None: all keys."""
    # The mask is a constant. If the program computed it, XLA would fuse it differently inside a
    # conditional, and the results of the same layer would not be bitwise identical.
    seen_BHTS: Mask = np.tri(length, dtype=bool)[None, None] if causal else None
    if form.window is not None:
        positions_BT = np.arange(length)[None] if form.positions_BT is None else form.positions_BT
        near_B1TS = abs(positions_BT[:, None, :, None] - positions_BT[:, None, None]) < form.window
        seen_BHTS = near_B1TS if seen_BHTS is None else seen_BHTS & near_B1TS
    if mask_BS is not None:
        keys = mask_BS[:, None, None, :]
        seen_BHTS = keys if seen_BHTS is None else seen_BHTS & keys
    return seen_BHTS


def _in_segment(seen_BHTS: Mask, segments_BT: jax.Array | None, begin: int, end: int) -> Mask:
    """Return ``seen`` for the queries ``begin .. end - 1``, but only the keys of their segments."""
    if segments_BT is None:
        return seen_BHTS
    same_B1TS = segments_BT[:, None, begin:end, None] == segments_BT[:, None, None, :end]
    return same_B1TS if seen_BHTS is None else seen_BHTS & same_B1TS


def segment_positions(segments_BT: jax.Array) -> jax.Array:
    """Return the position of each token in its segment, int32 [B, T].

    Example:
      >>> segment_positions(jnp.array([[0, 0, 1, 1, 1, 2]])).tolist()
      [[0, 1, 0, 1, 2, 0]]
    """
    at_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1], dtype=jnp.int32), segments_BT.shape)
    continues_BT = jnp.pad(segments_BT[:, 1:] == segments_BT[:, :-1], ((0, 0), (1, 0)))
    return at_BT - jax.lax.cummax(jnp.where(continues_BT, 0, at_BT), 1)


def attention_by_xla(q_BTHK, k_BSGK, v_BSGK, seen_BHTS, form: ScoreForm = PLAIN):
    """Return `attention` by XLA's products, for the keys that each query sees."""
    dtype = q_BTHK.dtype
    head_dim = q_BTHK.shape[-1]
    if dtype != jnp.float64 and not form.cap and form.sinks_H is None:
        return jax.nn.dot_product_attention(
            q_BTHK, k_BSGK, v_BSGK, form.bias_BHTS, seen_BHTS, scale=form.scale
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    k_BSHK, v_BSHK = (jnp.repeat(x, q_BTHK.shape[2] // x.shape[2], 2) for x in (k_BSGK, v_BSGK))
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=wide)
    scores_BHTS = scores_BHTS / head_dim**0.5 if form.scale is None else scores_BHTS * form.scale
    if form.bias_BHTS is not None:
        scores_BHTS = scores_BHTS + form.bias_BHTS
    if form.cap:
        scores_BHTS = form.cap * jnp.tanh(scores_BHTS / form.cap)
    if seen_BHTS is not None:
        scores_BHTS = jnp.where(seen_BHTS, scores_BHTS, jnp.finfo(wide).min)
    if form.sinks_H is None:
        weights_BHTS = jax.nn.softmax(scores_BHTS)
    else:
        sinks_BHT1 = jnp.broadcast_to(
            form.sinks_H.astype(wide)[None, :, None, None], (*scores_BHTS.shape[:3], 1)
        )
        weights_BHTS = jax.nn.softmax(jnp.concatenate([scores_BHTS, sinks_BHT1], -1))[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(dtype), v_BSHK)


def query_blocks(length: int) -> list[tuple[int, int]]:
    """Return ``[(begin, end), ..]`` of the blocks of causal queries."""
    return [(begin, min(begin + QUERIES, length)) for begin in range(0, length, QUERIES)]


def mean_keys(length: int) -> float:
    """Return the mean number of keys that are computed for a causal query."""
    return sum(end * (end - begin) for begin, end in query_blocks(length)) / length
