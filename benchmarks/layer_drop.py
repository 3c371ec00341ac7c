"""How much time does layer dropping save? The time of a gradient as a ratio to the dense gradient.

    python benchmarks/layer_drop.py [--json FILE] [--layers 12] [--embed 384] [--context 128] [--batch 16] [--rounds 22]

It times loss and gradient of a GPT-2 with all, three quarters and half of the layers kept, by both
executions (`cond` and `gather`), with both checkpointing policies. For comparison, it times
masking, which runs a layer and then discards its result. The ideal is the ratio of FLOPs. Layer
dropping does not save AdamW's update, which has a separate row; its share of a step falls with the
batch.

Each program is timed between two dense gradients, and its ratio is relative to the mean of the two.
The ratio of a dense gradient shows the noise. The table also shows the temporary memory, without
parameters and gradients, and on a GPU how often the host waits for a predicate.
"""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import add_sizes, between, environment, parser, save, shown, sizes, summary
from jaxgrow import flops
from jaxgrow.layerdrop import KeepMask
from jaxgrow.models import GPT2Config
from jaxgrow.tables import align_columns
from train.data.windows import next_tokens
from train.state.model import TrainState, loss
from train.state.optim import Optim, transformation


def temporary(compiled: jax.stages.Compiled) -> float:
    """The temporary memory of a program, without its inputs and results, in gigabytes.

    It is NaN on backends that do not report it.
    """
    used = compiled.memory_analysis()  # None on some backends
    return used.temp_size_in_bytes / 1e9 if used else float("nan")


class Gradient:
    """Loss and gradient of one model that runs the layers of ``keep_mask``.

    Args:
      config: the model.
      params: its parameters.
      tokens: tokens [B, T + 1].
      keep_mask: the kept layers and their scale; None: the dense gradient.
    """

    def __init__(
        self, config: GPT2Config, params: Any, tokens: np.ndarray, keep_mask: KeepMask | None
    ):
        def gradient(params, keep_mask):
            return jax.value_and_grad(
                lambda p: loss(TrainState(p, None, config), next_tokens(tokens), keep_mask)
            )(params)

        compiled = jax.jit(gradient).lower(params, keep_mask).compile()
        self.temporary = temporary(compiled)
        self._run = partial(compiled, params, keep_mask)
        self.loss = float(self._run()[0])

    def timed(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._run())
        return time.perf_counter() - start


class Update:
    """AdamW's in-place update of all parameters, which follows every gradient.

    Args:
      params: the parameters.
      axes: their axis names.
    """

    def __init__(self, params: Any, axes: Any):
        tx = transformation(Optim())

        def update(params, opt, grads):
            updates, opt = tx.update(grads, opt, params, axes=axes)
            return jax.tree.map(lambda p, u: p - 6e-4 * u, params, updates), opt

        self._grads = jax.tree.map(jnp.ones_like, params)
        self._state = jax.tree.map(jnp.copy, params), jax.jit(tx.init)(params)
        self._run = (
            jax.jit(update, donate_argnums=(0, 1)).lower(*self._state, self._grads).compile()
        )
        self.temporary = temporary(self._run)
        self.timed()

    def timed(self) -> float:
        start = time.perf_counter()
        self._state = jax.block_until_ready(self._run(*self._state, self._grads))
        return time.perf_counter() - start


def sides(
    config: GPT2Config, batch: int, counts: list[int]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The programs to time, and the ideal ratio of each.

    Args:
      config: the model.
      batch: sequences per step.
      counts: numbers of kept layers.

    Returns:
      The programs by name, and the FLOPs of each as a fraction of the dense gradient's FLOPs.
    """
    params = jax.jit(lambda: config.init(jax.random.key(0)))()
    tokens = np.random.default_rng(0).integers(
        0, config.vocab, (batch, config.context + 1), dtype=np.int32
    )
    side = partial(Gradient, config, params, tokens)
    dense = flops.train_flops(config, batch * config.context)
    made = {"dense": side(None)}
    ideal = {"dense": 1.0}
    for count in counts:
        # The kept layers are spread over the depth.
        layers = np.round(np.linspace(0, config.layers - 1, count)).astype(np.int32)
        mask = np.isin(np.arange(config.layers), layers)
        scale = jnp.full(config.layers, config.layers / count, jnp.float32)
        kinds = {"cond": KeepMask(mask, scale), "gather": KeepMask(layers, scale)}
        if count < config.layers:
            kinds["mask"] = KeepMask(None, scale * mask)
        for kind, keep_mask in kinds.items():
            name = f"{kind}, {count} kept"
            made[name] = side(keep_mask)
            ideal[name] = flops.train_flops(config, batch * config.context, layers=count) / dense
        losses = {kind: made[f"{kind}, {count} kept"].loss for kind in kinds}
        np.testing.assert_allclose(
            list(losses.values()),
            losses["cond"],
            rtol=1e-5,
            err_msg=f"the executions do different work: their losses are {losses}",
        )
    return made | {"AdamW": Update(params, config.axes())}, ideal


def waits(side: Any) -> int | None:
    """How often the host waits for a value during a gradient on a GPU.

    XLA evaluates the predicate of a conditional on the host.

    Returns:
      The number of waits, or None on other devices.
    """
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


def measured(config: GPT2Config, batch: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure each execution, and the update of AdamW."""
    made, ideal = sides(config, batch, [config.layers, config.layers * 3 // 4, config.layers // 2])
    times, over_dense = between(
        made["dense"].timed, {name: s.timed for name, s in made.items()}, rounds
    )
    return {
        name: {
            "ideal": ideal.get(name),
            "ratio": summary(over_dense[name]),
            "seconds": summary(times[name]),
            "temporary_gigabytes": side.temporary,
            "host_waits": waits(side),
        }
        for name, side in made.items()
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a row of `measured`."""
    best = f"{row['ideal']:.3f}" if row["ideal"] else ""
    over = f"{row['ratio']['median'] / row['ideal'] - 1:.1%}" if row["ideal"] else ""
    waited = "-" if row["host_waits"] is None else str(row["host_waits"])
    times = (best, shown(row["ratio"], 3), over, shown(row["seconds"], 3))
    return (*times, f"{row['temporary_gigabytes']:.2f}", waited)


def main() -> None:
    p = parser(__doc__, rounds=22)
    add_sizes(p, layers=12, embed=384, vocab=256, context=128)
    p.add_argument("--batch", type=int, default=16, help="sequences of each step")
    a = p.parse_args()
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    config = GPT2Config(**sizes(a), dtype=dtype)
    result: dict[str, Any] = environment("jax", "jaxlib", "flax", "optax") | {
        "device": jax.devices()[0].device_kind
    }
    print(
        f"{result['machine']}, {len(os.sched_getaffinity(0))} cores; {config}, batch {a.batch}, {a.rounds} rounds"
    )
    lines = []
    for remat in ("products", "projections"):
        rows = measured(replace(config, remat=remat), a.batch, a.rounds)
        lines += [(f"{name}, {remat}", *cells(row)) for name, row in rows.items()]
        result[remat] = rows
    head = ("", "ideal", "time / dense", "over the ideal", "seconds", "GB", "host waits")
    print(align_columns(head, lines, right=range(1, 7)))
    save(a.json, result | {"size": vars(config), "batch": a.batch, "rounds": a.rounds})


if __name__ == "__main__":
    main()
