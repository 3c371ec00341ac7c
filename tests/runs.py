"""Tiny experiments on a tiny corpus, for the tests of `train`."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment
from train.data import Data
from train.optim import Optim
from train.plan import Stage, VCycle

_COMPILED = tempfile.TemporaryDirectory(prefix="jaxgrow-compiled-")
MODEL = GPT2Config(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
VCYCLE = VCycle(down=(Stage(0.25),), up=(Stage(0.5, lr=2.0), Stage(0.5)))  # 2, 4 and 4 of 8 steps


@contextmanager
def quick() -> Iterator[None]:
    """Compiling is what these tests cost: inside, nothing is compiled twice, by this process or one that it starts."""
    settings = {  # here, and by default
        "jax_compilation_cache_dir": (_COMPILED.name, None),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
        "jax_persistent_cache_min_entry_size_bytes": (-1, 0),
        "jax_disable_most_optimizations": (True, False),
    }
    for name, (here, _) in settings.items():
        jax.config.update(name, here)
    reset_cache()
    yield
    for name, (_, default) in settings.items():
        jax.config.update(name, default)
    reset_cache()


def corpus(folder: Path, files: int = 8) -> Path:
    """A folder with files of 300 letters each."""
    where = folder / "corpus"
    where.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        (where / f"{i}.txt").write_text("".join(random.Random(i).choices("abcd efgh\n", k=300)))
    return where


def experiment(folder: Path, **changes: Any) -> Experiment:
    """A run of 8 steps on a corpus in ``folder``."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": MODEL,
        "steps": 8,
        "batch": 8,
        "data": Data("text", str(corpus(folder)), valid_fraction=0.25, cache=str(folder / "cache")),
        "optim": Optim(peak_lr=1e-2, warmup=2),
        "eval_every": 4,
        "eval_batches": 2,
        "log_every": 2,
        "checkpoint_every": 2,
    }
    return Experiment(**values | changes)


def script(folder: Path, experiment: Experiment) -> str:
    """A config file of ``experiment``; its path."""
    path = folder / f"{experiment.name}.py"
    imports = (
        "from jaxgrow.models.gpt2 import GPT2Config\nfrom train.config import Experiment\nfrom train.data import Data\n"
    )
    imports += "from train.optim import Optim\nfrom train.plan import *\n\n\n"
    path.write_text(f"{imports}def config():\n    return {experiment!r}\n")
    return str(path)


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, without the time, which is never the same."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
