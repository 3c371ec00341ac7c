"""The maps that LiGO learned: saved with the run, loaded, plotted, applied to another checkpoint of the same shape.

``python -m train.maps FILE [--plot FILE.png] [--apply RUN --out FOLDER]``
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxgrow import grow, ligo, sizes
from jaxgrow.ligo import LiGO
from jaxgrow.models import Config, from_json
from train.checkpoint import load as load_checkpoint
from train.errors import UserError, exits_cleanly
from train.plan import Learn


@dataclass(frozen=True)
class Maps:
    """Learned maps, and the configs that they lead from and to."""

    small: Config
    large: Config
    ligo: LiGO
    coefficients: dict[str, Any]  # as of `jaxgrow.ligo.init`

    def apply(self, params: Any) -> Any:
        """The parameters of a model of the config ``small``, grown to ``large``.

        Raises:
          ValueError: parameters of another shape.
        """
        axes = self.small.axes()
        wrong = {a: (n, getattr(self.small, a)) for a, n in sizes(params, axes).items() if n != getattr(self.small, a)}
        if wrong:
            raise ValueError(f"the model's sizes differ from those that the maps lead from: {wrong}")
        return grow(ligo.growth(self.coefficients, axes, sizes(params, axes)), params, axes)


def save(path: Path, phase: Learn, coefficients: dict[str, Any]) -> None:
    """Writes the maps of a `Learn`; the file appears whole or not at all."""
    about = {"small": phase.small.as_json(), "large": phase.config.as_json(), "ligo": asdict(phase.ligo)}
    flat: dict[str, Any] = {"about": json.dumps(about)}
    flat |= {f"depth:{module}": w for module, w in coefficients["depth"].items()}
    flat |= {f"width:{name}:{kind}": m for name, ms in coefficients["width"].items() for kind, m in ms.items()}
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **flat)
    part.replace(path)


def load(path: Path) -> Maps:
    """The maps that `save` wrote.

    Raises:
      UserError: the file is missing, damaged, or holds something else.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        coefficients: dict[str, Any] = {"depth": {}, "width": {}}
        for name, m in arrays.items():
            kind, which, *role = name.split(":")
            if kind == "depth":
                coefficients["depth"][which] = m
            else:
                coefficients["width"].setdefault(which, {})[role[0]] = m
        return Maps(from_json(about["small"]), from_json(about["large"]), LiGO(**about["ligo"]), coefficients)
    except FileNotFoundError:
        raise UserError(f"there are no maps in {path}; a run that learns them writes maps.npz") from None
    except Exception as error:
        raise UserError(f"{path} holds no maps that can be read: {type(error).__name__}: {error}") from error


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


def plot(maps: Maps, path: Path) -> None:
    """Every map as an image: depth weights by module, width maps from old to new units."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    images = {f"w, {name.removeprefix('blocks/')}": w for name, w in maps.coefficients["depth"].items()}
    depth = set(images)
    for name, matrices in maps.coefficients["width"].items():
        for kind, m in matrices.items():
            images[f"{name}, {kind}"] = m if m.ndim == 2 else m.mean(0)
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    for i, (title, m) in enumerate(images.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        bound, (new, old) = np.abs(m).max(), m.shape
        extent = (0.5, old + 0.5, new + 0.5, 0.5)  # counted from one
        image = axes.imshow(m, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", extent=extent)
        figure.colorbar(image, ax=axes)
        for axis, of in ((axes.xaxis, "old"), (axes.yaxis, "new")):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            axis.set_label_text(f"{of} {'layer' if title in depth else 'unit'}", fontsize=8)
        axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.maps", description=__doc__)
    parser.add_argument("file", type=Path, help="maps.npz of a run")
    parser.add_argument("--plot", type=Path, help="where to draw them")
    parser.add_argument("--apply", type=Path, metavar="RUN", help="a run whose last model is grown by the maps")
    parser.add_argument("--out", type=Path, help="where the grown parameters go: a new Orbax folder")
    arguments = parser.parse_args()
    if (arguments.apply is None) != (arguments.out is None):
        raise UserError("--apply and --out go together: a run to grow, and a folder for the result")
    maps = load(arguments.file)
    print(describe(maps))
    if arguments.plot:
        plot(maps, arguments.plot)
    if arguments.apply:
        try:
            grown = maps.apply(load_checkpoint(arguments.apply))
        except ValueError as error:
            raise UserError(f"the maps of {arguments.file} do not fit {arguments.apply}: {error}") from error
        if arguments.out.exists():
            raise UserError(f"{arguments.out} exists already; give another --out")
        ocp.save(str(arguments.out.resolve()), grown)


if __name__ == "__main__":
    exits_cleanly(main)
