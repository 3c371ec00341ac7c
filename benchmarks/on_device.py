"""Measure jaxgrow on an accelerator within half an hour, the most valuable measurements first.

    python -m benchmarks.on_device --json FILE.jsonl [--minutes 25]
    python -m benchmarks.on_device --rehearse          # tiny sizes, on any device

The benchmark uses all devices of this host and does not need a network. Tokens are random, and the
text comes from the standard library. Each measurement runs in a separate process, so its memory and
its failures do not affect other measurements. Each result is appended to FILE at once, and results
in FILE are not measured again. After an interruption, the same command continues. Measurements that
do not fit into the remaining minutes are reported and skipped.

1. The real training step of GPT-2 124M (T = 1024, bfloat16) with the fastest of `VARIANTS`: tokens
   per second, and MFU. MFU uses the model's FLOPs with the causal half of attention, and nanoGPT's
   count with full attention.
2. The time of steps with 12, 9 and 6 of 12 layers relative to the dense step, compared with the
   ratio of FLOPs. The goal is a difference of at most 5 %.
3. The peak memory of the step relative to the estimate of the program compiled here.
4. The step with the library's default settings.
5. Attention, forward and backward, as models compute it (with cuDNN on a GPU), relative to XLA's
   implementation.
6. The time of growing leaves with the shapes of a 7B model, in width and depth, relative to the
   time of copying the result.
7. The host time of a step (`benchmarks.scale`; the goal is below 500 microseconds), and the step
   with `pmap` relative to the step on a mesh.
8. Generation: new tokens per second.
9. The step at other batch sizes and with the other variants, and the peak memory relative to the
   estimate of a program compiled ahead of time for a description of the machine.
10. `train.pretrain` of a small GPT with a V-cycle, and with a V-cycle that drops layers, relative
    to training from scratch: time, FLOPs and loss.

Each part has a separate time limit, and all limits together fit into the minutes. A part that hangs
does not stop other parts.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Rows, alone, between, environment, parser, summary
from benchmarks.scale import TINY, Loop, StepAlone, experiment, host_work, over_devices, step_times
from jaxgrow import flops, grow, operators
from jaxgrow.extras.models.generation import generate
from jaxgrow.layerdrop import KeepMask, LayerDrop
from jaxgrow.models import Config, GPT2Config
from jaxgrow.models.attention import attention
from train.config.experiment import load_experiment
from train.data.text import Data
from train.extras.aot.machines import Machine, describe_machine, present_machine
from train.plan.modifiers import DropLayers
from train.run.trainer import run_experiment
from train.state.mesh import Mesh
from train.state.optim import Optim
from train.state.packing import Packed
from train.step import programs, xla
from train.step.step import StepInputs


@dataclass(frozen=True)
class Sizes:
    model: GPT2Config
    grown: tuple[dict[str, int], dict[str, int]]  # sizes of the leaves before and after the growth
    generated: tuple[int, int, int]  # prompts, tokens per prompt, new tokens
    batches: tuple[int, ...]  # per device; the first should be fast
    lengths: tuple[int, ...]  # sequence lengths of attention
    tokens: int  # total tokens of attention
    small: GPT2Config  # the model of the complete training runs
    train_steps: int
    steps: int  # steps per timing
    rounds: int


BASE = GPT2Config(dtype="bfloat16")  # 124M
# Variants of the step, from the library's default to the fastest variant, which needs the most
# memory (docs/results/speed.md).
VARIANTS: dict[str, dict[str, Any]] = {
    "layers scanned, products saved": {},
    "unrolled": {"scan_layers": False},
    "unrolled, head of 8192": {"scan_layers": False, "head_positions": 8192},
    "unrolled, nothing computed again": {"scan_layers": False, "remat": "none"},
}
# Four of the 32 layers of a Llama 7B. They grow to the width of a 13B model.
OF_7B = {"layers": 4, "embed": 4096, "mlp": 11008}
REAL = Sizes(
    model=BASE,
    grown=(OF_7B, {"layers": 5, "embed": 5120, "mlp": 13824}),
    generated=(32, 128, 256),
    batches=(32, 64),
    lengths=(1024, 4096),
    tokens=16 * 1024,
    small=GPT2Config(
        vocab=256, context=256, layers=8, embed=384, heads=6, mlp=1536, dtype="bfloat16"
    ),
    train_steps=1000,
    steps=10,
    rounds=5,
)
_TINY = GPT2Config(vocab=256, context=16, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
REHEARSED = Sizes(
    model=_TINY,
    grown=({"layers": 2, "embed": 4, "mlp": 8}, {"layers": 3, "embed": 6, "mlp": 12}),
    generated=(2, 3, 4),
    batches=(2, 4),
    lengths=(8,),
    tokens=16,
    small=_TINY,
    train_steps=4,
    steps=1,
    rounds=2,
)


def clocked(work: Callable[[], Any], steps: int) -> Callable[[], float]:
    """Call ``work`` once, then return a function that measures the seconds per call."""

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(steps - 1):
            work()
        jax.block_until_ready(work())
        return (time.perf_counter() - start) / steps

    jax.block_until_ready(work())
    return seconds


def throughput(
    s: Sizes, batch: int, variant: str, optimizer: Literal["adamw", "muon"] = "adamw"
) -> dict[str, Any]:
    """Measure the throughput of the real step.

    `memory` measures the peak memory. It reuses the compiled programs of this function.
    """
    machine = present_machine()
    config = replace(s.model, **VARIANTS[variant])
    loop = _loop(config, batch, optim=Optim(name=optimizer))
    loop.seconds(s.steps)
    seconds = [loop.seconds(s.steps) for _ in range(s.rounds)]
    row: dict[str, Any] = {
        "tokens_per_second": summary([loop.tokens / t for t in seconds]),
        "seconds": summary(seconds),
    }
    if not machine.chip.flops:
        return row | {
            "mfu": f"no figures of {jax.devices()[0].device_kind} (train/extras/aot/machines.py)"
        }
    peak = machine.chip.flops * len(machine.devices)
    counts = {
        "mfu": flops.train_flops(config, loop.tokens),
        "mfu_by_nanogpt": nanogpt_flops(config, loop.tokens),
    }
    return row | {
        name: summary([cost / peak / t for t in seconds]) for name, cost in counts.items()
    }


def nanogpt_flops(config: GPT2Config, tokens: int) -> float:
    """Count the FLOPs of a training step like nanoGPT (PaLM, appendix B).

    A token costs ``6 N + 12 L H K T``. N is the number of parameters without position embeddings.
    Attention is counted without the causal mask.
    """
    leaves = jax.tree.leaves(jax.eval_shape(config.init, jax.random.key(0)))
    parameters = sum(x.size for x in leaves) - config.context * config.embed
    return tokens * (
        6 * parameters + 12 * config.layers * config.heads * config.head_dim * config.context
    )


def _loop(config: Config, batch: int, **changes: Any) -> Loop:
    return Loop(experiment(config, batch * len(jax.devices()), **changes), jax.devices())


def dropped(s: Sizes, batch: int, variant: str) -> dict[str, Any]:
    """Measure the time of steps with dropped layers relative to the dense step.

    The rows contain quartiles, and the median relative to the ratio of FLOPs.
    """
    config = replace(s.model, **VARIANTS[variant])
    layers = s.model.layers
    loop = _loop(config, batch)
    e = experiment(config, batch * len(jax.devices()))
    data = next(loop.data)
    state = loop.state

    def side(keep_mask: KeepMask | None) -> Callable[[], float]:
        modifiers = () if keep_mask is None else (DropLayers(LayerDrop()).program(),)
        step = programs.step(loop.tx, 1, modifiers, e.parallel, loop.mesh)
        inputs = StepInputs(np.float32(1e-4), given=() if keep_mask is None else (keep_mask,))

        def work() -> Packed:
            nonlocal state
            state, _ = step(state, data, inputs)
            return state

        return clocked(work, s.steps)

    dense = side(None)
    sides = {}
    ideal = {}
    for count in (layers, layers * 3 // 4, layers // 2):
        # spread over the depth
        places = np.round(np.linspace(0, layers - 1, count)).astype(np.int32)[None]
        scale = np.full((1, layers), layers / count, np.float32)
        for how, which in {
            "cond": np.isin(np.arange(layers)[None], places),
            "gather": places,
        }.items():
            sides[f"{how}, {count} of {layers}"] = side(KeepMask(which, scale))
            ideal[f"{how}, {count} of {layers}"] = flops.train_flops(
                config, 1, layers=count
            ) / flops.train_flops(config, 1)
    _, over = between(dense, {"dense": dense, **sides}, s.rounds)
    rows: dict[str, Any] = {"dense again": {"ratio": summary(over.pop("dense"))}}
    for name, ratios in over.items():
        rows[name] = {"ratio": summary(ratios), "ideal": ideal[name]}
        rows[name]["over_ideal"] = statistics.median(ratios) / ideal[name]
    return rows


def memory(s: Sizes, batch: int, variant: str, ahead: bool) -> dict[str, Any]:
    """Compare the peak memory of a device with the estimate of the compiled step, in gigabytes.

    With ``ahead``, the step is compiled ahead of time for a description of the machine.
    """
    config = replace(s.model, **VARIANTS[variant])
    loop = _loop(config, batch)
    loop.seconds(s.steps)
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    here = present_machine()
    machine = describe_machine(here.name) if ahead else Machine("here", here.chip, here.devices)
    e = experiment(config, batch * len(jax.devices()))
    (program,) = StepAlone(e, machine).programs_of_steps()
    row: dict[str, Any] = {"said": program.memory / 1e9}
    return row | ({"peak": used / 1e9, "peak_over_said": used / program.memory} if used else {})


def attended(s: Sizes, length: int) -> dict[str, Any]:
    """Measure attention with gradients, in seconds and relative to XLA's implementation."""
    heads = s.model.heads
    width = s.model.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (s.tokens // length, length, heads, width)
    q, k, v, target = (jax.random.normal(key, shape, s.model.dtype) for key in keys)

    def side(function: Callable[..., jax.Array]) -> Callable[[], float]:
        def value(q, k, v, target):
            return (function(q, k, v) * target).astype(jnp.float32).sum()

        return clocked(partial(jax.jit(jax.grad(value, (0, 1, 2))), q, k, v, target), s.steps)

    xla = side(partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"))
    times, over = between(
        xla, {"ours": side(partial(attention, causal=True)), "xla": xla}, s.rounds
    )
    return {
        name: {"seconds": summary(times[name]), "over_xla": summary(over[name])} for name in times
    }


def mapped(s: Sizes, batch: int, variant: str) -> dict[str, Any]:
    """Time the step on all devices with a mesh and with `pmap`."""
    count = len(jax.devices())
    loops = over_devices([count], replace(s.model, **VARIANTS[variant]), batch * count)
    return step_times(loops, s.rounds, s.steps)


def host(s: Sizes) -> dict[str, Any]:
    """Measure the host time per step in microseconds.

    The steps are on a mesh, with `pmap`, and of a model that is eight times as deep.
    """
    count = len(jax.devices())
    loops = over_devices([count], TINY, 4 * count) | {
        "eight times as deep": _loop(replace(TINY, layers=8), 4)
    }
    return {name: host_work(loop, 20 * s.steps) for name, loop in loops.items()}


def grown(s: Sizes) -> dict[str, Any]:
    """Compare growing the leaves of layers on one device with copying the result.

    The rows contain seconds, and gigabytes of the result per second.
    """
    old, new = s.grown
    axes = {
        "up": ("layers", "embed.in", "mlp"),
        "down": ("layers", "mlp.in", "embed"),
        "norm": ("layers", "embed.in"),
    }
    width = {name: size for name, size in new.items() if name != "layers"}
    wide = operators.aki(old, width)
    deep = operators.stack(old, {"layers": new["layers"]})
    shapes = {
        name: tuple(old[n.removesuffix(".in")] for n in names) for name, names in axes.items()
    }
    source = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in shapes.items()}
    grower = jax.jit(lambda p: grow(deep, grow(wide, p, axes), axes))
    result = grower(source)
    copier = jax.jit(lambda p: jax.tree.map(jnp.copy, p))
    copy = clocked(partial(copier, result), 1)
    times, over = between(
        copy, {"grow": clocked(partial(grower, source), 1), "copy": copy}, s.rounds
    )
    size = sum(x.nbytes for x in jax.tree.leaves(result)) / 1e9
    rows = {
        name: {"seconds": summary(t), "gigabytes_per_second": size / statistics.median(t)}
        for name, t in times.items()
    }
    return {"gigabytes": size, **rows, "grow_over_copy": summary(over["grow"])}


def generated(s: Sizes) -> dict[str, Any]:
    """Measure new tokens per second, including the time for the prompts."""
    prompts, length, new = s.generated
    params = jax.jit(lambda: s.model.init(jax.random.key(0)))()
    texts = [[1] * length] * prompts
    seconds = clocked(lambda: generate(s.model, params, texts, max_new=new), 1)
    return {"tokens_per_second": summary([prompts * new / seconds() for _ in range(s.rounds)])}


def trained(s: Sizes, batch: int) -> dict[str, Any]:
    """Run the methods of the demo at another size.

    The rows contain seconds without compilation and FLOPs, both also relative to training from
    scratch, and the final loss.
    """
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("scratch", "vcycle", "vcycle_pld"):
            e = load_experiment(f"configs/demo.py:{name}")
            steps = s.train_steps
            optim = replace(e.optim, peak_lr=1e-3, warmup=s.train_steps // 20)
            e = replace(
                e,
                model=s.small,
                steps=steps,
                batch=batch,
                optim=optim,
                data=Data(cache=f"{folder}/data"),
            )
            e = replace(e, eval_every=steps, eval_batches=4, checkpoint_every=steps)
            result = run_experiment(e, Path(folder) / name)
            out[name] = {
                "seconds": result["seconds"] - result["compile_seconds"],
                "flops": result["flops"],
            }
            for figure in ("seconds", "flops"):
                out[name][f"{figure}_over_scratch"] = out[name][figure] / out["scratch"][figure]
            out[name] |= {
                "val_loss": result["val_loss"],
                "compile_seconds": result["compile_seconds"],
            }
    return out


def named(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a measurement and add the devices and the flags of XLA to its row."""
    row = function(*arguments)
    devices = jax.devices()
    about = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "xla": xla.recorded(Mesh().over(devices)),
    }
    return {**about, **row}


def measurements(s: Sizes):
    """Yield ``(name, time limit in seconds, function, arguments)``, the most valuable first."""
    first, *others = s.batches
    scanned, *rest, fastest = VARIANTS
    yield f"step, {first} a device, {fastest}", 110, throughput, (s, first, fastest)
    yield "layer dropping", 200, dropped, (s, first, scanned)
    yield "memory", 60, memory, (s, first, fastest, False)
    yield f"step, {first} a device, {scanned}", 110, throughput, (s, first, scanned)
    for length in s.lengths:
        yield f"attention, T = {length}", 40, attended, (s, length)
    yield "growth of leaves of a 7B", 80, grown, (s,)
    yield "host", 60, host, (s,)
    yield "pmap and mesh", 80, mapped, (s, first, fastest)
    yield "generation", 80, generated, (s,)
    for batch in others:
        yield f"step, {batch} a device, {fastest}", 110, throughput, (s, batch, fastest)
    for variant in rest:
        yield f"step, {first} a device, {variant}", 110, throughput, (s, first, variant)
    yield "memory, said ahead", 90, memory, (s, first, fastest, True)
    yield "training", 200, trained, (s, 64 if s is REAL else 8)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--minutes", type=float, default=25.0, help="time limit of all measurements")
    p.add_argument("--rehearse", action="store_true", help="tiny sizes, in this process")
    a = p.parse_args()
    end = time.monotonic() + 60 * a.minutes
    found = Rows(a.json, environment("jax", "jaxlib", "flax", "optax"))
    with tempfile.TemporaryDirectory() as programs_of_all:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = programs_of_all  # for every following process
        for name, seconds, function, arguments in measurements(REHEARSED if a.rehearse else REAL):
            left = end - time.monotonic()
            name = "rehearsed: " * a.rehearse + name  # it is no result of the real sizes
            if name in found:
                continue
            if left < seconds:
                print(
                    f"{name}: left out, it may take {seconds} s and {max(0, left):.0f} are left",
                    flush=True,
                )
                continue
            try:
                row = (
                    named(function, *arguments)
                    if a.rehearse
                    else alone(named, function, *arguments, seconds=seconds)
                )
            except (TimeoutError, RuntimeError) as error:
                row = {"failed": str(error)}
            found.add(name, row)
            figures = {key: value for key, value in row.items() if key != "xla"}
            print(f"{name}, {left - end + time.monotonic():.0f} s: {told(figures)}", flush=True)


def told(row: Any) -> str:
    """Format the medians of a row with their names."""
    if isinstance(row, dict):
        inside = row.get("median")
        return (
            told(inside)
            if inside is not None
            else "; ".join(f"{name} {told(x)}" for name, x in row.items())
        )
    return f"{row:.4g}" if isinstance(row, float) else str(row)


if __name__ == "__main__":
    main()
