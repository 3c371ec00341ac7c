"""How do models differ? The used directions, the gradient and the importance of each layer.

    python benchmarks/anatomy.py NAME=MODEL ... --text FILE [--plot FILE.png] [--json FILE]

MODEL is any model that `train.evaluate` accepts. To examine a grown model at initialisation, give
the stage after the growth no steps:

    python -m train.pretrain configs/wikipedia12.py:stack --set method.to.0.stages.0.steps=0 \\
        --set name=stack_init
"""

import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import environment, new_file, parser, save
from jaxgrow.axes import LAYERS, leaves, role_of, split_kernel
from jaxgrow.layerdrop import layer_sensitivity
from train.common.errors import exits_cleanly
from train.data.windows import next_tokens
from train.extras.pretrained import open_text_model
from train.extras.text.formats import text_pieces
from train.state.model import TrainState, loss

BATCHES = 4
SAMPLES = 32


def used(matrices: np.ndarray) -> np.ndarray:
    """The fraction of its directions that each matrix uses (Roy & Vetterli, 2007).

    ``exp(H(p)) / min(m, n)``, where p are the squared singular values divided by their sum, and H
    is the entropy. An orthogonal matrix has the value 1. A matrix in which each unit has a copy has
    half of the value.

    Args:
      matrices: matrices [.., m, n].

    Returns:
      An array [..] with a value between 0 and 1 for each matrix.
    """
    values = np.linalg.svd(matrices.astype(np.float64), compute_uv=False) ** 2
    p = values / values.sum(-1, keepdims=True)
    return np.exp(-(p * np.log(np.maximum(p, 1e-300))).sum(-1)) / p.shape[-1]


def anatomy(folder: Path, file: Path) -> dict[str, Any]:
    """Examine each layer of a model.

    Args:
      folder: the run or checkpoint.
      file: validation text.

    Returns:
      ``loss``, and a list with one value per layer for each of: ``directions``, the mean of `used`
      over the matrices of the layer; ``gradient``, the norm of the layer's gradient as a fraction
      of the sum over the layers; ``matters``, the increase of the loss if the layer is removed.
    """
    model = open_text_model(folder)
    config = model.config
    params = jax.device_get(model.params)
    tokens = np.array(model.tokenizer.encode("".join(text_pieces(file))).ids, np.int32)
    size = BATCHES * SAMPLES * (config.length + 1)
    if len(tokens) < size:
        sys.exit(
            f"{file} has {len(tokens)} tokens, but at least {size} are needed. Use a longer text."
        )
    places = np.linspace(0, len(tokens) - config.length - 1, BATCHES * SAMPLES).astype(int)
    samples = np.stack([tokens[p : p + config.length + 1] for p in places]).reshape(
        BATCHES, SAMPLES, -1
    )
    batches = jax.vmap(next_tokens)(samples)

    def at(params, keep_mask, batch):
        return loss(TrainState(params, None, config), batch, keep_mask)

    value, grads = jax.jit(
        lambda p: jax.value_and_grad(
            lambda p: jax.lax.map(lambda b: at(p, None, b), batches).mean()
        )(p)
    )(params)
    squares = np.zeros(config.layers)
    directions = []
    axes = config.axes()
    for (path, w, names), (_, g, _) in zip(leaves(params, axes), leaves(grads, axes), strict=True):
        if names[0] != LAYERS:
            continue
        squares += (np.asarray(g, np.float64) ** 2).reshape(config.layers, -1).sum(1)
        if role_of(path, names) == "kernel":
            directions.append(
                used(
                    w.reshape(
                        config.layers, math.prod(w.shape[1 : 1 + len(split_kernel(names).read)]), -1
                    )
                )
            )
    matters = layer_sensitivity(
        lambda keep_mask, b: at(params, keep_mask, b), config.layers, batches
    )
    norms = np.sqrt(squares)
    return {
        "loss": float(value),
        "directions": np.mean(directions, 0).tolist(),
        "gradient": (norms / norms.sum()).tolist(),
        "matters": np.asarray(matters).tolist(),
    }


PANELS = {
    "directions": "used fraction of directions",
    "gradient": "fraction of the gradient norm",
    "matters": "increase of the loss without the layer",
}
LINEAR = 0.1  # the scale of the last panel is linear up to this loss


def drawn(found: dict[str, dict[str, Any]], path: str) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for i, (name, of) in enumerate(found.items()):
            axes.plot(range(1, len(of[key]) + 1), of[key], ".-" if i < 10 else "x--", label=name)
        axes.set(xlabel="layer", title=title)
    # Without the first layer, the loss rises ten times more than without any other layer.
    figure.axes[-1].set_yscale("symlog", linthresh=LINEAR)
    figure.axes[-1].set_ylabel(f"linear below {LINEAR}, logarithmic above")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=120)


def main() -> None:
    p = parser(__doc__)
    models = "label and folder of each model"
    p.add_argument("models", nargs="+", metavar="NAME=MODEL", help=models)
    p.add_argument("--text", type=Path, required=True, metavar="FILE", help="validation text")
    p.add_argument(
        "--plot", type=new_file, metavar="FILE.png", help="where to draw the three panels"
    )
    arguments = p.parse_args()
    if any("=" not in model for model in arguments.models):
        p.error("give each model with its label, such as scratch=runs/wiki12/wiki12_scratch-seed0")
    found = {}
    for name, _, folder in (model.partition("=") for model in arguments.models):
        found[name] = anatomy(Path(folder), arguments.text)
        means = ", ".join(
            f"{key} {np.mean(found[name][key]):.3f}" for key in ("directions", "matters")
        )
        print(f"{name}: loss {found[name]['loss']:.4f}; means over layers: {means}")
    if arguments.plot:
        drawn(found, arguments.plot)
    save(arguments.json, {"environment": environment("jax"), "models": found})


if __name__ == "__main__":
    exits_cleanly(main)
