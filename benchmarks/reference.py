"""The ceiling of a plain training step of GPT-2 124M, for comparison: python -m benchmarks.reference [--on h100:1] [--batch 32]

The step is written like the default steps of nanodo and MaxText: layers in a scan that saves
products, activations in bfloat16, attention by cuDNN, all logits at once, a cross-entropy in
float32, AdamW of optax. It is compiled for a GPU that does not have to be present. Its ceiling is
the roofline that `python -m train.preflight` prints for jaxgrow's steps. Nothing is run.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgrow import flops
from jaxgrow.models import GPT2Config
from train.common.errors import exits_cleanly
from train.extras.aot.machines import Machine, describe_machine
from train.extras.aot.roofline import program_kernels, sum_kernels

C = GPT2Config(dtype="bfloat16")


def normed(x, scale, bias):
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + C.eps)
    return (y * scale + bias).astype(jnp.bfloat16)


def product(w, x):
    return x @ w["kernel"].astype(jnp.bfloat16) + w["bias"].astype(jnp.bfloat16)


def layer(x, w):
    samples, length, width = x.shape
    h = normed(x, w["attention_norm"]["scale"], w["attention_norm"]["bias"])
    q, k, v = (
        y.reshape(samples, length, C.heads, C.head_dim)
        for y in jnp.split(product(w["qkv"], h), 3, -1)
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + product(w["out"], y.reshape(samples, length, width))
    h = normed(x, w["mlp_norm"]["scale"], w["mlp_norm"]["bias"])
    return x + product(w["down"], jax.nn.gelu(product(w["up"], h))), None


def loss(params, tokens, targets):
    table = params["tokens"]
    x = (jnp.take(table, tokens, 0) + params["positions"][None]).astype(jnp.bfloat16)
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=saved, prevent_cse=False), x, params["layers"])
    x = normed(x, params["norm"]["scale"], params["norm"]["bias"])
    logits = (x @ table.T.astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def shapes() -> Any:
    def linear(inputs, outputs):
        return {"kernel": (C.layers, inputs, outputs), "bias": (C.layers, outputs)}

    def norm(*layers):
        return {"scale": (*layers, C.embed), "bias": (*layers, C.embed)}

    layers = {"qkv": linear(C.embed, 3 * C.embed), "out": linear(C.embed, C.embed)}
    layers |= {"up": linear(C.embed, C.mlp), "down": linear(C.mlp, C.embed)}
    layers |= {"attention_norm": norm(C.layers), "mlp_norm": norm(C.layers)}
    tables = {"tokens": (C.vocab, C.embed), "positions": (C.context, C.embed)}
    return {"layers": layers, "norm": norm(), **tables}


def ceiling(machine: Machine, batch: int) -> dict[str, float]:
    """The lower bound of the step time in milliseconds, and the upper bound of the MFU."""
    mesh = Mesh(np.array(machine.devices[:1]), ("data",))
    where = NamedSharding(mesh, P())
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1))

    def step(params, state, tokens, targets):
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((batch, C.context), "int32")
    given = params, jax.eval_shape(tx.init, params), tokens, tokens
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), given)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*placed).compile()
    assert machine.chip.flops and machine.chip.bandwidth
    least = sum_kernels(
        program_kernels(compiled.as_text() or ""), machine.chip.flops, machine.chip.bandwidth
    )
    cost = flops.train_flops(C, batch * C.context) / machine.chip.flops
    parts = {name: seconds * 1e3 for name, seconds in least.parts.items()}
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        "milliseconds": least.seconds * 1e3,
        "mfu": cost / least.seconds,
        "gigabytes": held / 1e9,
        **parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", default="h100:1", help="a machine with one GPU")
    parser.add_argument("--batch", type=int, default=32)
    a = parser.parse_args()
    # compilation needs no device, and must not occupy one
    jax.config.update("jax_platforms", "cpu")
    for name, value in ceiling(describe_machine(a.on), a.batch).items():
        print(f"{name} {value:.4g}")


if __name__ == "__main__":
    exits_cleanly(main)
