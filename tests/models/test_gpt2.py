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

from jaxgrow.models import GPT2Config
from jaxgrow.models.stack import Remat
from jaxgrow.operators import hypercloning, stack

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10


# --- names ---


def test_resized_is_the_config_of_the_grown_model():
    config = tiny.config()
    grown = config.resized(
        {**hypercloning(tiny.WIDTHS, tiny.wider(2)), **stack(tiny.WIDTHS, {"layers": 5})}
    )
    assert grown == replace(config, layers=5, embed=12, heads=6, mlp=18)


def test_paper_axes_swap_input_and_output_around_the_blocks():
    config = tiny.config(tied=True, dtype="float32")
    axes, published = config.axes(), config.paper_axes()
    assert published["token_embedding"] == ("vocab", "embed.in.below")
    assert published["position_embedding"] == ("context", "embed.in.below")
    assert published["final_norm"] == {"scale": ("embed.norm.scale",), "bias": ("embed.norm.bias",)}
    assert published["blocks"] == axes["blocks"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 0, "mlp": -1}, r"heads is 0, less than 1, mlp is -1, less than 1"),
        ({"dtype": "float16"}, "dtype must be 'float32', 'bfloat16' or 'float64', not 'float16'"),
    ],
)
def test_config_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPT2Config(**wrong)


# --- the function ---


def norm(x, p):
    """Return ``(x - mean) / sqrt(var + 1e-5) * scale + bias`` of one position."""
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5) * p["scale"] + p["bias"]


def attention(x, p, i):
    """Compute attention by position and head.

    The equation is ``sum_s softmax_s(q_t k_s / sqrt(K)) v_s``, with s up to t.
    """
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
    """Compute the logits of GPT-2 for one sequence.

    Each layer is ``x += attention(norm(x)); x += mlp(norm(x))``, followed by the final norm and
    head.
    """
    b = params["blocks"]
    x = np.stack(
        [
            params["token_embedding"][w] + params["position_embedding"][t]
            for t, w in enumerate(tokens)
        ]
    )
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
    np.testing.assert_allclose(
        tiny.forward(config)(params, tokens), expected, rtol=0, atol=TOLERANCE
    )


def test_the_future_changes_no_bit_of_the_past():
    config = tiny.config()
    params, tokens = tiny.params(config), tiny.tokens(2, 7)
    other = tokens.copy()
    other[:, 4:] = (other[:, 4:] + 3) % config.vocab
    one, two = (np.asarray(tiny.forward(config)(params, t)) for t in (tokens, other))
    np.testing.assert_array_equal(one[:, :4], two[:, :4])
    assert (one[:, 4:] != two[:, 4:]).any(-1).all()


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
    assert of_layers == {
        (2, 3, 5, 6): 1,
        (2, 15, 15): 3,
        (2, 15, 6): 1,
        (2, 15, 9): 1,
    }


@pytest.mark.parametrize(
    ("dtype", "close"), [("bfloat16", 0.2), pytest.param("float32", 1e-5, marks=pytest.mark.slow)]
)
def test_low_precision_keeps_logits_in_float32(dtype, close):
    config = tiny.config(dtype=dtype)
    params = tiny.params(config, dtype="float32")
    low = tiny.forward(config)(params, tiny.tokens())
    exact = tiny.forward(tiny.config())(tiny.params(tiny.config()), tiny.tokens())
    assert low.dtype == jnp.float32
    assert exact.dtype == jnp.float64
    assert 0 < jnp.abs(low - exact).max() < close * exact.std()


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
