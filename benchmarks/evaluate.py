"""How fast are scoring and generation, compared with Hugging Face `transformers` on PyTorch?

    python benchmarks/evaluate.py [--json FILE] [--layers 12] [--embed 768] [--texts 8] [--batches 1,8] [--new 128]

Both sides read the same GPT-2 with random weights from one folder, in float32, and run on the same
processor. Scoring computes the loss of every token of texts that fill the context. jaxgrow uses
`train.extras.evaluation.scoring`. PyTorch uses a forward pass of the model, with one text at a time
or with all texts at once, whichever is faster. Generation is greedy with a KV cache on both sides
and includes the prefill of the prompts. Each side has its own process with all cores. Rounds
alternate, and ratios are taken within a round. Losses and first tokens must agree, which shows that
both sides do the same work.
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

SAME = 4  # first tokens of each row that must agree; later ones may differ after a near tie

Work = Callable[[np.ndarray, int], np.ndarray]
# The tasks of this worker process. "generate" maps prompts [B, P] and the number of new tokens to
# new tokens [B, new]. "score" maps texts [B, T] and the number of texts per batch to losses [B].
_works: dict[str, Work] = {}


def start_torch(folder: str, threads: int) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # never stop before all tokens are generated

    def generated(prompts: np.ndarray, new: int) -> np.ndarray:
        tokens = torch.from_numpy(prompts).long()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return out[:, prompts.shape[1] :].numpy()

    def scored(texts: np.ndarray, at_once: int) -> np.ndarray:
        out = []
        with torch.inference_mode():
            for part in torch.from_numpy(texts).long().split(at_once):
                logits = model(part[:, :-1]).logits
                each = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none"
                )
                out.append(each.reshape(len(part), -1).sum(1).numpy())
        return np.concatenate(out)

    _works.update(generate=generated, score=scored)


def start_jax(folder: str) -> None:
    from jaxgrow.extras.models.generation import generate
    from train.extras.evaluation.scoring import Request, Scorer
    from train.extras.pretrained import open_text_model

    model = open_text_model(folder, "bytes")
    scorer = Scorer(model)

    def generated(prompts: np.ndarray, new: int) -> np.ndarray:
        return np.stack(generate(model.config, model.params, list(prompts), max_new=new))

    def scored(texts: np.ndarray, at_once: int) -> np.ndarray:
        return np.array(
            [score.loss for score in scorer([Request(text, 1, len(text)) for text in texts])]
        )

    _works.update(generate=generated, score=scored)


def timed(work: str, tokens: np.ndarray, number: int) -> tuple[float, float, np.ndarray]:
    """Run a task once.

    Returns:
      Wall-clock seconds, processor seconds, and the result.
    """
    start = time.perf_counter()
    cpu = time.process_time()
    found = _works[work](tokens, number)
    return time.perf_counter() - start, time.process_time() - cpu, found


def compare(size: dict[str, int], a: argparse.Namespace) -> dict[str, Any]:
    """Measure each task on both sides.

    Returns:
      For each task, the result of `sides`.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.cores])  # the workers inherit it
    rng = np.random.default_rng(0)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        with ProcessPoolExecutor(1, context) as writer:  # a process that returns its memory
            writer.submit(write, folder, size).result()
        starts: dict[str, tuple[Callable, tuple]] = {
            "torch": (start_torch, (folder, a.cores)),
            "jax": (start_jax, (folder,)),
        }
        workers = processes(starts)
        for worker in workers.values():
            worker.submit(len, "").result()  # wait until they have read the folder
    texts = rng.integers(0, size["vocab"], (a.texts, size["context"] + 1))
    at_once = min(
        (1, a.texts),
        key=lambda n: min(_seconds(workers["torch"], "score", texts, n) for _ in range(2)),
    )
    out = {"score": sides(workers, "score", texts, at_once, texts[:, 1:].size, a.rounds)}
    for batch in map(int, a.batches.split(",")):
        prompts = rng.integers(0, size["vocab"], (batch, a.prompt))
        out[f"generate, batch {batch}"] = sides(
            workers, "generate", prompts, a.new, batch * a.new, a.rounds
        )
    for worker in workers.values():
        worker.shutdown()
    return out


def _seconds(worker: ProcessPoolExecutor, *work: Any) -> float:
    return worker.submit(timed, *work).result()[0]


def sides(
    workers: dict[str, ProcessPoolExecutor],
    work: str,
    tokens: np.ndarray,
    number: int,
    count: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure one task on both sides.

    Args:
      workers: a worker process for each side.
      work: "score" or "generate".
      tokens: texts or prompts.
      number: texts per batch, or new tokens.
      count: tokens that one call processes.
      rounds: number of rounds.

    Returns:
      The throughput of each side, and its ratio to PyTorch.
    """
    # The first call also compiles.
    first = {name: w.submit(timed, work, tokens, number).result()[2] for name, w in workers.items()}
    if work == "score":
        np.testing.assert_allclose(first["jax"], first["torch"], rtol=1e-4)
    else:
        np.testing.assert_array_equal(
            first["jax"][:, :SAME],
            first["torch"][:, :SAME],
            "the two sides do different work: their first tokens differ",
        )
    reports = alternate(
        {
            name: lambda w=w: w.submit(timed, work, tokens, number).result()
            for name, w in workers.items()
        },
        rounds,
    )
    return over_torch(reports, count)


def write(folder: str, size: dict[str, int]) -> None:
    """Write a model whose greedy tokens are not all the same.

    Its kernels are four times as large as at initialisation.
    """
    import jax

    from jaxgrow.checkpoints import save as save_model
    from jaxgrow.models import GPT2Config

    config = GPT2Config(**size)  # type: ignore[arg-type]
    params = jax.jit(config.init)(jax.random.key(0))
    save_model(folder, config, jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, params))


def main() -> None:
    p = parser(__doc__, rounds=8)
    add_sizes(p, layers=12, embed=768, vocab=50257, context=1024)
    p.add_argument("--texts", type=int, default=8, help="number of scored texts")
    p.add_argument("--batches", default="1,8", help="batch sizes of generation, such as 1,8")
    p.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    p.add_argument("--new", type=int, default=128, help="generated tokens of each prompt")
    add_cores(p)
    a = p.parse_args()

    size = sizes(a)
    result = environment("jax", "jaxlib", "flax", "torch", "transformers")
    print(
        f"{result['machine']}, {a.cores} of {result['cores']} cores; {size}, {a.prompt} + {a.new} tokens"
    )
    works = compare(size, a)
    rows = [
        (work, name, *speeds(side, 1))
        for work, both in works.items()
        for name, side in both.items()
    ]
    head = ("", "", "tokens/s", "speed / torch", "in processor time")
    # Loading JAX at the top would also load it into the process that measures torch.
    from jaxgrow.tables import align_columns

    print(align_columns(head, rows, right=(2, 3, 4)))
    about = {name: getattr(a, name) for name in ("texts", "prompt", "new", "rounds")}
    save(a.json, result | {"size": size, **about, "cores_used": a.cores, "works": works})


if __name__ == "__main__":
    main()
