"""ModernBERT has the right names, attention windows and first layer, which has no attention norm.

Exact means 1e-10 of the standard deviation of the logits, in float64. A change must be visible:
above 1e-2. Logits are compared with `transformers` in `test_interop_families`; the properties shared
with decoders are in `test_llama` and `test_decoders`.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from jaxgrow.checkpoints import FAMILIES
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models.stack import KeptTokens

pytestmark = pytest.mark.usefixtures("x64")

EXACT, VISIBLE = 1e-10, 1e-2
OLD = {"layers": 3, "heads": 2, "kv_heads": 2, "embed": 6, "mlp": 9}


def config(**other) -> ModernBERTConfig:
    own = {"vocab": 11, "context": 7, "head_dim": 4, "window": 3, "rope_theta": 50.0}
    return ModernBERTConfig(**own | OLD | {"dtype": "float64"} | other)


def inputs(**more) -> dict:
    return {"tokens": tiny.tokens(2, 7), **more}


def test_the_published_config_as_it_lies_there():
    """Read the ModernBERT-base config, which predates ``layer_types`` and ``rope_parameters``."""
    said = dict(
        vocab_size=50368, hidden_size=768, intermediate_size=1152, num_hidden_layers=22, num_attention_heads=12,
        max_position_embeddings=8192, norm_eps=1e-5, norm_bias=False, attention_bias=False, mlp_bias=False,
        hidden_activation="gelu", global_attn_every_n_layers=3, global_rope_theta=160000.0, local_attention=128,
        local_rope_theta=10000.0, decoder_bias=True, classifier_bias=False, classifier_activation="gelu",
        classifier_pooling="mean", layer_norm_eps=1e-5, sparse_prediction=False, tie_word_embeddings=True,
    )  # fmt: skip
    family = FAMILIES["ModernBertForMaskedLM"]
    found = family.from_hf(said)
    assert found == ModernBERTConfig(pooling="mean")
    assert found.layer_kinds == "fss" * 7 + "f"
    written = family.to_hf(found, said)
    assert {key: written[key] for key in said} == said
    deeper = family.to_hf(replace(found, layers=23, kinds="fs" + "fss" * 7), said)
    assert deeper["global_attn_every_n_layers"] is None
    assert deeper["layer_types"][1:3] == ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"norm_bias is true, but .* only with false"):
        family.from_hf(said | {"norm_bias": True})
    scaled = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    message = 'rope_type of sliding_attention is "linear", but only "default"'
    with pytest.raises(ValueError, match=message):
        family.from_hf(said | {"rope_parameters": scaled})


def test_only_the_first_layer_has_no_norm_of_its_attention():
    """A layer that is the lowest after dropping keeps its norm."""
    c = config()
    params, before = tiny.params(c), tiny.forward(c)(tiny.params(c), inputs())
    for layer in range(3):
        other = jax.tree.map(np.copy, params)
        other["blocks"]["attention_norm"]["scale"][layer] *= 3
        assert (np.abs(tiny.forward(c)(other, inputs()) - before).max() > VISIBLE) == (layer > 0)
    dropped = jax.jit(lambda p, k: c.module.apply({"params": p}, inputs(), keep_mask=KeepMask(k)))
    without = dropped(params, np.array([False, True, True]))
    # This layer is now the lowest and keeps its norm.
    other["blocks"]["attention_norm"]["scale"][1] *= 3
    assert np.abs(dropped(other, np.array([False, True, True])) - without).max() > VISIBLE


def test_a_window_reaches_both_ways():
    """Tokens see two positions on each side. With full attention, they see all positions."""
    c = config(layers=1, kinds="s")
    params, before = tiny.params(c), tiny.forward(c)(tiny.params(c), inputs())
    other = inputs()
    other["tokens"][:, 3] = (other["tokens"][:, 3] + 1) % 11
    changed = np.abs(tiny.forward(c)(params, other) - before).max((0, 2)) > 0
    assert changed.tolist() == [False, True, True, True, True, True, False]
    whole = replace(c, kinds="f", rope_theta=c.local_theta)
    distance = np.abs(tiny.forward(whole)(params, other) - tiny.forward(whole)(params, inputs()))
    assert (distance.max((0, 2)) > 0).all()
    # Kept tokens keep their original distances in the window.
    kept = KeptTokens(np.array([[0, 2, 5]] * 2, np.int32), 0, 1)
    run = jax.jit(lambda given: c.module.apply({"params": params}, given, kept_tokens=kept))
    other = inputs()
    other["tokens"][:, 2] = (other["tokens"][:, 2] + 1) % 11
    assert np.flatnonzero(np.abs(run(other) - run(inputs())).max((0, 2))).tolist() == [0, 2]


def test_what_is_masked_is_in_no_mean():
    c = config(head="classes", pooling="mean")
    mask, params = np.arange(7) < np.array([[7], [4]]), tiny.params(c)
    other = inputs(mask=mask)
    other["tokens"] = np.where(mask, other["tokens"], (other["tokens"] + 3) % 11)
    one, two = (tiny.forward(c)(params, given) for given in (inputs(mask=mask), other))
    np.testing.assert_array_equal(one, two)
    everywhere = tiny.forward(c)(params, inputs(mask=np.ones((2, 7), bool)))
    np.testing.assert_allclose(everywhere, tiny.forward(c)(params, inputs()), rtol=0, atol=EXACT)
    assert np.abs(one - everywhere)[1].max() > VISIBLE
