"""How long does a newcomer wait? ``python -m benchmarks.first_hour [FIGURE ...] [--json FILE]``

The command prints the processor seconds and the wall-clock seconds of everything that a newcomer
does in the first hour, beside the old value and the limit. Without a FIGURE, it measures all of
them. Run it on an idle machine. ``install`` needs a package index, and ``pytest`` takes minutes.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import environment, parser, save
from jaxgrow.tables import align_columns

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable


@dataclass(frozen=True)
class Spent:
    """The processor seconds (user and system) and the wall-clock seconds of commands."""

    cpu: float
    wall: float
    note: str = ""


def spent(*command: str, folder: Path = ROOT, status: Sequence[int] = (0,)) -> Spent:
    """Run a command with all its children, and return its time.

    Raises:
      RuntimeError: the exit status is not one of ``status``. The message ends with its last output.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    start, before = time.perf_counter(), _children()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode not in status:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-1000:]}")
    return Spent(_children() - before, time.perf_counter() - start)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_command(folder: Path) -> Spent:
    """The three trainings of the README."""
    (line,) = re.findall(r"python -m (train\.compare .*)", (ROOT / "README.md").read_text())
    return spent(PYTHON, "-m", *line.split(), "--workdir", str(folder / "runs"))


def _longest(each: dict[str, Spent]) -> Spent:
    name, found = max(each.items(), key=lambda pair: pair[1].cpu)
    return Spent(found.cpu, found.wall, f"the slowest of {len(each)}: {name}")


def library_usage(folder: Path) -> Spent:
    """``jaxgrow --help``, ``--version``, and a usage error."""
    jaxgrow = (PYTHON, "-m", "jaxgrow")
    asked = {"--help": 0, "--version": 0, "grow --wrong": 2}
    return _longest(
        {a: spent(*jaxgrow, *a.split(), folder=folder, status=[s]) for a, s in asked.items()}
    )


def library_import(folder: Path) -> Spent:
    """``from jaxgrow import grow``, relative to ``import jax``."""
    found = []
    for code in ("import jax", "from jaxgrow import grow"):
        every = [spent(PYTHON, "-c", code, folder=folder) for _ in range(3)]
        found.append(min(every, key=lambda one: one.cpu))
    jax, ours = found
    return Spent(ours.cpu, ours.wall, f"{ours.cpu / jax.cpu:.2f} times import jax")


def compare_usage(_: Path) -> Spent:
    """``train.compare --help``, and a wrong argument."""
    command = (PYTHON, "-m", "train.compare")
    wrong = ("configs/demo.py:muon", "--frontier", "50")
    return _longest(
        {"--help": spent(*command, "--help"), "--frontier 50": spent(*command, *wrong, status=[2])}
    )


def ten_lines(folder: Path) -> Spent:
    """The Python example of the README."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return spent(PYTHON, "-c", code, folder=folder)


def tests(_: Path) -> Spent:
    """The tests, as the README runs them."""
    return spent(PYTHON, "-m", "pytest", "-q")


def install(folder: Path) -> Spent:
    """The installation of the trainer in a fresh environment."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    found = spent(python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[train]")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
    return Spent(found.cpu, found.wall, f"{size / 1e9:.1f} GB")


@dataclass(frozen=True)
class Figure:
    """A figure of the table: how it is measured, what it was, and its limit."""

    measure: Callable[[Path], Spent]
    old: str
    limit: str


FIGURES = {
    "first_command": Figure(
        first_command, "258 s wall; 453 cpu (JAX 0.12)", "75 s wall and 130 cpu"
    ),
    "library_usage": Figure(library_usage, "3.3 to 4.0 cpu", "0.4 cpu"),
    "library_import": Figure(library_import, "2.2 times import jax", "1.3 times"),
    "compare_usage": Figure(compare_usage, "5.6 to 8.3 cpu", "1.0 cpu"),
    "ten_lines": Figure(ten_lines, "18 to 21 cpu", "6 cpu"),
    "pytest": Figure(tests, "8 to 15 minutes", "5 minutes (JAX 0.10), 9 (JAX 0.12)"),
    "install": Figure(install, "73 cpu, 1.1 GB", "none"),
}


def row_of(name: str) -> tuple[str, ...]:
    """Measure a figure in an empty folder, and return its row of the table."""
    figure = FIGURES[name]
    what = (figure.measure.__doc__ or "").splitlines()[0].replace("`", "").rstrip(".")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = figure.measure(Path(folder))
        except RuntimeError as error:  # the other figures are still measured
            return name, "failed", "", figure.old, figure.limit, f"{what}: {error}"
    note = f"{what}; {found.note}" if found.note else what
    return name, f"{found.cpu:.2f}", f"{found.wall:.2f}", figure.old, figure.limit, note


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("figures", nargs="*", help=", ".join(FIGURES))
    given = arguments.parse_args()
    if unknown := set(given.figures) - set(FIGURES):
        arguments.error(f"unknown figure {min(unknown)}: choose from {', '.join(FIGURES)}")
    about = environment("jax")
    print(f"{about['machine']}, {about['cores']} cores, load {about['load']}: {about['versions']}")
    rows = [row_of(name) for name in given.figures or FIGURES]
    head = ("figure", "cpu s", "wall s", "old", "limit", "what")
    print(align_columns(head, rows, right=(1, 2)))
    save(
        given.json, {"environment": about, "rows": [dict(zip(head, r, strict=True)) for r in rows]}
    )


if __name__ == "__main__":
    main()
