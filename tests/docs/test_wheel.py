"""The wheel contains the library and its command.

`train` needs a clone of the repository, and its error names the missing part.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import train

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("copy"), "build_wheel")


def built(copy: Path, build: str) -> Path:
    """Build a wheel from a copy, because setuptools writes files next to the sources."""
    pytest.importorskip("setuptools", "77")
    for name in ("pyproject.toml", "README.md", "LICENSE", "jaxgrow_command.py"):
        shutil.copy(ROOT / name, copy)
    for name in ("jaxgrow", "train", "configs", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools.build_meta import {build}; {build}('dist')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (found,) = (copy / "dist").iterdir()
    return found


def test_an_editable_install_puts_the_clone_on_the_path(tmp_path):
    """A folder named jaxgrow, such as the clone in its parent folder, then hides no package."""
    files = ZipFile(built(tmp_path, "build_editable"))
    [path] = [name for name in files.namelist() if name.endswith(".pth")]
    assert files.read(path).decode().strip() == str(tmp_path)


def test_a_wheel_holds_the_library_its_command_and_its_types(wheel):
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = (p for ending in ("*.py", "*.pyi") for p in (ROOT / "jaxgrow").rglob(ending))
    library = {str(p.relative_to(ROOT)) for p in sources}
    others = "jaxgrow/py.typed jaxgrow/extras/evidence.toml jaxgrow_command.py"
    assert held == library | {*others.split()}


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = tmp_path / "venv/bin/python"
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command, expected=0) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        return done.stdout + done.stderr

    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # comes after the wheel; .pth files in this path are not read
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert Path(
        run(python, "-c", "import jaxgrow; print(jaxgrow.__file__)").strip()
    ).is_relative_to(site)
    assert "convert checkpoints on disk" in run(tmp_path / "venv/bin/jaxgrow", "--help")
    assert "No module named 'train'" in run(python, "-m", "train.compare", "--help", expected=1)


def test_what_train_needs_is_the_extra_of_that_name():
    def names(requirements):
        return {re.split("[>=<]", text)[0].replace("-", "_") for text in requirements}

    assert names(PROJECT["optional-dependencies"]["train"]) == set(train.NEEDS)
    assert not names(PROJECT["dependencies"]) & set(train.NEEDS)


LACKING = """
import importlib.util, runpy, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("grain", "scipy") else found(name, *a)
sys.argv = ["compare", "--help"]
{}
"""


@pytest.mark.parametrize(
    "start", ["runpy._run_module_as_main('train.compare')", "import train.config.experiment"]
)
def test_what_train_lacks_is_said_in_one_line_with_the_way_out(start):
    code = LACKING.format(start)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = "ImportError: grain, scipy: not installed; run pip install -e '.[train]'"
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr or "import" in start
