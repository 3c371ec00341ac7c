"""Re-warm-up of new entries: its learning rate, the affected entries, and resuming within it."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import chex
import jax
import numpy as np
import pytest
import runs
import tiny

from jaxgrow.growth.moments import clock
from train import pretrain
from train.data.windows import next_tokens
from train.extras.modifiers import Rewarm
from train.plan.methods import GrowTo, TrainStage, VCycle
from train.plan.training import Train
from train.plan.transforms import Grow
from train.state.mesh import replicated_sharding
from train.state.model import TrainState
from train.state.optim import Optim, learning_rate, transformation
from train.state.packing import packed
from train.step import programs
from train.step.parallel import mapped
from train.step.step import StepInputs, train_step

TOKENS = np.random.default_rng(0).integers(0, 256, (8, 9)).astype(np.int32)
BATCH = next_tokens(TOKENS)
TX = transformation(Optim())
REWARM = TrainStage(0.5, warmup=0, modifiers=(Rewarm(peak=2.0, steps=2),))


# --- the learning rate ---


def test_the_rate_by_hand():
    optim, rewarm = (
        Optim(peak_lr=4.0, warmup=0, floor=0.25, schedule="linear"),
        Rewarm(peak=1.5, steps=4),
    )
    rates = [rewarm.learning_rate(optim, 12, i) for i in range(13)]
    # from 1.5 times the first learning rate to the floor, in 8 steps
    cosine = 1 + 5 * (1 + np.cos(np.pi * np.arange(9) / 8)) / 2
    np.testing.assert_allclose(rates, [4.5, 5, 5.5, 6, *cosine], atol=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(
    ("peak", "steps", "floor"), [(1.3, 250, 0.0), (1.0, 1, 0.1), (2.0, 999, 1.0), (3.0, 0, 0.5)]
)
def test_the_learning_rate_peaks_and_ends_at_the_floor(schedule, peak, steps, floor):
    optim = Optim(peak_lr=2.0, warmup=0, floor=floor, schedule=schedule)
    rates = [Rewarm(peak, steps).learning_rate(optim, 1000, i) for i in range(1001)]
    assert all(learning_rate(optim, 1000, 0) <= a <= b for a, b in pairwise(rates[:steps]))
    assert all(a >= b for a, b in pairwise(rates[steps:]))
    assert max(rates) == pytest.approx(peak * 2.0) == rates[steps]
    assert rates[-1] == pytest.approx(floor * 2.0)


def test_a_warmup_of_the_whole_model_is_refused_beside_it():
    says = "rewarm warms up the new entries instead of all entries: set warmup to 0, not 100"
    with pytest.raises(ValueError, match=says):
        Train("large", 8, Optim(), runs.LARGE, modifiers=(Rewarm(),))
    with pytest.raises(ValueError, match=says):
        TrainStage(0.5, modifiers=(Rewarm(),)).train("large", runs.LARGE, Optim(), 8)


@pytest.mark.parametrize("moments", ["drop", "copy", "exact"])
def test_moments_that_do_not_mark_new_entries_are_refused(moments):
    says = f"rewarm finds new entries by their step counts.* not '{moments}', or leave out rewarm"
    with pytest.raises(ValueError, match=says):
        GrowTo((REWARM,), runs.DOUBLED, moments=moments)
    with pytest.raises(ValueError, match=f"set moments_up to 'asymmetric', not '{moments}'"):
        VCycle((TrainStage(0.1),), (TrainStage(0.4), REWARM), moments_up=moments)


# --- the step ---


def grown() -> TrainState:
    """Return a large model whose second copies got separate moments in a growth at step 5."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: runs.SMALL.init(jax.random.key(0)))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 5, shapes)
    clip, adam, state, decay = TX.init(params)
    mu = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    adam, state = (
        adam._replace(count=np.int32(5), mu=mu, nu=jax.tree.map(np.square, mu)),
        state._replace(count=np.int32(5)),
    )
    small = TrainState(params, (clip, adam, state, decay), runs.SMALL)
    phase = Grow(
        "small", "large", runs.SMALL, runs.LARGE, runs.DOUBLED, noise=10.0, moments="asymmetric"
    )
    return jax.device_get(jax.jit(lambda m: phase.apply({"small": m}, TX))(small))


def test_new_entries_use_the_second_learning_rate():
    start, run = grown(), mapped(partial(train_step, TX, 1, (Rewarm(),)), "mesh", runs.mesh())
    starts = clock(start.opt).start_count
    assert {int(x) for b in jax.tree.leaves(starts) for x in np.unique(b)} == {0, 5}
    at = jax.device_put(start, replicated_sharding(runs.mesh()))

    def after(lr, new, birth):
        inputs = StepInputs(np.float32(lr), given=((np.float32(new), np.int32(birth)),))
        return jax.device_get(run(at, BATCH, inputs)[0].params)

    slow, fast, both = after(0.25, 0.25, 5), after(0.5, 0.5, 5), after(0.25, 0.5, 5)
    expected = jax.tree.map(lambda b, f, s: np.where(b == 5, f, s), starts, fast, slow)
    chex.assert_trees_all_equal(both, expected)
    chex.assert_trees_all_equal(after(0.25, 0.5, 6), slow)  # all entries are older
    chex.assert_trees_all_equal(after(0.25, 0.5, 0), fast)  # all entries are new
    # Twice the learning rate gives twice the update, up to rounding of values of order one.
    for name, p, s, f in ((n, *x) for (n, *x) in three(start.params, slow, fast)):
        np.testing.assert_allclose(f - p, 2 * (s - p), rtol=1e-4, atol=1e-6, err_msg=name)
        assert (s != p).any(), name


def three(a, b, c):
    return (
        (name, x, y, z)
        for (name, x, y), (_, _, z) in zip(tiny.pairs(a, b), tiny.pairs(a, c), strict=True)
    )


# --- a run ---


def test_new_entries_are_those_that_the_growth_added(tmp_path, monkeypatch):
    """A split schedule keeps the age of new entries when its second phase begins later.

    Schedules are split like this to measure the sensitivity of layers.
    """
    seen = []

    def counting(state, batch, inputs):
        """Advance the step counters without an update."""
        if inputs.given:
            seen.append((float(inputs.given[0][0]), int(inputs.given[0][1])))
        model = state.model
        opt = [
            s._replace(count=s.count + 1) if "count" in getattr(s, "_fields", ()) else s
            for s in model.opt
        ]
        return packed(replace(model, opt=tuple(opt))), {
            "loss": np.float32(1),
            "grad_norm": np.float32(1),
        }

    e = runs.experiment(tmp_path, model=runs.MODEL, checkpoint_every=8)
    optim, rewarm = Optim(peak_lr=1.0, warmup=0), Rewarm(2.0, 2)
    large = Train("large", 4, optim, runs.MODEL, (rewarm,), until=1)
    plan = (
        Train("small", 2, optim, runs.SMALL),
        Grow("small", "large", runs.SMALL, runs.MODEL, ("hypercloning",), moments="asymmetric"),
        large,
        replace(large, begin=1, until=4),
    )
    monkeypatch.setattr(type(e), "plan", plan)
    monkeypatch.setattr(
        programs,
        "mapped",
        lambda f, how, mesh, *, donate=False: (
            counting
            if donate
            else lambda *_: {"val_loss": np.float32(1), "val_accuracy": np.float32(1)}
        ),
    )
    with runs.compiling("step", "evaluation"):
        pretrain.run_experiment(e, tmp_path / "run")
    assert [birth for _, birth in seen] == [2] * 4
    assert (
        [rate for rate, _ in seen]
        == [rewarm.learning_rate(optim, 4, i) for i in range(4)]
        == [1.5, 2, 2, 1]
    )
