"""Packed rows of documents, and the law of their losses."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxgrow.models import Config

TOLERANCE = 1e-5  # sums of float32 in another order
SIZES = dict(vocab=11, context=12, layers=3, embed=12, heads=4, head_dim=4, mlp=20)
LENGTHS = (1, 5, 2, 4)


def documents(lengths=LENGTHS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 11, n).astype(np.int32) for n in lengths]


def packed(docs) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return inputs and targets of one row; the targets of last tokens are those of a stranger."""
    tokens = np.concatenate(docs)[None]
    # The ids are not consecutive, and the row begins within the numbering of a corpus.
    segments = np.repeat(7 * np.arange(3, 3 + len(docs)), [len(d) for d in docs])[None]
    last = np.zeros(tokens.shape, bool)
    last[0, np.cumsum([len(d) for d in docs]) - 1] = True
    inputs = {"tokens": tokens, "segments": segments.astype(np.int32)}
    return inputs | {"weights": (~last).astype(np.float32)}, np.roll(tokens, -1, 1)


def of_row(config: Config, docs, params: Any, **options: Any) -> Any:
    """Return the sum of the losses of a packed row."""
    inputs, targets = packed(docs)
    if config.masked:
        inputs, targets = {name: inputs[name] for name in ("tokens", "segments")}, inputs["tokens"]
    mean, _ = config.module.apply({"params": params}, inputs, targets=targets, **options)
    return mean * (targets.size if config.masked else inputs["weights"].sum())


def of_each(config: Config, docs, params: Any, **options: Any) -> Any:
    """Return the sum of the losses of documents that are rows of their own."""
    total = 0.0
    for document in docs:
        inputs: Any = {"tokens": document[None]} if config.masked else document[None]
        logits = config.module.apply({"params": params}, inputs, **options)
        log_p = jax.nn.log_softmax(logits)[0]
        targets = document if config.masked else document[1:]
        total -= jnp.take_along_axis(log_p[: len(targets)], targets[:, None], 1).sum()
    return total


def assert_law(config: Config, docs=None, params: Any = None, **options: Any) -> None:
    docs = docs or documents()
    params = tiny.params(config, dtype="float32") if params is None else params
    run = [
        jax.jit(jax.value_and_grad(partial(f, config, docs, **options))) for f in (of_row, of_each)
    ]
    found, expected = (f(params) for f in run)
    chex.assert_trees_all_close(found[0], expected[0], rtol=TOLERANCE)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected[1]))
    chex.assert_trees_all_close(
        *(g[1] for g in (found, expected)), rtol=TOLERANCE, atol=TOLERANCE * largest
    )
