"""Unmodified models of public packages keep their outputs when they are widened and deepened.

Their axes are named from outside, and each model is trained before and after the growth. Install
the packages into a separate environment with ``pip install -e '.[third-party-test]'``. nanodo is
not on a package index, so install it from its repository.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import third_party
from flax import nnx
from third_party import Stranger, tokens
from tunix_models import llama_of_nnx

import jaxgrow
import jaxgrow.extras.integrations.nnx as of_nnx
from jaxgrow import from_rules, infer_rules, operators, sizes, stack_layers

# These warnings concern the packages.
pytestmark = [
    pytest.mark.third_party,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

# The models compute at least their softmax in float32. For logits of order ten, the order of
# summation changes the result by up to this much.
ATOL = 1e-4

SMALL = {"vocab": 13, "context": 7, "layers": 2, "embed": 12, "heads": 3, "head_dim": 4, "mlp": 10}
WIDE = {"embed": 24, "heads": 6, "mlp": 20}
SMALL_GQA, WIDE_GQA = {**SMALL, "heads": 6, "kv_heads": 3}, {**WIDE, "heads": 12, "kv_heads": 6}
POSITIONS = np.broadcast_to(np.arange(SMALL["context"]), tokens().shape)
PARTS = ("query", "key", "value")


@pytest.fixture(scope="module", autouse=True)
def their_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def gpt2() -> tuple[Stranger, dict]:
    """GPT-2 of transformers 4, Flax Linen: fused and flat heads, and a tied head.

    The kernels have the layout of PyTorch and the names of Flax.
    """
    found = pytest.importorskip(
        "transformers.models.gpt2.modeling_flax_gpt2", reason="pip install 'transformers<5'"
    )

    def module(sizes):
        config = found.GPT2Config(
            vocab_size=sizes["vocab"],
            n_positions=sizes["context"],
            n_layer=sizes["layers"],
            n_embd=sizes["embed"],
            n_head=sizes["heads"],
            n_inner=sizes["mlp"],
        )
        return found.FlaxGPT2LMHeadModule(config)

    def apply(sizes):
        return lambda params, tokens: module(sizes).apply(
            {"params": params}, tokens, jnp.ones_like(tokens), POSITIONS, return_dict=False
        )[0]

    def shapes(sizes):
        init = partial(module(sizes).init, return_dict=False)
        return jax.eval_shape(
            init, jax.random.key(0), tokens(), jnp.ones_like(tokens()), POSITIONS
        )["params"]

    fused = (
        ("attn/c_attn/kernel", "(parts heads head_dim) embed", PARTS),
        ("attn/c_attn/bias", "(parts heads head_dim)", PARTS),
        ("attn/c_proj/kernel", "embed (heads head_dim)"),
    )
    corrected = {
        "transformer/ln_f/scale": ("embed.in.norm.scale",),
        "transformer/ln_f/bias": ("embed.in.norm.bias",),
    }
    return Stranger(shapes, apply, "transformer/h/{}", {}, fused, SMALL, WIDE), corrected


def nanodo() -> tuple[Stranger, dict]:
    """nanodo of Google DeepMind, Flax Linen: modules named by numbers, and a tied head."""
    found = pytest.importorskip("nanodo.model", reason="nanodo, from its repository")

    def module(sizes):
        letters = {
            "D": "embed",
            "H": "heads",
            "L": "context",
            "N": "layers",
            "V": "vocab",
            "F": "mlp",
        }
        sized = {letter: sizes[name] for letter, name in letters.items()}
        return found.TransformerDo(found.DoConfig(**sized, fsdp_enabled=False))

    return Stranger(
        lambda sizes: jax.eval_shape(module(sizes).init, jax.random.key(0), tokens())["params"],
        lambda sizes: lambda params, tokens: module(sizes).apply({"params": params}, tokens),
        "blocks_{}",
        {},
        (),
        SMALL,
        WIDE,
    ), {"out_ln/scale": ("embed.in.norm.scale",)}


def tunix() -> tuple[Stranger, dict]:
    """Llama 3 of Google's Tunix, Flax NNX: GQA, scales called ``w``, and a tied head."""
    mask = np.tril(np.ones((len(tokens()), SMALL["context"], SMALL["context"]), bool))

    def shapes(sizes):
        return nnx.as_pure(nnx.state(nnx.eval_shape(llama_of_nnx(sizes)), nnx.Param))

    def apply(sizes):
        return lambda params, tokens: of_nnx.build_nnx(llama_of_nnx(sizes), params)(
            tokens, POSITIONS, None, mask
        )[0]

    return Stranger(shapes, apply, "layers/{}", {}, (), SMALL_GQA, WIDE_GQA), {
        "final_norm/w": ("embed.in.norm.scale",)
    }


def eqx_zoo() -> tuple[Stranger, dict]:
    """Qwen 3 of eqx-zoo, Equinox: GQA, norms of queries and keys, and an untied head."""
    eqx = pytest.importorskip("equinox")
    found = pytest.importorskip("eqx_zoo.models.causal_lm", reason="pip install eqx-zoo")

    def known(sizes):
        hugging_face = {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": sizes["vocab"],
            "hidden_size": sizes["embed"],
            "intermediate_size": sizes["mlp"],
            "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["kv_heads"],
            "head_dim": sizes["head_dim"],
            "rms_norm_eps": 1e-6,
        }
        config = found.Config.from_hf(hugging_face)
        model = eqx.filter_eval_shape(lambda: found.CausalLM(config, key=jax.random.key(0)))
        return eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def apply(sizes):
        static = known(sizes)[1]
        return lambda params, tokens: jax.vmap(lambda t: eqx.combine(params, static)(t)[0])(tokens)

    fused = (
        ("self_attn/[qkv]_proj/weight", "(heads head_dim) embed"),
        ("self_attn/o_proj/weight", "embed (heads head_dim)"),
    )
    return Stranger(
        lambda sizes: known(sizes)[0], apply, "layers/{}", {}, fused, SMALL_GQA, WIDE_GQA
    ), {}


def named(model: Stranger, corrected: dict) -> Stranger:
    """Return the model with the rules that `infer_rules` proposes and the corrections of wrong rules."""
    proposed = infer_rules(model.inwards(third_party.drawn(model.shapes(model.small))), model.small)
    assert set(corrected) <= set(proposed)
    return model._replace(rules=proposed | corrected)


@pytest.fixture(scope="module", params=[gpt2, nanodo, tunix, eqx_zoo], ids=lambda of: of.__name__)
def journey(request) -> third_party.Journey:
    return third_party.journey(named(*request.param()), np.float32)


def test_a_public_model_keeps_its_function_and_trains_on(journey):
    before, after = journey.logits
    np.testing.assert_allclose(after, before, rtol=0, atol=ATOL)
    assert np.abs(before).max() > 1
    first, later = journey.losses
    assert later[-1] < later[0] < first[0]


def test_each_axis_that_is_read_must_be_said_to_be(journey):
    """The control: each forgotten ``.in`` changes the outputs, including those in the corrections.

    The scale before a tied head is one of the leaves that need ``.in``.
    """
    off = third_party.forgotten(journey)
    unseen = {leaf for leaf, by in off.items() if by < 100 * ATOL}
    # A norm of queries and keys cancels the factor by which their kernels were too large, so equal
    # outputs prove nothing there.
    assert unseen == {leaf for leaf in off if leaf.endswith(("q_proj/weight", "k_proj/weight"))}, (
        off
    )


def test_a_model_of_nnx_is_grown_as_a_model():
    """The `nnx` integration grows a model bitwise like `grow`, and the graph has the new sizes."""
    stranger = named(*tunix())
    given = third_party.drawn(stranger.shapes(SMALL_GQA), np.float32)
    model = of_nnx.build_nnx(llama_of_nnx(SMALL_GQA), given)
    axes = stack_layers(from_rules(given, stranger.rules), "layers/{}")
    growth = operators.hypercloning(sizes(stack_layers(given, "layers/{}"), axes), WIDE_GQA)
    wide = of_nnx.grow_nnx(
        model, growth, axes, llama_of_nnx({**SMALL_GQA, **WIDE_GQA}), "layers/{}"
    )
    stacked = jaxgrow.grow(growth, stack_layers(given, "layers/{}"), axes)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.as_pure(nnx.state(wide, nnx.Param)),
        jaxgrow.restructure(
            jaxgrow.unstack_layers(stacked, "layers/{}"), stranger.shapes({**SMALL_GQA, **WIDE_GQA})
        ),
    )
    assert wide.layers[0].attn.num_kv_heads == WIDE_GQA["kv_heads"]
