"""The logs of the measured runs, in one archive: ``benchmarks/results/runs.tar.xz``.

    python -m benchmarks.curves runs/m1     # adds the finished runs in this folder to the archive

The archive has a folder for each comparison or sweep. For each of its runs, it has the config, the
log and the result, and the logs and scores of its fine-tunings. ``tar -xJf`` unpacks it into work
folders, from which the commands print their tables without training.
"""

import argparse
import atexit
import shutil
import tarfile
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp

from jaxgrow.checkpoints.io.folders import atomic_file
from train.analysis.runs import Run
from train.common.errors import UserError, exits_cleanly

ARCHIVE = Path(__file__).parent / "results" / "runs.tar.xz"
KEPT = (
    "*-seed*/config.json",
    "*-seed*/metrics.jsonl",
    "*-seed*/result.json",
    "finetune/*/metrics.jsonl",
    "finetune/*/scores.json",
)
# A run or a fine-tuning that has ended has one of these files.
ENDS = ("result.json", "scores.json")


@cache
def unpacked_archive() -> Path:
    """Unpack the archive for the lifetime of this process, and return the folder."""
    place = mkdtemp()
    atexit.register(shutil.rmtree, place)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return Path(place)


def logged_runs(folder: str, name: str) -> dict[int, Run]:
    """Return the logged runs of one name in a folder of the archive, by their seeds.

    The runs of `benchmarks.one_gpu` have their own folder, ``one_gpu/CARD/EXPERIMENT``.
    """
    place = ARCHIVE.parent if folder.startswith("one_gpu/") else unpacked_archive()
    found = (place / folder).glob(f"{name}-seed*")
    seeds = ((int(run.name.rpartition("-seed")[2]), run) for run in found)
    return {seed: Run(name, seed, run) for seed, run in sorted(seeds)}


def add_runs(folder: Path) -> None:
    """Add the runs of a comparison or a sweep, and write the archive again."""
    found = (file for pattern in KEPT for file in folder.glob(pattern))
    new = [file for file in found if any((file.parent / name).exists() for name in ENDS)]
    if not new:
        raise UserError(
            f"{folder} has no finished runs: give the --workdir of a comparison or a sweep"
        )
    before = unpacked_archive()
    files = {str(f.relative_to(before)): f for f in before.rglob("*") if f.is_file()}
    files |= {f"{folder.resolve().name}/{file.relative_to(folder)}": file for file in new}
    written = BytesIO()
    with tarfile.open(fileobj=written, mode="w:xz") as archive:
        for name in sorted(files):
            content = files[name].read_bytes()
            member = tarfile.TarInfo(name)  # without the owner and the times of the file
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    with atomic_file(ARCHIVE) as part:
        part.write_bytes(written.getvalue())
    unpacked_archive.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="work folders with finished runs")
    for folder in parser.parse_args().folders:
        add_runs(folder)


if __name__ == "__main__":
    exits_cleanly(main)
