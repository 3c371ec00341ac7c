"""Tiny experiments on a tiny corpus, that the tests of `train` share."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgrow.cli.program import main as jaxgrow
from jaxgrow.models import Config, GPT2Config
from train import pretrain
from train.config.experiment import Experiment
from train.data.batches import Stream
from train.data.text import Data
from train.extras.run_params import load_params
from train.plan.methods import Growing, GrowTo, TrainStage, VCycle
from train.plan.phase import Phase
from train.plan.training import Train
from train.run import trainer
from train.state.mesh import Mesh, replicated_sharding
from train.state.model import TrainState
from train.state.optim import Optim
from train.step import programs, step
from train.store.checkpoint import Checkpoints

MODEL = GPT2Config(vocab=256, context=8, layers=2, embed=8, heads=2, head_dim=4, mlp=16)
# the small model, which two growths make this large:
SMALL = replace(MODEL, embed=4, heads=1, mlp=8)
LARGE = replace(MODEL, layers=4)
DOUBLED = ("hypercloning", "stack")  # function-preserving width growth, then depth
# 2, 4 and 4 of 8 steps
VCYCLE = VCycle(down=(TrainStage(0.25),), up=(TrainStage(0.5, lr=2.0), TrainStage(0.5)))


def corpus(folder: Path, files: int = 8) -> Path:
    """Write a folder of files with 300 letters each."""
    where = folder / "corpus"
    where.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        text = "".join(random.Random(i).choices("abcd efgh\n", k=300))
        path = where / f"{i}.txt"
        if not path.exists() or path.read_text() != text:  # a new file would be tokenised again
            path.write_text(text)
    return where


def experiment(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment of 8 steps on a corpus in ``folder``."""
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
        "checkpoint_every": 8,  # only at the end, because saving costs more than all steps
    }
    return Experiment(**values | changes)


def script(folder: Path, experiment: Experiment) -> str:
    """Write a config file of ``experiment`` and return its path."""
    path = folder / f"{experiment.name}.py"
    library = ("extras.peft.lora", "models", "layerdrop", "operators.ligo")
    train = ("extras.fine_tune", "extras.labelled.task", "config.experiment", "data.text")
    train += ("state.optim", "state.mesh", "plan.methods", "plan.modifiers", "plan.transforms")
    modules = [*(f"jaxgrow.{name}" for name in library), *(f"train.{name}" for name in train)]
    imports = "".join(f"from {name} import *\n" for name in modules)
    path.write_text(f"{imports}\n\ndef config():\n    return {experiment!r}\n")
    return str(path)


def log(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's log without the times, which differ between runs."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    times = ("seconds", "compile_seconds")
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def setting_values(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every setting of a ``config.json``."""
    if not isinstance(node, dict | list) or not node:
        yield name, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from setting_values(value, f"{name}.{key}".lstrip("."))


def export(run: Path, folder: Path) -> None:
    """Write the model of a run for `transformers`."""
    assert jaxgrow(["convert", str(run), str(folder)]) == 0


@cache
def mesh() -> jax.sharding.Mesh:
    """Return a mesh of all devices, each with a complete copy of the model."""
    return Mesh().over(jax.devices())


@cache
def fresh(config: Config, seed: int = 0) -> Any:
    """Return parameters like initial ones, drawn in NumPy to avoid a second of compilation."""
    return alike(jax.eval_shape(config.init, jax.random.key(0)), seed)


def alike(shapes: Any, seed: int = 0) -> Any:
    """Return parameters of these shapes, distributed like freshly initialised parameters."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        constant = {"scale": np.ones, "bias": np.zeros}
        values = constant[name](x.shape) if name in constant else 0.02 * rng.normal(size=x.shape)
        return values.astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def model(config: Config, tx: optax.GradientTransformation) -> TrainState:
    """Return a freshly initialised model on every device."""
    params = fresh(config)
    return jax.device_put(TrainState(params, tx.init(params), config), replicated_sharding(mesh()))


def trained(config: Config, tx: optax.GradientTransformation, scale: float = 0.2) -> TrainState:
    """Return a model with random NumPy parameters, and AdamW's state of five steps."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: config.init(jax.random.key(0)))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * scale, shapes)
    clip, adam, clock_state, decay = jax.eval_shape(tx.init, params)
    mu, nu = (
        jax.tree.map(lambda x: np.square(rng.normal(size=x.shape)).astype(np.float32), params)
        for _ in range(2)
    )
    five, starts = np.int32(5), jax.tree.map(lambda _: np.int32(0), params)
    clock_state = clock_state._replace(count=five, start_count=starts)
    opt = (clip, adam._replace(count=five, mu=mu, nu=nu), clock_state, decay)
    return TrainState(params, opt, config)


def small(folder: Path) -> Path:
    """Run the small model to its end, so that other runs can grow it."""
    run = folder / "small-seed0"
    optim = Optim(peak_lr=0.1, warmup=2)
    pretrain.run_experiment(experiment(folder, name="small", model=SMALL, optim=optim), run)
    return run


def growing(
    folder: Path, *to: GrowTo, source: TrainStage | str = "small-seed{seed}", **changes: Any
) -> Experiment:
    """Return an experiment that starts from the small model."""
    return experiment(folder, **{"model": LARGE, "method": Growing(SMALL, source, to)} | changes)


def spelled_plan(plan: Sequence[Phase]) -> str:
    """Return the label of each phase with its steps, or with the model that it writes."""
    return "; ".join(
        f"{p.label} {p.steps}" if isinstance(p, Train) else f"{p.label} > {p.writes}" for p in plan
    )


class Killed(BaseException):
    """An exception that no code catches, like a power cut."""


def stopped(experiment: Experiment, folder: Path, *steps: int) -> None:
    """Run, kill the run right after each checkpoint in ``steps``, and continue it each time."""
    for at in steps:
        killed(experiment, folder, at)
    pretrain.run_experiment(experiment, folder)


def killed(experiment: Experiment, folder: Path, at: int) -> None:
    """Run, and kill the run right after the checkpoint ``at``."""
    save = Checkpoints.save

    def stopping(self, step, *rest):
        save(self, step, *rest)
        if step == at:
            self.wait()
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", stopping)
        with pytest.raises(Killed):
            pretrain.run_experiment(experiment, folder)


def assert_same_end(folder: Path, whole: Path) -> None:
    """Check that logs and parameters are bitwise identical."""
    assert log(folder) == log(whole)
    chex.assert_trees_all_equal(load_params(folder), load_params(whole))


@contextmanager
def compiling(*kinds: str):
    """Runs inside this context compile separate programs of all or of the given kinds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in kinds or ("step", "evaluation", "made"):
            patch.setattr(programs, name, cache(getattr(programs, name).__wrapped__))
        yield


def poison(patch, *steps, value=np.nan, entry=False):
    """Make the gradients of the given steps NaN, or one entry of one leaf."""
    real = step.gradients

    def gradients(model, batch, rows, key, accumulate, pairs):
        loss, grads = real(model, batch, rows, key, accumulate, pairs)
        leaf = grads["final_norm"]["scale"]
        bad = leaf.at[1].set(value) if entry else leaf * value
        # the key of a step says which step it is
        keys = [jax.random.fold_in(jax.random.key(0), number - 1) for number in steps]
        hit = jnp.stack(list(map(jax.random.key_data, keys))) == jax.random.key_data(key)[None]
        grads["final_norm"]["scale"] = jnp.where(hit.all(-1).any(), bad, leaf)
        return loss, grads

    patch.setattr(step, "gradients", gradients)


def recorded_inputs(patch) -> list[np.ndarray]:
    """Return a list to which every training batch of later runs adds its inputs."""
    found: list[np.ndarray] = []
    following = Stream.__next__

    def recorded(self):
        batch = following(self)
        found.append(np.asarray(batch[0]))
        return batch

    patch.setattr(Stream, "__next__", recorded)
    return found


@contextmanager
def only(count):
    """Runs inside this context use only the first ``count`` devices."""
    devices = jax.devices()[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.jax, "devices", lambda: devices)
        yield


def assert_close(folder, other):
    """Check that logs and parameters are equal up to rounding of sums in a different order."""
    for a, b in zip(log(folder), log(other), strict=True):
        assert a.keys() == b.keys() and a["phase"] == b["phase"]
        for key, x in a.items():
            if key != "phase":
                assert b[key] == pytest.approx(x, rel=1e-4, abs=2e-4), (a, b)
    chex.assert_trees_all_close(load_params(folder), load_params(other), rtol=1e-3, atol=1e-5)
