"""The measurements of E3 of `benchmarks.one_gpu`: the step of GPT-2 124M, PyTorch, growth, memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks import torch_step
from benchmarks.on_device import (
    REAL,
    REHEARSED,
    VARIANTS,
    Sizes,
    generated,
    grown,
    mapped,
    throughput,
)
from benchmarks.scale import experiment
from train.data.text import Data
from train.extras.sharing import branch_run
from train.run.trainer import run_experiment
from train.store.workdir import Workdir

# Nothing is computed again, and layers are not scanned: the fastest step of docs/results/speed.md.
FASTEST = list(VARIANTS)[-1]
# Steps of the run whose memory is measured, and the step after which the second run resumes.
STEPS = 6
RESUMED = 3


def measurements(rehearse: bool, work: Path) -> Iterator[tuple[str, int, Callable, tuple]]:
    """Yield ``(name, time limit in seconds, function, arguments)``, the most valuable first."""
    s = replace(REHEARSED if rehearse else REAL, batches=(2,) if rehearse else (32, 64, 128))
    for batch in s.batches:
        yield f"step-adamw-{batch}", 80, throughput, (s, batch, FASTEST)
        yield f"step-torch-{batch}", 80, by_torch, (s, batch)
        yield f"step-muon-{batch}", 80, throughput, (s, batch, FASTEST, "muon")
    yield "memory-fresh", 80, fresh, (s, work)
    yield "memory-resumed", 80, resumed, (s, work)
    yield "growth-7b", 60, grown, (s,)
    yield "pmap-and-mesh", 80, mapped, (s, s.batches[0], FASTEST)
    yield "generation", 80, generated, (s,)


def by_torch(s: Sizes, batch: int) -> dict[str, Any]:
    """The same step in PyTorch."""
    names = ("vocab", "context", "layers", "embed", "heads", "mlp")
    size = {name: getattr(s.model, name) for name in names}
    return torch_step.throughput(size, batch, s.steps, s.rounds)


def fresh(s: Sizes, work: Path) -> dict[str, Any]:
    """Train some steps, and keep a checkpoint in the middle for `resumed`."""
    return _peak(s, work / "fresh", keep=(RESUMED,))


def resumed(s: Sizes, work: Path) -> dict[str, Any]:
    """Continue from the checkpoint of `fresh` in a new process.

    The first step after that must not need more memory than the steps of an uninterrupted run.
    """
    folder = work / "resumed"
    if not branch_run(Workdir(folder), Workdir(work / "fresh"), RESUMED, _trained(s, work)):
        return {
            "skipped": f"there is no checkpoint in {work / 'fresh'}: measure memory-fresh first"
        }
    return _peak(s, folder)


def _trained(s: Sizes, work: Path) -> Any:
    page = str(Path(__file__).parents[1] / "docs" / "results" / "muon.md")
    data = Data(source="text", path=page, valid_path=page, cache=str(work / "data"))
    config = replace(s.model, **VARIANTS[FASTEST])
    e = experiment(config, s.batches[0] * len(jax.devices()), data=data)
    return replace(e, steps=STEPS, eval_every=STEPS, eval_batches=1, checkpoint_every=STEPS)


def _peak(s: Sizes, folder: Path, keep: tuple[int, ...] = ()) -> dict[str, Any]:
    result = run_experiment(_trained(s, folder.parent), folder, keep=keep)
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"steps": result["steps"], **({"peak": used / 1e9} if used else {})}
