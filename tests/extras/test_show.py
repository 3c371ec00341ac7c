"""Figures of growths (the old unit of each new unit) and of plans (the phases over time)."""

import itertools
import sys

import jax
import numpy as np
import pytest
import runs
import tiny
from advice import command
from checkpoints import saved
from growths import OPERATORS
from published import called, refused

from jaxgrow import AxisMap, sizes
from jaxgrow.cli.program import main
from jaxgrow.extras import plot
from jaxgrow.growth.maps import Rule, Rules, identity, select, tile
from jaxgrow.growth.matrices import SparseMap, dense, is_identity
from jaxgrow.models import GPT2Config
from jaxgrow.operators import ligo
from train import show as plans
from train.common.errors import exits_cleanly
from train.extras import run_plots as plots
from train.plan.methods import GrowTo, Learned, Scratch, TrainStage
from train.store.workdir import Workdir

CONFIG = tiny.config()
SHAPES, AXES = tiny.shapes_by_name(CONFIG), tiny.axes(CONFIG)
GPT = GPT2Config(vocab=50257, context=1024, layers=12, embed=768, heads=12, head_dim=64, mlp=3072)


def titles(panels) -> list[str]:
    return [panel.title.replace("\n", "; ") for panel in panels]


def placed(figure) -> list:
    """Return the panels of a figure without its color bar."""
    return [place for place in figure.axes if place.get_label() != "<colorbar>"]


# --- growths ---


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_drawn_each_matrix_that_acts_once(name):
    """The panels show all maps of the growth that change an axis, with the same values."""
    growth = OPERATORS[name].growth
    panels = plot.growth_panels(growth, SHAPES, AXES)
    rules = isinstance(growth, Rules)
    terms = [term for r in growth.rules for term in r.terms] if rules else [growth]
    keyed = [(k if isinstance(k, tuple) else (k,), m) for term in terms for k, m in term.items()]
    roles = [panel.title.split("\n")[1].split(" and ") for panel in panels]
    for panel, acts in zip(panels, roles, strict=True):
        held = [getattr(m, role) for axes, m in keyed if axes == panel.axes for role in acts]
        assert any(np.array_equal(dense(panel.matrix), dense(m)) for m in held)
        assert not is_identity(panel.matrix)
    assert len({(p.axes, dense(p.matrix).tobytes()) for p in panels}) == len(panels)
    changed = [axes for axes, m in keyed if not (is_identity(m.write) and is_identity(m.read))]
    drawn = {axis for panel in panels for axis in panel.axes}
    assert drawn == set(itertools.chain(*changed))
    if not rules:
        found = {(p.axes[0], role) for p, acts in zip(panels, roles, strict=True) for role in acts}
        both = {*itertools.product(growth, ("write", "read"))} - {("layers", "read")}
        assert found == both


def test_panels_of_an_axis_by_hand():
    growth = {"mlp": select([0, 1, 2, 3, 4, 5, 6, 7, 8, 8], 9), "heads": AxisMap(*[np.full((3, 3), 0.25)] * 2),
              "embed": identity(6)}  # fmt: skip
    panels = plot.growth_panels(growth, SHAPES, AXES)
    expected = ["heads 3 → 3; write and read", "mlp 9 → 10; write", "mlp 9 → 10; read"]
    assert titles(panels) == expected
    # the copy has weight 1 in the write map and 1/2 in the read map
    assert [dense(panel.matrix)[9, 8] for panel in panels[1:]] == [1, 0.5]
    figure = plot.plot_growth(growth, SHAPES, AXES)
    assert figure.get_supxlabel() == "unchanged: layers 2, head_dim 5, embed 6, context 7, vocab 11"
    labels = [(place.get_xlabel(), place.get_ylabel()) for place in placed(figure)]
    assert labels == [("old head", "new head")] + [("old unit", "new unit")] * 2


def test_rules_are_numbered_listed_and_told_by_their_terms():
    figure = plot.plot_growth(OPERATORS["staged"].growth, SHAPES, AXES)
    said = [place.get_title().replace("\n", "; ") for place in placed(figure)]
    assert said[:3] == [
        "embed 6 → 12; write and read; rules 1.1, 2.1, 3.1, 4.1",
        "embed 6 → 12; write and read; rules 1.2, 2.2, 3.2, 4.2",
        "embed 6 → 12; write; rule 5",
    ]
    lines = figure.get_supxlabel().split("\n")
    assert lines[0] == "rule 1: leaves of axes layers, heads.in, embed.out, that are kernel"
    unchanged = "unchanged: layers 2, head_dim 5, context 7, vocab 11"
    assert lines[4:] == ["rule 5: all leaves", unchanged]
    # both terms are equal, so one panel shows all terms of the rule
    both = Rules((Rule(({"mlp": tile(9, 2)}, {"mlp": tile(9, 2)})),))
    shown = titles(plot.growth_panels(both, SHAPES, AXES))
    assert shown == ["mlp 9 → 18; write; rule 1", "mlp 9 → 18; read; rule 1"]


def test_learned_maps_over_two_axes_are_drawn():
    old, new = sizes(SHAPES, AXES), {"heads": 5, "layers": 3}
    coefficients = ligo.init_coefficients(ligo.LiGO(), AXES, old, new, jax.random.key(0))
    panels = plot.growth_panels(ligo.learned_growth(coefficients, AXES, old), SHAPES, AXES)
    write = coefficients["width"]["query"]["write"]
    (query,) = titles(p for p in panels if np.array_equal(dense(p.matrix), write))
    assert query.startswith("heads x head_dim 3 x 5 → 5 x 5; write; rules ")
    assert {p.axes for p in panels} == {("layers",), ("heads", "head_dim")}


def test_figures_show_the_matrices_in_one_scale():
    panels = plot.growth_panels(OPERATORS["lemon, ragged"].growth, SHAPES, AXES)
    figure = plot.panel_figure(panels)
    most = max(np.abs(dense(p.matrix)).max() for p in panels)
    for place, panel in zip(placed(figure), panels, strict=True):
        (picture,) = place.images
        np.testing.assert_array_equal(picture.get_array(), dense(panel.matrix))
        assert (picture.norm.vmin, picture.norm.vmax) == (-most, most) and picture.norm(0.0) == 0.5
        assert np.allclose(picture.cmap(picture.norm(0.0))[:3], 0.97, atol=0.01)
        new, old = panel.matrix.shape
        # row 0 is at the top
        assert place.get_xlim() == (-0.5, old - 0.5) and place.get_ylim() == (new - 0.5, -0.5)
        assert all(float(tick).is_integer() for tick in [*place.get_xticks(), *place.get_yticks()])
    figure.draw_without_rendering()
    texts = [[x.title, x.xaxis.label, *x.get_xticklabels()] for x in figure.axes]
    assert min(t.get_fontsize() for t in itertools.chain(*texts)) >= 8
    assert figure.get_figwidth() <= 8.7


def test_a_cell_shows_the_largest_entry_of_its_square():
    rng = np.random.default_rng(0)
    m = rng.normal(size=(300, 257)) * (rng.random((300, 257)) < 0.02)
    drawn = plot.matrix_cells(m)  # 3 units per cell
    assert drawn.shape == (100, 86)
    padded = np.pad(m, ((0, 0), (0, 1)))
    squares = padded.reshape(100, 3, 86, 3).swapaxes(1, 2).reshape(100, 86, 9)
    largest = np.take_along_axis(squares, np.abs(squares).argmax(-1)[..., None], -1)[..., 0]
    np.testing.assert_array_equal(drawn, largest)
    few = rng.normal(size=(plot.CELLS, 5))
    np.testing.assert_array_equal(plot.matrix_cells(few), few)
    twice = SparseMap(np.array([[1, 1]]), np.array([[0.5, 0.5]]), old=2)  # one entry in two terms
    assert plot.matrix_cells(twice).tolist() == [[0, 1]]


def test_real_sizes_make_a_readable_picture_and_nothing_dense():
    """A dense vocabulary map would need 40 GB; all units copied in place are one straight line."""
    shapes, axes = jax.eval_shape(GPT.init, jax.random.key(0)), GPT.axes()
    growth = {"vocab": select([*range(50257), *range(50257)], 50257)}
    growth |= {"embed": select([*range(768), *[7] * 256], 768)}
    panels = plot.growth_panels(growth, shapes, axes)
    embed, vocab = (p for p in panels if "write" in p.title.split("\n")[1])
    drawn = plot.matrix_cells(vocab.matrix)
    assert drawn.shape == (128, 64) and drawn.sum() <= 64 * 2 + 64
    assert (drawn[:64].diagonal() == 1).all()
    drawn = plot.matrix_cells(embed.matrix)
    assert drawn.shape == (128, 96) and drawn.sum() == 128
    assert (drawn[:96] == np.eye(96)).all() and drawn[96:, 0].all()
    place, *_ = placed(plot.plot_growth(growth, shapes, axes))
    assert place.get_xlabel() == "old unit, 8 per cell"
    figure = plot.panel_figure([vocab])
    figure.draw_without_rendering()
    (place,) = placed(figure)
    numbers = [t for t in place.get_xticklabels() if t.get_text()]
    boxes = [t.get_window_extent() for t in numbers if 0 <= t.get_position()[0] <= 50257]
    # the numbers do not overlap
    assert len(boxes) > 2 and all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_an_unfitting_or_empty_growth_is_refused():
    with pytest.raises(ValueError, match="axis 'mlp' has size 9, but its map takes 4 to 8"):
        plot.plot_growth({"mlp": tile(4, 2)}, SHAPES, AXES)
    with pytest.raises(ValueError, match="nothing to draw: the growth does not change any axis"):
        plot.plot_growth({"mlp": identity(9)}, SHAPES, AXES)


# --- jaxgrow show ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("source") / "gpt")


def test_show_draws_what_grow_does_and_writes_nothing_else(folder, tmp_path, capsys):
    before = sorted(folder.iterdir())
    asked = ["--method", "net2net", "--embed", "18", "--heads", "6", "--mlp", "30", "--seed", "3"]
    assert main(["show", str(folder), *asked, "--out", str(tmp_path / "maps.png")]) == 0
    assert "embed=18" in (said := capsys.readouterr().out) and "the function is changed" in said
    said = called(capsys, "show", folder, *asked, "--out", tmp_path / "maps.png")
    assert said["sizes"]["mlp"] == 30 and said["arguments"]["seed"] == 3 and not said["keeps"]
    assert [p.name for p in tmp_path.iterdir()] == ["maps.png"]
    assert (tmp_path / "maps.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(("arguments", "says"), [
    (["--layers", "8", "--out", "{}/none/x.png"], "no such file or directory"),
    (["--layers", "8", "--out", "{}/x.maps"], "Format 'maps' is not supported"),
    (["--layers", "8", "--out", "{}"], "is a directory"),
    (["--layers", "4", "--out", "{}/x.png"], "nothing to draw"),
    (["--out", "{}/x.png"], "nothing to show: give the new size of an axis"),
    (["--layers", "2", "--out", "{}/x.png"], "stack cannot reduce the size from 4 to 2"),
    (["--layers", "8", "--seed", "1", "--out", "{}/x.png"], "--seed: stack does not use random numbers"),
])  # fmt: skip
def test_what_cannot_be_shown_is_one_line(folder, tmp_path, capsys, arguments, says):
    words = ["show", folder, "--method", "stack", *(a.format(tmp_path) for a in arguments)]
    # 2: the arguments are wrong for every file
    status = 2 if says.startswith(("nothing to show", "--seed")) else 1
    error = refused(capsys, *words, status=status)
    assert error.startswith("error: ") and says in error and "\n" not in error
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_line_says_what_to_install(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["show", folder, "--method", "stack", "--layers", 8, "--out", tmp_path / "x.png"]
    message = "error: plots require matplotlib, which is not installed: pip install matplotlib"
    assert refused(capsys, *words) == message


# --- plans ---


def test_what_is_expected_of_a_plan_is_what_its_run_counts(small_run):
    ledger = Workdir(small_run).result["phases"]
    e = runs.experiment(small_run.parent, name="small", model=runs.SMALL)
    (expected,) = plans.planned_phases(e)
    assert plans.plan_row(str(small_run)) == (small_run.name, ledger)
    assert all(ledger[0][name] == expected[name] for name in ("phase", "parameters"))
    assert expected["flops"] == pytest.approx(ledger[0]["flops"])


def test_micro_batches_that_learn_maps_are_part_of_the_expected_cost(tmp_path):
    """Every micro-batch grows the small model by the maps."""
    to = GrowTo((TrainStage(0.5),), by=Learned(steps=4))
    whole, divided = (
        runs.growing(tmp_path, to, source=TrainStage(0.5), accumulate=count) for count in (1, 4)
    )
    costs = [sum(p["flops"] for p in plans.planned_phases(e)) for e in (whole, divided)]
    assert costs == [whole.cost, divided.cost] and costs[1] > costs[0]


def test_bars_show_flops_and_model_sizes(tmp_path):
    methods = {"scratch": Scratch(), "cycle": runs.VCYCLE}
    planned = {name: runs.experiment(tmp_path, method=method) for name, method in methods.items()}
    rows = [(name, plans.planned_phases(e)) for name, e in planned.items()]
    phases = [p["phase"] for p in rows[1][1]]
    assert phases[:3] == ["train large", "coalesce large", "train coarse1"]
    first, second = plots.plan_timeline(rows).axes
    (whole,), bars = first.patches, second.patches
    trained = [p for p in rows[1][1] if p["flops"]]
    assert whole.get_width() == whole.get_height() == 1 and len(bars) == len(trained) == 3
    total = rows[0][1][0]["flops"]
    assert [b.get_width() for b in bars] == pytest.approx([p["flops"] / total for p in trained])
    sizes = [p["parameters"] / rows[0][1][0]["parameters"] for p in trained]
    assert [b.get_height() for b in bars] == pytest.approx(sizes) and sizes[1] < 1
    starts = np.cumsum([0, *(b.get_width() for b in bars)])
    assert [b.get_x() for b in bars] == pytest.approx(starts[:-1])
    assert second.get_title(loc="left") == f"cycle: {starts[-1]:.0%}"
    colours = [b.get_facecolor() for b in bars]
    assert colours[0] == colours[2] == whole.get_facecolor() != colours[1]
    assert all(text.get_fontsize() >= 8 for text in [*first.texts, *second.texts])


def test_a_config_and_a_run_are_shown_together(small_run, tmp_path):
    script = runs.script(tmp_path, runs.experiment(tmp_path, name="cycle", method=runs.VCYCLE))
    said = command("train.show", script, small_run, "--out", tmp_path / "plans.png")
    assert "| cycle " in said and f"| {small_run.name} " in said and "| of cycle |" in said
    assert (tmp_path / "plans.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("plan", "out", "says"), [
    ("{}/nothing", "x.png", "there is no config {}/nothing; a config is an existing Python file"),
    ("{}", "x.png", "there is no finished run in {}; to show the plan before the run, give its config, FILE.py:NAME"),
    ("{}/tiny.py", "none/x.png", "no such file or directory"),
    ("{}/tiny.py", "x.plan", "Format 'plan' is not supported"),
])  # fmt: skip
def test_plans_that_cannot_be_shown_are_one_line(tmp_path, monkeypatch, capsys, plan, out, says):
    runs.script(tmp_path, runs.experiment(tmp_path))
    words = ["show", plan.format(tmp_path), "--out", str(tmp_path / out)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        exits_cleanly(plans.main)
    error = capsys.readouterr().err
    assert says.format(tmp_path) in error and error.count("\n") == 1
