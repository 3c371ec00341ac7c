"""All that is worth measuring on an accelerator that is there for half an hour, the most valuable first.

    python -m benchmarks.on_device --json FILE.jsonl [--minutes 25]
    python -m benchmarks.on_device --rehearse          # tiny, on whatever is there

On all devices of this host, without a network: tokens are random, text is the standard library's. Every measurement is a
process of its own, so that its memory is its own and its failure nobody else's. Results are appended as they come, and those in
FILE are not measured again: after a cut, the same command goes on. What no longer fits into the minutes is said, and left out.

1. the real training step of GPT-2 124M, T = 1024, bfloat16, by batch and remat: tokens a second, and MFU, the model's FLOPs
   over the peak (the aim is 0.45)
2. steps that run 12, 9 and 6 of 12 layers over the dense step, against the ratio of FLOPs (the aim is within 5 %)
3. the most memory that such steps took, over what the program compiled here says; and the one compiled for a description
4. attention, forward and backward, as models compute it (on a GPU by cuDNN), over XLA's own
5. the step by `pmap` over that on a mesh; what it asks of the host (`benchmarks.scale`; the aim is below 500 microseconds)
6. growing a 124M to 350M, in width by LEMON and in depth by stacking, over copying the result
7. `train.pretrain` of a small GPT by a V-cycle, and by one that drops layers, over training from scratch: time, FLOPs, loss
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Rows, alone, between, environment, summary
from benchmarks.scale import TINY, Loop, StepAlone, experiment, host_work, over_devices, step_times
from jaxgrow import flops, grow, operators, sizes
from jaxgrow.drop import Kept, LayerDrop
from jaxgrow.models import Config, GPT2Config
from jaxgrow.models.attention import attention
from jaxgrow.models.layers import Remat
from train.ahead.machines import Machine, described, present
from train.data.text import Data
from train.experiment import load
from train.loop import programs
from train.loop.step import StepInputs
from train.loop.trainer import run
from train.plan.modifiers import DropLayers
from train.state.model import Model


@dataclass(frozen=True)
class Sizes:
    model: GPT2Config
    grown: GPT2Config
    batches: tuple[int, ...]  # of each device; the first should be a good one
    lengths: tuple[int, ...]  # of attention
    tokens: int  # .. in all
    small: GPT2Config  # that is trained to its end
    train_steps: int
    steps: int  # timed at once
    rounds: int


BASE = GPT2Config(dtype="bfloat16")  # 124M
REAL = Sizes(
    model=BASE,
    grown=replace(BASE, layers=24, embed=1024, heads=16, mlp=4096),
    batches=(32, 64, 16, 128),
    lengths=(1024, 4096),
    tokens=16 * 1024,
    small=GPT2Config(vocab=256, context=256, layers=8, embed=384, heads=6, mlp=1536, dtype="bfloat16"),
    train_steps=1000,
    steps=10,
    rounds=7,
)
_TINY = GPT2Config(vocab=256, context=16, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
REHEARSED = Sizes(
    model=_TINY,
    grown=replace(_TINY, layers=4, embed=24, heads=3, mlp=48),
    batches=(2,),
    lengths=(8,),
    tokens=16,
    small=_TINY,
    train_steps=4,
    steps=1,
    rounds=2,
)


def clocked(work: Callable[[], Any], steps: int) -> Callable[[], float]:
    """Seconds of a run of ``work``, of so many one after the other. It has run once before."""

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(steps - 1):
            work()
        jax.block_until_ready(work())
        return (time.perf_counter() - start) / steps

    jax.block_until_ready(work())
    return seconds


def throughput(s: Sizes, batch: int, remat: Remat) -> dict[str, Any]:
    """Of the real step; what it peaks at is in `memory`, which compiles nothing anew."""
    machine, config = present(), replace(s.model, remat=remat)
    loop = _loop(config, batch)
    loop.seconds(s.steps)
    seconds = [loop.seconds(s.steps) for _ in range(s.rounds)]
    row: dict[str, Any] = {
        "tokens_per_second": summary([loop.tokens / t for t in seconds]),
        "seconds": summary(seconds),
    }
    if machine.chip.flops:
        cost = flops.train(config, loop.tokens) / len(machine.devices) / machine.chip.flops
        row["mfu"] = summary([cost / t for t in seconds])
    return row


def _loop(config: Config, batch: int) -> Loop:
    return Loop(experiment(config, batch * len(jax.devices())), jax.devices())


def dropped(s: Sizes, batch: int, remat: Remat) -> dict[str, Any]:
    """Time of steps that run some of the layers over that of the dense one: with its quartiles, and over the ratio of FLOPs."""
    config, layers = replace(s.model, remat=remat), s.model.layers
    loop = _loop(config, batch)
    e = experiment(config, batch * len(jax.devices()))
    data, model = next(loop.data), loop.model

    def side(kept: Kept | None) -> Callable[[], float]:
        modifiers = () if kept is None else (DropLayers(LayerDrop()).program(),)
        step = programs.step(loop.tx, 1, modifiers, e.parallel, loop.mesh)
        inputs = StepInputs(np.float32(1e-4), given=() if kept is None else (kept,))

        def work() -> Model:
            nonlocal model
            model, _ = step(model, data, inputs)
            return model

        return clocked(work, s.steps)

    dense, sides, ideal = side(None), {}, {}
    for count in (layers, layers * 3 // 4, layers // 2):
        places = np.round(np.linspace(0, layers - 1, count)).astype(np.int32)[None]  # spread over the depth
        scale = np.full((1, layers), layers / count, np.float32)
        for how, which in {"cond": np.isin(np.arange(layers)[None], places), "gather": places}.items():
            sides[f"{how}, {count} of {layers}"] = side(Kept(which, scale))
            ideal[f"{how}, {count} of {layers}"] = flops.train(config, 1, layers=count) / flops.train(config, 1)
    _, over = between(dense, {"dense": dense, **sides}, s.rounds)
    rows: dict[str, Any] = {"dense again": {"ratio": summary(over.pop("dense"))}}
    for name, ratios in over.items():
        rows[name] = {"ratio": summary(ratios), "ideal": ideal[name]}
        rows[name]["over_ideal"] = statistics.median(ratios) / ideal[name]
    return rows


def memory(s: Sizes, batch: int, remat: Remat, ahead: bool) -> dict[str, Any]:
    """Gigabytes of a device: what was most in use, and what the compiled step says; ``ahead``, compiled for a description."""
    loop = _loop(replace(s.model, remat=remat), batch)
    loop.seconds(s.steps)
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    here = present()
    machine = described(here.name) if ahead else Machine("here", here.chip, here.devices)
    e = experiment(replace(s.model, remat=remat), batch * len(jax.devices()))
    (program,) = StepAlone(e, machine).programs_of_steps()
    row: dict[str, Any] = {"said": program.memory / 1e9}
    return row | ({"peak": used / 1e9, "peak_over_said": used / program.memory} if used else {})


def attended(s: Sizes, length: int) -> dict[str, Any]:
    """Seconds of attention and its gradients as models have it, and over those of XLA's own."""
    heads, width = s.model.heads, s.model.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (s.tokens // length, length, heads, width)
    q, k, v, target = (jax.random.normal(key, shape, s.model.dtype) for key in keys)

    def side(function: Callable[..., jax.Array]) -> Callable[[], float]:
        def value(q, k, v):
            return (function(q, k, v) * target).astype(jnp.float32).sum()

        return clocked(partial(jax.jit(jax.grad(value, (0, 1, 2))), q, k, v), s.steps)

    xla = side(partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"))
    times, over = between(xla, {"ours": side(partial(attention, causal=True)), "xla": xla}, s.rounds)
    return {name: {"seconds": summary(times[name]), "over_xla": summary(over[name])} for name in times}


def mapped(s: Sizes, batch: int, remat: Remat) -> dict[str, Any]:
    """The step on all devices over a mesh and by `pmap`."""
    count = len(jax.devices())
    loops = over_devices([count], replace(s.model, remat=remat), batch * count)
    return step_times(loops, s.rounds, s.steps)


def host(s: Sizes) -> dict[str, Any]:
    """Microseconds of the host for a step over a mesh and by `pmap`, and eight times as deep."""
    count = len(jax.devices())
    loops = over_devices([count], TINY, 4 * count) | {"eight times as deep": _loop(replace(TINY, layers=8), 4)}
    return {name: host_work(loop, 20 * s.steps) for name, loop in loops.items()}


def grown(s: Sizes) -> dict[str, Any]:
    """Growing a model on one device against copying what comes out: seconds, gigabytes of the result a second."""
    old, axes = sizes(s.model.init(jax.random.key(0)), s.model.axes()), s.model.axes()
    wide = operators.lemon(old, {"embed": s.grown.embed, "heads": s.grown.heads, "mlp": s.grown.mlp})
    deep = operators.stack({"layers": s.model.layers}, {"layers": s.grown.layers})
    source = jax.jit(lambda: s.model.init(jax.random.key(0)))()
    grower = jax.jit(lambda p: grow(deep, grow(wide, p, axes), axes))
    result = grower(source)
    copier = jax.jit(lambda p: jax.tree.map(jnp.copy, p))
    copy = clocked(partial(copier, result), 1)
    times, over = between(copy, {"grow": clocked(partial(grower, source), 1), "copy": copy}, s.rounds)
    size = sum(x.nbytes for x in jax.tree.leaves(result)) / 1e9
    rows = {
        name: {"seconds": summary(t), "gigabytes_per_second": size / statistics.median(t)} for name, t in times.items()
    }
    return {"gigabytes": size, **rows, "grow_over_copy": summary(over["grow"])}


def trained(s: Sizes, batch: int) -> dict[str, Any]:
    """Runs of the demo's methods at another size: seconds without compiling, FLOPs, both over scratch's, and the final loss."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("scratch", "vcycle", "vcycle_pld"):
            e = load(f"configs/demo.py:{name}")
            steps, optim = s.train_steps, replace(e.optim, peak_lr=1e-3, warmup=s.train_steps // 20)
            e = replace(e, model=s.small, steps=steps, batch=batch, optim=optim, data=Data(cache=f"{folder}/data"))
            e = replace(e, eval_every=steps, eval_batches=4, checkpoint_every=steps)
            result = run(e, Path(folder) / name)
            out[name] = {"seconds": result["seconds"] - result["compile_seconds"], "flops": result["flops"]}
            for figure in ("seconds", "flops"):
                out[name][f"{figure}_over_scratch"] = out[name][figure] / out["scratch"][figure]
            out[name] |= {"val_loss": result["val_loss"], "compile_seconds": result["compile_seconds"]}
    return out


def named(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What it measures, and on which devices."""
    row = function(*arguments)
    return {"device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}", **row}


def measurements(s: Sizes, found: Rows):
    """``(name, seconds that it may take, function, its arguments)``; later ones look at earlier results."""
    remats: tuple[Remat, ...] = ("products", "projections")
    tried: dict[tuple[int, Any], str]
    tried = {(batch, remat): f"step, {batch} a device, {remat}" for remat in remats for batch in s.batches}
    for (batch, remat), name in tried.items():
        yield name, 80, throughput, (s, batch, remat)

    def speed(case: tuple[int, str]) -> float:
        done = tried[case] in found and "failed" not in found[tried[case]]
        return found[tried[case]]["tokens_per_second"]["median"] if done else 0.0

    best = max(tried, key=speed)
    for remat in remats:
        batch = max(s.batches, key=lambda batch, remat=remat: speed((batch, remat)))
        yield f"layer dropping, {remat}", 200, dropped, (s, batch, remat)
    yield "memory", 60, memory, (s, *best, False)
    yield "memory, said ahead", 90, memory, (s, *best, True)
    for length in s.lengths:
        yield f"attention, T = {length}", 40, attended, (s, length)
    yield "pmap and mesh", 90, mapped, (s, *best)
    yield "host", 60, host, (s,)
    yield "growth", 60, grown, (s,)
    yield "training", 240, trained, (s, 64 if s is REAL else 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to append the results, a line each")
    parser.add_argument("--minutes", type=float, default=25.0, help="of all of it")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, in this process")
    a = parser.parse_args()
    end = time.monotonic() + 60 * a.minutes
    found = Rows(a.json, environment("jax", "jaxlib", "flax", "optax"))
    with tempfile.TemporaryDirectory() as programs_of_all:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = programs_of_all  # of each process that follows
        for name, seconds, function, arguments in measurements(REHEARSED if a.rehearse else REAL, found):
            left = end - time.monotonic()
            if name in found:
                continue
            if left < seconds:
                print(f"{name}: left out, it may take {seconds} s and {max(0, left):.0f} are left", flush=True)
                continue
            try:
                row = named(function, *arguments) if a.rehearse else alone(named, function, *arguments, seconds=left)
            except (TimeoutError, RuntimeError) as error:
                row = {"failed": str(error)}
            found.add(name, row)
            print(f"{name}, {left - end + time.monotonic():.0f} s: {told(row)}", flush=True)


def told(row: Any) -> str:
    """Medians, and what belongs to what."""
    if isinstance(row, dict):
        inside = row.get("median")
        return told(inside) if inside is not None else "; ".join(f"{name} {told(x)}" for name, x in row.items())
    return f"{row:.4g}" if isinstance(row, float) else str(row)


if __name__ == "__main__":
    main()
