# %% [markdown]
# # Writing an operator, and property-testing it
#
# Every exact widening of the literature shares a unit's outgoing weights *evenly* among its copies. Must it? Say a
# reader takes 30 % from one twin and 70 % from the other: the sum is the same. Let us write that operator, try to
# break it, and find out what it is for.

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
from jaxgrow.testing import assert_function_preserving, assert_gradient_duality, assert_inverse, assert_linear


def uneven(size: int, share: float) -> AxisMap:
    """Every unit twice; readers take ``share`` of the first and the rest of the second."""
    eye = np.eye(size)
    return AxisMap(write=np.concatenate([eye, eye]), read=np.concatenate([share * eye, (1 - share) * eye]))


print(uneven(2, 0.25).read)

# %% [markdown]
# That is the whole operator: [a pair of matrices](../concepts/growths.md). `grow` does the rest, in any model that
# names the axis.
#
# ## What should be true of it
#
# Not one example but all: any sizes, any share, any weights. [Hypothesis](https://hypothesis.readthedocs.io) draws
# them, and shrinks what fails to the smallest. The assertions are those of
# [`jaxgrow.testing`](../howto/operator.md); float64, so that a tolerance is about mathematics.

# %%
AXES = {"up": ("embed.in", "mlp"), "bias": ("mlp.bias",), "down": ("mlp.in", "embed")}


def model(params, x):
    return np.maximum(x @ params["up"] + params["bias"], 0) @ params["down"]


def drawn(seed, embed, mlp):
    rng = np.random.default_rng(seed)
    return {"up": rng.normal(size=(embed, mlp)), "bias": rng.normal(size=mlp), "down": rng.normal(size=(mlp, embed))}


def properties(operator):
    """A test of an operator ``(size, share) -> AxisMap``, over everything."""

    phases = Phase.generate, Phase.shrink

    @settings(max_examples=25, phases=phases, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 7), st.integers(1, 7), st.floats(-2, 2), st.integers(0, 2**32 - 1))
    def holds(embed, mlp, share, seed):
        growth = {"mlp": operator(mlp, share)}
        first, second = drawn(seed, embed, mlp), drawn(seed + 1, embed, mlp)
        x = np.random.default_rng(seed).normal(size=(3, embed))

        def larger(params):
            return grow(growth, params, AXES)

        assert_linear(larger, first, second, atol=1e-10)
        assert_inverse(lambda p: grow(swap(growth), p, AXES), larger, first, atol=1e-10)
        assert_function_preserving(larger, first, model, model, x, atol=1e-10)
        assert preserves_function(growth)

    return holds


properties(uneven)()
print("uneven: linear, invertible, keeps the function, and the library knows it does")

# %% [markdown]
# A share of 2 and -1 is fine, too: twins that work against each other. Would the test have noticed a mistake? **A
# law that was never seen to fail proves nothing**, so break the operator on purpose: here, readers take `share` of
# both.


# %%
def broken(size, share):
    good = uneven(size, share)
    return AxisMap(good.write, np.concatenate([share * np.eye(size), share * np.eye(size)]))


try:
    properties(broken)()
except AssertionError as error:
    case = dict(re.findall(r"(embed|mlp|share)=([^,]+),", "".join(getattr(error, "__notes__", []))))
    print("broken: refused. The smallest case:", case)
else:
    raise SystemExit("the properties have no teeth")

# %% [markdown]
# ## In a real model, with other operators
#
# A growth of one axis says nothing about the others, so it composes with one that grows those.

# %%
config = GPT2Config(vocab=17, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=12)
rng = np.random.default_rng(0)
params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype("float32") / 2, jax.eval_shape(config.init, jax.random.key(0))
)
axes, tokens = config.axes(), rng.integers(0, 17, (2, 8))
growth = compose(operators.hypercloning(sizes(params, axes), {"embed": 16, "heads": 4}), {"mlp": uneven(12, 0.3)})
large = config.resized(growth)


def says(config):
    return jax.jit(lambda params, tokens: config.module.apply({"params": params}, tokens))


def larger(params):
    return grow(growth, params, axes)


before, after = says(config), says(large)
assert_function_preserving(larger, params, before, after, tokens, atol=1e-5)
print("a GPT-2, wider on three axes:", {k: large.sizes()[k] for k in ("embed", "heads", "mlp")}, "and the same logits")

# %% [markdown]
# How gradients travel is a property, as well: along the [dual](../concepts/growths.md) growth, not along the growth
# itself. Adam's moments are made of gradients, so this is what `grow_optimizer` goes by.


# %%
def of(run):
    return lambda params: jnp.square(run(params, tokens)).mean()


assert_gradient_duality(
    larger, lambda g: grow(dual(growth), jax.device_get(g), axes), params, of(before), of(after), atol=1e-5
)
try:
    assert_gradient_duality(larger, larger, params, of(before), of(after), atol=1e-5)
    raise SystemExit("a gradient that grew like a weight went unnoticed")
except AssertionError:
    print("gradients grow by the dual; grown like weights, they are wrong")

# %% [markdown]
# ## So what is it for?
#
# All that was exactness, and an even share is as exact. The difference shows in training. Twins that are read alike
# get the same gradient, step for step: they stay one unit that was paid for twice. A property of the operator says
# nothing of this; an experiment does.


# %%
def apart(share, tx, steps=200):
    """How far twins are from each other in the end, of their own size."""
    small = drawn(0, 4, 6)
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


found = {share: [apart(share, tx) for tx in (optax.sgd(0.03), optax.adam(0.01))] for share in (0.5, 0.3)}
for share, (sgd, adam) in found.items():
    print(f"share {share}: twins differ by {sgd:6.1%} after SGD, by {adam:6.1%} after Adam")
assert max(found[0.5]) < 1e-6 < min(found[0.3])

# %% [markdown]
# At one half nothing ever tells them apart. Noise that cancels does, too (`jaxgrow.symmetry.break_symmetry`,
# HyperCloning's), and so do [moments](../api/training.md) that are not copied. Whether new units that differ are
# worth their FLOPs is the next question, and no property of a matrix answers it: [measure](saving.py). To give an
# operator to others, [three places](../contributing.md) name it.
