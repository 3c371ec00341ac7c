"""Loops of Hugging Face models: the written model equals the model of `transformers` that runs layers again."""

import json

import numpy as np
import pytest
import tiny
from transformers_models import answered, assert_alike, given, made, run, theirs, transformers

from jaxgrow import checkpoints
from jaxgrow.checkpoints import Loaded, Output, write
from jaxgrow.cli import program
from jaxgrow.models import Loop

pytestmark = pytest.mark.interop

DECODERS = pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)


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
