"""`measure_preservation` agrees with hand calculations on lookup tables, and runs on a GPT-2."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrow import grow
from jaxgrow.extras.preservation import Preservation, measure_preservation, output_rms
from jaxgrow.operators import hypercloning, stack

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-12  # for logarithms of small integers in float64
LN2, LN3 = np.log(2), np.log(3)


def model(logits, rms):
    return lambda tokens: (jnp.asarray(logits)[tokens], jnp.asarray(rms))


def test_by_hand():
    """Two positions and two words, computed by hand.

    First: probabilities 1/2, 1/2 and 3/4, 1/4; second: 2/3, 1/3 and the same.
    """
    first = model([[0.0, 0.0], [LN3, 0.0]], [1.0, 2.0])
    second = model([[LN2, 0.0], [LN3, 0.0]], [3.0, 5.0, 7.0])
    report = measure_preservation(first, second, jnp.asarray([[0, 1]]))
    found = [report.max_abs, report.mean_abs, report.scale, report.kl]
    expected = [LN2, LN2 / 4, LN3 * 3**0.5 / 4, (np.log(3 / 4) + np.log(3 / 2)) / 2 / 2]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert report.rms_first == (1, 2) and report.rms_second == (3, 5, 7)


def test_kl_does_not_see_a_constant_and_the_logits_do():
    first = np.random.default_rng(0).normal(size=(7, 5))
    report = measure_preservation(model(first, []), model(first + 0.25, []), jnp.arange(7))
    found = [report.max_abs, report.mean_abs, report.kl]
    np.testing.assert_allclose(found, [0.25, 0.25, 0], rtol=0, atol=TOLERANCE)


def gpt2_model(config, params):
    model = jax.jit(partial(config.module.apply, observe=output_rms))
    return lambda tokens: model({"params": params}, tokens)


def test_of_gpt2s():
    config, tokens = tiny.config(), tiny.tokens()
    params, axes = tiny.params(config), tiny.axes(config)
    first = gpt2_model(config, params)
    same = measure_preservation(first, first, tokens)
    assert (same.max_abs, same.mean_abs, same.kl) == (0, 0, 0)
    assert same.rms_first == same.rms_second and len(same.rms_first) == config.layers
    wide, deep = hypercloning(tiny.WIDTHS, tiny.wider(2)), stack(tiny.WIDTHS, {"layers": 4})
    kept, broken = (
        measure_preservation(first, gpt2_model(config.resized(g), grow(g, params, axes)), tokens)
        for g in (wide, deep)
    )
    assert kept.max_abs < TOLERANCE * kept.scale and abs(kept.kl) < TOLERANCE
    np.testing.assert_allclose(kept.rms_second, kept.rms_first, rtol=1e-6)  # computed in float32
    assert broken.kl > 1e-3 and broken.max_abs > 1e-2 * broken.scale
    np.testing.assert_allclose(broken.rms_second[:2], broken.rms_first)
    assert len(broken.rms_second) == 4


def test_models_share_a_vocabulary():
    first, second = (model(np.zeros((2, vocab)), []) for vocab in (3, 5))
    message = r"logits of shapes \(2, 3\) and \(2, 5\); they must share a vocabulary"
    with pytest.raises(ValueError, match=message):
        measure_preservation(first, second, jnp.arange(2))


def test_it_prints_every_number():
    assert str(Preservation(0.5, 0.25, 2.0, 0.125, (1.0, 2.0), (3.0,))).splitlines() == [
        "logits: max |a - b| 5.00e-01, mean |a - b| 2.50e-01, std of a 2.00e+00",
        "KL(a || b): 1.25e-01 nats per position",
        "RMS of each layer's output, a: 1 2",
        "RMS of each layer's output, b: 3",
    ]
