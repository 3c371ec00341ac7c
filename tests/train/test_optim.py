"""AdamW and its schedules, against optax and against numbers by hand."""

from dataclasses import replace
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import MODEL, fresh

from jaxgrow.growth._trial import kinds
from train.state.optim import Optim, learning_rate, transformation


@pytest.mark.parametrize(("schedule", "expected"), [  # peak 4, 8 steps after a warm-up of 4 steps
    ("linear", [1, 2, 3, 4, 4, 3.5, 3, 2.5, 2, 1.5, 1, 0.5]),
    ("cosine", [1, 2, 3, 4, *(2 + 2 * np.cos(np.pi * np.arange(8) / 8))]),
    ("wsd", [1, 2, 3, 4, 4, 4, 4, 4, 4, 3, 2, 1]),
])  # fmt: skip
def test_schedules_by_hand(schedule, expected):
    optim = Optim(peak_lr=4.0, schedule=schedule, warmup=4, decay=0.5)
    found = [learning_rate(optim, 12, i) for i in range(12)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    floor = replace(optim, warmup=0, floor=0.25)
    assert learning_rate(floor, 10, 0) == 4.0
    assert learning_rate(floor, 10, 10) == pytest.approx(1.0)


SHARES = st.floats(0, 1), st.floats(0, 1)


@given(
    st.sampled_from(("cosine", "linear", "wsd")), st.integers(0, 30), st.integers(1, 60), *SHARES
)
def test_schedules_rise_during_warmup_only(schedule, warmup, steps, floor, decay):
    optim = Optim(peak_lr=2.0, schedule=schedule, warmup=warmup, floor=floor, decay=decay)
    rates = [learning_rate(optim, steps, i) for i in range(steps)]
    assert rates[0] > 0 and max(rates) <= 2.0
    assert all(a < b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert min(rates[warmup:], default=2.0) >= 2.0 * floor - 1e-12


@pytest.mark.parametrize("size", [1e-3, 1e3])  # gradient norms below and above the clip
def test_the_transformation_is_optax_adamw_after_clipping(size):
    optim = Optim(peak_lr=1e-2, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, clip=2.0)
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    params = {"kernel": kernel, "bias": np.ones(3, np.float32)}
    axes, mask = {"kernel": ("a.in", "b"), "bias": ("b.bias",)}, {"kernel": True, "bias": False}
    adamw = optax.adamw(1e-2, 0.8, 0.9, 1e-6, weight_decay=0.3, mask=mask)
    mine, peer = transformation(optim), optax.chain(optax.clip_by_global_norm(2.0), adamw)

    @jax.jit
    def stepped(ours, theirs, grads):
        updates, state = mine.update(grads, ours[1], ours[0], axes=axes)
        ours = (jax.tree.map(lambda p, u: p - 1e-2 * u, ours[0], updates), state)
        updates, state = peer.update(grads, theirs[1], theirs[0])
        return ours, (optax.apply_updates(theirs[0], updates), state)

    ours, theirs = (params, mine.init(params)), (params, peer.init(params))
    for step in range(5):
        grads = jax.tree.map(lambda p, step=step: size * np.cos(p + step), params)
        ours, theirs = stepped(ours, theirs, grads)
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_second_moments_are_the_fields_with_the_name_nu(name):
    """Only these fields of a checkpoint are checked."""
    tx = transformation(Optim(name=name), MODEL.axes())
    found = kinds(tx, fresh(MODEL), MODEL.axes())
    named = {leaf for leaf in found if "/nu/" in f"/{leaf}"}
    assert len(found) > 10 and {leaf for leaf, kind in found.items() if kind == 2} == named


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_cautious_decay_by_its_equation(name):
    """``p - lr (u + w p)`` where ``u p >= 0``, and ``p - lr u`` elsewhere, with the update u."""
    axes = {"kernel": ("layers", "a.in", "b"), "bias": ("layers", "b.bias")}
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(2, 3, 4)), "bias": rng.normal(size=(2, 4))}
    params = jax.tree.map(lambda x: np.where(abs(x) < 0.3, 0, x).astype(np.float32), params)
    many = [
        transformation(Optim(name=name, clip=1e3, weight_decay=w, cautious_decay=c), axes)
        for w, c in ((0.3, True), (0.0, False), (0.3, False))
    ]
    states, decayed = [t.init(params) for t in many], 0

    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: np.cos(9 * p + step), params)
        (updates, _), (u, _), (every, _) = found = jax.device_get(
            [t.update(grads, s, params, axes=axes) for t, s in zip(many, states, strict=True)]
        )
        states, p, own = [state for _, state in found], params["kernel"], u["kernel"]
        decayed += (p * own >= 0).sum()
        expected = own + np.where(p * own >= 0, np.float32(0.3) * p, 0)
        np.testing.assert_array_equal(updates["kernel"], expected)
        np.testing.assert_array_equal(updates["bias"], u["bias"])
        assert (every["kernel"] != updates["kernel"]).any()
        params = jax.tree.map(lambda p, x: p - np.float32(0.1) * x, params, updates)
    assert 0 < decayed < 72
    chex.assert_trees_all_equal(states[0], states[2])  # so it grows and is saved like any other


def test_adam_with_cautious_decay_by_hand():
    """Two steps from ``m = b1 m + (1 - b1) g`` on, in NumPy."""
    optim = Optim(b1=0.5, b2=0.75, eps=1e-3, weight_decay=0.25, clip=1e3, cautious_decay=True)
    tx, axes = transformation(optim), {"kernel": ("a.in", "b")}
    p = np.array([[2.0, -2.0, 0.0]], np.float32)
    state, m, v = tx.init({"kernel": p}), 0.0, 0.0
    for t, g in enumerate((np.array([[1.0, 1.0, 1.0]]), np.array([[-8.0, 1.0, 1.0]])), 1):
        grads = {"kernel": g.astype(np.float32)}
        updates, state = tx.update(grads, state, {"kernel": p}, axes=axes)
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g**2
        u = m / (1 - 0.5**t) / (np.sqrt(v / (1 - 0.75**t)) + 1e-3)
        expected = u + 0.25 * np.where(u * p >= 0, p, 0)
        np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-5)
        p = p - np.asarray(updates["kernel"], np.float32)


def test_sgd_by_hand():
    """Nesterov's momentum of the gradient and the decay: ``m = b m + g``, then ``b m + g``."""
    tx = transformation(Optim(name="sgd", b1=0.5, weight_decay=0.25, clip=100.0))
    params = {"kernel": np.full((1, 1), 8.0, np.float32), "bias": np.ones(1, np.float32)}
    axes, state, seen = {"kernel": ("a.in", "b"), "bias": ("b.bias",)}, tx.init(params), []
    for g in (2.0, 4.0):
        grads = jax.tree.map(lambda p, g=g: np.full_like(p, g), params)
        updates, state = tx.update(grads, state, params, axes=axes)
        seen.append((float(updates["kernel"][0, 0]), float(updates["bias"][0])))
    # The decay adds 2 to each gradient of the kernel: m = 4, then 2 + 6.
    assert seen == [(0.5 * 4 + 4, 0.5 * 2 + 2), (0.5 * 8 + 6, 0.5 * 5 + 4)]


def test_kernels_and_embeddings_decay_biases_and_norms_do_not():
    params = jax.tree.map(np.ones_like, fresh(MODEL))
    tx, axes = transformation(Optim(weight_decay=0.5)), MODEL.axes()
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda p: tx.update(zeros, tx.init(p), p, axes=axes)[0])(params)
    decays = {
        jax.tree_util.keystr(p, simple=True, separator="/"): float(u.max())
        for p, u in jax.tree.leaves_with_path(updates)
    }
    inside = (
        *(f"attention/{name}" for name in ("query", "key", "value", "out")),
        "mlp/up",
        "mlp/down",
    )
    kernels = {"token_embedding", "position_embedding", *(f"blocks/{n}/kernel" for n in inside)}
    assert decays == {name: 0.5 if name in kernels else 0.0 for name in decays}
    assert kernels < decays.keys()
