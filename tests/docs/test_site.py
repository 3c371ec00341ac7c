"""Every public name has a docstring, and the site builds without warnings."""

import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import jaxgrow

ROOT = Path(__file__).parents[2]
MODULES = {
    module.name: import_module(module.name)
    for module in pkgutil.walk_packages(jaxgrow.__path__, "jaxgrow.")
    if not any(part.startswith("_") for part in module.name.split("."))
}


def public(module) -> dict:
    """Return the functions and classes that a module defines."""
    return {
        n: x
        for n, x in vars(module).items()
        if inspect.isfunction(inspect.unwrap(x)) or inspect.isclass(x)
        if x.__module__ == module.__name__ and not n.startswith("_")
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_name_has_a_docstring(name):
    assert MODULES[name].__doc__
    made = re.compile(r"\w+\(.*\)$", re.DOTALL)  # the default docstring of a dataclass
    assert not [n for n, x in public(MODULES[name]).items() if made.match(x.__doc__ or "x()")]


def test_versions_agree():
    assert f"\nversion: {jaxgrow.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {jaxgrow.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
@pytest.mark.third_party
def test_the_site_is_built_without_a_warning(tmp_path):
    if not all(find_spec(name) for name in ("sphinx", "furo", "myst_nb", "jupytext")):
        pytest.skip("pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", ROOT / "docs"]
    done = subprocess.run([*command, tmp_path / "site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.extra
@pytest.mark.parametrize("name", ["wiki12", "wiki12_muon", "keep", "starts"])
def test_result_figures_have_title_few_lines_and_labels(name):
    matplotlib = pytest.importorskip("matplotlib")
    spec = spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
    assert spec and spec.loader
    figures = module_from_spec(spec)
    with matplotlib.rc_context():
        spec.loader.exec_module(figures)
        figure = getattr(figures, name)()
    places = figure.axes
    lines = [line for ax in places for line in ax.lines if line.get_linestyle() != "None"]
    assert 1 <= len(lines) <= 6 and not any(ax.get_legend() for ax in places)
    assert figure.get_suptitle() or places[0].get_title("left")
    # distinguishable without color
    assert len({line.get_marker() for line in places[0].lines}) >= min(3, len(lines))
    assert all(
        len(ax.texts) >= len([x for x in ax.lines if x.get_linestyle() != "None"]) for ax in places
    )


@pytest.mark.slow
def test_the_pictures_are_drawn(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs" / "pictures.py", tmp_path], check=True)
    drawn, kept = ({p.name for p in f.iterdir()} for f in (tmp_path, ROOT / "docs" / "pictures"))
    assert drawn == kept
