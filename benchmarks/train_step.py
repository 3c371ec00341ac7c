"""How fast is the training step, compared with Hugging Face's PyTorch GPT-2 of the same size?

    python benchmarks/train_step.py [--json FILE] [--layers 6] [--embed 384] [--batch 8] [--rounds 12]

Both sides run on the same processor, with the same weights, tokens, float32, batch, AdamW, weight
decay and clipping, and without dropout. Each side has its own process with all cores. Rounds
alternate, and ratios are taken within a round. The losses of the first steps must agree, which
shows that both sides do the same work. On an accelerator, use ``python -m benchmarks.on_device``.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import (
    add_cores,
    add_sizes,
    alternate,
    environment,
    over_torch,
    parser,
    save,
    sizes,
    speeds,
)
from benchmarks.common import workers as processes

LR = 6e-4
B1 = 0.9
B2 = 0.95
EPS = 1e-8
DECAY = 0.1
CLIP = 1.0

_step: Callable[[], float]  # runs one training step in this worker process and returns the loss


def start_torch(size: dict[str, int], batch: int, threads: int) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    global _step
    torch.set_num_threads(threads)
    model = _torch_model(size)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(B1, B2), eps=EPS, fused=True)
    tokens = torch.from_numpy(_tokens(size, batch)).long()

    def step() -> float:
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    _step = step


def _torch_model(size: dict[str, int]) -> Any:
    """Hugging Face's GPT-2 with our initial weights."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    config = GPT2Config(
        vocab_size=size["vocab"],
        n_positions=size["context"],
        n_layer=size["layers"],
        n_embd=size["embed"],
        n_head=size["heads"],
        n_inner=size["mlp"],
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    ours = _weights(size)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(_hugging_face(ours, name).reshape(p.shape)))
    assert sum(p.numel() for p in model.parameters()) == _count(ours)
    return model


def start_jax(size: dict[str, Any], batch: int) -> None:
    import jax

    from jaxgrow.models import GPT2Config
    from train.data.windows import next_tokens
    from train.state.mesh import Mesh
    from train.state.model import TrainState
    from train.state.optim import Optim, transformation
    from train.step.parallel import mapped
    from train.step.step import StepInputs, train_step

    global _step
    params = jax.tree.map(jax.numpy.asarray, _weights(size))
    tx = transformation(Optim(b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, clip=CLIP))
    model = TrainState(params, jax.jit(tx.init)(params), GPT2Config(**size))
    run = mapped(partial(train_step, tx, 1), "mesh", Mesh().over(jax.devices()), donate=True)
    tokens = _tokens(size, batch)

    def step() -> float:
        nonlocal model
        model, metrics = run(model, next_tokens(tokens), StepInputs(np.float32(LR)))
        return float(metrics["loss"])

    _step = step


def timed(steps: int) -> tuple[float, float, list[float]]:
    """Run training steps.

    Returns:
      Wall-clock seconds per step, processor seconds per step, and the losses.
    """
    start = time.perf_counter()
    cpu = time.process_time()
    losses = [_step() for _ in range(steps)]
    return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps, losses


def compare(size: dict[str, Any], batch: int, rounds: int, cores: int) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # the workers inherit it
    starts = {
        "torch": (start_torch, (size, batch, cores)),
        "jax": (start_jax, (size, batch)),
        "jax, remat": (start_jax, (size | {"remat": "projections"}, batch)),
    }
    workers = processes(starts)
    losses = {name: w.submit(timed, 3).result()[2] for name, w in workers.items()}  # also compiles
    for name, values in losses.items():
        np.testing.assert_allclose(
            values,
            losses["torch"],
            rtol=1e-3,
            err_msg=f"{name} and torch do different work: their losses differ",
        )
    reports = alternate(
        {name: lambda w=w: w.submit(timed, 1).result() for name, w in workers.items()}, rounds
    )
    for w in workers.values():
        w.shutdown()
    sides = over_torch(reports, batch * size["context"])
    return {name: side | {"first_losses": losses[name]} for name, side in sides.items()}


def _tokens(size: dict[str, Any], batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(
        0, size["vocab"], (batch, size["context"] + 1), dtype=np.int32
    )


def _weights(size: dict[str, Any]) -> Any:
    """GPT-2's initial weights as a jaxgrow tree, the same in every process."""
    import jax

    from jaxgrow.models import GPT2Config

    config = GPT2Config(**size)
    shapes = jax.eval_shape(lambda: config.init(jax.random.key(0)))
    rng = np.random.default_rng(0)

    def fresh(path, x):
        last = path[-1].key
        if last in ("scale", "bias"):
            return np.full(x.shape, last == "scale", np.float32)
        return 0.02 * rng.standard_normal(x.shape, np.float32)

    return jax.tree_util.tree_map_with_path(fresh, shapes)


def _hugging_face(ours: Any, name: str) -> np.ndarray:
    """The weight that Hugging Face's GPT-2 calls ``name``."""
    names = {"weight": "kernel", "bias": "bias"}
    match name.split("."):
        case ["transformer", "wte", "weight"]:
            return ours["token_embedding"]
        case ["transformer", "wpe", "weight"]:
            return ours["position_embedding"]
        case ["transformer", "ln_f", leaf]:
            return ours["final_norm"][{"weight": "scale", "bias": "bias"}[leaf]]
        case ["transformer", "h", i, ("ln_1" | "ln_2") as norm, leaf]:
            ln = ours["blocks"]["attention_norm" if norm == "ln_1" else "mlp_norm"]
            return ln[{"weight": "scale", "bias": "bias"}[leaf]][int(i)]
        case ["transformer", "h", i, "attn", "c_attn", leaf]:
            attention = ours["blocks"]["attention"]
            parts = [attention[n][names[leaf]][int(i)] for n in ("query", "key", "value")]
            # Heads and head_dim are one axis in PyTorch.
            parts = [p.reshape(*p.shape[:-2], -1) for p in parts]
            return np.concatenate(parts, -1)
        case ["transformer", "h", i, "attn", "c_proj", leaf]:
            return ours["blocks"]["attention"]["out"][names[leaf]][int(i)]
        case ["transformer", "h", i, "mlp", ("c_fc" | "c_proj") as linear, leaf]:
            return ours["blocks"]["mlp"]["up" if linear == "c_fc" else "down"][names[leaf]][int(i)]
    raise KeyError(name)


def _count(tree: Any) -> int:
    import jax

    return sum(x.size for x in jax.tree.leaves(tree))


def main() -> None:
    p = parser(__doc__, rounds=12)
    add_sizes(p, layers=6, embed=384, vocab=8192, context=256)
    p.add_argument("--batch", type=int, default=8, help="sequences of each step")
    add_cores(p)
    a = p.parse_args()

    size = sizes(a)
    result = environment("jax", "jaxlib", "flax", "optax", "torch", "transformers")
    sides = compare(size, a.batch, a.rounds, a.cores)
    print(
        f"{result['machine']}, {a.cores} of {result['cores']} cores; {size}, batch {a.batch}, {a.rounds} rounds"
    )
    rows = []
    for name, side in sides.items():
        losses = " ".join(f"{x:.4f}" for x in side["first_losses"])
        rows.append((name, *speeds(side, 0), losses))
    head = ("", "tokens/s", "speed / torch", "in processor time", "first losses")
    # Loading JAX at the top would also load it into the process that measures torch.
    from jaxgrow.tables import align_columns

    print(align_columns(head, rows, right=(1, 2, 3)))
    about = {"size": size | {"batch": a.batch}, "rounds": a.rounds, "cores_used": a.cores}
    save(a.json, result | about | {"sides": sides})


if __name__ == "__main__":
    main()
