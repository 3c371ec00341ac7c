# %% [markdown]
# # Growing GPT-2 by hand
#
# What does it take to make a GPT-2 wider without changing a single logit? Here with `np.concatenate` and nothing
# else, one axis after the other, with what goes wrong on the way. At the end stands a rule, and the rule is all
# that the library is.

# %%
from functools import partial

import jax
import numpy as np

from jaxgrow import AxisMap, grow, operators, sizes, swap
from jaxgrow.axes import is_names, path, reads
from jaxgrow.models import GPT2Config

small = GPT2Config(vocab=17, context=8, layers=2, embed=12, heads=3, head_dim=4, mlp=20)
tokens = np.random.default_rng(0).integers(0, small.vocab, (2, small.context))


rng = np.random.default_rng(1)  # no bias is zero and no scale one, so that no mistake can hide behind them
shapes = jax.eval_shape(small.init, jax.random.key(0))
params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("float32") / 2, shapes)


@partial(jax.jit, static_argnums=0)
def logits(config, params):
    return config.module.apply({"params": params}, tokens)


def off(config, params):
    """The largest difference from what the small model says."""
    return np.abs(logits(config, params) - logits(small, old)).max()


old = params
print(
    f"logits between {logits(small, old).min():.1f} and {logits(small, old).max():.1f}; a change below 1e-4 is rounding"
)

# %% [markdown]
# ## One axis: the hidden units of the MLP
#
# Give every hidden unit a twin. Its incoming weights and its bias are copied, so the twin computes the same number.
# But the next kernel *sums* over hidden units, and now it would count each one twice.

# %%


def twice(x, axis):
    return np.concatenate([x, x], axis)


def with_mlp(tree, share):
    blocks = {**tree["blocks"], "mlp": {**tree["blocks"]["mlp"]}}
    up, down = blocks["mlp"]["up"], blocks["mlp"]["down"]
    blocks["mlp"]["up"] = {
        "kernel": twice(up["kernel"], 2),
        "bias": twice(up["bias"], 1),
    }  # [layers, embed, mlp], [layers, mlp]
    blocks["mlp"]["down"] = {**down, "kernel": twice(down["kernel"], 1) * share}  # [layers, mlp, embed]
    return {**tree, "blocks": blocks}


wider = small.with_sizes({"mlp": 40})
print("copied          ", off(wider, with_mlp(params, share=1)))
print("copied, shared  ", off(wider, with_mlp(params, share=1 / 2)))
assert off(wider, with_mlp(params, share=1 / 2)) < 1e-4 < off(wider, with_mlp(params, share=1))

# %% [markdown]
# Two kernels, one axis, two roles: `up` **writes** the hidden units, so it is copied; `down` **reads** them, so it
# shares. Which leaf of a GPT-2 plays which role on which axis? The library's models [say it where a parameter is
# born](../concepts/axes.md); `.in` marks the reader.

# %%
axes = small.axes()
for p, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names):
    print(f"{path(p):34}", *(f"[{n}]" if reads(n) else n for n in names))

# %% [markdown]
# ## Every axis: the same two moves for each leaf
#
# So width by hand is a loop: along every axis that grows, copy; and if the leaf reads that axis, halve.


# %%
def by_hand(tree, grows, reader=reads):
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
# ## What hides in the table above
#
# Two lines of it are not obvious. The layer norms *inside* only copy: the mean and the variance of a vector are
# those of the vector twice. But the **last** one is marked as a reader. GPT-2's head is its embedding table, tied:
# as an embedding it writes, so it must be copied whole; as a head it reads, so somebody must halve. The table
# cannot do both; the norm before the head can. Halve the table instead, as one might, and every logit is wrong:

# %%
norm, table = grown["final_norm"], grown["token_embedding"]
halved = {**grown, "token_embedding": table / 2, "final_norm": {k: 2 * x for k, x in norm.items()}}
print("the table halved   ", off(large, halved))
forgotten = {**grown, "final_norm": {k: 2 * x for k, x in norm.items()}}
print("nothing halved     ", off(large, forgotten), "(twice the logits: overconfident, the same ranking)")
assert off(large, halved) > 0.1 and np.allclose(logits(large, forgotten), 2 * logits(small, old), atol=1e-3)

# %% [markdown]
# And heads are copied *whole*: had we doubled the numbers within a head instead, the softmax would see scores twice
# as large.
#
# ## The rule, as data
#
# What the loop did to an axis is two matrices: one for those that write it, one for those that read it. A growth is
# a dict of such pairs, and `grow` applies it: there is nothing about GPT-2 in it.

# %%
eye = np.eye(20)
pair = AxisMap(write=np.concatenate([eye, eye]), read=np.concatenate([eye, eye]) / 2)
print("reading undoes writing:", bool((pair.read.T @ pair.write == eye).all()))

growth = operators.hypercloning(sizes(params, axes), {"embed": 24, "heads": 6, "mlp": 40})
jax.tree.map(np.testing.assert_array_equal, grow(growth, params, axes), grown)
print("hypercloning is our loop, to the bit:", ", ".join(growth))

# %% [markdown]
# Data can be turned around. Swapped, it goes back down: copies are averaged, what was shared is summed, and the
# small model is there again, to the bit. That is [coalescing](../papers/multilevel.md), and half of [a
# V-cycle](v_cycle.py).

# %%
jax.tree.map(np.testing.assert_array_equal, grow(swap(growth), grown, axes), params)
print("down again: equal to the bit")

# %% [markdown]
# ## Depth is an axis, too, and another matter
#
# Layers are stacked on an axis named `layers`. Copying a layer is as easy as copying a unit. But layers are applied
# one *after* the other, so there is no reader that could share: whatever the maps, a copied layer acts again. Only
# copies that add nothing yet keep the function.

# %%
deep = small.with_sizes({"layers": 4})
for name in ("stack", "interleave", "llama_pro"):
    deeper = getattr(operators, name)(sizes(params, axes), {"layers": 4})
    print(f"{name:11}", off(deep, grow(deeper, params, axes)))
assert off(deep, grow(deeper, params, axes)) < 1e-4

# %% [markdown]
# Does an exact start train better than an inexact one? Not by itself: `stack` has been the stronger start in
# published comparisons, and the [measurements here](../results/index.md) have their own surprises. Exactness is a
# property to know of an operator, not its worth. [Which operator guarantees what](../concepts/operators.md); [the
# same on your own model](../howto/model.md).
