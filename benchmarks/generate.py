"""Tokens a second of generation, against Hugging Face's `generate` by PyTorch, of the same GPT-2 on the same processor.

    python benchmarks/generate.py [--json FILE] [--layers 12] [--embed 768] [--batches 1,8] [--prompt 128] [--new 128]

Same weights (random ones, read from one folder), prompts, float32, the likeliest tokens, keys and values kept on both sides.
Each side lives in a process of its own with all cores; rounds alternate, and ratios are taken within a round. A time is that
of all new tokens, the reading of the prompts included. The first tokens must agree: both then do the same work.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alternate, environment, ratios, save, shown, summary

SAME = 4  # tokens of each row that must be; later ones may part at a near tie

_generate: Callable[[np.ndarray, int], np.ndarray]  # of this worker process: prompts [B, P] -> new tokens [B, new]


def start_torch(folder: str, threads: int) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    global _generate
    torch.set_num_threads(threads)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # no text ends before all tokens are there

    def run(prompts: np.ndarray, new: int) -> np.ndarray:
        tokens = torch.from_numpy(prompts).long()
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new, pad_token_id=0
            )
        return out[:, prompts.shape[1] :].numpy()

    _generate = run


def start_jax(folder: str) -> None:
    import jax

    from jaxgrow import generate
    from jaxgrow.interop import load

    global _generate
    config, params = load(folder)
    params = jax.tree.map(jax.numpy.asarray, params)

    def run(prompts: np.ndarray, new: int) -> np.ndarray:
        return np.stack(generate(config, params, list(prompts), max_new=new))

    _generate = run


def timed(prompts: np.ndarray, new: int) -> tuple[float, float, np.ndarray]:
    """Seconds, seconds of processor time, and the new tokens."""
    start, cpu = time.perf_counter(), time.process_time()
    found = _generate(prompts, new)
    return time.perf_counter() - start, time.process_time() - cpu, found


def compare(size: dict[str, int], batch: int, prompt: int, new: int, rounds: int, cores: int) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # the workers inherit it
    prompts = np.random.default_rng(0).integers(0, size["vocab"], (batch, prompt))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        with ProcessPoolExecutor(1, context) as writer:  # which gives its memory back
            writer.submit(write, folder, size).result()
        starts: dict[str, tuple[Callable, tuple]] = {
            "torch": (start_torch, (folder, cores)),
            "jax": (start_jax, (folder,)),
        }
        workers = {name: ProcessPoolExecutor(1, context, *start) for name, start in starts.items()}
        first = {name: w.submit(timed, prompts, new).result()[2] for name, w in workers.items()}  # and compiles
    np.testing.assert_array_equal(first["jax"][:, :SAME], first["torch"][:, :SAME], "jax and torch do different work")
    sides = {name: lambda w=w: w.submit(timed, prompts, new).result() for name, w in workers.items()}
    rounds_of = alternate(sides, rounds)
    for w in workers.values():
        w.shutdown()
    wall = {name: [r[0] for r in reports] for name, reports in rounds_of.items()}
    cpu = {name: [r[1] for r in reports] for name, reports in rounds_of.items()}
    return {
        name: {
            "tokens_per_second": summary([batch * new / s for s in wall[name]]),
            "speed_over_torch": ratios(wall["torch"], wall[name]),
            "speed_over_torch_in_processor_time": ratios(cpu["torch"], cpu[name]),
            "same_tokens": float((first[name] == first["torch"]).mean()),
        }
        for name in workers
    }


def write(folder: str, size: dict[str, int]) -> None:
    """A model whose tokens are not all the same: weights are larger than fresh ones."""
    import jax

    from jaxgrow.interop import save as save_model
    from jaxgrow.models import GPT2Config

    config = GPT2Config(**size)  # type: ignore[arg-type]
    params = jax.jit(config.init)(jax.random.key(0))
    save_model(folder, config, jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--embed", type=int, default=768, help="a multiple of 64, the size of a head")
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="1,8", help="prompts that are continued together, such as 1,8")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that follow")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="with 1, trust processor time")
    parser.add_argument("--json", help="where to write the result")
    a = parser.parse_args()

    size = {"vocab": a.vocab, "context": a.context, "layers": a.layers, "embed": a.embed}
    size |= {"heads": a.embed // 64, "head_dim": 64, "mlp": 4 * a.embed}
    result = environment("jax", "jaxlib", "flax", "torch", "transformers")
    print(f"{result['machine']}, {a.cores} of {result['cores']} cores; {size}, {a.prompt} + {a.new} tokens")
    print(f"{'batch':>6} {'':>6} {'tokens/s':>22} {'speed over torch':>20} {'in processor time':>20}   same tokens")
    batches = {}
    for batch in map(int, a.batches.split(",")):
        batches[str(batch)] = sides = compare(size, batch, a.prompt, a.new, a.rounds, a.cores)
        for name, side in sides.items():
            columns = f"{shown(side['tokens_per_second'], 1):>22} {shown(side['speed_over_torch']):>20}"
            columns += f" {shown(side['speed_over_torch_in_processor_time']):>20}"
            print(f"{batch:>6} {name:>6} {columns}   {side['same_tokens']:.2f}")
    about = {"size": size, "prompt": a.prompt, "new": a.new, "rounds": a.rounds, "cores_used": a.cores}
    save(a.json, result | about | {"batches": batches})


if __name__ == "__main__":
    main()
