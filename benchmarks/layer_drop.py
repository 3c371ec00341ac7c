"""The time of a training step that drops layers, as a ratio to the dense step: what layer dropping really saves.

    python benchmarks/layer_drop.py [--json FILE] [--layers 12] [--embed 384] [--context 128] [--batch 16] [--rounds 8]

A GPT-2's whole step, AdamW included, with all, three quarters and half of the layers kept, by both executions, with and
without rematerialisation; beside it masking, which runs a layer and then discards it. The ideal is the ratio of FLOPs. All
sides take part in every round, and ratios are taken within one. On a GPU, also the waits of the host for a predicate.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alternate, environment, ratios, save, shown, summary
from jaxgrow import flops
from jaxgrow.drop import Kept
from jaxgrow.models import gpt2
from jaxgrow.models.gpt2 import GPT2Config
from train.optim import Optim, transformation
from train.parallel import AXIS, mapped
from train.step import Model, train_step


class Side:
    """One way to take a training step."""

    def __init__(self, config: GPT2Config, batch: int, kept: Kept | None):
        tx = transformation(Optim())
        params = jax.jit(lambda: gpt2.init(config, jax.random.key(0)))()
        self._model = Model(params, jax.jit(tx.init)(params), config)
        self._tokens = np.random.default_rng(0).integers(0, config.vocab, (batch, config.context + 1), dtype=np.int32)
        self._kept = jax.tree.map(lambda x: np.asarray(x)[None], kept)  # a leading axis: micro-batches
        self._step = mapped(train_step(tx, 1, AXIS), "pmap", donate=True)
        self.loss = self.timed()[1]  # and compiles

    def timed(self) -> tuple[float, float]:
        start = time.perf_counter()
        self._model, metrics = self._step(self._model, self._tokens, np.float32(6e-4), self._kept)
        loss = float(metrics["loss"])
        return time.perf_counter() - start, loss


def sides(config: GPT2Config, batch: int, counts: list[int]) -> tuple[dict[str, Side], dict[str, float]]:
    """The sides by name, and the share of the dense step's FLOPs that each cannot do without."""
    dense = flops.train(config, batch * config.context)
    made, ideal = {"dense": Side(config, batch, None)}, {"dense": 1.0}
    for count in counts:
        layers = np.round(np.linspace(0, config.layers - 1, count)).astype(np.int32)  # spread over the depth
        gates = np.isin(np.arange(config.layers), layers)
        scale = jnp.full(config.layers, config.layers / count, jnp.float32)
        kinds = {"cond": Kept(gates, scale), "gather": Kept(layers, scale)}
        if count < config.layers:
            kinds["mask"] = Kept(None, scale * gates)
        for kind, kept in kinds.items():
            name = f"{kind}, {count} kept"
            made[name] = Side(config, batch, kept)
            ideal[name] = flops.train(config, batch * config.context, layers=count) / dense
        losses = {kind: made[f"{kind}, {count} kept"].loss for kind in kinds}
        np.testing.assert_allclose(
            list(losses.values()), losses["cond"], rtol=1e-5, err_msg=f"{losses}: different work"
        )
    return made, ideal


def waits(side: Side) -> int | None:
    """How often a step on a GPU makes the host wait for a value: XLA runs a conditional's predicate there."""
    if jax.default_backend() != "gpu":
        return None
    import tempfile

    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            side.timed()
        data = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        names = [e.name for plane in data.planes for line in plane.lines for e in line.events]
    return sum("BlockHostUntilDone" in n or "StreamSynchronize" in n for n in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--embed", type=int, default=384, help="a multiple of 64, the size of a head")
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", help="where to write the result")
    a = parser.parse_args()
    config = GPT2Config(
        a.vocab, a.context, a.layers, a.embed, a.embed // 64, 64, 4 * a.embed,
        dtype="bfloat16" if jax.default_backend() == "gpu" else "float32",
    )  # fmt: skip
    result: dict[str, Any] = environment("jax", "jaxlib", "flax", "optax") | {"device": jax.devices()[0].device_kind}
    print(f"{result['machine']}, {len(os.sched_getaffinity(0))} cores; {config}, batch {a.batch}, {a.rounds} rounds")
    print(f"{'':>24} {'ideal':>6} {'time / dense':>22} {'over the ideal':>15} {'seconds':>22} {'host waits':>11}")
    for remat in (False, True):
        config_ = GPT2Config(**{**vars(config), "remat": remat})
        made, ideal = sides(config_, a.batch, [a.layers, a.layers * 3 // 4, a.layers // 2])
        times = alternate({name: lambda s=s: s.timed()[0] for name, s in made.items()}, a.rounds)
        rows = {}
        for name, side in made.items():
            rows[name] = row = {
                "ideal": ideal[name],
                "ratio": ratios(times[name], times["dense"]),
                "seconds": summary(times[name]),
                "host_waits": waits(side),
            }
            over = row["ratio"]["median"] / row["ideal"] - 1
            print(
                f"{name + (', remat' if remat else ''):>24} {row['ideal']:6.3f} {shown(row['ratio'], 3):>22} {over:>14.1%} "
                f"{shown(row['seconds'], 3):>22} {'-' if row['host_waits'] is None else row['host_waits']:>11}"
            )
        result["remat" if remat else "no remat"] = rows
        del made
    save(a.json, result | {"size": vars(config), "batch": a.batch, "rounds": a.rounds})


if __name__ == "__main__":
    main()
