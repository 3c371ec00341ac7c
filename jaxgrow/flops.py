"""The cost of a model, from its own formula: floating-point operations of its matrix products.

A multiply-add counts two. Norms, softmax and the optimizer are left out: below 2 % at the sizes of the papers. The test
``tests/test_flops.py`` holds the formula against what XLA counts in the compiled step.
"""

from jaxgrow.models.gpt2 import GPT2Config
from jaxgrow.models.layers import query_blocks


def forward(config: GPT2Config, tokens: int, length: int | None = None, layers: float | None = None) -> float:
    """FLOPs of a forward pass over ``tokens`` tokens in sequences of ``length`` (the config's context, if left out).

    ``layers``: how many ran, a mean perhaps (the config's, if left out).

    A token and layer: ``2 * (4 D HK + 2 D F)`` in the kernels, ``4 * S HK`` in scores and their weighted sum, with S the mean
    number of keys that are computed for a query, of which the mask hides some (`jaxgrow.models.layers.query_blocks`);
    ``2 D V`` in the head.
    """
    c = config
    width, length = c.heads * c.head_dim, length or c.context
    keys = sum(end * (end - begin) for begin, end in query_blocks(length)) / length
    layer = 2 * (4 * c.embed * width + 2 * c.embed * c.mlp) + 4 * keys * width
    return float(tokens) * ((c.layers if layers is None else layers) * layer + 2 * c.embed * c.vocab)


def train(config: GPT2Config, tokens: int, length: int | None = None, layers: float | None = None) -> float:
    """FLOPs of a training step: the backward pass costs two forward ones. What remat computes again is not counted."""
    return 3 * forward(config, tokens, length, layers)
