"""The cost formulas of extra families and layer parts agree with counted matrix products."""

from dataclasses import replace

import jax
import pytest
from counting import assert_counted, programs

from jaxgrow import flops
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.layerdrop import TokenDrop
from jaxgrow.models import LlamaConfig

# XLA also counts norms, softmax and GELU, which the formula omits. They are 3 % at these sizes.
LEFT_OUT = 0.05
SIZES = dict(vocab=384, context=64, embed=64, heads=3, head_dim=32, mlp=160)
SHAPE = SIZES | {"kv_heads": 3}
FORMS = {
    "experts": LlamaConfig(**SHAPE, experts=5, active=2),
    "experts with a capacity": LlamaConfig(**SHAPE, experts=5, active=2, capacity=1.25),
    "sublayers in parallel, biases, no gate": LlamaConfig(**SHAPE, layer_norm=True, parallel=True, gated=False, bias=True,
        qkv_bias=True, rotary=0.5),
    "four norms, norms of queries and keys, a window, caps": LlamaConfig(**SHAPE, norms="both", query_norm="head", kinds="s",
        window=9, score_cap=5.0, logit_cap=5.0),
    # This config is wider because the error function of GELU, which is omitted, takes many
    # operations.
    "ModernBERT": ModernBERTConfig(**SHAPE | {"embed": 192, "head_dim": 64, "mlp": 480}, kinds="s", window=9),
}  # fmt: skip


CAIT = CaiTConfig(
    image=20, patch=5, classes=11, layers=3, embed=6, heads=3, head_dim=7, mlp=9, class_layers=4
)
COUNTED = {
    **{name: (replace(config, layers=2),) for name, config in FORMS.items()},
    "CaiT": (CAIT,),
    **{f"CaiT, {n} frozen": (CAIT, n) for n in (1, 3)},
    "CaiT, dropped patches": (CAIT, 0, TokenDrop(0.3)),
}


@pytest.mark.parametrize("given", COUNTED.values(), ids=COUNTED)
def test_every_matrix_product_is_counted(given):
    """Check every form, including experts in rows without a token."""
    assert_counted(*given)


@pytest.mark.parametrize("c2p", [True, False])
def test_every_matrix_product_of_deberta_is_counted(c2p):
    c = DeBERTaConfig(**SIZES, layers=2, distances=8, farthest=64, masked=0.25, c2p=c2p)
    # The keys and queries of relative positions are computed once for the batch.
    once = (c2p + c.p2c) * c.layers * 2 * c.distances * c.embed * c.heads * c.head_dim
    assert_counted(c, once=once)


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_xla_counts_little_more_of_every_form(config):
    """Check a forward pass of every form.

    XLA counts the body of a loop once, so experts in several rounds of blocks are not compared.
    """
    config = replace(config, layers=1)
    (forward, *_), arguments = programs(config)
    counted = jax.jit(forward).lower(*arguments).compile().cost_analysis()["flops"]
    assert 1 <= counted / flops.forward_flops(config, 2 * 64, at_once=2 * 64) < 1 + LEFT_OUT
