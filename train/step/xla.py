"""How does XLA compile the programs of a run? Flags for GPUs, and the compilation cache.

This module is the only place that sets XLA flags. They are compiler options of each program, so
preflight compiles with the same flags as the run. A flag in the environment variable XLA_FLAGS
takes precedence. ``result.json`` and the rows of benchmarks record both.
"""

import os
from pathlib import Path

import jax
from jax.sharding import Mesh

# In a loop, collectives of one iteration overlap with compute of the neighbouring iterations. JAX
# 0.11 has other names for these options, and refuses the old ones.
_OLD = "xla_gpu_enable_pipelined_"
_NEW = "xla_gpu_pipeline_"
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
_PIPELINED: dict[str, bool | str] = (
    {_OLD + kind: True for kind in _COLLECTIVES}
    if jax.__version_info__ < (0, 11)
    else {_NEW + kind: "COLLECTIVE_PIPELINING_MODE_ON" for kind in _COLLECTIVES}
)

# By default, the scheduler ends each collective before it starts the next one. Since JAX 0.11, it then
# computed no matrix products during most of the gathers of a pipelined loop. With this limit, the
# four gathers of a Llama layer are in progress at the same time, during a matrix product.
_AT_ONCE = (
    {}
    if jax.__version_info__ < (0, 11)
    else {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
)

# The compiler options that `options` sets for GPUs.
GPU_FLAGS: dict[str, bool | int | str] = {
    # The scheduler starts collectives early and computes until their results are needed.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    **_PIPELINED,
    **_AT_ONCE,
    # Collectives are combined up to these sizes. They are large enough to use the bandwidth, and
    # small enough to start before all of the operands are computed.
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_all_reduce_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 * 2**20,
    # Command buffers (CUDA graphs) launch many kernels at once, and XLA enables them by default.
    # Groups of fewer kernels than this are launched one by one.
    "xla_gpu_graph_min_graph_size": 5,
}


def options(mesh: Mesh) -> dict[str, bool | int | str]:
    """Return the XLA compiler options for the devices of ``mesh``.

    Args:
      mesh: mesh of the devices that run the program. Only GPUs get options.

    Returns:
      `GPU_FLAGS` without the flags that XLA_FLAGS names, for ``jax.jit(..., compiler_options=)``.
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    given = os.environ.get("XLA_FLAGS", "").replace(_OLD, _NEW)
    return {
        name: value
        for name, value in GPU_FLAGS.items()
        if f"--{name.replace(_OLD, _NEW)}" not in given
    }


def options_once() -> dict[str, bool | int | str]:
    """Return the XLA compiler options of a program that runs only once, such as an initialisation.

    On a CPU, less optimisation halves its compilation, which takes longer than the program itself.
    """
    return {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else {}


def recorded(mesh: Mesh) -> dict[str, object]:
    """Return the XLA settings that results record: `options` and the variable XLA_FLAGS."""
    return {"options": options(mesh), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


def keep_programs() -> None:
    """Enable JAX's persistent compilation cache, so that a restarted run compiles nothing.

    Programs of any compilation time are cached. JAX's default is programs that take at least a
    second; JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS still sets another limit.

    The cache is in ``~/.cache/jaxgrow/programs`` for accelerators, and there is none for CPUs. If
    the environment variable JAX_COMPILATION_CACHE_DIR is set, it overrides both.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.default_backend() != "cpu":
        folder = Path.home() / ".cache" / "jaxgrow" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(folder))
