"""Tiny experiments on a tiny corpus, for the tests of `train`."""

import json
import random
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

from jaxgrow.models import Config, GPT2Config
from train import pretrain
from train.config.experiment import Experiment
from train.data.text import Data
from train.engine.loop import programs, trainer
from train.engine.run.checkpoint import Checkpoints
from train.engine.run.workdir import load
from train.engine.state.mesh import Mesh, replicated
from train.engine.state.model import Model
from train.engine.state.optim import Optim
from train.plan.methods import Growing, GrowTo, Stage, VCycle

MODEL = GPT2Config(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
SMALL = replace(MODEL, embed=4, heads=1, mlp=8)  # .. that grows, twice in all, to:
LARGE = replace(MODEL, layers=4)
DOUBLED = ("hypercloning", "stack")  # .. in width without a change of the function, then in depth
VCYCLE = VCycle(down=(Stage(0.25),), up=(Stage(0.5, lr=2.0), Stage(0.5)))  # 2, 4 and 4 of 8 steps


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
        "checkpoint_every": 8,  # at the end: saving costs more than all these steps
    }
    return Experiment(**values | changes)


def script(folder: Path, experiment: Experiment) -> str:
    """A config file of ``experiment``; its path."""
    path = folder / f"{experiment.name}.py"
    modules = (
        "jaxgrow.models",
        "jaxgrow.layerdrop",
        "jaxgrow.operators.ligo",
        "train.config.experiment",
        "train.data.text",
        "train.engine.state.optim",
        "train.plan.methods",
        "train.engine.state.mesh",
    )
    imports = "".join(
        f"from {name} import *\n"
        for name in (*modules, "train.plan.modifiers", "train.plan.transforms")
    )
    path.write_text(f"{imports}\n\ndef config():\n    return {experiment!r}\n")
    return str(path)


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, without the time, which is never the same."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "compile_seconds")} for line in lines
    ]


@cache
def mesh() -> jax.sharding.Mesh:
    """All devices, each with all of the model."""
    return Mesh().over(jax.devices())


@cache
def fresh(config: Config, seed: int = 0) -> Any:
    """Parameters like its initial ones, in NumPy: the program that draws those takes a second to compile."""
    return alike(jax.eval_shape(config.init, jax.random.key(0)), seed)


def alike(shapes: Any, seed: int = 0) -> Any:
    """Parameters of these shapes, like those that a model is born with."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        constant = {"scale": np.ones, "bias": np.zeros}
        values = constant[name](x.shape) if name in constant else 0.02 * rng.normal(size=x.shape)
        return values.astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def model(config: Config, tx: optax.GradientTransformation) -> Model:
    """Fresh, on every device."""
    params = fresh(config)
    return jax.device_put(Model(params, tx.init(params), config), replicated(mesh()))


def small(folder: Path) -> Path:
    """The finished run of a small model, beside which others grow it."""
    run = folder / "small-seed0"
    pretrain.run(
        experiment(folder, name="small", model=SMALL, optim=Optim(peak_lr=0.1, warmup=2)), run
    )
    return run


def growing(
    folder: Path, *to: GrowTo, source: Stage | str = "small-seed{seed}", **changes: Any
) -> Experiment:
    """A run that begins from the small model."""
    return experiment(folder, **{"model": LARGE, "method": Growing(SMALL, source, to)} | changes)


class Killed(BaseException):
    """What nothing catches, like a power cut."""


def stopped(experiment: Experiment, folder: Path, *steps: int) -> None:
    """The run, killed right after each of the checkpoints ``steps``, and continued each time."""
    for step in steps:
        killed(experiment, folder, step)
    pretrain.run(experiment, folder)


def killed(experiment: Experiment, folder: Path, at: int) -> None:
    """The run, killed right after the checkpoint ``at``."""
    save = Checkpoints.save

    def stopping(self, step, *rest):
        save(self, step, *rest)
        if step == at:
            self.wait()
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", stopping)
        with pytest.raises(Killed):
            pretrain.run(experiment, folder)


def assert_same_end(folder: Path, whole: Path) -> None:
    """To the bit."""
    assert log(folder) == log(whole)
    chex.assert_trees_all_equal(load(folder), load(whole))


@contextmanager
def compiling(*kinds: str):
    """The runs within compile their programs, or these kinds of them, themselves, and leave them to nobody."""
    with pytest.MonkeyPatch.context() as patch:
        for name in kinds or ("step", "evaluation", "made"):
            patch.setattr(programs, name, cache(getattr(programs, name).__wrapped__))
        yield


@contextmanager
def only(count):
    """The runs within have the first few devices alone."""
    devices = jax.devices()[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.jax, "devices", lambda: devices)
        yield


def assert_close(folder, other):
    """The same lines, to the rounding of sums in another order; parameters, too."""
    for a, b in zip(log(folder), log(other), strict=True):
        assert a.keys() == b.keys() and a["phase"] == b["phase"]
        for key, x in a.items():
            if key != "phase":
                assert b[key] == pytest.approx(x, rel=1e-4, abs=2e-4), (a, b)
    chex.assert_trees_all_close(load(folder), load(other), rtol=1e-3, atol=1e-5)
