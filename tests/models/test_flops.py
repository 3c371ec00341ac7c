"""The cost formula agrees with hand calculations, counted matrix products and XLA's own count."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import products, programs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxgrow import flops
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.layerdrop import TokenDrop
from jaxgrow.models import GPT2Config, LlamaConfig
from jaxgrow.models.stack import KeptTokens

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


@pytest.mark.parametrize(
    ("layers", "context", "tied"),
    [
        (2, 300, False),  # three blocks of queries; (3, 64), tied, is tested below
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((1, 64, True), (1, 64, False), (2, 300, True))
        ),
    ],
)
def test_every_matrix_product_of_the_program_is_counted(layers, context, tied):
    config = GPT2Config(layers=layers, tied=tied, **SIZES | {"context": context})
    (forward, step, trained), arguments = programs(config)
    assert flops.forward_flops(config, 2 * context) == products(
        jax.make_jaxpr(forward)(*arguments).jaxpr
    )
    for program in (step, trained):
        assert flops.train_flops(config, 2 * context) == products(
            jax.make_jaxpr(program)(*arguments).jaxpr
        )


@pytest.mark.parametrize(
    ("frozen", "tied"),
    [
        *((0, True), (1, False)),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((0, False), (1, True), (3, False), (3, True))
        ),
    ],
)
def test_no_backward_product_is_computed_below_frozen_layers(frozen, tied):
    config = GPT2Config(layers=3, tied=tied, **SIZES)
    (forward, step, trained), arguments = programs(config, frozen=frozen)
    assert flops.forward_flops(config, 2 * 64) == products(
        jax.make_jaxpr(forward)(*arguments).jaxpr
    )
    for program in (step, trained):
        assert flops.train_flops(config, 2 * 64, frozen=frozen) == products(
            jax.make_jaxpr(program)(*arguments).jaxpr
        )


@pytest.mark.parametrize(
    ("context", "rate", "first", "last", "frozen"),
    [
        (300, 0.15, 1, 1, 2),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                (64, 0.15, 1, 1, 0),
                (64, 0.3, 2, 0, 3),
                (64, 0.5, 0, 2, 1),
                (300, 0.9, 0, 0, 4),
            )
        ),
    ],
)
def test_tokens_that_go_around_layers_are_not_computed_there(context, rate, first, last, frozen):
    config = GPT2Config(layers=4, tied=False, **SIZES | {"context": context})
    drop = TokenDrop(rate, first, last)
    positions = np.broadcast_to(
        np.arange(drop.kept(context), dtype=np.int32), (2, drop.kept(context))
    )
    (_, step, trained), arguments = programs(
        config, kept_tokens=KeptTokens(positions, *drop.middle(4)), frozen=frozen
    )
    for program in (step, trained):
        counted = products(jax.make_jaxpr(program)(*arguments).jaxpr)
        assert flops.train_flops(config, 2 * context, frozen=frozen, drop=drop) == pytest.approx(
            counted, rel=1e-12
        )
        assert counted < flops.train_flops(config, 2 * context, frozen=frozen)


def test_a_long_sequence_costs_about_half_of_its_square():
    config = GPT2Config(layers=1, **SIZES | {"context": 4096})
    whole = flops.forward_flops(config, 1, length=64)
    scores = 4 * config.heads * config.head_dim
    assert flops.forward_flops(config, 1) == whole + scores * ((4096 + 128) / 2 - 64)


def test_xla_counts_little_more():
    """Use one layer, because XLA counts the body of a loop once, for any number of iterations."""
    config = GPT2Config(layers=1, **SIZES)
    (forward, step, _), arguments = programs(config)
    for program, formula in ((forward, flops.forward_flops), (step, flops.train_flops)):
        counted = jax.jit(program).lower(*arguments).compile().cost_analysis()["flops"]
        assert 1 <= counted / formula(config, 2 * 64) < 1 + LEFT_OUT


# These configs add the layer parts that the configs above do not have.
SHAPE = SIZES | {"kv_heads": 3}
FORMS = {
    "experts": LlamaConfig(**SHAPE, experts=5, active=2),
    "experts with a capacity": LlamaConfig(**SHAPE, experts=5, active=2, capacity=1.25),
    "sublayers in parallel, biases, no gate": LlamaConfig(
        **SHAPE, layer_norm=True, parallel=True, gated=False, bias=True, qkv_bias=True, rotary=0.5
    ),
    "four norms, norms of queries and keys, a window, caps": LlamaConfig(
        **SHAPE, norms="both", query_norm="head", kinds="s", window=9, score_cap=5.0, logit_cap=5.0
    ),
    # This config is wider because the error function of GELU, which is omitted, takes many
    # operations.
    "ModernBERT": ModernBERTConfig(
        **SHAPE | {"embed": 192, "head_dim": 64, "mlp": 480}, kinds="s", window=9
    ),
}


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_every_matrix_product_of_every_form_is_counted(config):
    """Check every form, including experts in rows without a token."""
    config = replace(config, layers=2)
    (forward, *steps), arguments = programs(config)
    counted = products(jax.make_jaxpr(forward)(*arguments).jaxpr)
    assert flops.forward_flops(config, 2 * 64, at_once=2 * 64) == pytest.approx(counted, rel=1e-12)
    for program in steps:
        counted = products(jax.make_jaxpr(program)(*arguments).jaxpr)
        assert flops.train_flops(config, 2 * 64, at_once=2 * 64) == pytest.approx(
            counted, rel=1e-12
        )


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_xla_counts_little_more_of_every_form(config):
    """Check a forward pass of every form.

    XLA counts the body of a loop once, so experts in several rounds of blocks are not compared.
    """
    config = replace(config, layers=1)
    (forward, *_), arguments = programs(config)
    counted = jax.jit(forward).lower(*arguments).compile().cost_analysis()["flops"]
    assert 1 <= counted / flops.forward_flops(config, 2 * 64, at_once=2 * 64) < 1 + LEFT_OUT


# --- counting any program ---


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


@pytest.mark.parametrize(
    ("function", "shapes", "products", "arithmetic"),
    [
        (lambda x, y: x @ y, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 0),
        (
            lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
            [(7, 2, 3), (7, 3, 5)],
            2 * 7 * 2 * 3 * 5,
            0,
        ),
        (lambda x: (x + 1).sum(0), [(2, 3)], 0, 6 + 6),
        (scanned, [(3, 3)], 7 * 2 * 27, 7 * 9),
        (jax.jit(jax.checkpoint(scanned)), [(3, 3)], 7 * 2 * 27, 7 * 9),
        (either, [(2, 3), (3, 3)], 2 * 2 * 2 * 9, 0),
        (divided, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 0),
        (repeated, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 0),
        (lambda x: x.at[jnp.array([0, 0])].add(1.0), [(2, 3)], 0, 6),
        (lambda x: jax.lax.fori_loop(0, 4, lambda _, y: y * 2, x), [(2, 3)], 0, 4 * 6),
        (
            lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"),
            [(1, 2, 4, 4), (5, 2, 3, 3)],
            2 * (5 * 2 * 2) * (2 * 9),
            0,
        ),
        # control: moving data is not arithmetic
        (lambda x: x.T[:1].astype(jnp.bfloat16), [(2, 3)], 0, 0),
    ],
)
def test_operations_of_a_traced_program(function, shapes, products, arithmetic):
    assert count(function, *shapes) == (products, arithmetic)
