"""How much memory does a device need to grow one leaf of a large model? Compiled for eight H100s.

    python -m benchmarks.growth_memory [--on h100:8] [--json FILE.json]      # pip install -e '.[aot]'

The programs are compiled ahead of time and not run. Each row grows one kernel that is sharded by
`jaxgrow.sharding.RULES`. The bound: a device needs its shards of the source and of the result, and
one slice of the source that is at most as large as its shard.
"""

import json
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.common import environment, parser, save
from jaxgrow import compose, grow
from jaxgrow.axes import axis_of
from jaxgrow.growth.maps import Growth
from jaxgrow.operators import aki, hypercloning, stack
from jaxgrow.sharding import partition_spec
from train.common.errors import exits_cleanly
from train.extras.aot.machines import Machine, describe_machine
from train.state.mesh import Mesh

LEAVES = {"up": ("layers", "embed.in", "mlp"), "down": ("layers", "mlp.in", "embed")}
SEVEN = {"layers": 32, "embed": 4096, "mlp": 11008}
HALF = {"layers": 40, "embed": 4096, "mlp": 14336}
WIDE = {"embed": 5120, "mlp": 13824}


def growths() -> dict[str, tuple[dict[str, int], Growth]]:
    """The sizes of the source model and the growth, by name."""
    deep = stack(SEVEN, {"layers": 40})
    to_70b = {"embed": 8192, "mlp": 28672}
    return {
        "7B to 13B, AKI and stack": (SEVEN, compose(deep, aki(SEVEN, WIDE))),
        "half a 70B to 70B, HyperCloning and stack": (
            HALF,
            stack(HALF, {"layers": 80}) | hypercloning(HALF, to_70b),
        ),
    }


def row(
    machine: Machine, sizes: dict[str, int], growth: Growth, leaf: str, fsdp: int
) -> dict[str, Any]:
    """The memory of one device, in bytes, to grow one leaf.

    Args:
      machine: description of the machine.
      sizes: axis sizes of the source model.
      growth: the growth.
      leaf: name of the leaf in `LEAVES`.
      fsdp: size of the FSDP axis of the mesh; the tensor axis has the other devices.
    """
    names = LEAVES[leaf]
    count = len(machine.devices)
    mesh = Mesh(1, fsdp, count // fsdp).over(list(machine.devices))
    shape = tuple(sizes[axis_of(name)] for name in names)
    where = jax.sharding.NamedSharding(mesh, partition_spec(names, shape, mesh))
    x = jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
    with jax.set_mesh(mesh):
        program = jax.jit(partial(_grown, growth, names)).lower(x)
    memory = program.compile().memory_analysis()
    assert memory is not None  # all compilers in use report it
    return {
        "leaf": f"{leaf} {shape}",
        "mesh": f"fsdp={fsdp} tensor={count // fsdp}",
        "source": memory.argument_size_in_bytes,
        "result": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


def _grown(growth: Growth, names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Grow one leaf."""
    return grow(growth, {"kernel": x}, {"kernel": names})["kernel"]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--on", default="h100:8", help="machine, as for train.preflight")
    a = p.parse_args()
    jax.config.update("jax_platforms", "cpu")  # no device is needed
    machine = describe_machine(a.on)
    rows = []
    for name, (sizes, growth) in growths().items():
        for leaf in LEAVES:
            for fsdp in (len(machine.devices), 2):
                found = {"growth": name} | row(machine, sizes, growth, leaf, fsdp)
                found["within"] = found["temporary"] <= found["source"]
                print(json.dumps(found), flush=True)
                rows.append(found)
    save(a.json, {"on": a.on, "rows": rows} | environment("jax", "jaxlib"))


if __name__ == "__main__":
    exits_cleanly(main)
