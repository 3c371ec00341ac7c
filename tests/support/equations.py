"""Layers in NumPy, and the attention of Swin V2, patch by patch."""

from math import erf

import numpy as np


def norm(x, p, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def unit(x):
    return x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), 1e-12)


def linear(x, p):
    return np.tensordot(x, p["kernel"], (-1, 0)) + p.get("bias", 0)


def mlp(x, p):
    h = linear(x, p["up"])
    return linear(h / 2 * (1 + np.vectorize(erf)(h / np.sqrt(2))), p["down"])


def attention(x, p, window, trained, shift):
    """Compute attention patch by patch, by Equations 2 to 4.

    A patch sees the patches of its window that are adjacent in the image, not those that were
    wrapped around by the shift.
    """
    side, heads = len(x), len(p["log_scale"])
    padded = -(-side // window) * window
    x = np.pad(x, ((0, padded - side), (0, padded - side), (0, 0)))
    q, k, v = (linear(x, p[name]) for name in ("query", "key", "value"))
    q, k = unit(q), unit(k)
    places = np.array([(i, j) for i in range(padded) for j in range(padded)])
    out = np.zeros((side, side, x.shape[-1]))
    for i, j in (place for place in places if max(place) < side):
        here = np.array([i, j])
        same = (places - shift) % padded // window == (here - shift) % padded // window
        seen = places[same.all(1) & (np.abs(places - here).max(1) < window)]
        apart = here - seen
        apart = np.sign(apart) * np.log2(1 + np.abs(8 * apart / (trained - 1))) / np.log2(8)
        hidden = np.maximum(linear(apart, p["position_up"]), 0)
        bias = 16 / (1 + np.exp(-linear(hidden, p["position_down"])))
        out[i, j] = p["out"]["bias"]
        for h in range(heads):
            scale = np.exp(min(p["log_scale"][h], np.log(100)))
            scores = scale * k[*seen.T, h] @ q[i, j, h] + bias[:, h]
            weights = np.exp(scores) / np.exp(scores).sum()
            out[i, j] += weights @ v[*seen.T, h] @ p["out"]["kernel"][h]
    return out
