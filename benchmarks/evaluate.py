"""Tokens a second of scoring and of generation, against Hugging Face's `transformers` by PyTorch, on the same processor.

    python benchmarks/evaluate.py [--json FILE] [--layers 12] [--embed 768] [--texts 8] [--batches 1,8] [--new 128]

One GPT-2 of random weights, read from one folder, in float32. Scoring: the loss of every token of texts of the model's context,
by `train.tasks.scoring`, and by a forward pass of the model, a text at a time or all at once, whichever is faster. Generation:
the likeliest tokens, keys and values kept on both sides, the reading of the prompts included. Each side lives in a process of
its own with all cores; rounds alternate, and ratios are taken within a round. Losses and first tokens must agree: both then do
the same work.
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

Work = Callable[[np.ndarray, int], np.ndarray]
# Of this worker process. "generate": prompts [B, P] -> new tokens [B, new]; "score": texts [B, T] -> their losses [B], of so
# many at once.
_works: dict[str, Work] = {}


def start_torch(folder: str, threads: int) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # no text ends before all tokens are there

    def generated(prompts: np.ndarray, new: int) -> np.ndarray:
        tokens = torch.from_numpy(prompts).long()
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new, pad_token_id=0
            )
        return out[:, prompts.shape[1] :].numpy()

    def scored(texts: np.ndarray, at_once: int) -> np.ndarray:
        out = []
        with torch.inference_mode():
            for part in torch.from_numpy(texts).long().split(at_once):
                logits = model(part[:, :-1]).logits
                each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
                out.append(each.reshape(len(part), -1).sum(1).numpy())
        return np.concatenate(out)

    _works.update(generate=generated, score=scored)


def start_jax(folder: str) -> None:
    from jaxgrow import generate
    from train.state.opened import opened
    from train.tasks.scoring import Request, Scorer

    model = opened(folder, "bytes")
    scorer = Scorer(model)

    def generated(prompts: np.ndarray, new: int) -> np.ndarray:
        return np.stack(generate(model.config, model.params, list(prompts), max_new=new))

    def scored(texts: np.ndarray, at_once: int) -> np.ndarray:
        return np.array([score.loss for score in scorer([Request(text, 1, len(text)) for text in texts])])

    _works.update(generate=generated, score=scored)


def timed(work: str, tokens: np.ndarray, number: int) -> tuple[float, float, np.ndarray]:
    """Seconds, seconds of processor time, and what was found."""
    start, cpu = time.perf_counter(), time.process_time()
    found = _works[work](tokens, number)
    return time.perf_counter() - start, time.process_time() - cpu, found


def compare(size: dict[str, int], a: argparse.Namespace) -> dict[str, Any]:
    """What each side does in a second, by work."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.cores])  # the workers inherit it
    rng, context = np.random.default_rng(0), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        with ProcessPoolExecutor(1, context) as writer:  # which gives its memory back
            writer.submit(write, folder, size).result()
        starts: dict[str, tuple[Callable, tuple]] = {
            "torch": (start_torch, (folder, a.cores)),
            "jax": (start_jax, (folder,)),
        }
        workers = {name: ProcessPoolExecutor(1, context, *start) for name, start in starts.items()}
        for worker in workers.values():
            worker.submit(len, "").result()  # they have read the folder
    texts = rng.integers(0, size["vocab"], (a.texts, size["context"] + 1))
    at_once = min((1, a.texts), key=lambda n: min(_seconds(workers["torch"], "score", texts, n) for _ in range(2)))
    out = {"score": sides(workers, "score", texts, at_once, texts[:, 1:].size, a.rounds)}
    for batch in map(int, a.batches.split(",")):
        prompts = rng.integers(0, size["vocab"], (batch, a.prompt))
        out[f"generate, batch {batch}"] = sides(workers, "generate", prompts, a.new, batch * a.new, a.rounds)
    for worker in workers.values():
        worker.shutdown()
    return out


def _seconds(worker: ProcessPoolExecutor, *work: Any) -> float:
    return worker.submit(timed, *work).result()[0]


def sides(
    workers: dict[str, ProcessPoolExecutor], work: str, tokens: np.ndarray, number: int, count: int, rounds: int
) -> dict[str, Any]:
    """Each side at one work, of ``count`` tokens."""
    first = {name: w.submit(timed, work, tokens, number).result()[2] for name, w in workers.items()}  # and compiles
    if work == "score":
        np.testing.assert_allclose(first["jax"], first["torch"], rtol=1e-4)
    else:
        np.testing.assert_array_equal(first["jax"][:, :SAME], first["torch"][:, :SAME], "they do different work")
    reports = alternate(
        {name: lambda w=w: w.submit(timed, work, tokens, number).result() for name, w in workers.items()}, rounds
    )
    wall = {name: [r[0] for r in of] for name, of in reports.items()}
    cpu = {name: [r[1] for r in of] for name, of in reports.items()}
    return {
        name: {
            "tokens_per_second": summary([count / s for s in wall[name]]),
            "speed_over_torch": ratios(wall["torch"], wall[name]),
            "speed_over_torch_in_processor_time": ratios(cpu["torch"], cpu[name]),
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
    parser.add_argument("--texts", type=int, default=8, help="that are scored")
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
    print(f"{'':>20} {'':>6} {'tokens/s':>22} {'speed over torch':>20} {'in processor time':>20}")
    works = compare(size, a)
    for work, both in works.items():
        for name, side in both.items():
            columns = f"{shown(side['tokens_per_second'], 1):>22} {shown(side['speed_over_torch']):>20}"
            columns += f" {shown(side['speed_over_torch_in_processor_time']):>20}"
            print(f"{work:>20} {name:>6} {columns}")
    about = {
        "size": size,
        "texts": a.texts,
        "prompt": a.prompt,
        "new": a.new,
        "rounds": a.rounds,
        "cores_used": a.cores,
    }
    save(a.json, result | about | {"works": works})


if __name__ == "__main__":
    main()
