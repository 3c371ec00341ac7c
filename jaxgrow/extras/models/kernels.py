"""Attention kernels: cuDNN on GPUs, Pallas' splash attention on TPUs, and ring attention.

They compute `jaxgrow.models.attention.attention`, which finds them by name. Shape suffixes: B batch,
T queries, S keys, H query heads, G key/value heads, K head_dim.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxgrow.extras.models.mapped import map_devices
from jaxgrow.models.attention import KERNELS, Kernel, ScoreForm, Unsupported
from jaxgrow.sharding import CONTEXT, RULES, axis_parts, batch_axes, current_platform

# The lanes of a TPU: the size of a block of splash attention is a multiple of this number.
LANES = 128


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
    tensor = RULES["heads"] if axis_parts("heads") > 1 else None
    if q_BTHK.shape[2] % axis_parts("heads") or k_BSGK.shape[2] % axis_parts("heads"):
        tensor = None
    spec = P(batch or None, None, tensor, None)
    specs = (spec,) * 3 + (P(batch or None, None),) * len(segments_BT)
    return map_devices(each, specs, spec)(q_BTHK, k_BSGK, v_BSGK, *segments_BT)


def by_cudnn(q_BTHK, k_BSGK, v_BSGK, causal: bool, masked: bool, form: ScoreForm) -> jax.Array:
    """Compute attention by cuDNN's kernel."""
    each = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    return _divided(each, q_BTHK, k_BSGK, v_BSGK)


def _not_by_cudnn(q_BTHK, k_BSGK, masked: bool, form: ScoreForm) -> list[str]:
    on = current_platform()
    capability = _compute_capability() if on == "gpu" else ()
    length, keys, head_dim = q_BTHK.shape[1], k_BSGK.shape[1], q_BTHK.shape[-1]
    # JAX refuses larger heads. Before compute capability 9.0, cuDNN has no backward pass for them.
    widest = 256 if capability >= (9, 0) else 128
    reasons = [
        (on == "gpu", f"the kernel runs on GPUs, but the program is for {on}"),
        (
            on != "gpu" or capability >= (8, 0),
            "the kernel needs NVIDIA GPUs of compute capability 8.0 (A100) or later",
        ),
        (head_dim % 8 == 0, f"head_dim is {head_dim}, not a multiple of 8"),
        (head_dim <= widest, f"head_dim is {head_dim}, greater than {widest}"),
        # JAX refuses odd numbers in programs that compute gradients.
        (
            length % 2 == keys % 2 == 0,
            f"the numbers of queries and keys, {length} and {keys}, are not both even",
        ),
        (form.segments_BT is None, "attention in segments needs the kernel splash or xla"),
    ]
    return [reason for serves, reason in (*reasons, *_common(q_BTHK, masked, form)) if not serves]


def _common(q_BTHK, masked: bool, form: ScoreForm) -> list[tuple[bool, str]]:
    """Return what both kernels of devices need: whether it is so, and the reason if it is not."""
    return [
        (q_BTHK.dtype.itemsize == 2, f"activations are {q_BTHK.dtype}, not bfloat16"),
        # A mask would be a bias for cuDNN. JAX then computes the gradient of the bias, and cuDNN
        # does not support this gradient for all shapes.
        (not masked, "some keys are masked"),
        (form.plain, "the scores have a custom scale, a soft cap, a window, sinks or a bias"),
    ]


def by_splash(q_BTHK, k_BSGK, v_BSGK, causal: bool, masked: bool, form: ScoreForm) -> jax.Array:
    """Compute attention by Pallas' splash kernel."""
    # Imported here, because the import takes a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    def each(q_BTHK, k_BSGK, v_BSGK, *segments_BT):
        masks = splash.CausalMask if causal else splash.FullMask
        mask = masks((q_BTHK.shape[1], k_BSGK.shape[1]))
        run = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q_BTHK.shape[2]), head_shards=1, q_seq_shards=1
        )
        heads_first: list[jax.Array] = [x.swapaxes(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK)]
        ids = [splash.SegmentIds(segments, segments) for segments in segments_BT]
        return jnp.asarray(jax.vmap(run)(*heads_first, *ids)).swapaxes(1, 2)

    scaled = q_BTHK / q_BTHK.shape[-1] ** 0.5
    return _divided(each, scaled, k_BSGK, v_BSGK, *_segments(form))


def _not_by_splash(q_BTHK, k_BSGK, masked: bool, form: ScoreForm) -> list[str]:
    on = current_platform()
    tensor = axis_parts("heads")
    length, heads, kv_heads = q_BTHK.shape[1], q_BTHK.shape[2], k_BSGK.shape[2]
    reasons = [
        (on == "tpu", f"the kernel runs on TPUs, but the program is for {on}"),
        (
            length % LANES == k_BSGK.shape[1] % LANES == 0,
            f"{length} positions are not a multiple of {LANES}",
        ),
        (
            heads % tensor == kv_heads % tensor == 0,
            f"{heads} heads and {kv_heads} key/value heads are not divisible by {tensor} devices",
        ),
    ]
    return [reason for serves, reason in (*reasons, *_common(q_BTHK, masked, form)) if not serves]


def _segments(form: ScoreForm) -> tuple[jax.Array, ...]:
    return () if form.segments_BT is None else (form.segments_BT,)


# The number of queries in a block of ring attention.
RING_QUERIES = 512


def by_ring(q_BTHK, k_BSGK, v_BSGK, causal: bool, masked: bool, form: ScoreForm) -> jax.Array:
    """Ring attention (Liu et al., 2023): each device has a part of the sequence.

    The devices pass their keys and values around the ring, so that each device sees the keys of
    every device once. It keeps the sum of exponentials relative to the greatest score so far. The
    backward pass computes the scores again. No device ever holds all keys. In causal attention, a
    device also computes the scores of later keys and masks them. Skipping them would save no time,
    because the last device needs the keys of all devices, and the others would wait for it.

    Raises:
      Unsupported: the scores have another form, or some keys are masked.
    """
    if masked or not form.plain or form.positions_BT is not None:
        raise Unsupported(
            "mesh.context shards the keys over devices, which does not support padding, dropped "
            "tokens, windows, soft caps, sinks, biases or a custom scale of attention: set mesh.context=1"
        )

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
        RULES["heads"]
        if axis_parts("heads") > 1 and k_BSGK.shape[2] % axis_parts("heads") == 0
        else None
    )
    spec = P(batch, CONTEXT, tensor, None)
    segments = _segments(form)
    specs = (spec,) * 3 + (P(batch, CONTEXT),) * len(segments)
    return map_devices(each, specs, spec)(q_BTHK, k_BSGK, v_BSGK, *segments)


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
        seen = jnp.array(True)
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

    def in_blocks(x):
        return x.reshape(samples, length // size, size, *x.shape[2:]).swapaxes(0, 1)

    firsts = jnp.arange(length // size) * size
    queries, own, of_sums = jax.tree.map(in_blocks, (q_BTHK, own_segments, sums))
    found = jax.lax.map(jax.checkpoint(block, prevent_cse=False), (queries, own, firsts, of_sums))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(samples, length, *x.shape[3:]), found)


KERNELS.add("cudnn", Kernel(by_cudnn, _not_by_cudnn))
KERNELS.add("splash", Kernel(by_splash, _not_by_splash))
KERNELS.add("ring", Kernel(by_ring, lambda q_BTHK, k_BSGK, masked, form: []))
