"""Copy everything that `benchmarks.one_gpu` needs on a GPU without a network, and list its size."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from configs.wikipedia_gpu import DATA
from jaxgrow.tables import align_columns
from train.common.errors import UserError

ROOT = Path(__file__).parents[1]
# `pip list` of the GPU's machine, only names.
PACKAGES = ROOT / "benchmarks" / "results" / "one_gpu" / "packages.txt"
PYTHON = "3.12"  # of the GPU's machine
# The C libraries that wheels for this machine may be built for. pip needs each of them by name.
PLATFORMS = ("manylinux_2_39", "manylinux_2_34", "manylinux_2_31", "manylinux_2_28")
PLATFORMS += ("manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
# Runs on text only check that these packages are there, and never import them.
UNUSED = ("tensorflow-datasets",)
# The limit of the machine on which the results are measured, in bytes.
LIMIT = 64 * 2**20
PREPARED = Path("build/gpu")


def missing() -> list[str]:
    """The packages that `jaxgrow[train]` needs and that the GPU's machine lacks, with versions."""
    there = set(map(_plain, PACKAGES.read_text().split()))
    target = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    target |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    needed: dict[str, str] = {}
    waiting: list[tuple[str, ...]] = [("jaxgrow", "train")]
    while waiting:
        name, *extras = waiting.pop()
        # The machine also has the requirements of the packages that it has.
        if _plain(name) in there or _plain(name) in needed:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            needed[_plain(name)] = name
            continue
        needed[_plain(name)] = f"{name}=={found.version}"
        if _plain(name) in UNUSED:
            continue
        for text in found.requires or []:
            r = Requirement(text)
            wanted = r.marker is None or any(
                r.marker.evaluate(target | {"extra": extra}) for extra in ("", *extras)
            )
            if wanted:
                waiting.append((r.name, *r.extras))
    needed.pop("jaxgrow")  # the repository itself
    return sorted(needed.values())


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def prepare(folder: Path) -> None:
    """Copy the corpus to ``folder/corpus``, and download the missing packages to ``folder/wheels``.

    Raises:
      UserError: the corpus is missing, or a package cannot be downloaded.
    """
    corpus, wheels = folder / "corpus", folder / "wheels"
    for path in (Path(str(DATA.path)), Path(str(DATA.valid_path))):
        if not path.is_file():
            raise UserError(
                f"there is no corpus at {path}; set the environment variable WIKIPEDIA_2013 to the folder with "
                "train.txt.xz and valid.txt.xz"
            )
        corpus.mkdir(parents=True, exist_ok=True)
        if path.resolve() != (corpus / path.name).resolve():
            shutil.copyfile(path, corpus / path.name)
    shutil.rmtree(wheels, ignore_errors=True)
    names = missing()
    platforms = [x for name in PLATFORMS for x in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *platforms]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    done = subprocess.run([*command, "--dest", str(wheels), *names], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"pip cannot download a wheel of {', '.join(names)}: {done.stderr.strip()[-400:]}; add the package to "
            f"{PACKAGES} if the GPU's machine has it, or download another version to {wheels}"
        )
    print(carried(folder))


def carried(folder: Path = PREPARED) -> str:
    """A table of everything that is taken to the GPU's machine, with sizes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    tree = sum(size(ROOT / name) for name in listed.stdout.split("\0") if name)
    parts = {"the working tree": tree}
    parts |= {str(file): size(file) for file in sorted(folder.glob("*/*")) if file.is_file()}
    total = sum(parts.values())
    rows = [(name, f"{bytes_ / 2**20:.1f}") for name, bytes_ in parts.items()]
    rows.append(("total", f"{total / 2**20:.1f} of {LIMIT / 2**20:.0f}"))
    table = align_columns(("carried", "MiB"), rows, right=(1,))
    if not (folder / "corpus").is_dir():
        table += f"\nThe corpus and the packages are not there: --prepare {folder}"
    if total > LIMIT:
        table += f"\nThis is too large: delete files of {folder} that the GPU's machine has."
    return table


def size(path: Path) -> int:
    return path.lstat().st_size if path.exists() and not path.is_symlink() else 0
