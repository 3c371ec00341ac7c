# ---
# jupyter:
#   language_info: {name: python}
# ---

# %% [markdown]
# # Growing GPT-2 by hand
#
# **How do I widen a GPT-2 without changing a single logit?** Copy along every axis that grows, and
# divide the weights of input axes by the number of copies. This notebook does it with
# `np.concatenate`, one axis after the other, and shows the typical mistakes. The library applies
# the same rule to any model.

# %%
from functools import partial

import jax
import numpy as np

from jaxgrow import AxisMap, grow, operators, sizes, swap
from jaxgrow.axes import is_names, path, reads_axis
from jaxgrow.models import GPT2Config

small = GPT2Config(vocab=17, context=8, layers=2, embed=12, heads=3, head_dim=4, mlp=20)
tokens = np.random.default_rng(0).integers(0, small.vocab, (2, small.context))


# biases are not zero and scales are not one, so that every mistake is visible
rng = np.random.default_rng(1)
shapes = jax.eval_shape(small.init, jax.random.key(0))
params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("float32") / 2, shapes)


@partial(jax.jit, static_argnums=0)
def logits(config, params):
    return config.module.apply({"params": params}, tokens)


def off(config, params):
    """The largest difference from the logits of the small model."""
    return np.abs(logits(config, params) - logits(small, old)).max()


old = params
print(
    f"logits between {logits(small, old).min():.1f} and {logits(small, old).max():.1f}; a change below 1e-4 is rounding"
)

# %% [markdown]
# ## One axis: the hidden units of the MLP
#
# Add a copy of every hidden unit. Its input weights and its bias are copied, so the copy has the
# same activation. But the next kernel *sums* over the hidden units, and now it counts each unit
# twice. Its weights must therefore be halved.

# %%


def twice(x, axis):
    return np.concatenate([x, x], axis)


def with_mlp(tree, share):
    blocks = {**tree["blocks"], "mlp": {**tree["blocks"]["mlp"]}}
    up, down = blocks["mlp"]["up"], blocks["mlp"]["down"]
    # [layers, embed, mlp], [layers, mlp]
    blocks["mlp"]["up"] = {"kernel": twice(up["kernel"], 2), "bias": twice(up["bias"], 1)}
    # [layers, mlp, embed]
    blocks["mlp"]["down"] = {**down, "kernel": twice(down["kernel"], 1) * share}
    return {**tree, "blocks": blocks}


wider = small.with_sizes({"mlp": 40})
print("copied          ", off(wider, with_mlp(params, share=1)))
print("copied, divided ", off(wider, with_mlp(params, share=1 / 2)))
assert off(wider, with_mlp(params, share=1 / 2)) < 1e-4 < off(wider, with_mlp(params, share=1))

# %% [markdown]
# The same axis has a different role in each of the two kernels. The hidden units are an **output**
# axis of `up`, so its weights are copied. They are an **input** axis of `down`, so its weights are
# divided among the copies. To widen the complete model, we need the role of every axis of every
# parameter. In the models of the library, [each parameter names its axes](../concepts/axes.md), and
# `.in` marks an input axis. The following table shows input axes in brackets.

# %%
axes = small.axes()
for p, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names):
    print(f"{path(p):34}", *(f"[{n}]" if reads_axis(n) else n for n in names))

# %% [markdown]
# ## Every axis: the same two operations for each leaf
#
# Widening by hand is therefore a loop over the leaves: copy along every axis that grows, and divide
# by two if the axis is an input axis of the leaf.


# %%
def by_hand(tree, grows, reader=reads_axis):
    def leaf(names, x):
        for i, name in enumerate(names):
            if name.split(".")[0] in grows:
                x = twice(x, i) / (2 if reader(name) else 1)
        return x

    return jax.tree.map(leaf, axes, tree, is_leaf=is_names)


large = small.with_sizes({"embed": 24, "heads": 6, "mlp": 40})
grown = by_hand(params, {"embed", "heads", "mlp"})
print("all three axes     ", off(large, grown))
assert off(large, grown) < 1e-4

# %% [markdown]
# ## Two lines of the table that are not obvious
#
# First, the layer norms *inside* the blocks are only copied, because the mean and the variance of a
# vector do not change when the vector is repeated.
#
# Second, the axis of the **last** norm is marked as an input axis. The reason is that the head of
# GPT-2 is tied to the embedding: both use the same array. For the embedding, `embed` is an output
# axis, so the array must be copied without a factor. For the head, it is an input axis, so the
# logits must be divided by two. The array cannot satisfy both. Therefore the scale and the bias of
# the norm before the head are divided by two. If you halve the embedding instead, every logit is
# wrong:

# %%
norm, table = grown["final_norm"], grown["token_embedding"]
halved = {**grown, "token_embedding": table / 2, "final_norm": {k: 2 * x for k, x in norm.items()}}
print("embedding halved   ", off(large, halved))
forgotten = {**grown, "final_norm": {k: 2 * x for k, x in norm.items()}}
print(
    "nothing halved     ",
    off(large, forgotten),
    "(logits are doubled: overconfident, but with the same ranking)",
)
assert off(large, halved) > 0.1 and np.allclose(
    logits(large, forgotten), 2 * logits(small, old), atol=1e-3
)

# %% [markdown]
# Attention heads are copied as a whole. If we doubled the dimensions within a head instead, the dot
# products of queries and keys would be twice as large.
#
# ## The rule as data
#
# For each axis, the loop applied two matrices: one to leaves for which it is an output axis
# (`write`), and one to leaves for which it is an input axis (`read`). A growth is a dict from axis
# names to such pairs, and `grow` applies it. Nothing in a growth is specific to GPT-2.

# %%
eye = np.eye(20)
pair = AxisMap(write=np.concatenate([eye, eye]), read=np.concatenate([eye, eye]) / 2)
print("read.T @ write is the identity:", bool((pair.read.T @ pair.write == eye).all()))

growth = operators.hypercloning(sizes(params, axes), {"embed": 24, "heads": 6, "mlp": 40})
jax.tree.map(np.testing.assert_array_equal, grow(growth, params, axes), grown)
print("hypercloning is bitwise identical to our loop:", ", ".join(growth))

# %% [markdown]
# A growth can also be reversed by `swap`. The swapped growth leads back to the small model: it
# averages the copies and adds the divided weights, and the result is bitwise identical to the small
# model. This operation is [coalescing](../papers/multilevel.md), one half of [a
# V-cycle](v_cycle.py).

# %%
jax.tree.map(np.testing.assert_array_equal, grow(swap(growth), grown, axes), params)
print("small model again: bitwise identical")

# %% [markdown]
# ## Depth is different
#
# Layers are stacked on an axis named `layers`, and copying a layer is as easy as copying a unit.
# But layers are applied one *after* the other. No later kernel sums over the copies, so no kernel
# can divide by two. A copied layer is therefore applied twice, whatever the map is. Only copies
# that initially add nothing to the residual stream preserve the function.

# %%
deep = small.with_sizes({"layers": 4})
for name in ("stack", "interleave", "llama_pro"):
    deeper = getattr(operators, name)(sizes(params, axes), {"layers": 4})
    print(f"{name:11}", off(deep, grow(deeper, params, axes)))
assert off(deep, grow(deeper, params, axes)) < 1e-4

# %% [markdown]
# Does a model train better if the growth preserved its function? Not necessarily. In published
# comparisons, `stack` reached lower losses, although it does not preserve the function. The
# [measurements here](../results/index.md) also show that function preservation does not determine
# how much an operator saves. See also [which operator preserves
# what](../concepts/operators.md), and [the same steps for your own model](../howto/model.md).
