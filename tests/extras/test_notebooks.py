"""The notebooks of the site run as scripts without a failed assertion and leave no files."""

import runpy
import sys
from pathlib import Path

import jax
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.py"))
LONG = ("dropping", "saving", "v_cycle")  # the build of the site also runs them


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(n, marks=[pytest.mark.slow] * (n.stem in LONG)) for n in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(notebook), run_name="notebook")
    assert len(capsys.readouterr().out.splitlines()) > 5 and not list(tmp_path.iterdir())


def test_no_notebook_hides_a_module_of_python():
    """Python looks in the folder of a script first, so all notebooks would fail as scripts."""
    assert not {path.stem for path in NOTEBOOKS} & sys.stdlib_module_names


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_text_cells_begin_below_their_marker(notebook):
    """Text beside a marker would be the title of the cell, which the site does not show."""
    markers = [line for line in notebook.read_text().splitlines() if line.startswith("# %% [")]
    # Without the language, the site would not highlight a notebook that it does not run.
    header = "# ---\n# jupyter:\n#   language_info: {name: python}\n# ---\n\n"
    assert notebook.read_text().startswith(header + "# %% [markdown]\n# # ")
    assert markers and set(markers) == {"# %% [markdown]"}
