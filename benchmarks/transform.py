"""How fast are growing and coalescing, compared with a plain copy? Gigabytes per second and memory.

    python benchmarks/transform.py [--params 1.5e9] [--only WORD] [--json FILE]

The trees are GPT-2s in float32. The larger tree of each transform has ``--params`` parameters.
Speed: the transform alternates with a plain copy of the larger tree in one process. The ratio is 1
if the transform is as fast as the copy. Memory: the peak of a separate process, above the memory of
its libraries, divided by source + result + largest leaf. Both are measured for NumPy leaves
(checkpoints on the host) and for jax arrays under ``jit``.
"""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alone, alternate, environment, parser, ratios, save, shown, summary
from jaxgrow import grow, operators, swap
from jaxgrow.growth.maps import Growth
from jaxgrow.models import GPT2Config
from jaxgrow.tables import align_columns

# Each entry makes a growth from the sizes of the large tree. The small tree, from which growing
# starts and at which coalescing ends, has half of the size.
GROWTHS: dict[str, Callable[[dict], Growth]] = {
    "hypercloning": lambda large: operators.hypercloning(
        {k: v // 2 for k, v in large.items()}, {k: large[k] for k in ("embed", "heads", "mlp")}
    ),
    "stack": lambda large: operators.stack(
        {"layers": large["layers"] // 2}, {"layers": large["layers"]}
    ),
    "interleave": lambda large: operators.interleave(
        {"layers": large["layers"] // 2}, {"layers": large["layers"]}
    ),
    "decoalesce far": lambda large: operators.decoalesce(large, heads="far", layers="far"),
    "decoalesce adjacent": lambda large: operators.decoalesce(
        large, heads="adjacent", layers="adjacent"
    ),
    "coalesce far": lambda large: operators.coalesce(large, heads="far", layers="far"),
    "coalesce adjacent": lambda large: operators.coalesce(
        large, heads="adjacent", layers="adjacent"
    ),
}


def config_of(params: float) -> GPT2Config:
    """The largest GPT-2 with at most ``params`` parameters and about the proportions of XL.

    It has twice as many layers as heads.
    """

    def config(heads: int) -> GPT2Config:
        return GPT2Config(layers=2 * heads, heads=heads, embed=64 * heads, mlp=256 * heads)

    heads = 2  # an even number, so that it can be halved
    while sum(x.size for x in jax.tree.leaves(shapes(config(heads + 2)))) <= params:
        heads += 2
    return config(heads)


def shapes(config: GPT2Config) -> Any:
    return jax.eval_shape(lambda: config.init(jax.random.key(0)))


def size(tree: Any) -> int:
    """The size of a tree in bytes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def filled(shape: jax.ShapeDtypeStruct, as_jax: bool) -> Any:
    """An array of random numbers with the given shape."""
    numbers = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    out = np.empty(shape.shape, shape.dtype)
    flat = out.reshape(-1)
    for i in range(0, flat.size, numbers.size):
        flat[i : i + numbers.size] = numbers[: flat.size - i]
    return jnp.asarray(out) if as_jax else out


def prepared(name: str, params: float, as_jax: bool) -> tuple[Callable, Any, Any, Any]:
    """Compile a transform and make its source.

    Returns:
      ``(transform, source, shapes of the result, shapes of the larger tree)``.
    """
    config = config_of(params)
    large = vars(config)
    growth = GROWTHS[name]({n: large[n] for n in ("layers", "heads", "embed", "mlp")})
    axes = config.axes()
    down = name.startswith("coalesce")
    start = config if down else config.resized(swap(growth))
    result = jax.eval_shape(lambda p: grow(growth, p, axes), shapes(start))

    def transform(tree):
        return grow(growth, tree, axes)

    if as_jax:
        transform = jax.jit(transform).lower(shapes(start)).compile()
    source = jax.block_until_ready(jax.tree.map(lambda x: filled(x, as_jax), shapes(start)))
    return transform, source, result, shapes(config)


def speed(name: str, params: float, as_jax: bool, rounds: int) -> dict[str, Any]:
    transform, source, result, larger = prepared(name, params, as_jax)
    large = (
        source
        if size(source) == size(larger)
        else jax.tree.map(lambda x: filled(x, as_jax), larger)
    )
    copy = (
        jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        if as_jax
        else lambda tree: jax.tree.map(np.copy, tree)
    )

    def timed(run: Callable, tree: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(tree))  # on both sides, the time includes freeing the result
        return time.perf_counter() - start

    sides = {"copy": lambda: timed(copy, large), "transform": lambda: timed(transform, source)}
    alternate(sides, 1)
    seconds = alternate(sides, rounds)
    return {
        "gigabytes_per_second": summary([size(larger) / s / 1e9 for s in seconds["transform"]]),
        "copy_gigabytes_per_second": summary([size(larger) / s / 1e9 for s in seconds["copy"]]),
        "speed_over_copy": ratios(seconds["copy"], seconds["transform"]),
        "source_gigabytes": size(source) / 1e9,
        "result_gigabytes": size(result) / 1e9,
    }


def memory(name: str, params: float, as_jax: bool) -> float:
    """The peak memory, divided by source + result + largest leaf.

    Call it in a fresh process.
    """
    jax.block_until_ready(jnp.zeros(1))
    libraries = _status("VmRSS")
    transform, source, result, _ = prepared(name, params, as_jax)
    # Reset the peak, so that making the source is not measured.
    Path("/proc/self/clear_refs").write_text("5")
    out = jax.block_until_ready(transform(source))
    peak = _status("VmHWM") - libraries
    leaf = max(map(size, jax.tree.leaves((source, result))))
    return peak / (size(source) + size(out) + leaf)


def _status(field: str) -> int:
    """A field of ``/proc/self/status``, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def _within_memory(params: float) -> float:
    """The number of parameters, or a smaller one that fits into the free memory."""
    free = int(re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    if params * 11 <= free:
        return params
    fits = free / 11
    print(
        f"{free / 1e9:.0f} GB of memory are free, so the larger tree has only {fits:.2g} parameters"
    )
    return fits


def main() -> None:
    p = parser(__doc__, rounds=5)
    bytes_each = "parameters of the larger tree; each needs 11 bytes of memory"
    only = "measure only transforms whose name contains this word"
    p.add_argument("--params", type=float, default=1.5e9, help=bytes_each)
    p.add_argument("--only", default="", help=only)
    a = p.parse_args()
    if not any(a.only in name for name in GROWTHS):
        p.error(f"no transform contains {a.only}: the transforms are {', '.join(GROWTHS)}")
    params = _within_memory(a.params)

    result: dict[str, Any] = environment("jax", "jaxlib", "numpy")
    result |= {
        "parameters": sum(x.size for x in jax.tree.leaves(shapes(config_of(params)))),
        "transforms": {},
    }
    print(
        f"{result['machine']}, {result['cores']} cores; {result['parameters']:.3g} parameters, {a.rounds} rounds"
    )
    rows = []
    names = [(kind, name) for kind in ("numpy", "jit") for name in GROWTHS if a.only in name]
    for kind, name in names:
        row = alone(speed, name, params, kind == "jit", a.rounds)
        peak = row["peak_over_source_result_leaf"] = alone(memory, name, params, kind == "jit")
        rates = ("gigabytes_per_second", "copy_gigabytes_per_second", "speed_over_copy")
        rows.append((f"{kind} {name}", *(shown(row[rate]) for rate in rates), f"{peak:.2f}"))
        result["transforms"][f"{kind} {name}"] = row
    head = ("", "GB/s", "copy, GB/s", "speed / copy", "peak memory")
    print(align_columns(head, rows, right=range(1, 5)))
    save(a.json, result)


if __name__ == "__main__":
    main()
