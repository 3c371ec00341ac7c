"""Exact distributions of keep masks, by enumeration, as references for samples and expectations."""

import itertools
from collections import defaultdict

import numpy as np

from jaxgrow.layerdrop.sampling import GRID


def independent(p):
    """Return ``{mask: probability}`` of independent keep masks."""
    masks = itertools.product([False, True], repeat=len(p))
    return {mask: float(np.prod(np.where(mask, p, 1 - p))) for mask in masks}


def systematic(p, u):
    """Keep layer l if floor(C_l - u) > floor(C_(l-1) - u), in integer multiples of 1 / GRID."""
    sure = p >= GRID
    c = np.concatenate([[0], np.cumsum(np.where(sure, 0, p))])
    return sure | ((c[1:] - u) // GRID > (c[:-1] - u) // GRID)


def fixed(p):
    """Return ``{mask: probability}`` of systematic keep masks; enumerates all orders and all u."""
    exact, found = np.round(p * GRID).astype(np.int64), defaultdict(float)
    orders = list(itertools.permutations(range(len(p))))
    for order in orders:
        order = list(order)
        c = np.cumsum(np.where(exact[order] >= GRID, 0, exact[order])) % GRID
        ends = np.unique([*c, GRID])  # the mask is constant for u between two ends
        for u, width in zip(ends, np.diff([0, *ends]), strict=True):
            if width:
                kept = np.zeros(len(p), bool)
                kept[order] = systematic(exact[order], u)
                found[tuple(kept.tolist())] += width / GRID / len(orders)
    return dict(found)
