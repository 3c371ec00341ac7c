"""Measure the cost of a training step, compiled for large machines or run on this processor.

    python -m benchmarks.scale [--only WORD] [--json FILE.jsonl]          # pip install -e '.[aot]'
    python -m benchmarks.scale --here [--rounds 15] [--json FILE.jsonl]

The first command compiles the training step of each entry of `ROWS` for its machine, in its own
process. It reads the memory and the exchanges from the compiled program and runs nothing. The lower
bound of the step time is `train.extras.aot.estimate.time_bound`: the sum over the kernels of
max(FLOPs / peak, bytes / bandwidth), or the time that the links are busy, if that is longer.
Exchanges between hosts are priced at the bandwidth of the network between hosts. Settings that are
"auto" are not chosen by memory here: `model.remat` is then "products", and `mesh.gradients`
"layer". Rows are written as soon as they are compiled, and rows that are already in FILE are not
compiled again.

``--here`` runs steps. *Step time*: one global batch on 1, 2 and 4 host devices, by `pmap` and over
a mesh, relative to a mesh of one device. All devices share the same cores, so a ratio of 1 means no
loss. *Host work*: processor time of the thread that runs the training loop, from one step to the
next. It covers the inputs of the step, its batch, and the dispatch of both to the devices. The
devices are idle at this time, and waiting for them is not counted. If a step of a model that is
eight times as deep, with the same number of arrays, takes no longer, then host work includes no
computation. The goal is less than 500 microseconds.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.common import (
    Rows,
    alone,
    between,
    environment,
    parser,
    refuse_unused,
    shown,
    summary,
)
from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import Config, GPT2Config
from jaxgrow.tables import align_columns
from train.config.experiment import Experiment, load_experiment
from train.data import batches
from train.data.windows import Windows
from train.extras.aot.compilation import AotRun, Program
from train.extras.aot.estimate import memory_fits, time_bound
from train.extras.aot.machines import describe_machine
from train.plan.ledger import Ledger
from train.plan.methods import Scratch
from train.plan.modifiers import DropLayers
from train.plan.training import PhaseStart, Train
from train.state.mesh import How, rows
from train.state.model import TrainState
from train.state.packing import packed
from train.step import programs
from train.step.inputs import step_plans

GPT = "configs/papers/gpt.py"
LLAMA = "configs/papers/llama.py"
# The rows of a model have equal numbers of sequences per device. A mesh is not larger than
# necessary.
ROWS = [
    (f"{GPT}:base_c4:batch=16", "h100:1"),
    (f"{GPT}:base_c4:batch=128", "h100:8"),
    (f"{GPT}:base_c4:batch=1024", "h100:8x8"),
    (f"{GPT}:xl_c4:batch=8", "h100:1"),
    (f"{GPT}:xl_c4:batch=64", "h100:8"),
    (f"{GPT}:xl_c4:batch=64:mesh.fsdp=8", "h100:8"),
    (f"{GPT}:xl_c4:batch=512:mesh.fsdp=8", "h100:8x8"),
    (f"{LLAMA}:llama_7b_c4:batch=128:mesh.fsdp=1", "h100:1"),
    (f"{LLAMA}:llama_7b_c4", "h100:8"),
    (f"{LLAMA}:llama_7b_c4:accumulate=16", "h100:8x8"),
    (f"{LLAMA}:llama_7b_c4:accumulate=16:mesh.fsdp=64", "h100:8x8"),
    (f"{LLAMA}:llama_70b_c4:model.remat=full:accumulate=128:mesh.fsdp=8", "h100:8"),
    (f"{LLAMA}:llama_70b_c4:model.remat=full", "h100:8x8"),
    (
        f"{LLAMA}:llama_70b_c4:model.remat=full:accumulate=128:mesh.fsdp=8:mesh.tensor=8",
        "h100:8x8",
    ),
    (f"{GPT}:base_c4:batch=128", "v5e:4x4"),
    (f"{GPT}:xl_c4:batch=64:mesh.fsdp=16", "v5e:4x4"),
    (f"{LLAMA}:llama_7b_c4:model.remat=full:mesh.fsdp=16", "v5e:4x4"),
    (f"{LLAMA}:llama_7b_c4:accumulate=16:mesh.fsdp=64", "v5p:4x4x4"),
    (f"{LLAMA}:llama_70b_c4:model.remat=full", "v5p:4x4x4"),
]
SECONDS = 1800  # time limit for compiling a row


# --- compiled ---


class StepAlone(AotRun):
    """Compile only the steps of the first phase.

    The initialisation and the evaluation are not compiled, because they need less memory.
    """

    def programs_of_steps(self) -> list[Program]:
        phase = self.experiment.plan[0]
        assert isinstance(phase, Train)
        self.compile_steps(phase, jax.eval_shape(lambda: phase.start({}, self.tx, self.key)))
        return self.programs

    def validate(self, step: int, model: TrainState) -> None: ...


def compiled(config: str, on: str) -> dict[str, Any]:
    """Compile the step of one row.

    Returns:
      The memory of one device in gigabytes, the lower bound of the step time in seconds, and the
      data that one device sends in a step.
    """
    jax.config.update("jax_platforms", "cpu")  # no device is needed, so none is reserved
    machine = describe_machine(on)
    start = time.perf_counter()
    (program,) = found = StepAlone(load_experiment(config), machine).programs_of_steps()
    kinds: dict[str, int] = {}
    for c in program.collectives:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.times
    row: dict[str, Any] = {
        "devices": len(machine.devices),
        "state_gigabytes": (program.parameters + program.moments) / 1e9,
        "besides_gigabytes": (program.other + program.temporary) / 1e9,
        "of_gigabytes": machine.memory / 1e9,
        "fits": memory_fits(found, machine),
        "tokens": program.tokens,
        "flops": program.flops,
        "sent_gigabytes": sum(c.sent for c in program.collectives) / 1e9,
        "exchanges": kinds,
        "compile_seconds": time.perf_counter() - start,
    }
    least = time_bound(program, machine)
    if least is None:
        return row
    return row | {
        "seconds_at_least": least.seconds,
        "by": least.by,
        "links_seconds": least.links,
        "mfu_at_most": least.utilisation,
        "tokens_per_second_at_most": program.tokens / least.seconds,
    }


def ahead(found: Rows, only: str) -> None:
    print(
        "Memory of one device in GB; lower bound of the step time and its cause; GB that a device sends per step and per second"
    )
    rows = []
    for config, on in ROWS:
        name = f"{config} on {on}"
        if only not in name:
            continue
        if name not in found:
            try:
                row = alone(compiled, config, on, seconds=SECONDS)
            except (TimeoutError, RuntimeError) as error:
                row = {"failed": str(error)}
            found.add(name, row)
        r = found[name]
        short = f"{config.partition(':')[2]} on {on}"
        if "failed" in r:
            print(f"{short}: {r['failed']}", flush=True)
            continue
        rows.append((short, *_cells(r)))
    head = ("", "state", "other", "total", "s", "by", "tokens/s", "sent", "GB/s")
    print(align_columns(head, rows, right=range(1, 9)))


def _cells(r: dict[str, Any]) -> tuple[str, ...]:
    memory = [f"{r[name]:.1f}" for name in ("state_gigabytes", "besides_gigabytes", "of_gigabytes")]
    if not r["fits"]:
        return (*memory, "", "does not fit", "", "", "")
    seconds = r["seconds_at_least"]
    return (
        *memory,
        f"{seconds:.3f}",
        r["by"],
        f"{r['tokens_per_second_at_most']:,.0f}",
        f"{r['sent_gigabytes']:.1f}",
        f"{r['sent_gigabytes'] / seconds:.0f}",
    )


# --- here ---

SMALL = GPT2Config(vocab=256, context=128, layers=4, embed=128, heads=4, head_dim=32, mlp=512)
TINY = GPT2Config(vocab=64, context=8, layers=1, embed=16, heads=2, head_dim=8, mlp=32)


def experiment(model: Config, batch: int, how: How = "mesh", **changes: Any) -> Experiment:
    return Experiment(
        name="benchmark", model=model, steps=1_000, batch=batch, parallel=how, **changes
    )


PARTS = ("inputs", "batch", "dispatch", "ledger")  # parts of the host's work for a step


class Loop:
    """The training loop, one step at a time, on random tokens.

    Args:
      e: an experiment with one phase.
      devices: the devices to use.
    """

    def __init__(self, e: Experiment, devices: list[Any]):
        (phase,) = e.plan
        assert isinstance(phase, Train)
        self.tokens = e.batch * phase.config.length
        self.mesh = e.mesh.over(devices, e.parallel)
        self.tx = e.tx
        initialise = programs.made(_begun, phase, self.tx)
        with jax.set_mesh(self.mesh):
            model: TrainState = initialise(jax.random.key(0))
        modifiers = tuple(m.program() for m in phase.modifiers)
        self._step = programs.step(self.tx, e.accumulate, modifiers, e.parallel, self.mesh)
        self._plans = step_plans(phase, model, PhaseStart({}, 0, e.batch, e.accumulate, e.seed))
        text = np.random.default_rng(0).integers(
            0, phase.config.sizes()["vocab"], 2**20, dtype=np.int32
        )
        self.state = packed(model)
        source = Windows(text, phase.config.length)
        self.data = batches.training_batches(source, e.batch, e.seed, rows(e.batch, self.mesh))
        self._ledger = Ledger()
        self._ledger.begin("train", "train", "large", 0)
        self.host()  # compiles

    def step(self) -> dict[str, float]:
        """Run one step.

        Returns:
          The processor seconds of this thread for each part of the host's work, and the elapsed
          seconds. The devices may still be busy.
        """
        start = time.perf_counter()
        clocks = [time.thread_time()]
        plan = self._plans(self._ledger.steps, self._ledger.steps)
        clocks.append(time.thread_time())
        batch = next(self.data)
        clocks.append(time.thread_time())
        self.state, self.metrics = self._step(self.state, batch, plan.inputs)
        clocks.append(time.thread_time())
        self._ledger.add(flops=plan.flops, tokens=self.tokens, steps=1, layers=plan.layers)
        clocks.append(time.thread_time())
        parts = {
            name: b - a for name, (a, b) in zip(PARTS, itertools.pairwise(clocks), strict=True)
        }
        return parts | {"all": clocks[-1] - clocks[0], "elapsed": time.perf_counter() - start}

    def host(self) -> dict[str, float]:
        """Run one step between idle times of the devices. Returns the same as `step`."""
        parts = self.step()
        jax.block_until_ready((self.state, self.metrics))
        return parts

    def seconds(self, steps: int) -> float:
        """The mean time of a step in seconds, including the work of the devices."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        jax.block_until_ready((self.state, self.metrics))
        return (time.perf_counter() - start) / steps


def _begun(phase: Train, tx: Any, key: jax.Array) -> TrainState:
    return phase.start({}, tx, key)


def host_work(loop: Loop, steps: int) -> dict[str, float]:
    """The medians of the host's work per step, in microseconds."""
    parts = [loop.host() for _ in range(steps)]
    return {name: statistics.median(p[name] for p in parts) * 1e6 for name in parts[0]}


def over_devices(counts: list[int], model: Config, batch: int) -> dict[str, Loop]:
    """A `Loop` with the same global batch for each number of devices, by `pmap` and over a mesh."""
    devices = jax.devices()
    hows: tuple[How, ...] = ("mesh", "pmap")
    return {
        f"{how}, {n}": Loop(experiment(model, batch, how), devices[:n])
        for n in counts
        for how in hows
    }


def step_times(loops: dict[str, Loop], rounds: int, steps: int) -> dict[str, Any]:
    """For each loop, the time of a step and its ratio to the first loop's time."""
    sides: dict[str, Callable[[], float]] = {
        name: partial(loop.seconds, steps) for name, loop in loops.items()
    }
    times, over = between(next(iter(sides.values())), sides, rounds)
    return {name: {"seconds": summary(times[name]), "ratio": summary(over[name])} for name in sides}


def here(found: Rows, rounds: int) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    counts = [1, 2, 4]
    print(f"{len(jax.devices())} devices: {jax.devices()[0].device_kind}; {rounds} rounds\n")
    rows = []
    for name, row in step_times(over_devices(counts, SMALL, 16), rounds, 2).items():
        found.add(f"step time, {name}", row)
        ms = {k: x * 1e3 for k, x in row["seconds"].items()}
        rows.append((name, shown(ms, 1), shown(row["ratio"])))
    head = ("one batch, number of devices", "ms per step", "over mesh, 1")
    print(align_columns(head, rows, right=(1, 2)))
    loops = over_devices(counts, TINY, 4)
    one = jax.devices()[:1]
    loops["mesh, 1, eight times as deep"] = Loop(experiment(replace(TINY, layers=8), 4), one)
    loops["mesh, 1, dropping layers"] = Loop(
        experiment(TINY, 4, method=Scratch((DropLayers(LayerDrop(theta=0.5)),))), one
    )
    each: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            each[name].append(host_work(loop, 50))
    rows = []
    for name, parts in each.items():
        row = {part: summary([p[part] for p in parts]) for part in parts[0]}
        found.add(f"host work in microseconds, {name}", row)
        medians = (f"{row[p]['median']:.0f}" for p in PARTS)
        rows.append((name, *medians, shown(row["all"], 0), shown(row["elapsed"], 0)))
    head = ("host work per step, microseconds", *PARTS, "all", "elapsed")
    print(f"\n{align_columns(head, rows, right=range(1, len(head)))}")


def main() -> None:
    p = parser(__doc__, rounds=15)
    p.add_argument("--here", action="store_true", help="time steps on this machine's processor")
    p.add_argument("--only", default="", help="compile only rows whose name contains this word")
    a = p.parse_args()
    if not any(a.only in f"{config} on {machine}" for config, machine in ROWS):
        p.error(f"no row contains {a.only}; the rows are ROWS in benchmarks/scale.py")
    refuse_unused(p, a, *(("with --here", "only") if a.here else ("without --here", "rounds")))
    found = Rows(a.json, environment("jax", "jaxlib", "flax", "optax"))
    if a.here:
        here(found, a.rounds)
    else:
        ahead(found, a.only)


if __name__ == "__main__":
    main()
