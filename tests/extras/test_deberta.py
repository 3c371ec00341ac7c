"""DeBERTa: its equations, in float64, and its settings. `test_interop_families` compares logits."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import tiny
from equations import linear, mlp, norm

from jaxgrow.checkpoints import FAMILIES
from jaxgrow.extras.models.deberta import DeBERTaConfig, distance_rows
from jaxgrow.models.stack import KeptTokens

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10
OLD = {"layers": 2, "heads": 3, "embed": 6, "mlp": 9}


def config(dtype="float64", **fields) -> DeBERTaConfig:
    """Return a model whose sequences are longer than its buckets."""
    own = {"vocab": 11, "context": 7, "head_dim": 5, "distances": 8, "farthest": 7, **OLD}
    return DeBERTaConfig(**own | fields, dtype=dtype)


def inputs(**more):
    return {"tokens": np.random.default_rng(0).integers(0, 11, (2, 7)), **more}


def test_axes_of_relative_positions():
    axes = tiny.axes(config())
    assert axes["relative_embedding"] == ("distances", "embed.below")
    key = axes["blocks"]["attention"]["key"]["kernel"]
    assert key == ("layers", "embed.in", "heads", "head_dim.in")


@pytest.mark.parametrize(("wrong", "message"), [
    ({"norm": "pre", "types": 2}, "does not support norm=pre, types=2"),
    ({"distances": 6}, "distances is 6, but must be a multiple of 4"),
    ({"farthest": 3}, "farthest is 3, but must be above 3, because buckets are used for distances above 2"),
])  # fmt: skip
def test_config_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**wrong)


def test_distances_above_a_quarter_share_buckets():
    """The published sizes: 128 rows on each side, then logarithmic buckets up to distance 511."""
    rows = distance_rows(DeBERTaConfig())
    assert rows.tolist() == sorted(rows) and (rows[0], rows[-1]) == (1, 511)
    right = rows[511:] - 256
    assert right[:129].tolist() == list(range(129))
    share = np.log(np.arange(129, 511) / 128) / np.log(511 / 128)
    assert right[129:511].tolist() == np.ceil(share * 127 + 128).tolist()
    np.testing.assert_array_equal(rows[511::-1] - 256, -right)


def test_scores_are_those_of_the_equation():
    """Compare one layer with loops over heads, queries and keys."""
    c = config(layers=1, head="states", eps=1e-3)
    params = tiny.params(c)
    layer = jax.tree.map(lambda w: w[0], params["blocks"])
    a, rows = layer["attention"], distance_rows(c)
    x = norm(params["token_embedding"][inputs()["tokens"]], params["embedding_norm"], c.eps)
    relative = norm(params["relative_embedding"], params["relative_norm"], c.eps)
    q, k, v = (linear(x, a[name]) for name in ("query", "key", "value"))
    r, s = (linear(relative, a[name]) for name in ("query", "key"))
    out = np.zeros_like(q)
    for b, h, i in np.ndindex(2, 3, 7):
        scores = np.zeros(7)
        for j in range(7):
            row = rows[i - j + 6]
            pairs = (q[b, i, h], k[b, j, h]), (q[b, i, h], s[row, h]), (r[row, h], k[b, j, h])
            scores[j] = sum(left @ right for left, right in pairs)
        weights = np.exp(scores / np.sqrt(5 * 3))
        out[b, i, h] = weights @ v[b, :, h] / weights.sum()
    y = np.tensordot(out, a["out"]["kernel"], 2) + a["out"]["bias"]
    x = norm(x + y, layer["attention_norm"], c.eps)
    expected = norm(x + mlp(x, layer["mlp"]), layer["mlp_norm"], c.eps)
    np.testing.assert_allclose(tiny.forward(c)(params, inputs()), expected, rtol=0, atol=TOLERANCE)


def test_hidden_tokens_change_nothing_at_visible_ones():
    c, mask = config(), np.arange(7) < np.array([[7], [4]])
    other = np.where(mask, inputs()["tokens"], (inputs()["tokens"] + 3) % 11)
    run, params = tiny.forward(c), tiny.params(c)
    one, two = (
        np.asarray(run(params, {"tokens": tokens, "mask": mask}))
        for tokens in (inputs()["tokens"], other)
    )
    np.testing.assert_array_equal(one, two)
    shorter = tiny.forward(c)(tiny.params(c), {"tokens": inputs()["tokens"][1:, :4]})
    np.testing.assert_allclose(one[1:, :4], shorter, rtol=0, atol=TOLERANCE)


def test_kept_tokens_keep_their_distances():
    c = config(layers=1, head="states")
    params, places = tiny.params(c), np.array([[0, 2, 6]] * 2, np.int32)
    kept = KeptTokens(places, 0, 1)
    found = jax.jit(lambda p: c.module.apply({"params": p}, inputs(), kept_tokens=kept))(params)
    mask = np.isin(np.arange(7), places[0])[None].repeat(2, 0)
    everywhere = tiny.forward(c)(params, inputs(mask=mask))
    at = (slice(None), places[0])
    np.testing.assert_allclose(found[at], everywhere[at], rtol=0, atol=TOLERANCE)


def test_frozen_layers_freeze_the_relative_positions():
    c = config()

    def loss(params, frozen):
        given = inputs(positions=np.array([[0], [2]], np.int32))
        passes = {"targets": given["tokens"][:, :1], "frozen": frozen}
        return c.module.apply({"params": params}, given, **passes)[0]

    one = jax.jit(jax.grad(partial(loss, frozen=1)))(tiny.params(c))
    assert not np.any(one["relative_embedding"]) and not np.any(one["relative_norm"]["scale"])
    assert np.any(one["blocks"]["attention"]["key"]["kernel"][1])


# The published config of DeBERTa-v3-base.
SAID = dict(
    model_type="deberta-v2", attention_probs_dropout_prob=0.1, hidden_act="gelu", hidden_dropout_prob=0.1,
    hidden_size=768, initializer_range=0.02, intermediate_size=3072, max_position_embeddings=512,
    relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
    pos_att_type="p2c|c2p", layer_norm_eps=1e-7, max_relative_positions=-1, position_biased_input=False,
    num_attention_heads=12, num_hidden_layers=12, type_vocab_size=0, vocab_size=128100,
)  # fmt: skip


def test_the_published_config_is_the_default():
    family = FAMILIES["DebertaV2Model"]
    c = family.from_hf(SAID)
    assert c == DeBERTaConfig(head="states")
    written = family.to_hf(c, SAID)
    assert {key: written[key] for key in SAID} == SAID
    wider = replace(c, embed=1536, heads=12, head_dim=128)
    written = family.to_hf(wider, SAID | {"embedding_size": 768, "attention_head_size": 64})
    assert written["pooler_hidden_size"] == 1536 and family.from_hf(written) == wider


@pytest.mark.parametrize(("setting", "message"), [
    ({"conv_kernel_size": 3}, "conv_kernel_size is 3, but .* DebertaV2Model only with 0"),
    ({"type_vocab_size": 2}, "type_vocab_size is 2, but .* only with 0"),
    ({"relative_attention": False}, "only with relative positions"),
    ({"position_biased_input": True}, "only without absolute positions in its input"),
    ({"embedding_size": 128}, "embedding_size is 128, but .* if it is the hidden size, 768"),
    ({"attention_head_size": 32}, "if it is the size of the heads, 64"),
    ({"position_buckets": 255}, "distances is 510, but must be a multiple of 4"),
    ({"pos_att_type": None}, r"pos_att_type is null, .* only with p2c\|c2p"),
    ({"pos_att_type": ["c2p"]}, r"only with p2c\|c2p"),
    ({"share_att_key": False}, "share_att_key is false, .* only if it is true. Choose .*deberta-v3-base"),
    ({"norm_rel_ebd": "none"}, "only with layer_norm"),
    ({"position_buckets": -1}, "position_buckets is -1, .* only with buckets"),
    ({"position_buckets": "many"}, "a value has the wrong type"),
], ids=str)  # fmt: skip
def test_other_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES["DebertaV2Model"].from_hf(SAID | setting)
