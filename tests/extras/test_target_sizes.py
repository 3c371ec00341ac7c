"""Sizes for a number of parameters are within 2 %, and the importance is measured once."""

import json
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from jaxgrow import checkpoints
from jaxgrow.axes import axis_kind
from jaxgrow.checkpoints import CheckpointError, Source, open_checkpoint
from jaxgrow.checkpoints.source import Leaf, initial_layout
from jaxgrow.cli.program import main
from jaxgrow.extras import importance
from jaxgrow.extras.commands import prune as command
from jaxgrow.extras.commands import scores, sizes
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig

SMALL = LlamaConfig(
    vocab=256, context=32, layers=6, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=192, tied=False
)
# The sizes of published models: Llama 3.1 8B, Qwen3 0.6B, Gemma 3 1B, GPT-2, and a mixture.
BIG = LlamaConfig(
    **dict(vocab=128256, context=64, layers=32, embed=4096, heads=32, kv_heads=8, head_dim=128),
    **dict(mlp=14336, tied=False),
)
QWEN = dict(vocab=151936, layers=28, embed=1024, heads=16, mlp=3072, tied=True, query_norm="head")
GEMMA = dict(vocab=262144, layers=24, embed=1152, heads=4, kv_heads=1, head_dim=256, mlp=6912)
MIXTURE = dict(layers=16, embed=2048, heads=16, kv_heads=16, mlp=1024, experts=64, active=8)
MODELS = {
    "llama": BIG,
    "qwen": replace(BIG, **QWEN),
    "kinds": replace(BIG, **GEMMA, tied=True, kinds="sssssf", window=4),
    "gpt": GPT2Config(),
    "bert": BERTConfig(),
    "mixture": replace(BIG, **MIXTURE),
}


class Shapes(Source):
    """A model without values."""

    def __init__(self, config):
        self.config = config
        layout = initial_layout(config)
        self.leaves = {
            p: Leaf(names, shape, np.dtype(np.float32)) for p, (names, shape) in layout.items()
        }


@pytest.mark.parametrize("factor", [0.4, 1.3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_within_two_percent_and_whole(name, factor):
    config = MODELS[name]
    source = Shapes(config)
    wanted = round(factor * source.parameters)
    targets = sizes.sizes_near(source, wanted)
    for target in targets:
        new = config.with_sizes(target)
        assert abs(Shapes(new).parameters / wanted - 1) < 0.02
        assert all((n > source.sizes()[a]) == (factor > 1) for a, n in target.items())
        assert new.layers % config.traits["period"] == 0
        own = new.sizes()
        assert own["heads"] % own.get("kv_heads", own["heads"]) == 0
        grouped = config.sizes().get("kv_heads", config.heads)
        assert own["heads"] // own.get("kv_heads", own["heads"]) == config.heads // grouped
        for axis, n in target.items():
            assert axis_kind(axis) not in ("embed", "mlp") or n % 64 == 0
        # GPT-2 and BERT have no key for the size of a head.
        separate = config.embed != config.heads * config.head_dim
        assert separate or new.embed == new.heads * new.head_dim
    assert len(targets) == len({json.dumps(t) for t in targets}) > 0


def test_an_error_names_the_nearest_sizes():
    source = Shapes(replace(SMALL, layers=1, embed=16, heads=1, kv_heads=1, mlp=3))
    message = r"within 2%; it has 9,408. The nearest are mlp=1, with 9,312 parameters: give these"
    with pytest.raises(CheckpointError, match=message):
        sizes.sizes_near(source, 100)


# --- the commands ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    checkpoints.save(folder / "llama", SMALL, tiny.params(SMALL, dtype="float32"))
    (folder / "text.txt").write_text("A text on which the importance is measured. " * 20)
    return folder


def run(*words):
    return main([str(word) for word in words])


def test_suggest_proposes_sizes(folder, capsys):
    assert run("suggest", folder / "llama", "--to-params", "6e5", "--json") == 0
    for found in json.loads(capsys.readouterr().out)["targets"]:
        for way in found["ways"]:
            assert abs(way["parameters"] / 6e5 - 1) < 0.02


def test_the_importance_is_measured_once(folder, tmp_path, capsys, monkeypatch):
    """Other sizes need no forward pass, and are those of a new measurement."""
    file = tmp_path / "importance.safetensors"
    words = ("prune", folder / "llama", "--data", folder / "text.txt")
    assert run(*words, tmp_path / "a", "--params", "2.5e5", "--scores", file, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert abs(about["parameters"] / 2.5e5 - 1) < 0.02
    assert "layers" not in about["arguments"]["target"]
    assert about["report"]["pruned"]["kl"] > 0
    other = ("--layers", 4, "--mlp", 128, "--by", "angular")
    assert run(*words, tmp_path / "fresh", *other) == 0
    for name in ("residual_streams", "unit_importance"):
        monkeypatch.setattr(importance, name, abstract_only(getattr(importance, name)))
    monkeypatch.setattr(command, "outputs_of", None)
    capsys.readouterr()
    assert run("prune", folder / "llama", tmp_path / "b", *other, "--scores", file, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["report"].keys() == {"scores"}
    assert again["arguments"]["scores"] == str(file) and "data" not in again["arguments"]
    stored, fresh = (checkpoints.load(tmp_path / name)[1] for name in ("b", "fresh"))
    chex.assert_trees_all_equal(stored, fresh)


def test_scores_that_cannot_be_written_are_not_measured(folder, tmp_path, capsys, monkeypatch):
    words = ("prune", folder / "llama", tmp_path / "b", "--layers", 4, "--data")
    words += (folder / "text.txt", "--scores")
    assert run(*words, tmp_path / "importance.safetensors", "--dry-run") == 0
    assert "nothing was written" in capsys.readouterr().out and not list(tmp_path.iterdir())
    monkeypatch.setattr(command, "scores_of", None)
    assert run(*words, tmp_path / "none" / "importance.safetensors") == 1
    assert "no such file or directory" in capsys.readouterr().err


def abstract_only(real):
    """Assert that nothing is computed: all arrays are traced."""

    def measured(config, *trees, **options):
        assert all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees))
        return real(config, *trees, **options)

    return measured


def test_prune_without_data_and_scores(folder, tmp_path, capsys):
    words = ("prune", folder / "llama", tmp_path / "b")
    for more, status, says in (
        (("--params", "2.5e5"), 2, "inputs with --data FILE, or a file of --scores"),
        (("--params", "2.5e5", "--scores", tmp_path / "importance"), 2,
         f"{tmp_path}/importance does not exist, and prune measures"),
        (("--params", "2e5", "--mlp", 8, "--data", folder / "text.txt"), 2,
         "--mlp: --params chooses the sizes; omit --mlp"),
        (("--params", "5", "--data", folder / "text.txt"), 1, "The nearest are"),
    ):  # fmt: skip
        assert run(*words, *more) == status
        assert says in capsys.readouterr().err


def of_other_values(stored):
    return {name: x + (np.nan if name.endswith("/mlp") else 0) for name, x in stored.items()}


def test_no_other_file_is_removed_for_scores(folder, tmp_path, capsys):
    """The file may hold the weights of a model, such as those of SRC."""
    model = folder / "llama"
    words = ("prune", model, tmp_path / "b", "--layers", 1, "--scores", model / "model.safetensors")
    assert main([*map(str, words)]) == 1
    error = capsys.readouterr().err
    assert "Give another path, to which" in error and "remove" not in error


@pytest.mark.parametrize(("change", "message"), [
    (of_other_values, "the scores 'mlp' are not finite. Give another file, or remove"),
    (lambda s: {n: x.astype(np.float64) for n, x in s.items()}, r"the scores '.*' are F64 .*, but must be F32"),
    (lambda s: {n: x[..., :-1] if n.endswith("/embed") else x for n, x in s.items()},
     r"the scores 'embed' are F32 \(63,\), but must be F32 \(64,\)"),
    (lambda s: {n: x for n, x in s.items() if "mlp" not in n}, "they differ in mlp"),
    (lambda s: {f"0{n[1:]}x": x for n, x in s.items()}, None),
    (lambda s: {n.replace(n[:8], "00000000"): x for n, x in s.items()}, "of another model"),
])  # fmt: skip
def test_a_file_of_scores_is_checked(folder, tmp_path, change, message):
    source = open_checkpoint(folder / "llama")
    file = tmp_path / "importance.safetensors"
    shapes = scores.expected_scores(source)
    own = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    scores.save_scores(file, source, lambda: own)
    assert scores.read_scores(file, source).keys() == own.keys()
    save_file(change(load_file(file)), file)
    with pytest.raises(CheckpointError, match=message or "importance"):
        scores.read_scores(file, source)


def test_a_mixture_loses_experts():
    source = Shapes(MODELS["mixture"])
    for target in sizes.sizes_near(source, round(0.7 * source.parameters)):
        assert "mlp" not in target and target.get("experts", 64) >= 8


def test_features_that_are_the_outputs_stay():
    source = Shapes(replace(MODELS["bert"], head="states"))
    for target in sizes.sizes_near(source, round(0.7 * source.parameters)):
        assert not {"embed", "heads"} & target.keys()


@pytest.mark.parametrize("factor", [0.8, 1.29, 2])
def test_stages_change_together(tmp_path, factor):
    """A target has a size for each stage, as options do, and transformers has a Swin of these sizes."""
    stages = dict(layers=(2, 2, 6), embed=(16, 32, 64), heads=(2, 4, 8), mlp=(64, 128, 256))
    images = dict(image=32, patch=1, channels=1, classes=10, window=4, position_mlp=512)
    config = SwinConfig(**stages, **images, head_dim=8)
    checkpoints.save(tmp_path / "swin", config, tiny.params(config, dtype="float32"))
    source = open_checkpoint(tmp_path / "swin")
    for target in sizes.sizes_near(source, round(factor * source.parameters)):
        new = config.with_sizes(target)
        assert abs(Shapes(new).parameters / source.parameters / factor - 1) < 0.02
        assert len(target) == 3 * len({*map(axis_kind, target)})
        assert source.family.to_hf(new)["num_heads"] == new.heads
