"""Descriptions of the machines that programs are compiled for, with their manufacturers' figures.

The machine need not be present. Its name is ``kind:size``: ``h100:8``, ``h100:4x8`` (4 hosts with 8
devices each), ``h200:8``, ``a100:8``, ``v5e:2x4``, ``v5p:2x2x1``, ``cpu:4``. GPUs need JAX's CUDA
plugin and TPUs need libtpu, but neither needs a device. ``pip install -e '.[aot]'`` in a clone
installs both.

JAX is imported on the first use, because `train.arguments` checks the name of a machine before.
"""

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxgrow.typed import did_you_mean
from train.common.errors import UserError

if TYPE_CHECKING:  # it imports JAX
    from train.state.mesh import MeshDevice


@dataclass(frozen=True)
class Chip:
    """One device, with its manufacturer's figures for dense products in bfloat16.

    The network between hosts is not a part of a chip. Its bandwidth is taken from the
    manufacturer's reference systems (DGX): one adapter of 400 Gb/s for each H100 and H200, and of
    200 Gb/s for each A100.

    Attributes:
      platform: "cuda", "tpu" or "cpu".
      flops: peak FLOP/s.
      memory: bytes of memory.
      bandwidth: bandwidth of the memory in bytes/s.
      links: bandwidth to the other devices of the host in one direction, bytes/s.
      kinds: JAX's names of such a device.
      target: description of a GPU for XLA.
      network: bandwidth to other hosts in bytes/s per device; None if the links also reach them.
    """

    platform: str
    flops: float | None
    memory: float | None
    bandwidth: float | None
    links: float | None
    kinds: tuple[str, ...] = ()
    target: str = ""
    network: float | None = None


def _gpu(
    name: str,
    flops: float,
    memory: float,
    bandwidth: float,
    links: float,
    clock: float,
    network: float = 50e9,
    major: int = 9,
    cores: int = 132,
    shared: int = 232448,
    l2: int = 52428800,
) -> Chip:
    """A GPU with JAX's name of it and its clock rate in GHz. The defaults are those of an H100."""
    target = f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {shared + 1024}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {128 if major == 9 else 64} block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f} l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory:.0f} shared_memory_per_block_optin: {shared} registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
    return Chip("cuda", flops, memory, bandwidth, links, (name,), target, network)


CHIPS = {
    "h100": _gpu("NVIDIA H100 80GB HBM3", 989.4e12, 84942979072, 3.352e12, 450e9, 1.98),
    "h200": _gpu("NVIDIA H200", 989.4e12, 150754820096, 4.8e12, 450e9, 1.98),
    "h100pcie": _gpu("NVIDIA H100 PCIe", 756e12, 85520809984, 2.0e12, 64e9, 1.755, cores=114),
    "h100nvl": _gpu("NVIDIA H100 NVL", 835e12, 100e9, 3.9e12, 300e9, 1.785),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB",
        312e12,
        84987740160,
        2.039e12,
        300e9,
        1.41,
        network=25e9,
        major=8,
        cores=108,
        shared=166912,
        l2=41943040,
    ),
    "v5e": Chip("tpu", 197e12, 16 * 2**30, 819e9, 200e9, ("TPU v5 lite", "TPU v5e")),
    "v5p": Chip("tpu", 459e12, 95 * 2**30, 2765e9, 600e9, ("TPU v5", "TPU v5p")),
    "cpu": Chip("cpu", None, None, None, None, ("cpu",)),
}


@dataclass(frozen=True)
class Machine:
    name: str
    chip: Chip
    devices: "tuple[MeshDevice, ...]"
    # Number of hosts. All hosts have the same number of devices. A TPU slice counts as one host.
    hosts: int = 1
    # Bytes of a device that XLA may use, if they are fewer than the device has.
    limit: float | None = None

    @property
    def memory(self) -> float:
        """Bytes of a device that programs may use."""
        if self.limit is not None:
            return self.limit
        if self.chip.memory is not None:
            return self.chip.memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(self.devices)


def _allocated() -> float:
    """Return the fraction of the memory of a GPU that JAX allocates. The older variable still works."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return next((float(os.environ[name]) for name in names if os.environ.get(name)), 0.75)


# Without these variables, libtpu would query the cloud for the kind of this machine and print
# errors. Compilation does not need this information.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def parsed_machine(text: str) -> tuple[Chip, list[str]]:
    """Return the chip and the counts of ``kind:size``.

    Raises:
      UserError: the machine is unknown.
    """
    kind, _, size = text.partition(":")
    known = ", ".join(CHIPS)
    chip = CHIPS.get(kind)
    counts = size.split("x") if size else ["1"]
    # A CPU has one count, a GPU those of hosts and devices, and a TPU the sides of its grid.
    if (
        chip is None
        or len(counts) > {"cpu": 1, "cuda": 2}.get(chip.platform, 3)
        or not all(n.isdigit() and int(n) for n in counts)
    ):
        raise UserError(
            f"--on must be kind:size, such as h100:8, h100:4x8, v5e:2x4 or cpu:4, with a kind of {known}; not {text!r}"
            f"{did_you_mean(kind, CHIPS)}"
        )
    return chip, counts


def describe_machine(text: str) -> Machine:
    """Return the machine ``kind:size``.

    Raises:
      UserError: the machine is unknown, or its compiler is not installed.
    """
    from jax.experimental import topologies

    kind = text.partition(":")[0]
    chip, counts = parsed_machine(text)
    hosts = 1
    if chip.platform == "cpu":
        return Machine(text, chip, _cpus(int(counts[0])))
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    try:
        if chip.platform == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=text)
        else:
            hosts, each = map(int, (counts if len(counts) > 1 else ["1", *counts])[:2])
            described = topologies.get_topology_desc(
                platform="cuda",
                topology_name=kind,
                target_config=chip.target,
                topology=f"1x{hosts}x{each}",
            )
    except Exception as error:  # plugins raise errors of many types
        raise UserError(
            f"there is no working compiler for {text} ({' '.join(str(error).split())[:200]}); "
            "run pip install -e '.[aot]' in a clone of jaxgrow to install the compilers"
        ) from error
    limit = chip.memory * _allocated() if chip.platform == "cuda" and chip.memory else None
    return Machine(text, chip, tuple(described.devices), hosts, limit)


def present_machine() -> Machine:
    """Return the machine of this process.

    It does not have figures if the manufacturer of its devices does not publish them.
    """
    import jax

    devices = tuple(jax.devices())
    name, chip = next(
        ((n, c) for n, c in CHIPS.items() if devices[0].device_kind in c.kinds),
        (devices[0].platform, Chip(devices[0].platform, None, None, None, None)),
    )
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Machine(f"{name}:{len(devices)}", chip, devices, limit=limit)


def common_machine() -> Machine:
    """Return the machine of the run, with the smallest memory limit of its processes.

    All processes must choose the same settings, but their devices may report different limits.
    """
    from train.common.hosts import gather_values

    here = present_machine()
    limits = [limit for limit in gather_values(here.limit) if limit is not None]
    return replace(here, limit=min(limits, default=None))


def _cpus(count: int) -> "tuple[MeshDevice, ...]":
    import jax

    with contextlib.suppress(RuntimeError):  # JAX has created its CPU devices already
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"this process already has {len(devices)} CPU devices and cannot create {count}; start a new process"
        )
    return tuple(devices[:count])
