"""Token dropping keeps the right tokens and outputs and draws other tokens in every step."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
import tiny

from jaxgrow.extras.freeze import Freeze
from jaxgrow.extras.token_dropping import TokenDrop, sample_tokens
from jaxgrow.layerdrop import KeepMask, LayerDrop
from jaxgrow.models.gpt2 import GPT2Block
from jaxgrow.models.stack import KeptTokens
from train import pretrain
from train.data.windows import next_tokens
from train.extras.modifiers import DropTokens, FreezeParts
from train.plan.methods import GrowTo, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.training import Train
from train.state.mesh import Mesh
from train.state.model import TrainState
from train.state.optim import Optim
from train.step.parallel import mapped
from train.step.step import StepInputs, train_step

CONFIG = tiny.config(layers=4, dtype="float32")
PARAMS = tiny.params(CONFIG, dtype="float32")
TOKENS = tiny.tokens(3, 7)
PLACES = np.array([[0, 2, 3, 6], [1, 2, 4, 5], [0, 1, 2, 3]], np.int32)
DROP = TokenDrop(0.5)


# --- the kept tokens ---


def test_how_many_tokens_stay_and_which_layers_see_them_alone():
    cases = (0.15, 100), (0.15, 8), (0.5, 4), (0.99, 10)
    assert [TokenDrop(rate).kept(length) for rate, length in cases] == [85, 7, 2, 1]
    assert TokenDrop().middle(12) == (1, 11)
    assert TokenDrop(first=0, last=3).middle(4) == (0, 1)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": 1.0}, {"first": -1}, {"last": -1}])
def test_numbers_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TokenDrop(**wrong)


def test_a_model_without_layers_in_the_middle_is_refused():
    says = r"token dropping excludes 1 \+ 1 layers, but the model has only 2"
    with pytest.raises(ValueError, match=says):
        DROP.middle(2)
    with pytest.raises(ValueError, match=says):
        Train("large", 8, Optim(), replace(CONFIG, layers=2), (DropTokens(DROP),))


def test_every_choice_of_tokens_is_as_likely_as_any_other():
    """Sample three of five tokens, in ascending order, anew for every sequence and key."""
    draw = jax.jit(jax.vmap(lambda key: sample_tokens(TokenDrop(0.4), key, jnp.arange(2), 5)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    assert drawn.shape == (2000, 2, 3) and drawn.dtype == np.int32
    choices, noise = set(itertools.combinations(range(5), 3)), 4 * np.sqrt(0.1 * 0.9 / 2000)
    for sequence in range(2):
        found = Counter(map(tuple, drawn[:, sequence].tolist()))
        assert found.keys() <= choices
        assert all(abs(found[c] / 2000 - 0.1) < noise for c in choices)
    # Sequences sample independently of each other.
    assert abs((drawn[:, 0] == drawn[:, 1]).all(-1).mean() - 0.1) < noise


# --- the model ---


@pytest.fixture(scope="module")
def forward():
    """Return ``(params, tokens, positions) -> logits``; layers 1 and 2 see only the given positions."""

    def run(p, t, positions):
        return CONFIG.module.apply({"params": p}, t, kept_tokens=KeptTokens(positions, 1, 3))

    return jax.jit(run)


def test_tokens_go_around_the_middle_and_join_again(forward):
    """Compare with plain loops over the layers, on a sequence without the dropped tokens."""
    block = GPT2Block(CONFIG, jnp.float32, parent=None)
    apply = jax.jit(lambda w, x: block.apply({"params": w}, x))
    # Two programs for one model differ in float32 by the order of their sums.
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    for tokens, positions, found in zip(
        TOKENS, PLACES, forward(PARAMS, TOKENS, PLACES), strict=True
    ):
        x = PARAMS["token_embedding"][tokens] + PARAMS["position_embedding"]
        for i in range(4):
            w = jax.tree.map(lambda a, i=i: a[i], PARAMS["blocks"])
            if i in (1, 2):
                x[positions] = apply(w, x[None, positions])[0]
            else:
                x = np.array(apply(w, x[None])[0])
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + CONFIG.eps)
        x = x * PARAMS["final_norm"]["scale"] + PARAMS["final_norm"]["bias"]
        close(found, x @ PARAMS["token_embedding"].T)
    everything = np.broadcast_to(np.arange(7, dtype=np.int32), (3, 7))
    close(forward(PARAMS, TOKENS, everything), tiny.forward(CONFIG)(PARAMS, TOKENS))


@pytest.mark.parametrize("place", [3, 4])  # The first sequence keeps token 3 and drops token 4.
def test_no_token_sees_a_later_one(forward, place):
    other = TOKENS.copy()
    other[0, place] = (other[0, place] + 1) % 11
    before, after = forward(PARAMS, TOKENS, PLACES), forward(PARAMS, other, PLACES)
    np.testing.assert_array_equal(before[0, :place], after[0, :place])
    np.testing.assert_array_equal(before[1:], after[1:])
    assert (before[0, place:] != after[0, place:]).any(-1).all()


def test_dropping_tokens_and_layers_together_is_refused():
    says = "layer dropping is not supported together with token dropping or frozen layers"
    layers = DropLayers(LayerDrop())
    for other in (DropTokens(DROP), FreezeParts(Freeze((0,)))):
        with pytest.raises(ValueError, match=says):
            Train("large", 8, Optim(), CONFIG, (other, layers))
    stage = TrainStage(1.0, modifiers=(layers, DropTokens(DROP)))
    with pytest.raises(ValueError, match=says):
        stage.train("large", CONFIG, Optim(), 8)
    both = {"params": PARAMS}, TOKENS
    for other in ({"kept_tokens": KeptTokens(PLACES, 1, 3)}, {"frozen": 1}):
        with pytest.raises(ValueError, match="cannot be combined with token dropping"):
            CONFIG.module.apply(*both, keep_mask=KeepMask(np.ones(4, bool)), **other)


# --- training ---


@pytest.mark.extra
@pytest.mark.parametrize(
    "way", [("mesh", 1, 1), pytest.param(("pmap", 2, 4), marks=pytest.mark.slow)], ids=str
)
def test_each_sample_draws_its_own_tokens_on_any_device(monkeypatch, way):
    """One and four devices sample the same tokens in every micro-batch, in both ways of running."""
    seen = {}

    def note(rows, positions):
        seen.update(zip(rows.tolist(), positions.tolist(), strict=True))

    def noting(drop, key, rows, length):
        positions = sample_tokens(drop, key, rows, length)
        jax.debug.callback(note, rows, positions)
        return positions

    monkeypatch.setattr("train.extras.modifiers.sample_tokens", noting)
    tx, config = optax.identity(), replace(runs.LARGE, embed=4, heads=1, mlp=4)
    shapes = jax.eval_shape(
        lambda: TrainState(config.init(jax.random.key(0)), optax.EmptyState(), config)
    )
    model = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)

    def drawn(run, number, seed):
        inputs = StepInputs(np.float32(0), np.uint32(number), np.uint32(seed), (None,))
        jax.block_until_ready(run(model, next_tokens(np.zeros((16, 9), np.int32)), inputs))
        jax.effects_barrier()
        found = [seen.pop(row) for row in range(16)]
        assert not seen
        return found

    ways = []
    for how, accumulate, devices in (("mesh", 2, 4), way):
        mesh = Mesh().over(jax.devices()[:devices])
        run = mapped(partial(train_step, tx, accumulate, (DropTokens(DROP),)), how, mesh)
        ways.append([drawn(run, number, seed) for number, seed in ((0, 3), (1, 3), (0, 3), (0, 4))])
    first, other_step, again, other_seed = ways[0]
    # The number of choices is 70 for each of 16 samples, so a few are equal by chance.
    assert len({tuple(x) for x in first}) > 8
    for other in (other_step, other_seed):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 4
    assert again == first and ways[1] == ways[0]


@pytest.mark.slow
def test_a_token_dropping_run_resumes_bitwise(small_run):
    """A run grows by AKI; one checkpoint falls within the token-dropping training, one at its end."""
    to = GrowTo((TrainStage(0.5, modifiers=(DropTokens(DROP),)), TrainStage(0.25)), ("aki",))
    e = runs.growing(small_run.parent, to, name="tokens", checkpoint_every=3, log_every=1)
    result = pretrain.run_experiment(e, small_run.parent / "tokens")
    # The first 8 steps train the small model.
    runs.stopped(e, small_run.parent / "tokens-stopped", 8 + 3, 8 + 4)
    runs.assert_same_end(small_run.parent / "tokens-stopped", small_run.parent / "tokens")
    dropped, dense = (p["flops"] / p["steps"] for p in result["phases"][-2:])
    phase, tokens = e.plan[-2], e.batch * runs.LARGE.context
    assert dropped == phase.flops(tokens) < dense == replace(phase, modifiers=()).flops(tokens)
    assert phase.token_cost == phase.flops(1)
