"""Attention with a kernel that the devices support.

The kernels are cuDNN's on GPUs, Pallas' splash attention on TPUs, and XLA's products anywhere.

Shape suffixes: B batch, T queries, S keys, H query heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxgrow.sharding import CONTEXT, RULES, batch_axes, divided, parts, platform, sequence_parts

By: TypeAlias = Literal["auto", "cudnn", "xla", "splash"]

# The number of queries in a block of causal attention in XLA.
QUERIES = 128
# The lanes of a TPU: the size of a block of splash attention is a multiple of this number.
LANES = 128
# The kernels that "auto" tries before XLA's.
_KERNELS: tuple[By, ...] = ("cudnn", "splash")


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
    window: Any = None
    positions_BT: Any = None
    sinks_H: Any = None
    bias_BHTS: Any = None
    segments_BT: Any = None

    @property
    def plain(self) -> bool:
        """Whether the scores are ``q k / sqrt(K)``, without changes, for all keys of a segment."""
        others = (self.scale, self.window, self.sinks_H, self.bias_BHTS)
        return not self.cap and all(x is None for x in others)


PLAIN = ScoreForm()


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
        shapes (`unsupported_reasons`).
      form: another scale, a soft cap, a window, sinks or a bias, which run in XLA. A window does not
        reduce the FLOPs: keys before the window are computed and masked. The same holds for keys of
        other segments, in every kernel that supports segments.

    Raises:
      Unsupported: the chosen kernel does not support these shapes or these devices.
    """
    masked = mask_BS is not None
    by = _chosen_kernel(by, q_BTHK, k_BSGK, masked, form)
    length = q_BTHK.shape[1]
    if sequence_parts(length) > 1:
        if masked or not form.plain or form.positions_BT is not None:
            raise Unsupported(
                "mesh.context shards the keys over devices, which does not support padding, "
                "windows, soft caps, sinks, biases or a custom scale of attention: set mesh.context=1"
            )
        return _ring(q_BTHK, k_BSGK, v_BSGK, causal, form.segments_BT)
    if by == "splash":
        return _splash(q_BTHK, k_BSGK, v_BSGK, causal, form.segments_BT)
    if by == "cudnn":
        return _cudnn(q_BTHK, k_BSGK, v_BSGK, causal)
    seen_BHTS = _seen(length, causal, mask_BS, form)
    if not causal or q_BTHK.dtype == jnp.float64:
        seen_BHTS = _in_segment(seen_BHTS, form.segments_BT, 0, length)
        return _by_xla(q_BTHK, k_BSGK, v_BSGK, seen_BHTS, form)
    blocks = []
    for begin, end in query_blocks(length):
        mask = _in_segment(seen_BHTS[:, :, begin:end, :end], form.segments_BT, begin, end)
        blocks.append(_by_xla(q_BTHK[:, begin:end], k_BSGK[:, :end], v_BSGK[:, :end], mask, form))
    return jnp.concatenate(blocks, 1) if len(blocks) > 1 else blocks[0]


def _chosen_kernel(by: By, q_BTHK, k_BSGK, masked: bool, form: ScoreForm) -> By:
    """Return the kernel to use; "auto" is replaced by the first kernel that supports the inputs.

    Raises:
      Unsupported: the kernel does not support these shapes or these devices.
    """
    shapes = q_BTHK.shape[1:], k_BSGK.shape[1:]
    why = {
        kernel: unsupported_reasons(kernel, q_BTHK.dtype, *shapes, masked, form)
        for kernel in _KERNELS
    }
    if by == "auto":
        serving: list[By] = [kernel for kernel in _KERNELS if not why[kernel]]
        return serving[0] if serving else "xla"
    if why.get(by):
        raise Unsupported(
            f"attention={by} does not support this model: {'; '.join(why[by])}; set attention=auto"
        )
    return by


def _seen(length: int, causal: bool, mask_BS: Any, form: ScoreForm) -> Any:
    """Return which keys each query sees, bool, broadcastable to [B, H, T, S]; None: all keys."""
    # The mask is a constant. If the program computed it, XLA would fuse it differently inside a
    # conditional, and the results of the same layer would not be bitwise identical.
    seen_BHTS: Any = np.tri(length, dtype=bool)[None, None] if causal else None
    if form.window is not None:
        positions_BT = np.arange(length)[None] if form.positions_BT is None else form.positions_BT
        near_B1TS = abs(positions_BT[:, None, :, None] - positions_BT[:, None, None]) < form.window
        seen_BHTS = near_B1TS if seen_BHTS is None else seen_BHTS & near_B1TS
    if mask_BS is not None:
        keys = mask_BS[:, None, None, :]
        seen_BHTS = keys if seen_BHTS is None else seen_BHTS & keys
    return seen_BHTS


def _in_segment(seen_BHTS: Any, segments_BT: Any, begin: int, end: int) -> Any:
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


def attention_after(past, q_BTHK, k_BTGK, v_BTGK, form: ScoreForm = PLAIN):
    """Causal `attention` in XLA of tokens that follow a KV cache.

    The rows of a batch may be at different positions.

    Args:
      past: ``((keys, values), positions)``. Keys and values are [B, S, G, K] of the positions from
        0; entries from a row's first new position on are undefined. The positions of the new tokens
        are int32 [B, T], less than S and consecutive in each row.
      q_BTHK: queries of the tokens.
      k_BTGK: keys of the tokens.
      v_BTGK: values of the tokens.
      form: as in `attention`.
    """
    old, positions_BT = past
    k_BSGK, v_BSGK = (
        put_at(a, b, positions_BT[:, 0]) for a, b in zip(old, (k_BTGK, v_BTGK), strict=True)
    )
    seen_B1TS = jnp.arange(k_BSGK.shape[1])[None, None, None] <= positions_BT[:, None, :, None]
    if form.window is not None:
        seen_B1TS &= (
            positions_BT[:, None, :, None] - jnp.arange(k_BSGK.shape[1])[None, None, None]
            < form.window
        )
    return _by_xla(q_BTHK, k_BSGK, v_BSGK, seen_B1TS, form)


def put_at(old_BS, new_BT, first_B):
    """Write each row's ``new_BT`` into ``old_BS`` at the positions from ``first_B`` on.

    Both arrays may have further axes behind these two.
    """

    def row(old_S, new_T, first):
        return jax.lax.dynamic_update_slice_in_dim(old_S, new_T, first, 0)

    return jax.vmap(row)(old_BS, new_BT, first_B)


def _by_xla(q_BTHK, k_BSGK, v_BSGK, seen_BHTS, form: ScoreForm = PLAIN):
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


def unsupported_reasons(
    by: By,
    dtype: DTypeLike,
    queries_THK: tuple[int, ...],
    keys_SGK: tuple[int, ...],
    masked: bool,
    form: ScoreForm = PLAIN,
) -> list[str]:
    """Return the reasons why a kernel does not support attention of these shapes.

    Args:
      by: the kernel.
      dtype: dtype of activations.
      queries_THK: shape of the queries without the batch.
      keys_SGK: shape of the keys without the batch.
      masked: whether some keys are masked.
      form: as in `attention`.

    Returns:
      The reasons, for the devices that the traced code is for. Empty if the kernel is supported.
    """
    length, heads, head_dim = queries_THK
    keys, kv_heads, _ = keys_SGK
    on = platform()
    dtype = jnp.dtype(dtype)
    tensor = parts("heads")
    capability = _compute_capability() if on == "gpu" else ()
    # JAX refuses larger heads. Before compute capability 9.0, cuDNN has no backward pass for them.
    widest = 256 if capability >= (9, 0) else 128
    two_bytes = (dtype.itemsize == 2, f"activations are {dtype}, not bfloat16")
    # A mask would be a bias for cuDNN. JAX then computes the gradient of the bias, and cuDNN does not
    # support this gradient for all shapes.
    unmasked = (not masked, "some keys are masked")
    plain = (form.plain, "the scores have a custom scale, a soft cap, a window, sinks or a bias")
    reasons = {
        "cudnn": [
            (on == "gpu", f"the kernel runs on GPUs, but the program is for {on}"),
            (
                on != "gpu" or capability >= (8, 0),
                "the kernel needs NVIDIA GPUs of compute capability 8.0 (A100) or later",
            ),
            two_bytes,
            (head_dim % 8 == 0, f"head_dim is {head_dim}, not a multiple of 8"),
            (head_dim <= widest, f"head_dim is {head_dim}, greater than {widest}"),
            # JAX refuses odd numbers in programs that compute gradients.
            (
                length % 2 == keys % 2 == 0,
                f"the numbers of queries and keys, {length} and {keys}, are not both even",
            ),
            unmasked,
            plain,
            (form.segments_BT is None, "attention in segments needs the kernel splash or xla"),
        ],
        "splash": [
            (on == "tpu", f"the kernel runs on TPUs, but the program is for {on}"),
            two_bytes,
            (
                length % LANES == keys % LANES == 0,
                f"{length} positions are not a multiple of {LANES}",
            ),
            unmasked,
            plain,
            (
                heads % tensor == kv_heads % tensor == 0,
                f"{heads} heads and {kv_heads} key/value heads are not divisible by {tensor} devices",
            ),
        ],
    }
    return [reason for serves, reason in reasons.get(by, []) if not serves]


def _compute_capability() -> tuple[int, ...]:
    """Return the compute capability of the GPUs of this process, such as ``(9, 0)`` for an H100.

    It is ``(8, 0)`` if the process has no GPU and compiles for absent ones, as JAX then assumes the
    limits of these GPUs. It is empty for GPUs without cuDNN, whose capability is not a number.
    """
    numbers = getattr(jax.local_devices()[0], "compute_capability", "8.0").split(".")
    return tuple(map(int, numbers)) if all(n.isdigit() for n in numbers) else ()


def _divided(each: Callable, q_BTHK, k_BSGK, v_BSGK, *segments_BT):
    """Run ``each(q, k, v, ..)`` on every device, for the device's samples and heads.

    XLA does not partition a custom kernel. JAX's own rule for the kernel of cuDNN fails if two axes
    of the mesh divide the samples (0.10).
    """
    batch = batch_axes(len(q_BTHK))
    tensor = RULES["heads"] if parts("heads") > 1 else None
    if q_BTHK.shape[2] % parts("heads") or k_BSGK.shape[2] % parts("heads"):
        tensor = None
    spec = P(batch or None, None, tensor, None)
    specs = (spec,) * 3 + (P(batch or None, None),) * len(segments_BT)
    return divided(each, specs, spec)(q_BTHK, k_BSGK, v_BSGK, *segments_BT)


def _cudnn(q_BTHK, k_BSGK, v_BSGK, causal: bool):
    each = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    return _divided(each, q_BTHK, k_BSGK, v_BSGK)


def _splash(q_BTHK, k_BSGK, v_BSGK, causal: bool, segments_BT: Any = None):
    scaled = q_BTHK / q_BTHK.shape[-1] ** 0.5

    def each(q_BTHK, k_BSGK, v_BSGK, *segments_BT):
        run = _splash_kernel(q_BTHK.shape[2], q_BTHK.shape[1], k_BSGK.shape[1], causal)
        heads_first: list[jax.Array] = [x.swapaxes(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK)]
        ids = [_splash_segments(segments) for segments in segments_BT]
        return jnp.asarray(jax.vmap(run)(*heads_first, *ids)).swapaxes(1, 2)

    return _divided(each, scaled, k_BSGK, v_BSGK, *_present(segments_BT))


def _present(segments_BT: Any) -> tuple[Any, ...]:
    return () if segments_BT is None else (segments_BT,)


def _splash_segments(segments_BT: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(segments_BT, segments_BT)


def _splash_kernel(heads: int, queries: int, keys: int, causal: bool):
    # Imported here, because the import takes a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = (splash.CausalMask if causal else splash.FullMask)((queries, keys))
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads), head_shards=1, q_seq_shards=1
    )


# The number of queries in a block of ring attention.
RING_QUERIES = 512


def _ring(q_BTHK, k_BSGK, v_BSGK, causal: bool, segments_BT: Any = None):
    """Ring attention (Liu et al., 2023): each device has a part of the sequence.

    The devices pass their keys and values around the ring, so that each device sees the keys of
    every device once. It keeps the sum of exponentials relative to the greatest score so far. The
    backward pass computes the scores again. No device ever holds all keys. In causal attention, a
    device also computes the scores of later keys and masks them. Skipping them would save no time,
    because the last device needs the keys of all devices, and the others would wait for it.
    """

    def each(q_BTHK, k_BSGK, v_BSGK, *segments_BT):
        devices = jax.lax.axis_size(CONTEXT)
        own = jax.lax.axis_index(CONTEXT)
        around = [(i, (i + 1) % devices) for i in range(devices)]
        length = q_BTHK.shape[1]

        def turn(carry, number):
            keys, sums = carry
            # The position of the first of these keys in the sequence.
            first = (own - number) % devices * length
            ahead = own * length - first if causal else None
            sums = _meet((q_BTHK, *segments_BT), keys, sums, ahead)
            return (jax.lax.ppermute(keys, CONTEXT, around), sums), None

        wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
        most = jnp.full(q_BTHK.shape[:3], jnp.finfo(wide).min, wide)
        sums = most, jnp.zeros_like(most), jnp.zeros(q_BTHK.shape, wide)
        begin = (k_BSGK, v_BSGK, *segments_BT), sums
        (_, (_, total, out)), _ = jax.lax.scan(
            jax.checkpoint(turn, prevent_cse=False), begin, jnp.arange(devices)
        )
        return (out / total[..., None]).astype(q_BTHK.dtype)

    batch = batch_axes(len(q_BTHK)) or None
    tensor = (
        RULES["heads"] if parts("heads") > 1 and k_BSGK.shape[2] % parts("heads") == 0 else None
    )
    spec = P(batch, CONTEXT, tensor, None)
    segments = _present(segments_BT)
    specs = (spec,) * 3 + (P(batch, CONTEXT),) * len(segments)
    return divided(each, specs, spec)(q_BTHK, k_BSGK, v_BSGK, *segments)


def _meet(asking, asked, sums, ahead):
    """Return the running sums of attention after adding these keys.

    ``asking`` is the queries, and ``asked`` is the keys and values. Both end with their segment ids
    if attention is in segments. The sums are ``(greatest score, sum of exponentials [B, T, H],
    weighted sum of values)``. ``ahead`` is the position of the first query minus the position of
    the first key. If it is None, queries see all keys.
    """
    q_BTHK, *own_segments = asking
    k_BSGK, v_BSGK, *segments = asked
    samples, length, heads, width = q_BTHK.shape
    size = RING_QUERIES if length % RING_QUERIES == 0 else length
    keys, values = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k_BSGK, v_BSGK))
    positions = jnp.arange(keys.shape[1])

    def block(inputs):
        q, own, first, (most, total, out) = inputs
        scores = (
            jnp.einsum("bthk,bshk->bths", q, keys, preferred_element_type=out.dtype) / width**0.5
        )
        seen: Any = True
        if ahead is not None:
            seen = (first + ahead + jnp.arange(size)[:, None] >= positions[None])[None, :, None]
        for a, b in zip(own, segments, strict=True):
            seen = seen & (a[:, :, None, None] == b[:, None, None])
        scores = jnp.where(seen, scores, jnp.finfo(out.dtype).min)
        new = jnp.maximum(most, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new[..., None]), 0)
        scale = jnp.exp(most - new)
        added = jnp.einsum(
            "bths,bshk->bthk", weights.astype(q.dtype), values, preferred_element_type=out.dtype
        )
        return new, total * scale + weights.sum(-1), out * scale[..., None] + added

    def cut(x):
        return x.reshape(samples, length // size, size, *x.shape[2:]).swapaxes(0, 1)

    firsts = jnp.arange(length // size) * size
    cuts, own, of_sums = jax.tree.map(cut, (q_BTHK, own_segments, sums))
    found = jax.lax.map(jax.checkpoint(block, prevent_cse=False), (cuts, own, firsts, of_sums))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(samples, length, *x.shape[3:]), found)


def query_blocks(length: int) -> list[tuple[int, int]]:
    """Return ``[(begin, end), ..]`` of the blocks of causal queries."""
    return [(begin, min(begin + QUERIES, length)) for begin in range(0, length, QUERIES)]


def mean_keys(length: int) -> float:
    """Return the mean number of keys that are computed for a causal query."""
    return sum(end * (end - begin) for begin, end in query_blocks(length)) / length
