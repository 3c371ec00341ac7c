"""BERT and RoBERTa: axes, growth, layer dropping and cost, in float64 through two layers."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from jaxgrow import grow, operators
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
    norm = {"scale": ("embed.norm.scale",), "bias": ("embed.norm.bias",)}
    assert published.pop("head_norm") == norm
    assert axes.pop("head_norm")["scale"] == (
        "embed.in.norm.scale" if tied else "embed.norm.scale",
    )
    assert published == axes


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
    whole = {"tokens": np.zeros((1, 5), int), **given}
    with pytest.raises(ValueError, match=message):
        config.module.apply({"params": tiny.params(config)}, whole, **passes)


# --- the function; `test_interop_core` compares it with transformers ---


def test_a_pooler_adds_no_keys_to_a_published_config():
    """``config.json`` of MiniLM leaves out a key whose default applies."""
    said = dict(
        architectures=["BertModel"], model_type="bert", vocab_size=11, hidden_size=12,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
    )  # fmt: skip
    family = FAMILIES["BertModel"]
    config = replace(family.from_hf(said), pooler=True)
    assert family.to_hf(config, said) == said
    assert family.to_hf(replace(config, mlp=24), said) == said | {"intermediate_size": 24}


def test_names_in_older_files():
    current, norm = FAMILIES["BertForMaskedLM"].current, "cls.predictions.transform.LayerNorm"
    assert current("bert.embeddings.LayerNorm.gamma") == "bert.embeddings.LayerNorm.weight"
    assert current(f"{norm}.beta") == f"{norm}.bias"
    assert current("bert.pooler.dense.bias") == "bert.pooler.dense.bias"


def test_logits_at_places_are_those_of_the_places():
    config = tiny_bert()
    params, positions = tiny.params(config), np.array([[0, 2, 5], [1, 3, 4]])
    everywhere = np.asarray(tiny.forward(config)(params, inputs()))
    found = tiny.forward(config)(params, inputs() | {"positions": positions})
    expected = np.take_along_axis(everywhere, positions[..., None], 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


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
    "hypercloning": operators.hypercloning(OLD, WIDE),
    "staged": operators.staged(OLD, WIDE),
    "fpi heads and mlp": operators.fpi(OLD, {"heads": 5, "mlp": 13}, seed=1),
    "lemon, ragged": operators.lemon(OLD, {"embed": 8, "heads": 5, "mlp": 13}, seed=3),
    "stack": operators.stack(OLD, {"layers": 4}),
    "llama_pro": operators.llama_pro(OLD, {"layers": 4}),
}


def change(config, growth, axes=None):
    """Return ``max |logit difference| / std of the logits`` when the model grows."""
    params = tiny.params(config)
    before = tiny.forward(config)(params, inputs())
    grown = grow(growth, params, axes or tiny.axes(config))
    after = tiny.forward(config.resized(growth))(grown, inputs())
    return float(np.abs(np.subtract(after, before)).max() / np.std(before))


@pytest.mark.parametrize(("name", "norm", "keeps"), [
    *((name, "post", True) for name in ("decoalesce, threes", "hypercloning", "staged", "fpi heads and mlp")),
    ("llama_pro", "post", False),
    pytest.param("stack", "post", False, marks=pytest.mark.slow),
    *((name, "pre", True) for name in ("staged", "llama_pro")),
    *((name, "pre", False) for name in ("stack", "lemon, ragged")),
])  # fmt: skip
def test_what_keeps_the_function_of_a_tied_model(name, norm, keeps):
    found = change(tiny_bert(norm=norm), GROWTHS[name])
    assert found < TOLERANCE if keeps else found > VISIBLE


def test_published_tables_keep_it_but_for_the_eps_of_their_norm():
    """The norm sees ``x / k`` under the published tables, so its eps weighs k^2 times more."""
    growth, (one, none) = GROWTHS["decoalesce, threes"], (tiny_bert(eps=e) for e in (1e-5, 0.0))
    axes = tiny.paper_axes(one)
    assert 1e-6 < change(one, growth, axes) < 1e-2
    assert change(none, growth, axes) < TOLERANCE
    assert change(one, growth) < TOLERANCE


@pytest.mark.parametrize("axes_of", [tiny.axes, tiny.paper_axes])
def test_an_untied_model_keeps_its_function_too(axes_of):
    config = tiny_bert(tied=False, eps=0.0)
    assert change(config, GROWTHS["decoalesce, threes"], axes_of(config)) < TOLERANCE


@pytest.mark.parametrize("mixed", ["tables", "norm"])
def test_mixing_our_axes_with_the_papers_breaks_preservation(mixed):
    config = tiny_bert()
    growth = GROWTHS["decoalesce, pairs"]
    ours, published = tiny.axes(config), tiny.paper_axes(config)
    parts, other = (published, ours) if mixed == "tables" else (ours, published)
    axes = parts | {"head_norm": other["head_norm"]}
    assert change(config, growth, axes) > VISIBLE


# --- the published rules of coalescing as a NumPy reference ---


def average(groups, chunk):
    """Return F [small, large], whose small units are means of groups of ``chunk``-sized blocks."""
    f = np.zeros((len(groups) * chunk, sum(map(len, groups)) * chunk))
    for i, group in enumerate(groups):
        for j in group:
            f[i * chunk : (i + 1) * chunk, j * chunk : (j + 1) * chunk] = np.eye(chunk) / len(group)
    return f


def published(path):
    """Map each axis of a leaf to its role in the published mapper of Zou et al. (2024)."""
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
            m = 2 * f["embed"].T if direction == "down" else t["embed"].T / 2
            np.testing.assert_allclose(after, before @ m, rtol=0, atol=1e-6, err_msg=path)


# --- dropped layers ---


def test_sublayer_scaling_multiplies_the_branch_before_the_norm():
    """``norm(x + s f(x))`` is the layer whose writing kernels are multiplied by s."""
    config = tiny_bert()
    params, scale = tiny.params(config), np.array([1.5, 2.0])
    larger = jax.tree.map(np.copy, params)
    for part, module in (("attention", "out"), ("mlp", "down")):
        for x in larger["blocks"][part][module].values():
            x *= scale.reshape(-1, *[1] * (x.ndim - 1))

    @jax.jit
    def logits(p, keep_mask=None):
        return config.module.apply({"params": p}, inputs(masked=False), keep_mask=keep_mask)

    found = logits(params, KeepMask(np.arange(2), scale, "sublayer"))
    np.testing.assert_allclose(found, logits(larger), rtol=0, atol=TOLERANCE)
