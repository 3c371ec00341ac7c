"""Maps learned by LiGO are saved, described, plotted, and applied to another model of the same shape."""

import json
import sys
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import runs

from jaxgrow import checkpoints, grow, sizes
from jaxgrow.models import LlamaConfig, ViTConfig
from jaxgrow.operators import ligo
from train import ligo_maps
from train.common.errors import exits_cleanly
from train.extras import plots
from train.extras.learned_maps import load_maps
from train.extras.run_params import load_params
from train.extras.tokenizers.loading import load_tokenizer, tokenizer_of
from train.extras.tokenizers.special import special_tokens
from train.plan import learning
from train.plan.learning import Learn, Maps
from train.run.trainer import run_experiment

SMALL = runs.SMALL
AXES = SMALL.axes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return ``(file, coefficients)``."""
    how, optim = ligo.LiGO(), runs.experiment(tmp_path_factory.mktemp("c")).optim
    phase = Learn("maps", 1, optim, runs.LARGE, small=SMALL, ligo=how)
    old = sizes(jax.eval_shape(lambda: SMALL.init(jax.random.key(0))), AXES)
    made = jax.jit(lambda key: ligo.init_coefficients(how, AXES, old, phase.target, key))
    coefficients = jax.device_get(made(jax.random.key(1)))
    path = tmp_path_factory.mktemp("maps") / "maps.npz"
    learning.save_maps(path, Maps(SMALL, runs.LARGE, how, coefficients))
    return path, coefficients


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a finished run of a model of another shape."""
    folder = tmp_path_factory.mktemp("wide")
    run_experiment(runs.experiment(folder, steps=1), folder / "run")
    return folder / "run"


def called(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["maps", *map(str, options)])
    exits_cleanly(ligo_maps.main)


def test_a_file_holds_all_that_growing_needs(saved):
    path, coefficients = saved
    found = load_maps(path)
    assert (found.small, found.large) == (SMALL, runs.LARGE)
    chex.assert_trees_all_equal(found.coefficients, coefficients)
    assert not list(path.parent.glob("*.part"))


def test_maps_are_described_drawn_and_applied_to_another_model(
    saved, small_run, monkeypatch, capsys, tmp_path
):
    path, coefficients = saved
    words = ("--plot", tmp_path / "new/maps.png", "--apply", small_run, "--out", tmp_path / "grown")
    called(monkeypatch, path, *words)
    said = capsys.readouterr().out
    assert "blocks/attention/query: w (4, 2), row sums" in said
    assert "embed: write (8, 4), max |top - I| 0.00e+00" in said
    assert (tmp_path / "new" / "maps.png").read_bytes()[:4] == b"\x89PNG"
    params = load_params(small_run)
    growth = ligo.learned_growth(coefficients, AXES, sizes(params, AXES))
    expected = jax.jit(lambda p: grow(growth, p, AXES))(params)
    config, found = checkpoints.load(tmp_path / "grown")  # The commands of jaxgrow can read it.
    assert config == runs.LARGE
    assert tokenizer_of(tmp_path / "grown").get_vocab_size() == 256
    # float32 with another order of operations
    chex.assert_trees_all_close(found, jax.device_get(expected), rtol=0, atol=1e-6)
    chex.assert_trees_all_equal_shapes(found, runs.fresh(runs.LARGE))


def test_a_model_keeps_its_settings_and_its_special_tokens(saved, monkeypatch, tmp_path):
    source = tmp_path / "gpt2"
    own = replace(SMALL, eps=1e-3)
    checkpoints.save(source, own, runs.fresh(own))
    load_tokenizer("bytes").save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[PAD]"}))
    called(monkeypatch, saved[0], "--apply", source, "--out", tmp_path / "grown")
    assert checkpoints.load(tmp_path / "grown")[0] == replace(runs.LARGE, eps=1e-3)
    for folder in (source, tmp_path / "grown"):
        assert special_tokens(tokenizer_of(folder), folder).end == 0xC1


def test_maps_grow_a_vision_model():
    """Some axes of its parameters, such as the rows of a patch, are not fields of its config."""
    sides = dict(image=8, patch=4, channels=1, classes=3, embed=4, heads=1, head_dim=4, mlp=8)
    small, key = ViTConfig(**sides, layers=1), jax.random.key(0)
    large = replace(small, layers=2)
    made = ligo.init_coefficients(ligo.LiGO(), small.axes(), small.sizes(), {"layers": 2}, key)
    maps = learning.Maps(small, large, ligo.LiGO(), made)
    chex.assert_trees_all_equal_shapes(maps.apply(runs.fresh(small)), runs.fresh(large))
    with pytest.raises(ValueError, match=r"'mlp': \(16, 8\)"):
        maps.apply(runs.fresh(replace(small, mlp=16)))


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda path: path.unlink(), "with maps; a run that learns them writes maps.npz"),
    (lambda path: path.write_bytes(path.read_bytes()[:100]), "has no readable maps"),
    (lambda path: path.write_bytes(b""), "has no readable maps"),
    (lambda path: np.savez(path, x=np.ones(3)), "has no readable maps"),
], ids=["missing", "truncated", "empty", "something else"])  # fmt: skip
def test_files_that_hold_no_maps_are_refused(saved, tmp_path, monkeypatch, capsys, spoil, says):
    path = tmp_path / "maps.npz"
    path.write_bytes(saved[0].read_bytes())
    spoil(path)
    with pytest.raises(SystemExit):
        called(monkeypatch, path)
    assert says in capsys.readouterr().err


def test_unfitting_models_and_existing_results_are_refused(
    saved, small_run, wide, tmp_path, monkeypatch, capsys
):
    sides = dict(vocab=256, context=8, layers=2, embed=4, heads=1, kv_heads=1, head_dim=4, mlp=8)
    other = LlamaConfig(**sides)
    checkpoints.save(tmp_path / "llama", other, runs.fresh(other))
    new = ("--out", tmp_path / "grown")
    for words, says in (
        ((wide, *new), "do not fit"),
        ((tmp_path / "llama", *new), "are for a GPT2Config, but the model is a LlamaConfig"),
        ((small_run, "--out", tmp_path), "exists already; give another --out"),
        ((small_run,), "--apply and --out must be given together"),
    ):
        with pytest.raises(SystemExit):
            called(monkeypatch, saved[0], "--apply", *words)
        assert says in capsys.readouterr().err


def test_every_panel_of_the_plot_is_a_labelled_map(tmp_path, figures):
    depth = {"blocks/attention": np.eye(3)[[0, 1, 2, 0, 1, 2]], "blocks/mlp": np.ones((6, 3))}
    heads = {"write": np.ones((3, 6, 4)), "read": np.eye(6, 4)}
    made = {"depth": depth, "width": {"embed": {"write": np.ones((12, 8))}, "heads": heads}}
    plots.plot_maps(learning.Maps(SMALL, runs.LARGE, ligo.LiGO(), made), tmp_path / "maps.png")
    panels = [axes for axes in figures[0].axes if axes.get_label() != "<colorbar>"]
    titles = ["w, attention", "w, mlp", "embed, write", "heads, write", "heads, read"]
    assert [axes.get_title() for axes in panels] == titles  # five panels, and no empty ones
    kinds = [("layer", 3), ("layer", 3), ("unit", 8), ("head", 4), ("head", 4)]
    for axes, (kind, old) in zip(panels, kinds, strict=True):
        assert (axes.get_xlabel(), axes.get_ylabel()) == (f"old {kind}", f"new {kind}")
        # Layers are counted from zero, as in --layers 0+1.
        assert axes.get_xlim() == (-0.5, old - 0.5)
        ticks = [*axes.get_xticks(), *axes.get_yticks()]
        assert all(float(tick).is_integer() for tick in ticks)
