"""GPT-2 has the right parameter names and shapes, and follows its equations.

The tolerance is 1e-10, for float64 through three layers.
"""

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrow.models.stack import Remat

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10


def test_paper_axes_swap_input_and_output_around_the_blocks():
    config = tiny.config(tied=True, dtype="float32")
    axes, published = config.axes(), config.paper_axes()
    assert published["token_embedding"] == ("vocab", "embed.in.below")
    assert published["position_embedding"] == ("context", "embed.in.below")
    assert published["final_norm"] == {"scale": ("embed.norm.scale",), "bias": ("embed.norm.bias",)}
    assert published["blocks"] == axes["blocks"]


def norm(x, p):
    """Return ``(x - mean) / sqrt(var + 1e-5) * scale + bias`` of one position."""
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5) * p["scale"] + p["bias"]


def attention(x, p, i):
    """Compute ``sum_s softmax_s(q_t k_s / sqrt(K)) v_s``, s up to t, by position and head."""
    (T, _), H, K = x.shape, *p["query"]["bias"][i].shape
    out = np.zeros_like(x) + p["out"]["bias"][i]
    for h in range(H):
        q, k, v = (
            x @ p[n]["kernel"][i][:, h] + p[n]["bias"][i][h] for n in ("query", "key", "value")
        )
        for t in range(T):
            weight = np.array([np.exp(q[t] @ k[s] / np.sqrt(K)) for s in range(t + 1)])
            out[t] += (weight / weight.sum()) @ v[: t + 1] @ p["out"]["kernel"][i][h]
    return out


def mlp(x, p, i):
    h = x @ p["up"]["kernel"][i] + p["up"]["bias"][i]
    h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return h @ p["down"]["kernel"][i] + p["down"]["bias"][i]


def logits(params, tokens):
    """Compute the logits of one sequence: each layer is x += attention(norm(x)); x += mlp(norm(x))."""
    b = params["blocks"]
    x = params["token_embedding"][tokens] + params["position_embedding"][: len(tokens)]
    for i in range(len(b["mlp"]["up"]["bias"])):

        def normed(x, name, i=i):
            return np.stack([norm(row, {k: v[i] for k, v in b[name].items()}) for row in x])

        x = x + attention(normed(x, "attention_norm"), b["attention"], i)
        x = x + mlp(normed(x, "mlp_norm"), b["mlp"], i)
    x = np.stack([norm(row, params["final_norm"]) for row in x])
    return x @ params.get("head_kernel", params["token_embedding"].T)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_are_those_of_the_equations(tied):
    config = tiny.config(tied=tied, layers=3)
    params, tokens = tiny.params(config), tiny.tokens(2, 7)
    expected = np.stack([logits(params, sequence) for sequence in tokens])
    found = tiny.forward(config)(params, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_unrolled_layers_are_no_loop():
    config, tokens = tiny.config(layers=3), tiny.tokens()
    for scan in (True, False):
        c = replace(config, scan_layers=scan)
        assert ("scan[" in str(jax.make_jaxpr(tiny.forward(c))(tiny.shapes(c), tokens))) == scan


def test_remat_policies_save_the_documented_arrays():
    config, tokens = tiny.config(), tiny.tokens(batch=3)
    weights = Counter(w.shape for w in jax.tree.leaves(tiny.shapes(config)))
    every, plain, remat, full = (
        Counter(tiny.saved(replace(config, remat=r), tokens)) for r in get_args(Remat)
    )
    assert sum(map(math.prod, every.elements())) > sum(map(math.prod, plain.elements()))
    # Only the input x of each layer is stored.
    assert {s: n for s, n in (full - weights).items() if s[0] == config.layers} == {(2, 3, 5, 6): 1}
    # These shapes are the scores and the values that they weight.
    assert plain - remat == {(2, 3, 3, 5, 5): 2}
    assert remat - plain == {}
    others = remat - weights
    of_layers = {shape: n for shape, n in others.items() if shape[0] == config.layers}
    # In this order, the stored values are x; q, k and v; out; up.
    assert of_layers == {(2, 3, 5, 6): 1, (2, 15, 15): 3, (2, 15, 6): 1, (2, 15, 9): 1}


def test_low_precision_keeps_logits_in_float32():
    config = tiny.config(dtype="bfloat16")
    params = tiny.params(config, dtype="float32")
    low = tiny.forward(config)(params, tiny.tokens())
    exact = tiny.forward(tiny.config())(tiny.params(tiny.config()), tiny.tokens())
    assert low.dtype == jnp.float32
    assert exact.dtype == jnp.float64
    assert 0 < jnp.abs(low - exact).max() < 0.2 * exact.std()


INITIALISED = """
import jax, numpy as np
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig

sizes = {"vocab": 97, "context": 16, "layers": 3, "embed": 24, "heads": 3, "head_dim": 8, "mlp": 40}
for config in (GPT2Config(**sizes), LlamaConfig(**sizes, kv_heads=3), BERTConfig(**sizes)):
    key = jax.random.key(7)
    pairs = zip(jax.tree.leaves(config.init(key)), jax.tree.leaves(jax.jit(config.init)(key)))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs), config
"""


@pytest.mark.slow
def test_the_fast_compilation_of_init_gives_the_same_bits():
    real = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", INITIALISED], env=real, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
