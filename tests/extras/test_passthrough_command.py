"""`grow --layers-from` and `prune --keep` take layers from lists, also of several models."""

import json

import numpy as np
import pytest
from published import adapter, called, content, published, refused, stored

from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.extras.commands.passthrough import JoinedLayers

KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
QUERY = "model.layers.{}.self_attn.q_proj.weight"


def two(tmp_path, **keys):
    more = {"tie_word_embeddings": True, "layer_types": KINDS}
    a = published(tmp_path / "a", "Gemma3ForCausalLM", **more)
    more["layer_types"] = KINDS[::-1]
    return a, published(tmp_path / "b", "Gemma3ForCausalLM", seed=1, **more | keys)


def test_the_layers_of_two_models_keep_their_weights_and_kinds(tmp_path, capsys):
    a, b = two(tmp_path, max_position_embeddings=32, vocab_size=13)
    about = called(capsys, "grow", a, tmp_path / "c", "--layers-from", f"0-1,{b}:1-3,3")
    assert about["notes"] == [
        f"everything outside of the layers is that of {a}, such as embeddings, head and tokenizer"
    ]
    config, tensors, (one, other) = (
        content(tmp_path / "c"),
        stored(tmp_path / "c"),
        map(stored, (a, b)),
    )
    places = [(one, 0), (one, 1), (other, 1), (other, 2), (other, 3), (one, 3)]
    for new, (of, old) in enumerate(places):
        np.testing.assert_array_equal(tensors[QUERY.format(new)], of[QUERY.format(old)])
    kinds = [(KINDS if of is one else KINDS[::-1])[old] for of, old in places]
    assert config["layer_types"] == kinds and config["num_hidden_layers"] == 6
    outside = content(a)["vocab_size"], content(a)["max_position_embeddings"]
    assert (config["vocab_size"], config["max_position_embeddings"]) == outside
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(tensors[name], one[name])


def test_layers_of_several_models_have_a_dtype_that_holds_all_of_them(tmp_path, capsys):
    folders = [
        published(tmp_path / name, "LlamaForCausalLM", weights=dtype, seed=i)
        for i, (name, dtype) in enumerate((("a", "bfloat16"), ("b", "float32"), ("c", "bfloat16")))
    ]
    a, b, c = folders
    called(capsys, "grow", a, tmp_path / "d", "--layers-from", f"{c}:0,{b}:1")
    found = open_checkpoint(tmp_path / "d")
    assert {leaf.dtype.name for path, leaf in found.leaves.items() if "blocks" in path} == {
        "float32"
    }
    assert found.leaves["token_embedding"].dtype.name == "bfloat16"
    called(capsys, "grow", a, tmp_path / "e", "--layers-from", f"{c}:0,0", "--dtype", "float16")
    assert {x.dtype.name for x in stored(tmp_path / "e").values()} == {"float16"}


def test_one_layer_is_read_at_a_time_and_only_if_the_list_has_it(tmp_path, monkeypatch):
    a, b = map(open_checkpoint, two(tmp_path))
    reads = []
    for model in (a, b):
        read = model.read
        monkeypatch.setattr(
            model,
            "read",
            lambda path, layer=None, m=model, r=read: reads.append((m, layer)) or r(path, layer),
        )
    joined = JoinedLayers([a, b])
    assert not reads
    x = joined.read("blocks/attention/query/kernel", 5)
    assert reads == [(b, 1)] and x.shape == joined.leaves["blocks/attention/query/kernel"].shape[1:]
    assert joined.origin("blocks/attention/query/kernel", 5) == (b, 1)


def test_a_lora_and_a_list(tmp_path, capsys):
    a, _ = two(tmp_path)
    lora = adapter(tmp_path / "lora")
    called(capsys, "grow", a, tmp_path / "c", "--layers-from", "3,0", "--lora", lora)
    called(capsys, "prune", a, tmp_path / "d", "--keep", "0,3", "--lora", lora)
    record = json.loads((tmp_path / "d/jaxgrow.json").read_text())
    assert record["arguments"]["removed"] == {"layers": [1, 2]}
    assert (tmp_path / "d/adapter_model.safetensors").is_file()


def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys):
    a, b = two(tmp_path, rope_theta=7.0)
    wide = published(tmp_path / "w", "LlamaForCausalLM", intermediate_size=24)
    grow, prune = ["grow", a, tmp_path / "c"], ["prune", a, tmp_path / "c"]
    for words, status, says in (
        ([*grow, "--layers-from", "0-4"], 1, "has layer 4, but the model has the layers 0 to 3"),
        (
            [*grow, "--layers-from", f"0,{wide}:7"],
            1,
            f"{wide}: axis 'layers': the list of layers has layer 7",
        ),
        ([*grow, "--layers-from", f"0,{wide}:1"], 1, "intermediate_size is 20 in A and 24 in B"),
        ([*grow, "--layers-from", f"0,{b}:1"], 1, "rope_theta is 1000000.0 in A and 7.0 in B"),
        ([*grow, "--layers-from", "0", "--layers", "4"], 1, "leave out the sizes"),
        ([*grow, "--layers-from", f"{b}:0", "--mlp", "4"], 2, "omit --mlp"),
        ([*grow, "--layers-from", f"{b}:0", "--optimizer", "copy"], 2, "omit --optimizer"),
        (
            [*grow, "--layers-from", f"{b}:0", "--optimizer", "drop", "--optimizer-state", "o"],
            2,
            "omit --optimizer-state",
        ),
        ([*grow, "--method", "passthrough"], 1, "the list of layers is empty"),
        ([*prune, "--keep", "0,9"], 1, "must be some of 0 .. 3, in ascending order, not [0, 9]"),
        ([*prune, "--keep", "1,0"], 1, "in ascending order"),
        ([*prune, "--keep", "0-1", "--mlp", "4"], 2, "omit --mlp"),
        ([*prune, "--keep", "0-1", "--vocab", "8"], 2, "omit --vocab"),
        ([*prune, "--layers", "2"], 2, "give it inputs with --data FILE"),
    ):
        message = refused(capsys, *words, status=status)
        assert says in message and message.count("\n") == 0, message
    for words in (
        [*grow, "--layers-from", "3-1"],
        [*grow, "--layers-from", "0-1,"],
        [*prune, "--keep", "b:1"],
    ):
        with pytest.raises(SystemExit, match="2"):
            refused(capsys, *words)
        assert "layers" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_show_draws_a_list(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a, _ = two(tmp_path)
    about = called(capsys, "show", a, "--layers-from", "0-1,0-1", "--out", tmp_path / "maps.png")
    assert about["arguments"]["sources"] == [0, 1, 0, 1] and (tmp_path / "maps.png").is_file()
    called(capsys, "show", a, "--method", "loop", "--loop", "0-1x2", "--out", tmp_path / "loop.png")
