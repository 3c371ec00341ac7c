"""The maps that LiGO learned: described, plotted, applied to another checkpoint of the same shape.

``python -m train.maps FILE [--plot FILE.png] [--apply RUN --out FOLDER]``
"""

import argparse
from pathlib import Path

import numpy as np
from orbax.checkpoint import v1 as ocp

from train.errors import UserError, exits_cleanly
from train.plan.learning import Maps
from train.plan.learning import load as load_maps
from train.results import plots
from train.run.workdir import load as load_params


def describe(maps: Maps) -> str:
    """A line a map: its shape, how far its old part is from the identity, how large its new rows are."""
    lines = []
    for name, w in maps.coefficients["depth"].items():
        lines.append(f"{name}: w {w.shape}, row sums {w.sum(1).min():.3f} .. {w.sum(1).max():.3f}")
    for name, matrices in maps.coefficients["width"].items():
        for kind, m in matrices.items():
            old = m.shape[-1]
            top = np.abs(m[..., :old, :] - np.eye(old)).max()
            rows = np.sqrt(np.square(m[..., old:, :]).sum(-1))
            lines.append(f"{name}: {kind} {m.shape}, max |top - I| {top:.2e}, mean norm of new rows {rows.mean():.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.maps", description=__doc__)
    parser.add_argument("file", type=Path, help="maps.npz of a run")
    parser.add_argument("--plot", type=Path, help="where to draw them")
    parser.add_argument("--apply", type=Path, metavar="RUN", help="a run whose last model is grown by the maps")
    parser.add_argument("--out", type=Path, help="where the grown parameters go: a new Orbax folder")
    arguments = parser.parse_args()
    if (arguments.apply is None) != (arguments.out is None):
        raise UserError("--apply and --out go together: a run to grow, and a folder for the result")
    maps = load_maps(arguments.file)
    print(describe(maps))
    if arguments.plot:
        plots.maps(maps, arguments.plot)
    if arguments.apply:
        try:
            grown = maps.apply(load_params(arguments.apply))
        except ValueError as error:
            raise UserError(f"the maps of {arguments.file} do not fit {arguments.apply}: {error}") from error
        if arguments.out.exists():
            raise UserError(f"{arguments.out} exists already; give another --out")
        ocp.save(str(arguments.out.resolve()), grown)


if __name__ == "__main__":
    exits_cleanly(main)
