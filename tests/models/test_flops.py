"""The cost formula agrees with hand calculations, counted matrix products and XLA's own count."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import cases
from counting import assert_counted, programs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxgrow import flops
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.extras.token_dropping import TokenDrop
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig, ViTConfig

# XLA also counts norms, softmax and GELU, which the formula omits. They are 3 % at these sizes.
LEFT_OUT = 0.05
SIZES = dict(vocab=384, context=64, embed=64, heads=3, head_dim=32, mlp=160)


def test_by_hand():
    """Check one token through one layer, where every size is one except two.

    The layer has 4 kernels of 2x3, two of 2x5, scores and sums over 7 positions, and 11 words.
    """
    config = GPT2Config(vocab=11, context=7, layers=1, embed=2, heads=1, head_dim=3, mlp=5)
    kernels, attention, head = 2 * (4 * 2 * 3 + 2 * 2 * 5), 2 * (7 * 3 + 7 * 3), 2 * 2 * 11
    assert flops.forward_flops(config, 1) == kernels + attention + head
    assert flops.forward_flops(config, 10) == 10 * flops.forward_flops(config, 1)
    assert flops.forward_flops(config, 1, length=5) == kernels + 2 * (5 * 3 + 5 * 3) + head
    assert flops.train_flops(config, 10) == 3 * flops.forward_flops(config, 10)


GROUPED = SIZES | {"heads": 6, "kv_heads": 2}
IMAGES = dict(image=10, patch=5, classes=11, layers=3, embed=6, heads=3, head_dim=7, mlp=9)
DINO = dict(layer_scale=0.5, gated=True, mean_head=True)
CAIT = CaiTConfig(**IMAGES, class_layers=4)
SHAPE = SIZES | {"kv_heads": 3}
# Forms of layers that are extras. ModernBERT is wider because the error function of GELU, which is
# omitted, takes many operations.
FORMS = {
    "experts": LlamaConfig(**SHAPE, experts=5, active=2),
    "experts with a capacity": LlamaConfig(**SHAPE, experts=5, active=2, capacity=1.25),
    "sublayers in parallel, biases, no gate": LlamaConfig(**SHAPE, layer_norm=True, parallel=True, gated=False, bias=True,
        qkv_bias=True, rotary=0.5),
    "four norms, norms of queries and keys, a window, caps": LlamaConfig(**SHAPE, norms="both", query_norm="head", kinds="s",
        window=9, score_cap=5.0, logit_cap=5.0),
    "ModernBERT": ModernBERTConfig(**SHAPE | {"embed": 192, "head_dim": 64, "mlp": 480}, kinds="s", window=9),
}  # fmt: skip
# A config, the number of frozen layers, and the dropped tokens. Three blocks of queries have 300
# positions.
COUNTED = {
    "gpt2": (GPT2Config(layers=2, tied=False, **SIZES | {"context": 300}),),
    "gpt2, tied": (GPT2Config(layers=3, **SIZES),),
    "gpt2, frozen": (GPT2Config(layers=3, tied=False, **SIZES), 1),
    "gpt2, dropped tokens": (GPT2Config(layers=4, tied=False, **SIZES | {"context": 300}), 2, TokenDrop(0.15, 1, 1)),
    "gpt2, tied, frozen": (GPT2Config(layers=3, **SIZES), 3),
    "gpt2, all layers drop": (GPT2Config(layers=4, tied=False, **SIZES | {"context": 300}), 4, TokenDrop(0.9, 0, 0)),
    "llama, frozen": (LlamaConfig(layers=3, **GROUPED | {"context": 300}), 2),
    "llama, tied, dropped tokens": (LlamaConfig(layers=3, tied=True, **GROUPED), 1, TokenDrop(0.5)),
    "bert": (BERTConfig(layers=2, **SIZES | {"context": 150}, first_position=2, masked=0.3),),
    "bert, frozen": (BERTConfig(layers=3, **SIZES), 1),
    "bert, pre-norm, dropped tokens": (BERTConfig(layers=4, norm="pre", tied=False, **SIZES), 0, TokenDrop(0.5)),
    "vit": (ViTConfig(**IMAGES),),
    "vit, frozen": (ViTConfig(**IMAGES, distillation="head"), 1),
    "dinov2, frozen": (ViTConfig(**IMAGES, **DINO), 3),
    "cait": (CAIT,),
    "cait, one frozen": (CAIT, 1),
    "cait, three frozen": (CAIT, 3),
    "cait, dropped patches": (CAIT, 0, TokenDrop(0.3)),
    **{name: (replace(config, layers=2),) for name, config in FORMS.items()},
}  # fmt: skip
SHOWN = ("gpt2", "gpt2, dropped tokens", "llama, frozen", "bert", "vit")


@pytest.mark.parametrize("name", cases(COUNTED.keys(), SHOWN))
def test_every_matrix_product_is_counted(name):
    """Frozen layers have no backward products, and dropped tokens have none in their layers."""
    assert_counted(*COUNTED[name])


UNUSED = [dict(pooler="tanh"), dict(pooler="attention"), dict(head="states", mean_head=True),
    dict(head="states", distillation="head")]  # fmt: skip


@pytest.mark.parametrize("fields", UNUSED)
def test_a_head_or_a_pooler_that_does_not_run_is_not_counted(fields):
    assert_counted(ViTConfig(**IMAGES, **fields))


@pytest.mark.extra
def test_every_matrix_product_of_deberta_is_counted():
    c = DeBERTaConfig(**SIZES, layers=2, distances=8, farthest=64, masked=0.25)
    # The keys and queries of relative positions are computed once for the batch.
    once = 2 * c.layers * 2 * c.distances * c.embed * c.heads * c.head_dim
    assert_counted(c, once=once)


def test_a_long_sequence_costs_about_half_of_its_square():
    config = GPT2Config(layers=1, **SIZES | {"context": 4096})
    whole = flops.forward_flops(config, 1, length=64)
    scores = 4 * config.heads * config.head_dim
    assert flops.forward_flops(config, 1) == whole + scores * ((4096 + 128) / 2 - 64)


@pytest.mark.parametrize("name", cases(["gpt2", *FORMS], ["gpt2"], FORMS))
def test_xla_counts_little_more(name):
    """Use one layer, because XLA counts the body of a loop once, for any number of iterations."""
    config = replace(FORMS.get(name, COUNTED["gpt2, tied"][0]), layers=1)
    (forward, step, _), arguments = programs(config)
    positions = 2 * 64
    formulas = {forward: flops.forward_flops(config, positions, at_once=positions)}
    if name not in FORMS:  # for experts, XLA counts one round of their blocks
        formulas[step] = flops.train_flops(config, positions)
    for program, formula in formulas.items():
        counted = jax.jit(program).lower(*arguments).compile().cost_analysis()["flops"]
        assert 1 <= counted / formula < 1 + LEFT_OUT


def count(function, *shapes):
    return flops.counted(jax.make_jaxpr(function)(*[jnp.zeros(shape) for shape in shapes]).jaxpr)


def scanned(x):
    return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ carry), None), x, length=7)[0]


def either(x, y):
    """Branch between a function without a product and a function with two products."""
    return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: x @ y @ y)


TWO = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
SQUARE = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@partial(jax.shard_map, mesh=TWO, in_specs=(P("data"), P()), out_specs=P("data"))
def divided(x, y):
    return x @ y


@partial(jax.shard_map, mesh=SQUARE, in_specs=(P("data"), P()), out_specs=P("data"))
def repeated(x, y):
    """Divide rows between two pairs of devices. Both devices of a pair compute the same."""
    return x @ y


@pytest.mark.parametrize(("function", "shapes", "products", "arithmetic"), [
    (lambda x, y: x @ y, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 0),
    (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(7, 2, 3), (7, 3, 5)], 2 * 7 * 2 * 3 * 5, 0),
    (lambda x: (x + 1).sum(0), [(2, 3)], 0, 6 + 6),
    (scanned, [(3, 3)], 7 * 2 * 27, 7 * 9),
    (jax.jit(jax.checkpoint(scanned)), [(3, 3)], 7 * 2 * 27, 7 * 9),
    (either, [(2, 3), (3, 3)], 2 * 2 * 2 * 9, 0),
    (divided, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 0),
    (repeated, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 0),
    (lambda x: x.at[jnp.array([0, 0])].add(1.0), [(2, 3)], 0, 6),
    (lambda x: jax.lax.fori_loop(0, 4, lambda _, y: y * 2, x), [(2, 3)], 0, 4 * 6),
    (lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), [(1, 2, 4, 4), (5, 2, 3, 3)], 2 * (5 * 2 * 2) * (2 * 9), 0),
    # control: moving data is not arithmetic
    (lambda x: x.T[:1].astype(jnp.bfloat16), [(2, 3)], 0, 0),
])  # fmt: skip
def test_operations_of_a_traced_program(function, shapes, products, arithmetic):
    assert count(function, *shapes) == (products, arithmetic)
