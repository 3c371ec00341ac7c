"""Loops and heads of Hugging Face models equal `transformers` models that were changed in PyTorch."""

import json

import numpy as np
import pytest
import tiny
from transformers_models import (
    answered,
    assert_alike,
    given,
    made,
    run,
    theirs,
    torch,
    transformers,
)

from jaxgrow import checkpoints
from jaxgrow.checkpoints import Loaded, Output, write
from jaxgrow.cli import program
from jaxgrow.models import Loop

pytestmark = pytest.mark.interop

DECODERS = pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)


def listed(folder, architecture, sources, other=None):
    """Return the logits of a `transformers` model whose list of layers was built by hand.

    Args:
      folder: the model.
      architecture: its class.
      sources: the layers of the list; those of ``other`` count from the number of its own layers.
      other: another model.
    """
    models = [getattr(transformers, architecture).from_pretrained(x) for x in (folder, other) if x]
    every = [layer for model in models for layer in model.model.layers]
    model, layers = models[0], models[0].model.layers
    model.model.layers = type(layers)([every[i] for i in sources])
    kinds = [kind for m in models for kind in getattr(m.config, "layer_types", None) or ()]
    if kinds:
        model.config.layer_types = [kinds[i] for i in sources]
    model.config.num_hidden_layers = len(sources)
    model.config.use_cache = False
    return answered(model, given(checkpoints.open_checkpoint(folder).config))


@DECODERS
def test_lists_of_layers_are_those_of_a_model_built_by_hand(tmp_path, architecture, capsys):
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    more = {"num_hidden_layers": 4}
    more |= {"layer_types": kinds} if architecture == "Gemma3ForCausalLM" else {}
    source = made(tmp_path / "a", architecture, more=more)
    before = theirs(source)
    for name, words, sources in (
        ("deep", ["grow", "--layers-from", "0-2,1-3"], [0, 1, 2, 1, 2, 3]),
        ("shallow", ["grow", "--layers-from", "0,3"], [0, 3]),
        ("kept", ["prune", "--keep", "0,3"], [0, 3]),
        ("same", ["grow", "--layers-from", "0-3"], [0, 1, 2, 3]),
    ):
        run(words[0], source, tmp_path / name, *words[1:])
        expected = listed(source, architecture, sources)
        np.testing.assert_allclose(assert_alike(tmp_path / name), expected, rtol=0, atol=1e-4)
        record = json.loads((tmp_path / name / "jaxgrow.json").read_text())
        assert record["arguments"]["sources"] == sources
        same = "the function is preserved" in capsys.readouterr().out
        assert same == (name == "same") == bool(np.abs(expected - before).max() < 1e-4)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("shallow", "kept")]
    assert weights[0] == weights[1]


@DECODERS
def test_layers_of_two_models_are_those_of_a_model_built_by_hand(tmp_path, architecture):
    one = made(tmp_path / "a", architecture)
    more: dict = {"num_hidden_layers": 3, "vocab_size": 13}
    if architecture == "Gemma3ForCausalLM":
        more["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    other = made(tmp_path / "b", architecture, more=more)
    layers = f"0-1,{other}:1-2,1,{other}:0"
    run("grow", one, tmp_path / "c", "--layers-from", layers)
    sources = [0, 1, 3, 4, 1, 2]
    expected = listed(one, architecture, sources, other)
    np.testing.assert_allclose(assert_alike(tmp_path / "c"), expected, rtol=0, atol=1e-4)
    record = json.loads((tmp_path / "c" / "jaxgrow.json").read_text())
    places = [(one, 0), (one, 1), (other, 1), (other, 2), (one, 1), (other, 0)]
    assert record["arguments"]["sources"] == [f"{folder}:{i}" for folder, i in places]
    assert len(record["sources"]) == 2


@DECODERS
def test_loop_writes_a_layer_for_each_pass(tmp_path, architecture):
    """The oracle is the model of `transformers` with the same modules several times in its list."""
    source = made(tmp_path / "a", architecture)
    config = checkpoints.open_checkpoint(source).config
    last = config.layers - 1
    run("grow", source, tmp_path / "b", "--method", "loop", "--loop", f"{last - 1}-{last}x3")
    passes = [*range(last - 1), *[last - 1, last] * 3]
    record = json.loads((tmp_path / "b" / "jaxgrow.json").read_text())
    assert record["arguments"]["passes"] == passes

    model = getattr(transformers, architecture).from_pretrained(source)
    layers = model.model.layers
    model.model.layers = type(layers)([layers[i] for i in passes])
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = [kinds[i] for i in passes]
    model.config.num_hidden_layers = len(passes)
    model.config.use_cache = False
    expected = answered(model, given(config))
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), expected, rtol=0, atol=1e-4)
    assert np.abs(expected - theirs(source)).max() > 1e-2


@DECODERS
def test_a_model_with_a_loop_is_written_without_it(tmp_path, architecture, capsys):
    source = made(tmp_path / "a", architecture)
    run("grow", source, tmp_path / "b", "--method", "loop", "--loop", "0-1x2")
    config, params = checkpoints.load(source)
    looped = config.run_as(config).__class__(**{**vars(config), "loop": Loop(0, 2)})
    write(Loaded(looped, params), Output(tmp_path / "looped", "orbax"))
    tokens = given(config)
    expected = np.asarray(tiny.forward(looped)(params, tokens))
    data = tmp_path / "ids.npy"
    np.save(data, tokens)
    words = [tmp_path / "looped", tmp_path / "e", "--mlp", "8", "--data", data]
    assert program.main(["prune", *map(str, words)]) == 1
    assert "first give each pass its own layer with jaxgrow grow" in capsys.readouterr().err
    run("convert", tmp_path / "looped", tmp_path / "c", "--to", "hf")
    capsys.readouterr()
    run("grow", tmp_path / "looped", tmp_path / "d", "--method", "unloop", "--to", "hf")
    assert "the function is preserved" in capsys.readouterr().out
    for name in "bcd":
        np.testing.assert_allclose(assert_alike(tmp_path / name), expected, rtol=0, atol=1e-4)
    one, other = (checkpoints.load(tmp_path / name)[0] for name in "cd")
    assert one == other and one.loop is None


def test_wrong_loops_are_refused_in_one_line(tmp_path, capsys):
    source = made(tmp_path / "a", "LlamaForCausalLM")
    capsys.readouterr()
    words = ["grow", str(source), str(tmp_path / "b"), "--method"]
    for more, status, says in (
        (["loop"], 2, "loop requires the layers that run again, such as --loop 4-7x2"),
        (["loop", "--loop", "0-7x2"], 1, "LlamaConfig has 2 layers, but loop is Loop(begin=0"),
        (["loop", "--loop", "0:1x2"], 2, "is not a loop: give the first layer, the last layer"),
        (["loop", "--loop", "0-1x1"], 1, "runs at least one layer at least twice"),
        (["loop", "--loop", "0-1x2", "--layers", "4"], 1, "loop adds no weights"),
        (["unloop"], 1, "unloop needs a model with a loop"),
        (["stack", "--loop", "0-1x2", "--layers", "4"], 2, "stack makes no loop"),
    ):
        try:
            assert program.main([*words, *more]) == status
        except SystemExit as exit:
            assert exit.code == status
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "architecture",
    ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"],
)
def test_untie_and_tie(tmp_path, architecture, capsys):
    source = made(tmp_path / "tied", architecture, more={"tie_word_embeddings": True})
    before = theirs(source)
    run("grow", source, tmp_path / "apart", "--method", "untie")
    assert "the function is preserved" in capsys.readouterr().out
    np.testing.assert_array_equal(theirs(tmp_path / "apart"), before)
    assert_alike(tmp_path / "apart")
    model = getattr(transformers, architecture).from_pretrained(tmp_path / "apart")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert not model.config.tie_word_embeddings and head.weight is not embedding.weight
    with torch.no_grad():
        head.weight.mul_(1.5)
        model.save_pretrained(tmp_path / "trained")
        mean = (head.weight + embedding.weight) / 2
    capsys.readouterr()
    run("grow", tmp_path / "trained", tmp_path / "again", "--method", "tie")
    said = capsys.readouterr().out
    assert "token_embedding changed by 25.0% of its norm" in said and "is changed" in said
    assert "head_kernel changed by 16.7% of its norm" in said
    assert_alike(tmp_path / "again")
    tied = getattr(transformers, architecture).from_pretrained(tmp_path / "again")
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    torch.testing.assert_close(tied.get_input_embeddings().weight, mean, rtol=0, atol=1e-6)


def test_untie_is_refused_in_one_line(tmp_path, capsys):
    source = made(tmp_path / "a", "LlamaForCausalLM", more={"tie_word_embeddings": False})
    capsys.readouterr()
    words = ["grow", str(source), str(tmp_path / "b"), "--method"]
    for more, status, says in (
        (["untie"], 1, "untie needs a model that predicts tokens, with a head that is tied"),
        (["tie", "--layers", "4"], 1, "tie changes no size, but the target has layers"),
        (["tie", "--seed", "1"], 2, "tie changes only the head"),
        (["tie", "--optimizer", "drop", "--optimizer-state", "o"], 2, "omit --optimizer-state"),
    ):
        assert program.main([*words, *more]) == status
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_expert_copies(tmp_path, architecture, capsys):
    source = made(tmp_path / "a", architecture)
    before = checkpoints.open_checkpoint(source).config
    words = ("--method", "expert_copies", "--experts", 2 * before.experts)
    run("grow", source, tmp_path / "b", *words, "--seed", 1)
    said = capsys.readouterr().out
    assert "the function is changed" in said
    assert f"note: each token still uses {before.active} of the experts" in said
    assert_alike(tmp_path / "b")
    after, params = checkpoints.load(tmp_path / "b")
    assert (after.experts, after.active) == (2 * before.experts, before.active)
    old = checkpoints.load(source)[1]["blocks"]["mlp"]
    for name, w in params["blocks"]["mlp"].items():
        noise = 0.02 if name == "router" else 0
        axis = -1 if name == "router" else 1
        twice = np.concatenate([old[name]["kernel"]] * 2, axis)
        assert (w["kernel"] - twice).std() == pytest.approx(noise, rel=0.3)


@DECODERS
def test_targets_are_the_numbers_of_parameters_that_transformers_counts(
    tmp_path, architecture, capsys
):
    sizes: dict = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 97, "head_dim": 16}
    source = made(tmp_path / "a", architecture, more=sizes)

    def count(folder):
        return getattr(transformers, architecture).from_pretrained(folder).num_parameters()

    whole = count(source)
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(3, 97, (4, 7)))
    scores = ("--scores", tmp_path / "scores.safetensors")
    run(
        "prune",
        source,
        tmp_path / "b",
        "--params",
        0.7 * whole,
        "--data",
        tmp_path / "ids.npy",
        *scores,
    )
    run("prune", source, tmp_path / "c", "--params", 0.8 * whole, *scores)
    for name, part in (("b", 0.7), ("c", 0.8)):
        assert_alike(tmp_path / name)
        assert abs(count(tmp_path / name) / (part * whole) - 1) < 0.02

    capsys.readouterr()
    run("suggest", source, "--to-params", 2 * whole, "--json")
    for i, target in enumerate(json.loads(capsys.readouterr().out)["targets"]):
        way, folder = target["ways"][0], source
        for method, sizes in zip(way["methods"], way["targets"], strict=True):
            options = [
                word for axis, n in sizes.items() for word in (f"--{axis}".replace("_", "-"), n)
            ]
            folder, before = tmp_path / f"{i}-{method}", folder
            run("grow", before, folder, "--method", method, *options)
        assert_alike(folder)
        assert count(folder) == way["parameters"]
        assert abs(count(folder) / (2 * whole) - 1) < 0.02
