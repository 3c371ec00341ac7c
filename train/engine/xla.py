"""How XLA compiles the programs of a run and what it tells of them: flags for GPUs, the cache of compiled programs, profiles.

This is the one place that sets flags of XLA. They are options of each program, so preflight
compiles with the flags of the run. A flag that the environment variable XLA_FLAGS names is left as
it says there. ``result.json`` and the rows of benchmarks record both.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

# What `options` adds for GPUs.
GPU_FLAGS: dict[str, bool | int | str] = {
    # The scheduler starts exchanges between devices early, and computes until they are needed.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    # In a loop, exchanges of one turn run beside the compute of the turn before or after it.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    # Exchanges are combined up to these sizes: large enough for the bandwidth, small enough to
    # begin before all are there.
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_all_reduce_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 * 2**20,
    # Command buffers (CUDA graphs) launch many kernels at once. XLA has them on; with fewer kernels
    # than this it launches them one by one.
    "xla_gpu_graph_min_graph_size": 5,
}


def options(mesh: Mesh) -> dict[str, bool | int | str]:
    """The compiler options of programs on these devices; for ``jax.jit(..., compiler_options=)``."""
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in GPU_FLAGS.items() if f"--{name}" not in given}


def recorded(mesh: Mesh) -> dict[str, Any]:
    """What results say of the flags: those of `options`, and the environment variable."""
    return {"options": options(mesh), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


def keep_programs(folder: Path | None = None) -> Path | None:
    """Keeps compiled programs in a folder, so that a run that starts again compiles nothing.

    Args:
      folder: where; by default ``~/.cache/jaxgrow/programs`` for accelerators, and none for CPUs.
        The environment variable JAX_COMPILATION_CACHE_DIR, if it is set, stands for both.

    Returns:
      The folder, or None if programs are not kept.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if folder is None:
        if jax.default_backend() == "cpu":
            return None
        folder = Path.home() / ".cache" / "jaxgrow" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


FIRST = 3  # steps that are not traced: they compile, and fill the queues of the devices


class Profile:
    """A trace of some steps of a run, for xprof and Perfetto.

    Args:
      steps: how many steps of this process to trace, after the first `FIRST`; 0: none.
      folder: where the trace is written.
      say: what to do with the line that names the files.
    """

    def __init__(self, steps: int, folder: Path, say: Callable[[str], None]):
        self._steps, self._folder, self._say = steps, folder, say
        self._done, self._tracing = 0, False

    def step(self, results: Any) -> None:
        """One more step has been sent to the devices; ``results`` are what it computes."""
        self._done += 1
        if not self._steps or not FIRST <= self._done <= FIRST + self._steps:
            return
        jax.block_until_ready(results)
        if self._done == FIRST:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True
        elif self._done == FIRST + self._steps:
            self.close()

    def close(self) -> None:
        """Writes the trace, if one has begun."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        traces = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._say(
            f"the trace is in {self._folder}: `xprof --logdir {self._folder}` shows it (pip install xprof), and so does "
            f"https://ui.perfetto.dev, which opens {traces[-1] if traces else 'its perfetto_trace.json.gz'}"
        )
