"""The figures of a comparison show its numbers, of synthetic runs."""

import json

import pytest
from synthetic import CYCLE, GROWN, SCRATCH, dropping, made, tables, two_seeds

from jaxgrow.models import BERTConfig, GPT2Config, ViTConfig
from train.analysis.runs import Run
from train.analysis.savings import Comparison
from train.extras import run_plots as plots
from train.extras.comparison_report import markdown_report


@pytest.fixture
def comparison(tmp_path):
    return two_seeds(tmp_path)


@pytest.mark.parametrize(("model", "per"), [
    (ViTConfig(), "image"),
    (GPT2Config(head="classes", classes=3), "text"),
    (GPT2Config(), "token"),  # its config has the field `classes` as well
    (BERTConfig(), "token"),
    (BERTConfig(head="token_classes", classes=3), "token"),
    (BERTConfig(head="spans"), "text"),
], ids=["ViT", "texts", "GPT-2", "BERT", "words", "spans"])  # fmt: skip
def test_of_classifiers_the_table_tells_the_accuracy(figures, tmp_path, model, per):
    values = [{"model": model.as_json(), "val_accuracy": x} for x in (0.5, 0.75)]
    runs = [made(tmp_path, "run", SCRATCH, seed, **v) for seed, v in enumerate(values)]
    comparison = Comparison([runs], [])
    row = tables(markdown_report(comparison))[0]["run"]
    assert row.get("accuracy") == ("62.5%" if model.predicts == "classes" else None)
    plots.plot_losses(comparison, tmp_path / "losses.png")
    assert figures[-1].axes[0].get_ylabel() == f"validation loss (nats per {per})"


def test_losses_are_plotted_against_log_flops_with_a_legend(comparison, figures, tmp_path):
    later = [[(p, s, c + i, v) for p, s, c, v in SCRATCH] for i in range(9)]
    many = [[made(tmp_path, f"method{i}", curve)] for i, curve in enumerate(later)]
    first, shorter = ([x[:1] for x in each] for each in (comparison.runs, comparison.frontier))
    plots.plot_losses(Comparison([*first, *many], shorter), tmp_path / "plot.png")
    ((axes,), (legend,)) = figures[0].axes, figures[0].legends
    assert axes.get_xscale() == "log" and "FLOPs" in axes.get_xlabel()
    assert all(label.get_text() for label in axes.get_xticklabels())
    figures[0].draw_without_rendering()
    # The legend covers no data.
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0
    assert axes.get_window_extent().width > 0.8 * figures[0].bbox.width
    names = [t.get_text() for t in legend.get_texts()]
    own = ["final loss of the baseline", "shorter runs from scratch"]
    own += ["frontier: runs from scratch, each fully decayed"]
    assert names[-6:] == ["method8", *own, "small model of the run", "end of each seed"]
    lines = [line for line in axes.lines if len({*line.get_xdata()}) > 1]
    looks = {(x.get_color(), x.get_linestyle()) for x in lines if x.get_linestyle() != ":"}
    assert len(looks) == len(first) + len(many) + len(own), "all lines differ"


def test_every_line_style_is_in_the_legend(figures, tmp_path):
    curves = {"scratch": SCRATCH, "cycle": CYCLE, "again": SCRATCH}
    runs = [[made(tmp_path, name, c, seed) for seed in range(3)] for name, c in curves.items()]
    plots.plot_losses(Comparison(runs, []), tmp_path / "plot.png")
    ((axes,), (legend,)) = figures[0].axes, figures[0].legends
    explained = {line.get_linestyle() for line in legend.get_lines()}
    assert {line.get_linestyle() for line in axes.lines} <= explained
    assert "95 % interval of the mean" in {t.get_text() for t in legend.get_texts()}
    drawn = {line.get_label(): line for line in axes.lines}
    assert drawn["scratch"].get_xydata().tolist() == drawn["again"].get_xydata().tolist()
    assert drawn["scratch"].get_linewidth() > 2 * drawn["again"].get_linewidth()
    assert drawn["scratch"].get_color() != drawn["again"].get_color()


@pytest.mark.parametrize(("unit", "says"), [("flops", "FLOPs"), ("run_seconds", "seconds")])
def test_bands_and_the_budgets_of_the_frontier_are_drawn(comparison, figures, tmp_path, unit, says):
    far = [[(p, s, c, v + by) for p, s, c, v in SCRATCH] for by in (0, 1, 0.5)]
    first = [made(tmp_path, "far", curve, seed) for seed, curve in enumerate(far)]
    half = [made(tmp_path, "far-x0.5", [("train large", 1, 20.0, 4.0)], seed=s) for s in range(3)]
    plots.plot_losses(Comparison([first, comparison.runs[1]], [half]), tmp_path / "plot.png", unit)
    (axes,) = figures[0].axes
    assert axes.get_xlabel().startswith(says) and "all phases counted" in axes.get_xlabel()
    assert unit == "flops" or "without compilation and validation" in axes.get_xlabel()
    scale = 10 if unit == "flops" else 1
    line = next(x for x in axes.lines if x.get_label() == "far")
    assert line.get_xdata().tolist() == [scale * c for _, _, c, _ in SCRATCH]
    band, width = axes.collections[0].get_paths()[0].vertices, 4.303 * 0.5 / 3**0.5
    ends = [f(y for x, y in band if x == scale * 40.0) for f in (min, max)]
    assert ends == pytest.approx([3.5 - width, 3.5 + width], rel=1e-3)
    (frontier,) = (x for x in axes.lines if "frontier" in str(x.get_label()))
    assert frontier.get_xydata().tolist() == [[scale * 20.0, 4.0], [scale * 40.0, 3.5]]
    marked = {text.get_text(): text.get_position()[0] for text in axes.texts}
    marked = {text: x for text, x in marked.items() if text and "fewer" not in text}
    assert marked == {"50 %": scale * 20.0, "100 % of the budget": scale * 40.0}
    xs = [line.get_xdata() for line in axes.lines]
    assert {x[0] for x in xs if x[0] == x[-1]} >= {*marked.values()}
    dots = [x for x in axes.lines if x.get_marker() == "o"]
    assert [*dots[0].get_ydata()] == [3.0, 4.0, 3.5]  # the final loss of each seed
    figures[0].draw_without_rendering()
    (legend,) = figures[0].legends
    texts = [*axes.texts, *legend.get_texts(), *axes.get_xticklabels()]
    assert min(t.get_fontsize() for t in texts) >= 8
    assert figures[0].get_figwidth() <= 8.7  # At the width of the README, the text keeps its size.
    plots.plot_losses(Comparison([first[:2]], [half[:2]]), tmp_path / "two.png", unit)
    drawn = [path for c in figures[1].axes[0].collections for path in c.get_paths()]
    # no band, and markers without error bars
    assert all(len({y for _, y in path.vertices}) == 1 for path in drawn)


def test_keep_probabilities_have_one_panel_per_stage(figures, tmp_path):
    run = dropping(tmp_path, 0, 0.5)
    coarse = {"phase": "train coarse1", "step": 8, "keep": [1, 0.5], "tokens": 1}
    coarse |= {"seconds": 1, "compile_seconds": 0, "loss": 1.0}
    large = coarse | {"phase": "train large", "step": 4, "keep": [1, 1, 1, 0.5]}
    # Add a smaller model, and then another stage of the large one, with a single log line each.
    with (run.folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(coarse) + "\n" + json.dumps(large) + "\n")
    scratch = made(tmp_path, "scratch", SCRATCH)
    found = Comparison([[scratch], [Run("drop", 0, run.folder)]], [])
    assert plots.plot_keep(found, tmp_path / "keep.png")
    assert not plots.plot_keep(Comparison([[scratch]], []), tmp_path / "none.png")
    assert len(figures) == 1
    panels = [axes for axes in figures[0].axes if axes.get_title()]
    phases = ["train large", "train coarse1", "train large"]
    assert [axes.get_title() for axes in panels] == [f"drop, {phase}" for phase in phases]
    for axes, depth in zip(panels, (4, 2, 4), strict=True):
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "layer")
        assert axes.get_ylim() == (0.5, depth + 0.5)
        assert all(float(tick).is_integer() for tick in axes.get_yticks())


def test_the_saving_is_an_arrow_from_the_frontier(figures, tmp_path):
    whole, grown = made(tmp_path, "whole", SCRATCH), made(tmp_path, "grown", GROWN)
    short = made(tmp_path, "whole-x0.5", [("train large", 1, 20.0, 4.0)])
    comparison = Comparison([[whole], [grown]], [[short]])
    (saved,) = comparison.rows()[1]["saved_frontier"]
    assert 0 < saved < 1
    for unit, count in (("flops", 1), ("run_seconds", 0)):
        plots.plot_losses(comparison, tmp_path / "plot.png", unit)
        (axes,) = figures[-1].axes
        arrows = [t for t in axes.texts if getattr(t, "arrow_patch", None) is not None]
        assert len(arrows) == count and "50 parameters, 1 seed" in axes.get_title(loc="left")
        for arrow in arrows:
            (end, loss), (start, same) = arrow.xy, arrow.get_position()
            assert loss == same == grown.loss and end == grown.cost("flops")
            assert 1 - end / start == pytest.approx(saved)
            assert f"{100 * saved:.1f} % fewer FLOPs" in {t.get_text() for t in axes.texts}
