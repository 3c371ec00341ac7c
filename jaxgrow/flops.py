"""The cost of a model, from its own formula: floating-point operations of its matrix products.

A multiply-add counts two. Norms, softmax and the optimizer are left out: below 2 % at the sizes of the papers. The test
``tests/test_flops.py`` holds the formula against what XLA counts in the compiled step.
"""

import numpy as np

from jaxgrow import maps
from jaxgrow.axes import Tree, leaves
from jaxgrow.drop import TokenDrop
from jaxgrow.grow import products
from jaxgrow.models.gpt2 import GPT2Config
from jaxgrow.models.layers import query_blocks


def forward(config: GPT2Config, tokens: int, length: int | None = None, layers: float | None = None) -> float:
    """FLOPs of a forward pass over ``tokens`` tokens in sequences of ``length`` (the config's context, if left out).

    ``layers``: how many ran, a mean perhaps (the config's, if left out).

    A token and layer: ``2 * (4 D HK + 2 D F)`` in the kernels, ``4 * S HK`` in scores and their weighted sum, with S the mean
    number of keys that are computed for a query, of which the mask hides some (`jaxgrow.models.layers.query_blocks`);
    ``2 D V`` in the head.
    """
    length = length or config.context
    run = config.layers if layers is None else layers
    return float(tokens) * (run * _layer(config, length) + 2 * config.embed * config.vocab)


def _layer(config: GPT2Config, length: int) -> float:
    """A token's pass through a layer."""
    c, width = config, config.heads * config.head_dim
    keys = sum(end * (end - begin) for begin, end in query_blocks(length)) / length
    return 2 * (4 * c.embed * width + 2 * c.embed * c.mlp) + 4 * keys * width


def train(
    config: GPT2Config,
    tokens: int,
    length: int | None = None,
    layers: float | None = None,
    *,
    frozen: int = 0,
    drop: TokenDrop | None = None,
) -> float:
    """FLOPs of a training step: the backward pass costs two forward ones. What remat computes again is not counted.

    The bottom ``frozen`` layers have no backward pass, and then a tied head's table has no gradient; ``drop``: some tokens go
    around some layers.
    """
    length = length or config.context
    total = 3 * forward(config, tokens, length, layers) - 2 * tokens * frozen * _layer(config, length)
    if frozen and config.tied:
        total -= 2 * tokens * config.embed * config.vocab
    if drop is not None:
        (begin, end), kept = drop.middle(config.layers), drop.kept(length)
        saved = tokens * (_layer(config, length) - kept / length * _layer(config, kept))
        total -= saved * (3 * (end - begin) - 2 * max(0, min(frozen, end) - begin))
    return total


def grow(growth: maps.Growth, params: Tree, axes: Tree) -> float:
    """FLOPs of the matrix products of `jaxgrow.grow`; copies, means and sums by gathering are not counted.

    Learning the maps costs at most three times as much a step: the small model needs no gradient.
    """
    total = 0.0
    for path, x, names in leaves(params, axes):
        for term in maps.terms(growth, path, names):
            total += sum(products(term, names, np.shape(x)))
    return total
