# ---
# jupyter:
#   language_info: {name: python}
# ---

# %% [markdown]
# # Dropping layers in a third-party model
#
# **How do I drop layers in a model that does not support it?** Wrap the call of the model in
# `drop_blocks`. This notebook takes a plain Flax Transformer with a Python loop over its blocks. It
# trains the model with dropped layers, without changing its code, and checks that a dropped layer
# does not run. Then it shows the benefits and the limits.

# %%
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxgrow.extras.integrations.linen import drop_blocks
from jaxgrow.layerdrop import KeepMask, LayerDrop, keep_masks, schedule

LAYERS, CONTEXT = 4, 24


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, 32)(tokens) + nn.Embed(CONTEXT, 32)(jnp.arange(tokens.shape[1]))[None]
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = Block()(x, mask)
        return nn.Dense(128)(nn.LayerNorm()(x))


text = np.frombuffer(inspect.getsource(textwrap).encode("ascii", "ignore"), np.uint8).astype(
    "int32"
)
windows = np.stack([text[i : i + CONTEXT + 1] for i in range(0, len(text) - CONTEXT, 3)])
validation, seen = windows[-128:], windows[:-300]
params = jax.jit(Model().init)(jax.random.key(0), validation[:, :-1])["params"]


def loss(params, rows):
    logits = Model().apply({"params": params}, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


# %% [markdown]
# ## A layer that does not run
#
# `drop_blocks` is a context manager. Inside it, the i-th call of a `Block` only runs if the i-th
# entry of the keep mask is true. The mask is an *argument* of the compiled function, so one program
# serves every mask.


# %%
@jax.jit
def gated(params, rows, open_):
    with drop_blocks(Block, KeepMask(open_)):
        return loss(params, rows)


batch = seen[:16]
gradient = jax.jit(jax.grad(gated))(params, batch, jnp.array([True, False, False, True]))
norms = [float(optax.tree.norm(gradient[f"Block_{i}"])) for i in range(LAYERS)]
print("gradients of the four blocks:", " ".join(f"{n:.4f}" for n in norms))
assert norms[1] == norms[2] == 0 < min(norms[0], norms[3])

# %% [markdown]
# The gradients of the dropped layers are exactly zero. The layers are not multiplied by zero, which
# would not save time. Each layer is a branch of a conditional, and only the taken branch runs. The
# control is a mask that keeps all layers: its loss is bitwise identical to the loss of the
# unchanged model.

# %%
program = str(jax.make_jaxpr(gated)(params, batch, jnp.ones(LAYERS, bool)))
print("conditionals in the program:", program.count("cond["), "of", LAYERS, "blocks")
assert program.count("cond[") == LAYERS
evaluated = jax.jit(loss)
assert gated(params, validation, jnp.ones(LAYERS, bool)) == evaluated(params, validation)

# %% [markdown]
# ## A schedule
#
# A schedule determines the keep probability of each layer in each step. PLD keeps all layers at
# first and fewer as training continues, and it keeps deep layers less often than shallow ones. The
# class `LayerDrop` can also express [other schedules](../howto/dropping.md). The output of a kept
# layer is divided by its keep probability.

# %%
drop, STEPS = LayerDrop(theta=0.5, scale="block"), 150
for t in (0, 8, STEPS - 1):
    probs = schedule(drop, LAYERS, t, STEPS)
    print(
        f"step {t:3}: kept with",
        " ".join(f"{p:.2f}" for p in probs),
        f" {float(probs.sum()):.1f} layers of {LAYERS}",
    )


@jax.jit
def train(params, thin):
    """With or without dropped layers, by one program."""
    tx = optax.adam(optax.linear_schedule(5e-3, 0, STEPS))

    def step(i, carry):
        params, state, ran = carry
        rows = jax.random.choice(jax.random.fold_in(jax.random.key(1), i), seen, (8,))
        # the mask depends on the seed and the step, so it is the same on every device
        probs, sampled = keep_masks(drop, LAYERS, STEPS, i, seed=0)
        open_, scale = sampled[0] | ~thin, jnp.where(thin, 1 / probs, 1)
        with drop_blocks(Block, KeepMask(open_, scale)):
            gradient = jax.grad(loss)(params, rows)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(params, updates), state, ran + open_.sum()

    params, _, ran = jax.lax.fori_loop(0, STEPS, step, (params, tx.init(params), 0))
    return params, ran


(whole, all_ran), (thinned, ran) = train(params, False), train(params, True)
print(f"all layers  {all_ran:5} layers run, loss {evaluated(whole, validation):.3f}")
print(f"dropped     {ran:5} layers run, loss {evaluated(thinned, validation):.3f}")
assert 0.5 < ran / all_ran < 0.75

# %% [markdown]
# Fewer layers run, and the loss is higher. This comparison has an equal number of *steps*, so it
# does not show whether dropping saves compute. The fair comparison is a run from scratch with the
# same *cost*, and in that comparison [PLD saved nothing in our
# measurements](../results/dropping.md). Consider this before you use it to save compute.
#
# ## A benefit: models that tolerate missing layers
#
# A model that was trained with randomly dropped layers tolerates missing layers. The same context
# manager can remove layers of the trained model, the deepest first:

# %%
cost = {}
for name, trained in {"all layers": whole, "dropped": thinned}.items():
    cost[name] = [
        float(gated(trained, validation, jnp.arange(LAYERS) < LAYERS - without))
        for without in range(3)
    ]
    print(
        f"trained with {name:10}, evaluated without the last 0, 1, 2 layers:",
        " ".join(f"{x:.3f}" for x in cost[name]),
    )
whole_pays, thinned_pays = (cost[name][2] - cost[name][0] for name in ("all layers", "dropped"))
print(
    f"removing the last two layers costs {whole_pays:.2f} (all layers) and {thinned_pays:.2f} (dropped)"
)
assert thinned_pays < whole_pays

# %% [markdown]
# Such a model can therefore stop after some of its layers at inference (early exit). The numbers
# above show how much the loss increases. LayerDrop and LayerSkip were designed for this purpose.
# Layer dropping also works for [Flax NNX](../howto/model.md), for scanned layers, and as [a field
# of a training plan](../howto/dropping.md).
