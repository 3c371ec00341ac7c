# ---
# jupyter:
#   language_info: {name: python}
# ---

# %% [markdown]
# # A V-cycle in twenty lines
#
# **How does a V-cycle work, and when is it worthwhile?** A V-cycle trains the large model for a few
# steps and *coalesces* it into a small model. It trains the small model, whose steps cost a
# fraction of a large step, transfers its progress to the large model, and finishes the training of
# the large one. This is the [multi-level framework](../papers/multilevel.md) of Zou et al. It is
# worthwhile only if neither the large model from scratch nor the small model alone reaches the same
# loss at a lower cost. First, we need a model, data and a train step.

# %%
import argparse
import inspect
from functools import partial

import jax
import numpy as np
import optax

from jaxgrow import correct, flops, grow, interpolate, operators, sizes, swap
from jaxgrow.models import GPT2Config

BATCH, CONTEXT = 8, 24
LARGE = GPT2Config(vocab=128, context=CONTEXT, layers=2, embed=32, heads=4, head_dim=8, mlp=64)
text = np.frombuffer(inspect.getsource(argparse).encode("ascii", "ignore"), np.uint8).astype(
    "int32"
)
windows = np.stack([text[i : i + CONTEXT + 1] for i in range(0, len(text) - CONTEXT, 7)])
seen, validation = windows[:-400], windows[-320:]  # the end of the file is only for validation


def loss(config, params, rows):
    return config.module.apply({"params": params}, rows[:, :-1], targets=rows[:, 1:])[0]


@partial(jax.jit, static_argnums=0)
def _train(config, params, steps, seed, rate):
    adam = optax.scale_by_adam()

    def step(i, carry):
        params, state = carry
        rows = jax.random.choice(jax.random.fold_in(jax.random.key(seed), i), seen, (BATCH,))
        updates, state = adam.update(jax.grad(partial(loss, config))(params, rows), state)
        return jax.tree.map(lambda p, u: p - rate * (1 - i / steps) * u, params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, adam.init(params)))[0]


def train(config, params, steps, seed, rate=1e-2):
    """Adam from a fresh state. The learning rate falls to zero, so each phase ends as if it were the last one."""
    # algebra on the host does not have to be compiled
    return jax.device_get(_train(config, params, steps, seed, rate))


evaluated = jax.jit(loss, static_argnums=0)
start, axes = jax.device_get(jax.jit(LARGE.init)(jax.random.key(0))), LARGE.axes()
print(
    f"a uniform guess costs {np.log(LARGE.vocab):.3f}, the untrained model {evaluated(LARGE, start, validation):.3f}"
)

# %% [markdown]
# ## The twenty lines
#
# De-coalescing is a [growth](../concepts/growths.md), and coalescing is the swap of this growth.
# Both are defined by the same maps, so de-coalescing a model and coalescing the result changes
# nothing. Here, width and depth are halved, and every map is a mean or a copy.

# %%
up = operators.decoalesce(sizes(start, axes), heads="far", layers="adjacent")
SMALL = LARGE.resized(swap(up))
ABOVE, BELOW, AFTER = 15, 100, 60  # steps

before = train(LARGE, start, ABOVE, seed=1)
coarse = grow(swap(up), before, axes)
small = train(SMALL, coarse, BELOW, seed=2)
fixed = correct(before, small, up, axes)  # M + D(s - C(M))
cycled = train(LARGE, fixed, AFTER, seed=3)

cost = {config: flops.train_flops(config, BATCH * CONTEXT) for config in (LARGE, SMALL)}
print(
    f"a step of the small model costs {cost[SMALL] / cost[LARGE]:.0%} of one of the large: {SMALL.sizes()}"
)
print(
    f"the large model for {ABOVE} steps {evaluated(LARGE, before, validation):.3f}, "
    f"coalesced {evaluated(SMALL, coarse, validation):.3f}"
)
print(
    f"the small one for {BELOW} steps   {evaluated(SMALL, small, validation):.3f}, "
    f"transferred {evaluated(LARGE, fixed, validation):.3f}"
)
print(f"the large one for {AFTER} more    {evaluated(LARGE, cycled, validation):.3f}")

# %% [markdown]
# ## Two properties that do not depend on the losses
#
# First, de-coalescing and then coalescing gives bitwise identical parameters. Second, if the small
# model has learned *nothing*, the cycle must not change the large model. The second property
# distinguishes the correction from the paper's interpolation, which averages the large model with
# the de-coalesced one and therefore removes a part of the differences between merged units.

# %%
jax.tree.map(np.testing.assert_array_equal, grow(swap(up), grow(up, small, axes), axes), small)
idle = correct(before, coarse, up, axes)
mixed = interpolate(before, grow(up, coarse, axes), alpha=0.25)
moved = [
    max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), before, x)))
    for x in (idle, mixed)
]
print(
    f"nothing learned: the correction changes weights by {moved[0]:.0e}, the interpolation by {moved[1]:.2f}"
)
assert moved[0] == 0 < moved[1]

# %% [markdown]
# How should the progress of the small model be transferred, and with which weight? These are the
# losses of all candidates before further training:

# %%
lifted = grow(up, small, axes)
for name, params in {
    "the large model as it was": before,
    **{f"interpolated, alpha = {a}": interpolate(before, lifted, a) for a in (0.25, 0.5, 0.75)},
    "the small one, de-coalesced": lifted,
    "corrected": fixed,
}.items():
    print(f"{name:28} {evaluated(LARGE, params, validation):.3f}")

# %% [markdown]
# Do not draw conclusions from this table. In width, the de-coalesced model computes the same
# function as the small one. In depth, each layer is applied twice, which increases the loss. The
# corrected model combines the new weights of the small model with differences between units that
# were trained with the old weights. Only the loss *after* training shows how good a candidate is:

# %%
starts = {
    "interpolated, alpha = 0.5": interpolate(before, lifted, 0.5),
    "the small one, de-coalesced": lifted,
}
after = {"corrected": cycled} | {
    name: train(LARGE, params, AFTER, 3) for name, params in starts.items()
}
for name, params in after.items():
    print(f"{name:28} {evaluated(LARGE, params, validation):.3f}")

# %% [markdown]
# Although these candidates begin with very different losses, they end with similar losses. In the
# de-coalesced model, every unit has [an identical copy that receives identical
# gradients](uneven_copies.py), so in width the model is in effect still the small one. In the corrected
# and the interpolated model, the units of `before` make the copies different. In a longer run, this
# matters.
#
# ## Was it worthwhile?
#
# The cost of every phase counts. For comparison, we need the loss that training without a cycle
# reaches with the same FLOPs: the large model from scratch, also at another learning rate than the
# one used above, and the small model alone.

# %%
spent = (ABOVE + AFTER) * cost[LARGE] + BELOW * cost[SMALL]
ended = evaluated(LARGE, cycled, validation)
print(
    f"V-cycle                  {ABOVE + BELOW + AFTER:4} steps, {spent / 1e9:.2f} GFLOPs, loss {ended:.3f}"
)
for name, config, init in (("large", LARGE, start), ("small", SMALL, grow(swap(up), start, axes))):
    steps = round(spent / cost[config])
    for rate in (1e-2, 2e-2):
        loss_of = evaluated(config, train(config, init, steps, 3, rate), validation)
        print(
            f"{name} alone, peak lr {rate:<6} {steps:5} steps, {steps * cost[config] / 1e9:.2f} GFLOPs, loss {loss_of:.3f}"
        )
    assert abs(steps * cost[config] / spent - 1) < 0.01

# %% [markdown]
# This is one seed of a toy model, so the order of the lines proves nothing. But the reason for the
# order is instructive. In so short a training, the number of steps limits the loss, and a cheaper
# model takes more steps for the same FLOPs. The cycle therefore ends below the large model, and the
# small model ends below both. A large model is useful at budgets at which the small model no longer
# improves, and only at such budgets a saving is meaningful. [Reading a saving
# honestly](saving.py) explains how to measure it, and [the results](../results/muon.md) give the
# measurements. The cycle as a plan, with an optimizer state
# that grows with the weights, any number of levels, and a ledger of all costs, is [one
# config](../concepts/plans.md).
