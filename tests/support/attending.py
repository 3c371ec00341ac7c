"""Attention by definition, with NumPy in float64, and random inputs for it."""

import jax.numpy as jnp
import numpy as np

HEADS = 4
KV_HEADS = 2


def arrays(length, head_dim=8, dtype="float32", samples=2):
    """Return ``[queries, keys, values]`` and the segment ids of the tokens."""
    rng = np.random.default_rng(0)
    shapes = [(samples, length, h, head_dim) for h in (HEADS, KV_HEADS, KV_HEADS)]
    segments = np.sort(rng.integers(0, 5, (samples, length)), 1).astype(np.int32)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes], segments


def defined(qkv, causal, segments=None):
    """Compute attention; with segment ids, a token sees only the tokens of its segment."""
    q, k, v = (np.float64(x) for x in qkv)
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    seen = np.tri(*scores.shape[-2:], dtype=bool) if causal else np.array(True)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None])
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
