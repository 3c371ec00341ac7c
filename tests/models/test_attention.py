"""Attention by XLA computes softmax(q k / sqrt(K)) v, within segments if there are some."""

from functools import partial

import attending
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrow.models import GPT2Config
from jaxgrow.models.attention import ScoreForm, attention, segment_positions


@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("length", [1, 129, 300])
def test_attention_by_xla_in_blocks_of_queries(length, causal, in_segments):
    qkv, segments = attending.arrays(length)
    segments = segments if in_segments else None
    found = jax.jit(partial(attention, causal=causal, form=ScoreForm(segments_BT=segments)))(*qkv)
    expected = attending.defined(qkv, causal, segments)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    with jax.enable_x64():
        wide = [jnp.asarray(x, "float64") for x in qkv]
        found = attention(*wide, causal=causal, form=ScoreForm(segments_BT=segments))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_segment_positions_restart_with_each_segment():
    segments = jnp.array([[5, 5, 5, 2, 2, 9], [0, 1, 2, 2, 2, 2]])
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_an_attention_kernel_that_there_is_not_is_refused():
    with pytest.raises(
        ValueError, match="attention must be 'auto', 'cudnn', 'xla' or 'splash', not 'flash'"
    ):
        GPT2Config(attention="flash")  # type: ignore[arg-type]
