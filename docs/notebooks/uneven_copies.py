# ---
# jupyter:
#   language_info: {name: python}
# ---

# %% [markdown]
# # Writing an operator, and property-testing it
#
# **How do I write a growth operator and test that it is correct?** Return a pair of matrices for an
# axis, and test the properties that the operator must have. The example is an operator with uneven
# shares. Many function-preserving operators divide a unit's output weights *evenly* among its
# copies. Is this necessary? If the next kernel takes 30 % from one copy and 70 % from the other,
# the sum is the same. This notebook writes this operator, tests it, and shows its advantage.

# %%
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxgrow import AxisMap, compose, dual, grow, operators, preserves_function, sizes, swap
from jaxgrow.models import GPT2Config
from jaxgrow.testing import (
    assert_function_preserving,
    assert_gradient_duality,
    assert_inverse,
    assert_linear,
)


def uneven(size: int, share: float) -> AxisMap:
    """Copy every unit, and give the first copy ``share`` of the input weights."""
    eye = np.eye(size)
    return AxisMap(
        write=np.concatenate([eye, eye]), read=np.concatenate([share * eye, (1 - share) * eye])
    )


print(uneven(2, 0.25).read)

# %% [markdown]
# This is the complete operator: [a pair of matrices](../concepts/growths.md). `grow` applies it to
# any model that names the axis.
#
# ## Properties to test
#
# The operator should be linear, invertible by its swap, and function-preserving. We test these
# properties for many sizes, shares and weights, not for one example.
# [Hypothesis](https://hypothesis.readthedocs.io) samples them and reduces a failing case to the
# smallest one. The assertions come from [`jaxgrow.testing`](../howto/operator.md). The dtype is
# float64, so that tolerances test the mathematics and not the rounding.

# %%
AXES = {"up": ("embed.in", "mlp"), "bias": ("mlp.bias",), "down": ("mlp.in", "embed")}


def model(params, x):
    return np.maximum(x @ params["up"] + params["bias"], 0) @ params["down"]


def sampled(seed, embed, mlp):
    rng = np.random.default_rng(seed)
    return {
        "up": rng.normal(size=(embed, mlp)),
        "bias": rng.normal(size=mlp),
        "down": rng.normal(size=(mlp, embed)),
    }


def properties(operator):
    """A test of an operator ``(size, share) -> AxisMap``, for all sizes, shares and weights."""

    phases = Phase.generate, Phase.shrink

    @settings(max_examples=25, phases=phases, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 7), st.integers(1, 7), st.floats(-2, 2), st.integers(0, 2**32 - 1))
    def holds(embed, mlp, share, seed):
        growth = {"mlp": operator(mlp, share)}
        first, second = sampled(seed, embed, mlp), sampled(seed + 1, embed, mlp)
        x = np.random.default_rng(seed).normal(size=(3, embed))

        def larger(params):
            return grow(growth, params, AXES)

        assert_linear(larger, first, second, atol=1e-10)
        assert_inverse(lambda p: grow(swap(growth), p, AXES), larger, first, atol=1e-10)
        assert_function_preserving(larger, first, model, model, x, atol=1e-10)
        assert preserves_function(growth)

    return holds


properties(uneven)()
print("uneven: linear, invertible, function-preserving, and preserves_function agrees")

# %% [markdown]
# Shares of 2 and -1 also work: the copies then partly cancel each other. But would the test notice
# a mistake? **A test that has never failed proves nothing**, so we break the operator on purpose.
# Here, `read` takes `share` of both copies.


# %%
def broken(size, share):
    good = uneven(size, share)
    return AxisMap(good.write, np.concatenate([share * np.eye(size), share * np.eye(size)]))


try:
    properties(broken)()
except AssertionError as error:
    case = dict(re.findall(r"(embed|mlp|share)=([^,]+),", "".join(getattr(error, "__notes__", []))))
    print("broken: the test fails. The smallest case:", case)
else:
    raise SystemExit("the properties do not detect the mistake")

# %% [markdown]
# ## In a real model, with other operators
#
# A growth of one axis does not change the other axes, so it can be composed with a growth of them.

# %%
config = GPT2Config(vocab=17, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=12)
rng = np.random.default_rng(0)
params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype("float32") / 2,
    jax.eval_shape(config.init, jax.random.key(0)),
)
axes, tokens = config.axes(), rng.integers(0, 17, (2, 8))
growth = compose(
    operators.hypercloning(sizes(params, axes), {"embed": 16, "heads": 4}), {"mlp": uneven(12, 0.3)}
)
large = config.resized(growth)


def logits_of(config):
    return jax.jit(lambda params, tokens: config.module.apply({"params": params}, tokens))


def larger(params):
    return grow(growth, params, axes)


before, after = logits_of(config), logits_of(large)
assert_function_preserving(larger, params, before, after, tokens, atol=1e-5)
print(
    "a GPT-2, wider on three axes:",
    {k: large.sizes()[k] for k in ("embed", "heads", "mlp")},
    "and the same logits",
)

# %% [markdown]
# Another property concerns gradients. The gradients of the large model follow from the gradients of
# the small model by the [dual](../concepts/growths.md) growth, not by the growth itself. Adam's
# moments are means of gradients, so `grow_optimizer` uses the dual.


# %%
def of(run):
    return lambda params: jnp.square(run(params, tokens)).mean()


assert_gradient_duality(
    larger,
    lambda g: grow(dual(growth), jax.device_get(g), axes),
    params,
    of(before),
    of(after),
    atol=1e-5,
)
try:
    assert_gradient_duality(larger, larger, params, of(before), of(after), atol=1e-5)
    raise SystemExit("the test does not detect gradients that grow like weights")
except AssertionError:
    print("gradients grow by the dual growth, not like weights")

# %% [markdown]
# ## The advantage of uneven shares
#
# All of these properties also hold for equal shares. The difference shows in training. Copies with
# equal shares receive the same gradient in every step, so they remain one unit at twice the cost.
# None of the properties above shows this, but an experiment does.


# %%
def apart(share, tx, steps=200):
    """The final difference of the copies, relative to their size."""
    small = sampled(0, 4, 6)
    params = grow({"mlp": uneven(6, share)}, small, AXES)
    x, y = np.random.default_rng(1).normal(size=(2, 64, 4))

    def loss(params):
        hidden = jnp.maximum(x @ params["up"] + params["bias"], 0)
        return jnp.square(hidden @ params["down"] - np.sin(3 * y)).mean()

    def step(_, carry):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    up = jax.jit(lambda p: jax.lax.fori_loop(0, steps, step, (p, tx.init(p))))(params)[0]["up"]
    return float(jnp.abs(up[:, :6] - up[:, 6:]).mean() / jnp.abs(up).mean())


found = {
    share: [apart(share, tx) for tx in (optax.sgd(0.03), optax.adam(0.01))] for share in (0.5, 0.3)
}
for share, (sgd, adam) in found.items():
    print(f"share {share}: copies differ by {sgd:6.1%} after SGD, by {adam:6.1%} after Adam")
assert max(found[0.5]) < 1e-6 < min(found[0.3])

# %% [markdown]
# With a share of one half, the copies never become different. Noise that cancels
# (`jaxgrow.growth.symmetry.break_symmetry`, from HyperCloning) also breaks the symmetry, and so
# does an [optimizer state](../concepts/operators.md#optimizer-state) that is not copied. Whether
# different new units lower the loss enough to justify their FLOPs is another question. No property
# of a matrix answers it; [measure it](saving.py). To contribute an operator, change [these
# places](../contributing.md).
