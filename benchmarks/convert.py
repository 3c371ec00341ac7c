"""How much slower than a copy is ``jaxgrow grow --method stack``? Time and peak memory.

    python benchmarks/convert.py [--params 8e8] [--rounds 5] [--json FILE] [--mergekit VENV/bin/python]

A process stacks a random GPT-2 in float32 to twice its layers. ``dd`` copies the resulting files.
The two sides alternate. Both start with their input in the page cache, and end when the result is
on the disk. Memory is the peak of the process. The difference to the peak of the same command on a
model of a few kB is also reported. With ``--mergekit``, mergekit's passthrough merge of the same
layers is a third side.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alternate, environment, parser, ratios, save, shown, summary
from benchmarks.transform import config_of
from jaxgrow import checkpoints
from jaxgrow.checkpoints.source import Leaf, initial_layout
from jaxgrow.models import Config, GPT2Config
from jaxgrow.tables import align_columns

ROOT = Path(__file__).parents[1]


class Random(checkpoints.Source):
    """A model with random weights, which are generated when they are read."""

    def __init__(self, config: Config):
        self.config = config
        self.leaves = {
            path: Leaf(names, shape, np.dtype(np.float32))
            for path, (names, shape) in initial_layout(config).items()
        }
        self._rng = np.random.default_rng(0)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        shape = self.leaves[path].shape
        return self._rng.standard_normal(shape if layer is None else shape[1:], np.float32)


# The child writes its own peak. The peak that the system reports to the parent would start at the
# size of the parent.
CHILD = """
import atexit, re, runpy, sys
from pathlib import Path
def peak():
    Path(where).write_text(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
_, where, module, *rest = sys.argv
sys.argv = [module, *rest]
atexit.register(peak)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(python: str, target: Path, module: str, *arguments: object) -> float:
    """Run a module in a separate process.

    Returns:
      The peak memory of the process in bytes.
    """
    peak = target.with_suffix(".peak")
    command = [python, "-c", CHILD, str(peak), module, *map(str, arguments)]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True
    )
    return int(peak.read_text()) * 1024.0


def synced(folder: Path) -> None:
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def stack(source: Path, target: Path, layers: int) -> tuple[float, float]:
    """Stack a checkpoint to ``layers`` layers.

    Returns:
      Seconds until the result is on the disk, and peak memory in bytes. `copy` and `merge` return
      the same.
    """
    shutil.rmtree(target, ignore_errors=True)
    start = time.perf_counter()
    options = ("--method", "stack", "--layers", layers)
    peak = run(sys.executable, target, "jaxgrow", "grow", source, target, *options)
    return time.perf_counter() - start, peak


def copy(source: Path, target: Path) -> tuple[float, float]:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    start = time.perf_counter()
    for file in source.iterdir():
        subprocess.run(
            ["dd", f"if={file}", f"of={target / file.name}", "bs=4M", "conv=fsync", "status=none"],
            check=True,
        )
    return time.perf_counter() - start, 0.0


def merge(python: Path, source: Path, target: Path, layers: int) -> tuple[float, float]:
    shutil.rmtree(target, ignore_errors=True)
    recipe = target.with_suffix(".yaml")
    part = f"  - sources:\n      - model: {source}\n        layer_range: [0, {layers // 2}]\n"
    recipe.write_text(f"slices:\n{part}{part}merge_method: passthrough\ndtype: float32\n")
    start = time.perf_counter()
    peak = run(
        str(python), target, "mergekit.scripts.run_yaml", recipe, target, "--no-copy-tokenizer"
    )
    synced(target)
    return time.perf_counter() - start, peak


def measured(
    folder: Path, params: float, rounds: int, mergekit: Path | None
) -> tuple[dict[str, list[tuple[float, float]]], float, float]:
    """Measure all sides.

    Args:
      folder: where to write the models.
      params: largest number of parameters of the source model.
      rounds: measurements of each side.
      mergekit: Python of an environment with mergekit, if it is a side.

    Returns:
      Seconds and peak bytes of each side and round, the peak of stacking a tiny model, and the size
      of the result in bytes.
    """
    config = config_of(params)
    layers = 2 * config.layers
    checkpoints.write(Random(config), checkpoints.Output(folder / "source", "hf"))
    tiny = GPT2Config(vocab=8, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=8)
    checkpoints.write(Random(tiny), checkpoints.Output(folder / "tiny", "hf"))
    own = stack(folder / "tiny", folder / "tiny-stacked", 4)[1]

    stack(folder / "source", folder / "result", layers)
    size = sum(f.stat().st_size for f in (folder / "result").iterdir())
    sides: dict[str, Any] = {
        "copy": lambda: copy(folder / "result", folder / "copied"),
        "grow": lambda: stack(folder / "source", folder / "grown", layers),
    }
    if mergekit:
        sides["mergekit"] = lambda: merge(mergekit, folder / "source", folder / "merged", layers)
    alternate(sides, 1)
    return alternate(sides, rounds), own, size


def compared(
    sides: dict[str, list[tuple[float, float]]], own: float, size: float
) -> dict[str, dict[str, Any]]:
    """Summarise each side. The arguments are what `measured` returns."""
    found = {}
    seconds = {side: [time for time, _ in values] for side, values in sides.items()}
    for side, values in sides.items():
        row: dict[str, Any] = {
            "seconds": summary(seconds[side]),
            "over_copy": ratios(seconds[side], seconds["copy"]),
        }
        if side != "copy":
            peak = max(memory for _, memory in values)
            row |= {"peak_megabytes": peak / 1e6, "peak_over_result": peak / size}
            if side == "grow":
                row["peak_above_own_over_result"] = (peak - own) / size
        found[side] = row
    return found


def main() -> None:
    p = parser(__doc__, rounds=5)
    most = "largest number of parameters of the source model, in float32"
    where = "where to write the models (default: the folder for temporary files)"
    python = "Python of an environment with mergekit"
    p.add_argument("--params", type=float, default=8e8, help=most)
    p.add_argument("--folder", type=Path, help=where)
    p.add_argument("--mergekit", type=Path, metavar="PYTHON", help=python)
    a = p.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        sides, own, size = measured(Path(name), a.params, a.rounds, a.mergekit)

    result: dict[str, Any] = environment("jax", "numpy", "safetensors")
    result |= {"result_gigabytes": size / 1e9, "rounds": a.rounds, "own_megabytes": own / 1e6}
    result["sides"] = compared(sides, own, size)
    print(
        f"{result['machine']}, {result['cores']} cores; a result of {size / 1e9:.2f} GB, {a.rounds} rounds"
    )
    rows = []
    for side, row in result["sides"].items():
        cells = [side, shown(row["seconds"]), shown(row["over_copy"])]
        peaks = {"peak_megabytes": 0, "peak_over_result": 3, "peak_above_own_over_result": 3}
        cells += [f"{row[name]:.{digits}f}" for name, digits in peaks.items() if name in row]
        rows.append(cells)
    head = ("", "seconds", "time / copy", "peak MB", "peak / result", "peak above small / result")
    print(align_columns(head, rows, right=range(1, 6)))
    save(a.json, result)


if __name__ == "__main__":
    main()
