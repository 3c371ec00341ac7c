"""Measure the memory of growing two kernels on 2 x 4 devices and print it as JSON.

Usage: ``python tests/support/sharded_memory.py [OPERATOR ..]``. It runs in a separate process
because the other tests have four devices.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jaxgrow import operators, sharding
from jaxgrow.axes import axis_of
from jaxgrow.growth import _sharded, maps
from jaxgrow.growth.apply import grow_leaf

SIZES = {"layers": 4, "embed": 1024, "mlp": 4096, "heads": 16, "head_dim": 64, "experts": 1}
MIXTURE = {"layers": 4, "experts": 2, "embed": 512, "mlp": 2048}
AXES = {"up": ("layers", "embed.in", "mlp"), "down": ("layers", "mlp.in", "embed")}
ONE_EXPERT = {name: ("layers", "experts", *names[1:]) for name, names in AXES.items()}
WIDE = {"embed": 2048, "mlp": 8192, "heads": 32}
PATH = "blocks/mlp/kernel"


def cases() -> dict[str, tuple[dict[str, int], maps.Growth]]:
    """Return the initial sizes and the growth of every operator."""
    dense = {axis: n for axis, n in SIZES.items() if axis != "experts"}
    found = {
        name: (dense, of(dense, {"layers": 8}))
        for name, of in operators.DEPTH.items()
        if name not in ("unloop", "passthrough")
    }
    for name, of in operators.WIDTH.items():
        found[name] = dense, of(dense, WIDE)
    found["average, layers too"] = dense, operators.average(dense, {**WIDE, "layers": 8})
    found["lemon, ragged"] = dense, operators.lemon(dense, {"embed": 1536, "mlp": 4608})
    found["upcycle"] = SIZES, operators.upcycle(SIZES, {"experts": 4})
    found["upcycle, two experts"] = MIXTURE, operators.upcycle(MIXTURE, {"experts": 4})
    found["virtual_groups"] = SIZES, operators.virtual_groups(SIZES, {"experts": 4, "mlp": 2048})
    halves = dict(heads="far", mlp="far", layers="adjacent")
    found["coalesce"] = dense, operators.coalesce(dense, **halves)
    small = dense | maps.new_sizes(operators.coalesce(dense, **halves))
    found["decoalesce"] = small, operators.decoalesce(dense, **halves)
    kept = {"layers": [0, 2, 3], "mlp": np.arange(0, 4096, 2)}
    found["keep"] = dense, operators.keep_units(dense, kept)
    scores = {"mlp": np.random.default_rng(0).normal(size=(4, 4096))}
    found["prune, units of each layer"] = dense, operators.prune(dense, {"mlp": 2048}, scores)
    return found


def memory(name: str) -> dict[str, tuple[float, float]]:
    """Return ``(temporary bytes of a device, allowed bytes)`` of each kernel.

    The allowed bytes are one slice and the device's rows of the matrices. A slice is at most as
    large as the device's shard of the source, or 1 MiB.
    """
    sizes, growth = cases()[name]
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    axes = ONE_EXPERT if "experts" in sizes else AXES
    out = {}
    for leaf, names in axes.items():
        terms, shape = maps.terms(growth, PATH, names), tuple(sizes[axis_of(n)] for n in names)
        where = NamedSharding(mesh, sharding.partition_spec(names, shape, mesh))
        x = jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
        with jax.set_mesh(mesh):
            compiled = jax.jit(partial(grow_leaf, terms, names)).lower(x).compile()
        found = compiled.memory_analysis()
        one_slice = max(found.argument_size_in_bytes, _sharded.LEAST_BUDGET)
        out[leaf] = found.temp_size_in_bytes, one_slice + products(terms, names, mesh)
    return out


def products(terms: Sequence[maps.Term], names: tuple[str, ...], mesh: jax.sharding.Mesh) -> float:
    """Count the bytes of the matrices that a device multiplies by."""
    total = 0.0
    for term, name in product(terms, names):
        m = term.get((axis_of(name),))
        p = _sharded.dim_map(m and m.of(name), np.dtype(np.float32))
        if p is not None and p.index is None:
            total += p.weight.nbytes / mesh.shape.get(sharding.RULES.get(axis_of(name)), 1)
    return total


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps({name: memory(name) for name in sys.argv[1:] or cases()}))
