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

import jaxgrow.extras.integrations.nnx as of_nnx
from jaxgrow import infer_rules

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
    """GPT-2 of transformers 4, Flax Linen: fused and flat heads, kernels as in PyTorch, a tied head."""
    name = "transformers.models.gpt2.modeling_flax_gpt2"
    found = pytest.importorskip(name, reason="pip install 'transformers<5'")

    def module(sizes):
        names = {"vocab_size": "vocab", "n_positions": "context", "n_layer": "layers"}
        names |= {"n_embd": "embed", "n_head": "heads", "n_inner": "mlp"}
        config = found.GPT2Config(**{key: sizes[name] for key, name in names.items()})
        return found.FlaxGPT2LMHeadModule(config)

    def apply(sizes):
        return lambda params, tokens: module(sizes).apply(
            {"params": params}, tokens, jnp.ones_like(tokens), POSITIONS, return_dict=False
        )[0]

    def shapes(sizes):
        init = partial(module(sizes).init, return_dict=False)
        given = (tokens(), jnp.ones_like(tokens()), POSITIONS)
        return jax.eval_shape(init, jax.random.key(0), *given)["params"]

    fused = (
        ("attn/c_attn/kernel", "(parts heads head_dim) embed", PARTS),
        ("attn/c_attn/bias", "(parts heads head_dim)", PARTS),
        ("attn/c_proj/kernel", "embed (heads head_dim)"),
    )
    corrected = {f"transformer/ln_f/{x}": (f"embed.in.norm.{x}",) for x in ("scale", "bias")}
    return Stranger(shapes, apply, "transformer/h/{}", {}, fused, SMALL, WIDE), corrected


def nanodo() -> tuple[Stranger, dict]:
    """nanodo of Google DeepMind, Flax Linen: modules named by numbers, and a tied head."""
    found = pytest.importorskip("nanodo.model", reason="nanodo, from its repository")

    def module(sizes):
        names = zip("DHLNVF", ("embed", "heads", "context", "layers", "vocab", "mlp"), strict=True)
        sized = {letter: sizes[name] for letter, name in names}
        return found.TransformerDo(found.DoConfig(**sized, fsdp_enabled=False))

    def shapes(sizes):
        return jax.eval_shape(module(sizes).init, jax.random.key(0), tokens())["params"]

    def apply(sizes):
        return lambda params, tokens: module(sizes).apply({"params": params}, tokens)

    corrected = {"out_ln/scale": ("embed.in.norm.scale",)}
    return Stranger(shapes, apply, "blocks_{}", {}, (), SMALL, WIDE), corrected


def tunix() -> tuple[Stranger, dict]:
    """Llama 3 of Google's Tunix, Flax NNX: GQA, scales called ``w``, and a tied head."""
    mask = np.tril(np.ones((len(tokens()), SMALL["context"], SMALL["context"]), bool))

    def shapes(sizes):
        return nnx.as_pure(nnx.state(nnx.eval_shape(llama_of_nnx(sizes)), nnx.Param))

    def apply(sizes):
        return lambda params, tokens: of_nnx.build_nnx(llama_of_nnx(sizes), params)(
            tokens, POSITIONS, None, mask
        )[0]

    corrected = {"final_norm/w": ("embed.in.norm.scale",)}
    return Stranger(shapes, apply, "layers/{}", {}, (), SMALL_GQA, WIDE_GQA), corrected


def eqx_zoo() -> tuple[Stranger, dict]:
    """Qwen 3 of eqx-zoo, Equinox: GQA, norms of queries and keys, and an untied head."""
    eqx = pytest.importorskip("equinox")
    found = pytest.importorskip("eqx_zoo.models.causal_lm", reason="pip install eqx-zoo")

    def known(sizes):
        names = {"vocab_size": "vocab", "hidden_size": "embed", "intermediate_size": "mlp"}
        names |= {"num_hidden_layers": "layers", "num_attention_heads": "heads"}
        names |= {"num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
        about = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}
        config = found.Config.from_hf(about | {key: sizes[n] for key, n in names.items()})
        model = eqx.filter_eval_shape(lambda: found.CausalLM(config, key=jax.random.key(0)))
        return eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def apply(sizes):
        static = known(sizes)[1]
        return lambda params, tokens: jax.vmap(lambda t: eqx.combine(params, static)(t)[0])(tokens)

    fused = (
        ("self_attn/[qkv]_proj/weight", "(heads head_dim) embed"),
        ("self_attn/o_proj/weight", "embed (heads head_dim)"),
    )
    shapes = lambda sizes: known(sizes)[0]  # noqa: E731
    return Stranger(shapes, apply, "layers/{}", {}, fused, SMALL_GQA, WIDE_GQA), {}


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
    """The control: each forgotten ``.in`` changes the outputs, also that before a tied head."""
    off = third_party.forgotten(journey)
    unseen = {leaf for leaf, by in off.items() if by < 100 * ATOL}
    # A norm of queries and keys cancels the factor by which their kernels were too large, so equal
    # outputs prove nothing there.
    cancelled = ("q_proj/weight", "k_proj/weight")
    assert unseen == {leaf for leaf in off if leaf.endswith(cancelled)}, off
