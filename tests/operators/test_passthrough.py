"""Lists of layers: each new layer is the old layer that the list names, of the same kind."""

from dataclasses import replace

import chex
import jax
import numpy as np
import optax
import pytest
import tiny
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from jaxgrow import compose, grow, grow_optimizer, preserves_function
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.models import LlamaConfig, Loop
from jaxgrow.operators import hypercloning, keep_units, new_layers, passthrough

LAYERS = 4
GPT2 = tiny.config(layers=LAYERS, dtype="float32")
# Layers of three kinds, so that a new layer must have the kind of its source.
LLAMA = LlamaConfig(
    **{"vocab": 11, "context": 7, "layers": LAYERS, "embed": 12, "heads": 4, "kv_heads": 2},
    **{"head_dim": 4, "mlp": 9, "kinds": "fsns", "window": 2, "local_theta": 100.0},
)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "experts": replace(LLAMA, experts=3)}
lists = st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=7)


@pytest.fixture(params=cases(CONFIGS, core=("llama",)))
def case(request):
    """Return ``(config, parameters)``."""
    return request.param, tiny.params(request.param, dtype="float32")


def test_all_layers_in_order_are_the_identity(case):
    config, params = case
    growth = passthrough(config.sizes(), {}, range(LAYERS))
    chex.assert_trees_all_equal(grow(growth, params, config.axes()), params)
    assert config.resized(growth) == config and preserves_function(growth)
    assert not preserves_function(passthrough(config.sizes(), {}, [*range(LAYERS - 1), 0]))


@given(sources=lists)
def test_a_new_layer_is_a_row_of_its_source_and_has_its_kind(sources):
    growth = passthrough(LLAMA.sizes(), {"layers": len(sources)}, sources)
    larger, params = LLAMA.resized(growth), tiny.params(LLAMA, dtype="float32")
    assert larger.layer_kinds == "".join("fsns"[i] for i in sources)
    assert replace(larger, layers=LAYERS, kinds="fsns") == LLAMA
    grown = grow(growth, params, LLAMA.axes())
    expected = jax.tree.map(lambda w: w[np.array(sources)], params["blocks"])
    chex.assert_trees_all_equal(grown, params | {"blocks": expected})
    first = [i for i, layer in enumerate(sources) if layer not in sources[:i]]
    assert {*new_layers(growth)} == {*range(len(sources))} - {*first}


@given(kept=st.sets(st.integers(0, LAYERS - 1), min_size=1))
def test_a_list_without_some_layers_keeps_the_others(kept):
    kept = sorted(kept)
    one, other = passthrough(GPT2.sizes(), {}, kept), keep_units(GPT2.sizes(), {"layers": kept})
    chex.assert_trees_all_equal(one, other)


@given(sources=lists, again=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_lists_compose_with_lists_and_commute_with_widths(sources, again):
    sizes, axes, params = GPT2.sizes(), GPT2.axes(), tiny.params(GPT2, dtype="float32")
    wide = hypercloning(sizes, {"embed": 12, "heads": 6, "mlp": 18})
    deep = passthrough(sizes, {}, sources)
    one = grow(deep, grow(wide, params, axes), axes)
    chex.assert_trees_all_equal(one, grow(wide, grow(deep, params, axes), axes))
    chex.assert_trees_all_equal(one, grow(wide | deep, params, axes))
    again = [i % len(sources) for i in again]
    second = passthrough({**sizes, "layers": len(sources)}, {}, again)
    both = passthrough(sizes, {}, [sources[i] for i in again])
    chex.assert_trees_all_equal(grow(compose(second, deep), params, axes), grow(both, params, axes))


def test_the_optimizer_state_follows_the_layers(case):
    config, params = case
    axes, tx, sources = config.axes(), optax.adam(1e-3), [3, 0, 0]
    state = jax.device_get(jax.jit(tx.update)(params, tx.init(params), params)[1])
    growth = passthrough(config.sizes(), {}, sources)
    grown = grow_optimizer(tx, state, growth, params, axes, "copy")
    chex.assert_trees_all_equal_shapes(grown, tx.init(grow(growth, params, axes)))
    for new, old in ((grown[0].mu, state[0].mu), (grown[0].nu, state[0].nu)):
        rows = jax.tree.map(lambda m: m[np.array(sources)], old["blocks"])
        chex.assert_trees_all_equal(new, old | {"blocks": rows})


# --- what must fail ---


@pytest.mark.parametrize("sources", [[1, 0, 2, 3], [0, 1], [3, 2, 1, 0, 0]])
def test_layers_of_a_loop_first_need_their_own_weights(sources):
    """Also a list of as many layers as before would change which layers run several times."""
    config = replace(GPT2, loop=Loop(1, 3))
    with pytest.raises(ValueError, match="with the operator unloop"):
        config.resized(passthrough(config.sizes(), {}, sources))
    assert config.resized(passthrough(config.sizes(), {}, range(LAYERS))) == config


def test_messages():
    sizes = GPT2.sizes()
    with pytest.raises(ValueError, match=r"has layer 9, but the model has the layers 0 to 3: name"):
        passthrough(sizes, {}, [0, 9])
    with pytest.raises(ValueError, match=r"is empty, but the model .*--layers-from 0-3"):
        passthrough(sizes, {"layers": 8})
    for target in ({"layers": 3}, {"mlp": 40}):
        with pytest.raises(ValueError, match="makes the 2 layers of the list, but the target is"):
            passthrough(sizes, target, [0, 1])
    with pytest.raises(ValueError, match=r"the axes .*layers\.0.*a size for each stage"):
        passthrough(SwinConfig().sizes(), {}, [0])
