"""What tells models apart: how many directions their matrices use, where their gradients are, and which layers matter.

    python benchmarks/anatomy.py NAME=MODEL ... --text FILE [--plot FILE.png] [--json FILE]

MODEL is as of `train.evaluate`. A grown model as it is born is a run whose stage after the growth has no steps:
``python -m train.pretrain configs/wikipedia12.py:stack --set method.to.0.stages.0.steps=0 --set name=stack_born``.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import environment, save
from jaxgrow.axes import LAYERS, cut, leaves, role
from jaxgrow.drop import sensitivity
from train.data.batches import next_tokens
from train.data.formats import text
from train.state.model import Model, loss
from train.state.opened import opened

BATCHES, SAMPLES = 4, 32


def used(matrices: np.ndarray) -> np.ndarray:
    """The part of its directions that each matrix [.., m, n] uses: ``exp(H(p)) / min(m, n)``, p the squared singular values'
    parts of their sum, H the entropy (Roy & Vetterli, 2007). 1 of an orthogonal matrix; a copy of every unit halves it."""
    values = np.linalg.svd(matrices.astype(np.float64), compute_uv=False) ** 2
    p = values / values.sum(-1, keepdims=True)
    return np.exp(-(p * np.log(np.maximum(p, 1e-300))).sum(-1)) / p.shape[-1]


def anatomy(folder: Path, file: Path) -> dict[str, Any]:
    """Of each layer: ``directions`` used, the mean over its matrices; ``gradient``, its norm's part of the sum over layers; and
    ``matters``, by how much the loss rises without it."""
    model = opened(folder)
    config, params = model.config, jax.device_get(model.params)
    tokens = np.array(model.tokenizer.encode("".join(text(file))).ids, np.int32)
    size = BATCHES * SAMPLES * (config.length + 1)
    if len(tokens) < size:
        sys.exit(f"{file} has {len(tokens)} tokens, but {size} are wanted")
    places = np.linspace(0, len(tokens) - config.length - 1, BATCHES * SAMPLES).astype(int)
    samples = np.stack([tokens[p : p + config.length + 1] for p in places]).reshape(BATCHES, SAMPLES, -1)
    batches = jax.vmap(next_tokens)(samples)

    def at(params, kept, batch):
        return loss(Model(params, None, config), batch, kept)

    value, grads = jax.jit(
        lambda p: jax.value_and_grad(lambda p: jax.lax.map(lambda b: at(p, None, b), batches).mean())(p)
    )(params)
    squares, directions, axes = np.zeros(config.layers), [], config.axes()
    for (path, w, names), (_, g, _) in zip(leaves(params, axes), leaves(grads, axes), strict=True):
        if names[0] != LAYERS:
            continue
        squares += (np.asarray(g, np.float64) ** 2).reshape(config.layers, -1).sum(1)
        if role(path, names) == "kernel":
            directions.append(used(w.reshape(config.layers, math.prod(w.shape[1 : 1 + len(cut(names).read)]), -1)))
    matters = sensitivity(lambda kept, b: at(params, kept, b), config.layers, batches)
    norms = np.sqrt(squares)
    return {
        "loss": float(value),
        "directions": np.mean(directions, 0).tolist(),
        "gradient": (norms / norms.sum()).tolist(),
        "matters": np.asarray(matters).tolist(),
    }


PANELS = {
    "directions": "directions that its matrices use",
    "gradient": "part of the gradient's norm",
    "matters": "loss without it, less loss",
}
LINEAR = 0.1  # the scale of the last panel is linear up to this loss


def drawn(found: dict[str, dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for i, (name, of) in enumerate(found.items()):
            axes.plot(range(1, len(of[key]) + 1), of[key], ".-" if i < 10 else "x--", label=name)
        axes.set(xlabel="layer", title=title)
    figure.axes[-1].set_yscale("symlog", linthresh=LINEAR)  # the first layer is worth ten times the others
    figure.axes[-1].set_ylabel(f"linear below {LINEAR}, logarithmic above")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="held-out text")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = {}
    for name, _, folder in (model.partition("=") for model in arguments.models):
        found[name] = anatomy(Path(folder), arguments.text)
        means = ", ".join(f"{key} {np.mean(found[name][key]):.3f}" for key in ("directions", "matters"))
        print(f"{name}: loss {found[name]['loss']:.4f}; means over layers: {means}")
    if arguments.plot:
        drawn(found, arguments.plot)
    if arguments.json:
        save(arguments.json, {"environment": environment("jax"), "models": found})


if __name__ == "__main__":
    main()
