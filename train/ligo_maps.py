"""Describe the maps that LiGO learned, plot them, or apply them to another checkpoint of the same shape.

``python -m train.ligo_maps FILE [--plot FILE.png] [--apply MODEL --out FOLDER]``
"""

import os
from pathlib import Path

import numpy as np

from jaxgrow.axes import Params
from jaxgrow.checkpoints import CheckpointError, open_checkpoint, orbax
from jaxgrow.models import Config, from_json
from jaxgrow.untrusted import checked_path, copy_file, one_line
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say, say_notes
from train.extras import plots
from train.extras.learned_maps import load_maps
from train.extras.run_params import load_params
from train.extras.tokenizers import special
from train.plan.learning import Maps
from train.plan.transforms import differing
from train.store.workdir import Workdir


def describe_maps(maps: Maps) -> str:
    """Describe the maps, one in each line.

    A line has the shape of the map, the distance of the part for the old units from the identity,
    and the mean norm of the rows for the new units.
    """
    lines = [
        f"{name}: w {w.shape}, row sums {w.sum(1).min():.3f} .. {w.sum(1).max():.3f}"
        for name, w in maps.coefficients["depth"].items()
    ]
    for name, matrices in maps.coefficients["width"].items():
        for kind, m in matrices.items():
            old = m.shape[-1]
            top = np.abs(m[..., :old, :] - np.eye(old)).max()
            rows = np.sqrt(np.square(m[..., old:, :]).sum(-1))
            lines.append(
                f"{name}: {kind} {m.shape}, max |top - I| {top:.2e}, mean norm of new rows {rows.mean():.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    arguments = command_parser("ligo_maps").parse_args()
    maps = load_maps(arguments.file)
    say(describe_maps(maps))
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        plots.plot_maps(maps, arguments.plot)
    if arguments.apply:
        _apply(maps, arguments.file, arguments.apply, arguments.out)


def _apply(maps: Maps, file: Path, model: Path, out: Path) -> None:
    """Grow a model by the maps and write an Orbax folder, with the tokenizer of the model."""
    if out.exists():
        raise UserError(f"{out} exists already; give another --out")
    names = ("tokenizer.json", "vocab.json", "merges.txt")
    tokenizers = [checked_path(model, name) for name in names if os.path.lexists(model / name)]
    try:
        with one_line(CheckpointError, f"{model} cannot be read"):
            config, params = _read_model(model)
        if type(config) is not type(maps.small):
            raise ValueError(
                f"they are for a {type(maps.small).__name__}, but the model is a {type(config).__name__}"
            )
        grown = maps.apply(params)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    except ValueError as error:
        raise UserError(f"the maps of {file} do not fit {model}: {error}") from error
    # The maps determine only the sizes. Other settings, such as eps, are those of the model.
    orbax.export_model(out, config.with_sizes(differing(maps.small, maps.large)), grown)
    for tokenizer in tokenizers:
        copy_file(tokenizer, out / tokenizer.name)
    special.copy_special_files(model, out)


def _read_model(model: Path) -> tuple[Config, Params]:
    """Return the config and the parameters of a run, which may be unfinished, or of a checkpoint."""
    run = Workdir(model)
    if not run.begun:
        source = open_checkpoint(model)
        say_notes(source)
        return source.config, source.params()
    about = run.result if run.finished else run.config
    return from_json(about["model"]), load_params(model)


if __name__ == "__main__":
    exits_cleanly(main)
