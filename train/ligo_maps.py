"""Describe the maps that LiGO learned, plot them, or apply them to another checkpoint of the same shape.

``python -m train.ligo_maps FILE [--plot FILE.png] [--apply MODEL --out FOLDER]``
"""

import shutil
from pathlib import Path

import numpy as np

from jaxgrow.checkpoints import CheckpointError, open_checkpoint, orbax
from train.analysis import plots
from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly
from train.engine.run.workdir import Workdir
from train.engine.run.workdir import load as load_params
from train.plan.learning import Maps
from train.plan.learning import load as load_maps


def describe(maps: Maps) -> str:
    """Describe the maps, one in each line.

    A line has the shape of the map, the distance of the part for the old units from the identity,
    and the mean norm of the rows for the new units.
    """
    lines = []
    for name, w in maps.coefficients["depth"].items():
        lines.append(f"{name}: w {w.shape}, row sums {w.sum(1).min():.3f} .. {w.sum(1).max():.3f}")
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
    parser = Parser("ligo_maps", __doc__)
    parser.add_argument("file", type=Path, help="file maps.npz of a run")
    parser.add_argument(
        "--plot", type=Path, help="file for a figure of the maps (default: no figure)"
    )
    parser.add_argument(
        "--apply",
        type=Path,
        metavar="MODEL",
        help="run or checkpoint that the maps grow (default: none)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="new Orbax folder for the grown model, required with --apply (default: none)",
    )
    arguments = parser.parse_args()
    if (arguments.apply is None) != (arguments.out is None):
        raise UserError(
            "--apply and --out must be given together: the model to grow, and the folder for the result"
        )
    maps = load_maps(arguments.file)
    print(describe(maps))
    if arguments.plot:
        plots.maps(maps, arguments.plot)
    if arguments.apply:
        _apply(maps, arguments.file, arguments.apply, arguments.out)


def _apply(maps: Maps, file: Path, model: Path, out: Path) -> None:
    """Grow a model by the maps and write an Orbax folder, with the tokenizer of the model."""
    if out.exists():
        raise UserError(f"{out} exists already; give another --out")
    try:
        params = load_params(model) if Workdir(model).begun else open_checkpoint(model).params()
        grown = maps.apply(params)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    except ValueError as error:
        raise UserError(f"the maps of {file} do not fit {model}: {error}") from error
    orbax.export(out, maps.large, grown)
    if (tokenizer := model / "tokenizer.json").is_file():
        shutil.copyfile(tokenizer, out / tokenizer.name)


if __name__ == "__main__":
    exits_cleanly(main)
