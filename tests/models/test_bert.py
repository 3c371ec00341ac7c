"""BERT and RoBERTa match the public implementation in names, function, layer dropping and cost.

The tolerance is 1e-10, for float64 through two layers.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
import tiny

from jaxgrow import flops, grow, operators
from jaxgrow.checkpoints.hf.registry import FAMILIES
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import BERTConfig
from jaxgrow.models.stack import KeptTokens

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-10
VISIBLE = 1e-2
OLD = {"layers": 2, "heads": 3, "embed": 6, "mlp": 9}


def tiny_bert(dtype="float64", **fields) -> BERTConfig:
    return BERTConfig(
        **{"vocab": 11, "context": 7, "types": 4, "head_dim": 5, **OLD, **fields}, dtype=dtype
    )


def inputs(masked=True):
    """Return the tokens and types of two samples; the second sample is padded at its end."""
    rng = np.random.default_rng(0)
    out = {"tokens": rng.integers(2, 11, (2, 6)), "types": rng.integers(0, 4, (2, 6))}
    return out | {"mask": np.arange(6) < np.array([[6], [4]])} if masked else out


# --- names ---


@pytest.mark.parametrize("tied", [False, True])
def test_paper_axes_make_embeddings_inputs_and_norms_outputs(tied):
    config = tiny_bert(tied=tied)
    axes, published = dict(tiny.axes(config)), dict(tiny.paper_axes(config))
    for table, rows in (("token", "vocab"), ("position", "context"), ("type", "types")):
        assert published.pop(f"{table}_embedding") == (rows, "embed.in.below")
        assert axes.pop(f"{table}_embedding") == (rows, "embed.below")
    assert published.pop("head_norm") == {
        "scale": ("embed.norm.scale",),
        "bias": ("embed.norm.bias",),
    }
    assert axes.pop("head_norm")["scale"] == (
        "embed.in.norm.scale" if tied else "embed.norm.scale",
    )
    assert published == axes


@pytest.mark.parametrize(("wrong", "message"), [
    ({"types": -1}, "types is -1, less than 0"),
    ({"norm": "sandwich"}, "norm must be 'post' or 'pre', not 'sandwich'"),
    ({"masked": 0.0}, "masked must be above 0 and at most 1, but is 0.0"),
    ({"context": 2, "first_position": 2}, "context=2 leaves no position after first_position=2"),
])  # fmt: skip
def test_config_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        BERTConfig(**wrong)


@pytest.mark.parametrize(("given", "passes", "message"), [
    ({"attention_mask": None}, {},
     "inputs must be tokens and optionally types, mask, positions, segments, but are tokens, attention_mask"),
    ({"tokens": np.zeros((1, 6), int)}, {},
     "6 tokens is longer than the 5 positions that context=7 leaves from first_position=2 on"),
    ({"mask": np.ones((1, 5), bool)}, {"keep_mask": KeepMask(np.ones(2, bool))}, "pack the text, and leave out mask"),
    ({"mask": np.ones((1, 5), bool)}, {"kept_tokens": KeptTokens(np.zeros((1, 1), int), 0, 1)}, "leave out mask"),
    ({}, {"keep_mask": KeepMask(np.ones(2, bool)), "frozen": 1}, "cannot be combined with token dropping"),
])  # fmt: skip
def test_input_errors(given, passes, message):
    config = tiny_bert(first_position=2)
    with pytest.raises(ValueError, match=message):
        config.module.apply(
            {"params": tiny.params(config)}, {"tokens": np.zeros((1, 5), int), **given}, **passes
        )


# --- the function; `test_interop_core` compares it with transformers ---


def test_a_pooler_adds_no_keys_to_a_published_config():
    """``config.json`` of MiniLM leaves out a key whose default applies."""
    said = dict(
        architectures=["BertModel"], model_type="bert", vocab_size=11, hidden_size=12,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
    )  # fmt: skip
    config = replace(FAMILIES["BertModel"].from_hf(said), pooler=True)
    assert FAMILIES["BertModel"].to_hf(config, said) == said
    assert FAMILIES["BertModel"].to_hf(replace(config, mlp=24), said) == said | {
        "intermediate_size": 24
    }


def test_names_in_older_files():
    assert (
        FAMILIES["BertForMaskedLM"].current("bert.embeddings.LayerNorm.gamma")
        == "bert.embeddings.LayerNorm.weight"
    )
    assert (
        FAMILIES["BertForMaskedLM"]
        .current("cls.predictions.transform.LayerNorm.beta")
        .endswith("LayerNorm.bias")
    )
    assert FAMILIES["BertForMaskedLM"].current("bert.pooler.dense.bias") == "bert.pooler.dense.bias"


@pytest.mark.parametrize("norm", ["post", pytest.param("pre", marks=pytest.mark.slow)])
def test_logits_at_places_are_those_of_the_places(norm):
    config = tiny_bert(norm=norm)
    params, positions = tiny.params(config), np.array([[0, 2, 5], [1, 3, 4]])
    everywhere = np.asarray(tiny.forward(config)(params, inputs()))
    found = tiny.forward(config)(params, inputs() | {"positions": positions})
    np.testing.assert_allclose(
        found, np.take_along_axis(everywhere, positions[..., None], 1), rtol=0, atol=TOLERANCE
    )


def test_what_is_masked_changes_nothing():
    config, given = tiny_bert(), inputs()
    other = given | {"tokens": np.where(given["mask"], given["tokens"], (given["tokens"] + 3) % 11)}
    one, two = (np.asarray(tiny.forward(config)(tiny.params(config), i)) for i in (given, other))
    np.testing.assert_array_equal(one[given["mask"]], two[given["mask"]])
    # The outputs at masked positions do change.
    assert abs(one - two).max() > VISIBLE


def test_roberta_counts_positions_from_the_first_unmasked_token():
    config = tiny_bert(first_position=2, context=9)
    right = inputs()
    # The second sample is now padded at its start.
    left = {k: np.roll(x, 2, axis=1) for k, x in right.items()}
    left["tokens"][0], left["types"][0] = right["tokens"][0], right["types"][0]
    left["mask"][0] = True
    one, two = (np.asarray(tiny.forward(config)(tiny.params(config), i)) for i in (right, left))
    np.testing.assert_allclose(one[1, :4], two[1, 2:], rtol=0, atol=TOLERANCE)


# --- growth ---


def to(**new):
    return {**OLD, **new}


WIDE = {"heads": 6, "embed": 12, "mlp": 18}
GROWTHS = {
    "decoalesce, pairs": operators.decoalesce(to(**WIDE), heads="far"),
    "decoalesce, threes": operators.decoalesce(
        to(heads=9, embed=18, mlp=27), heads=operators.far(9, 3)
    ),
    "decoalesce layers": operators.decoalesce(to(layers=4), layers="adjacent"),
    "hypercloning": operators.hypercloning(OLD, WIDE),
    "staged": operators.staged(OLD, WIDE),
    "fpi heads and mlp": operators.fpi(OLD, {"heads": 5, "mlp": 13}, seed=1),
    "fpi, ragged": operators.fpi(OLD, {"embed": 8, "heads": 5, "mlp": 13}, seed=2),
    "lemon, ragged": operators.lemon(OLD, {"embed": 8, "heads": 5, "mlp": 13}, seed=3),
    "stack": operators.stack(OLD, {"layers": 4}),
    "llama_pro": operators.llama_pro(OLD, {"layers": 4}),
}


def change(config, growth, axes=None):
    """Return ``max |logit difference| / std of the logits`` when the model grows."""
    params = tiny.params(config)
    before = tiny.forward(config)(params, inputs())
    after = tiny.forward(config.resized(growth))(
        grow(growth, params, axes or tiny.axes(config)), inputs()
    )
    return float(np.abs(np.subtract(after, before)).max() / np.std(before))


@pytest.mark.parametrize(("name", "norm", "keeps"), [
    *((name, "post", True) for name in ("decoalesce, threes", "hypercloning", "staged")),
    ("fpi heads and mlp", "post", True),
    ("llama_pro", "post", False),
    *(pytest.param(name, "post", False, marks=pytest.mark.slow) for name in ("decoalesce layers", "stack", "fpi, ragged")),
    pytest.param("decoalesce, pairs", "post", True, marks=pytest.mark.slow),
    *((name, "pre", True) for name in ("staged", "llama_pro")),
    pytest.param("decoalesce, pairs", "pre", True, marks=pytest.mark.slow),
    *((name, "pre", False) for name in ("stack", "lemon, ragged")),
])  # fmt: skip
def test_what_keeps_the_function_of_a_tied_model(name, norm, keeps):
    found = change(tiny_bert(norm=norm), GROWTHS[name])
    assert found < TOLERANCE if keeps else found > VISIBLE


def test_an_untied_model_keeps_its_function_too():
    growth = GROWTHS["decoalesce, threes"]
    # This has the same programs as the test of published tables below.
    assert change(tiny_bert(tied=False, eps=0.0), growth) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "norm"), [pytest.param("pairs", "pre", marks=pytest.mark.slow), ("threes", "post")]
)
def test_published_tables_keep_it_but_for_the_eps_of_their_norm(name, norm):
    """Check that the function is preserved up to eps.

    The norm sees ``x / k`` under the published tables, so its eps weighs k^2 times more.
    """
    growth = GROWTHS[f"decoalesce, {name}"]
    axes = tiny.paper_axes(tiny_bert(norm=norm))
    assert 1e-6 < change(tiny_bert(norm=norm, eps=1e-5), growth, axes) < 1e-2
    assert change(tiny_bert(norm=norm, eps=0.0), growth, axes) < TOLERANCE
    # Our axes preserve the function for any eps.
    assert change(tiny_bert(norm=norm, eps=1e-5), growth) < TOLERANCE


@pytest.mark.parametrize("mixed", ["tables", "norm"])
def test_mixing_our_axes_with_the_papers_breaks_preservation(mixed):
    config = tiny_bert()
    growth = GROWTHS["decoalesce, pairs"]
    ours, published = tiny.axes(config), tiny.paper_axes(config)
    axes = (
        published | {"head_norm": ours["head_norm"]}
        if mixed == "tables"
        else ours | {"head_norm": published["head_norm"]}
    )
    assert change(config, growth, axes) > VISIBLE


def test_published_tables_of_an_untied_model():
    config = tiny_bert(tied=False, eps=0.0)
    assert change(config, GROWTHS["decoalesce, threes"], tiny.paper_axes(config)) < TOLERANCE


# --- the published rules of coalescing as a NumPy reference ---


def average(groups, chunk):
    """Return F [small, large], whose small units are means of groups of ``chunk``-sized blocks."""
    f = np.zeros((len(groups) * chunk, sum(map(len, groups)) * chunk))
    for i, group in enumerate(groups):
        for j in group:
            f[i * chunk : (i + 1) * chunk, j * chunk : (j + 1) * chunk] = np.eye(chunk) / len(group)
    return f


def published(path):
    """Map each axis of a leaf to its role, output or input, in the published mapper.

    The mapping follows the code of Zou et al. (2024).
    """
    d, h, ff = "embed", "heads", "mlp"
    if path in ("token_embedding", "position_embedding", "type_embedding"):
        return {1: ("in", d)}
    if path == "head_bias":
        return {}
    if "norm/" in path or path == "transform/bias":
        return {1 if path.startswith("blocks") else 0: ("out", d)}
    if path == "transform/kernel":
        return {0: ("in", d), 1: ("out", d)}
    _, _, module, leaf = path.split("/")
    (i, read), (o, write) = {
        **dict.fromkeys(("query", "key", "value"), ((1, d), (2, h))),
        "out": ((1, h), (3, d)),
        "up": ((1, d), (2, ff)),
        "down": ((1, ff), (2, d)),
    }[module]
    return {1: ("out", write)} if leaf == "bias" else {i: ("in", read), o: ("out", write)}


@pytest.mark.parametrize(
    "groups", [((0, 3), (1, 4), (2, 5)), ((0, 2, 4), (5, 3, 1))], ids=["pairs", "threes"]
)
@pytest.mark.parametrize("direction", ["down", "up"])
def test_published_axes_are_the_published_rules(groups, direction):
    """Check the published axes for both directions.

    Coalescing multiplies outputs by F (means) and inputs by T.T (sums). De-coalescing multiplies
    outputs by T (copies) and inputs by F.T (equal shares).
    """
    f = {axis: average(groups, size // 6) for axis, size in WIDE.items()}
    t = {axis: (m.T > 0).astype(float) for axis, m in f.items()}
    operator = operators.coalesce if direction == "down" else operators.decoalesce
    growth = operator(to(**WIDE), heads=groups)
    config = tiny_bert(**{name: m.old for name, m in growth.items()})
    params, axes = tiny.params(config), tiny.paper_axes(config)
    for path, before, after in tiny.pairs(params, grow(growth, params, axes)):
        expected = before
        for i, (role, axis) in published(path).items():
            m = (f if role == "out" else t) if direction == "down" else (t if role == "out" else f)
            m = m[axis] if role == "out" else m[axis].T
            expected = np.moveaxis(np.tensordot(m, expected, (1, i)), 0, i)
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-6, err_msg=path)
        # The published code has these factors for pairs.
        if path.endswith("embedding") and len(groups) == 3:
            literal = (
                2 * before @ f["embed"].T if direction == "down" else before @ t["embed"].T / 2
            )
            np.testing.assert_allclose(after, literal, rtol=0, atol=1e-6, err_msg=path)


# --- dropped layers and tokens, frozen parts ---


@cache
def loss_and_gradient(config, frozen=0):
    """Return a function of ``(params, keep_mask, kept_tokens)`` with NumPy results.

    Operations on NumPy arrays need no compilation.
    """

    def loss(p, keep_mask=None, kept_tokens=None):
        passes = {"keep_mask": keep_mask, "kept_tokens": kept_tokens, "frozen": frozen}
        return jax.nn.log_softmax(
            config.module.apply({"params": p}, inputs(masked=False), **passes)
        )[..., 3].mean()

    run = jax.jit(jax.value_and_grad(loss))
    return lambda *args, **passes: jax.device_get(run(*args, **passes))


def test_sublayer_scaling_multiplies_the_branch_before_the_norm():
    """Check the scale of a post-LN sublayer.

    ``norm(x + s f(x))`` equals the layer with kernels that write to the stream multiplied by s.
    """
    config = tiny_bert()
    params, scale = tiny.params(config), np.array([1.5, 2.0])
    larger = jax.tree.map(np.copy, params)
    for part, module in (("attention", "out"), ("mlp", "down")):
        for x in larger["blocks"][part][module].values():
            x *= scale.reshape(-1, *[1] * (x.ndim - 1))
    found, _ = loss_and_gradient(config)(params, KeepMask(np.arange(2), scale, "sublayer"))
    np.testing.assert_allclose(found, loss_and_gradient(config)(larger)[0], rtol=0, atol=TOLERANCE)


# --- cost ---


def test_cost_by_hand():
    """Check the cost of one layer for 20 tokens, 3 of which are predicted.

    The layer has 4 kernels of 2x3, two of 2x5, and scores and sums over 20 positions.
    """
    config = BERTConfig(vocab=11, context=20, layers=1, embed=2, heads=1, head_dim=3, mlp=5)
    layer = 2 * (4 * 2 * 3 + 2 * 2 * 5) + 2 * (20 * 3 + 20 * 3)
    assert flops.forward_flops(config, 20) == pytest.approx(
        20 * layer + 3 * (2 * 2 * 2 + 2 * 2 * 11), rel=1e-12
    )
