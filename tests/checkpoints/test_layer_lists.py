"""Keys of ``config.json`` that describe single layers agree with each other, and with the dtype."""

import json

import numpy as np
import pytest
from checkpoints import change
from published import called, content, published, refused

from jaxgrow.checkpoints import FAMILIES, CheckpointError, open_checkpoint
from jaxgrow.cli import program
from jaxgrow.extras.families import tensor_names

SLIDING, FULL = "sliding_attention", "full_attention"


# --- a list of another length ---


@pytest.mark.parametrize(("architecture", "key", "value"), [
    ("Gemma3ForCausalLM", "layer_types", [SLIDING] * 5 + [FULL]),
    ("Gemma3ForCausalLM", "layer_types", []),
    ("Qwen3ForCausalLM", "layer_types", [FULL] * 6),
    ("LlamaForCausalLM", "layer_types", [FULL] * 6),
    ("SmolLM3ForCausalLM", "no_rope_layers", [1, 1, 1, 0, 1, 1]),
    ("LlamaForCausalLM", "num_key_value_heads", [2] * 6),
    ("LlamaForCausalLM", "intermediate_size", [20] * 6),
    ("Gemma3ForCausalLM", "sliding_window", [3] * 6),
    ("Qwen3MoeForCausalLM", "moe_layer_freq", [1] * 6),
])  # fmt: skip
def test_a_list_of_another_length_names_the_key_both_numbers_and_the_way_out(
    tmp_path, architecture, key, value, capsys
):
    folder = published(tmp_path / "a", architecture)
    change(folder, **{key: value})
    error = refused(capsys, "inspect", folder)
    assert f"{key} has {len(value)} entries, but num_hidden_layers is 4" in error
    assert "Write one entry for each layer, or correct num_hidden_layers" in error
    change(folder, **{key: value[:4] if value else [FULL] * 4})
    if isinstance((value or [""])[0], str):  # the way out
        called(capsys, "inspect", folder)


def test_every_command_refuses_a_list_of_another_length(tmp_path, capsys):
    folder = published(tmp_path / "a", "Qwen3ForCausalLM", layer_types=[FULL] * 4)
    change(folder, layer_types=[FULL] * 6)
    for command in (
        ("convert", folder, tmp_path / "b", "--dtype", "bfloat16"),
        ("report", folder, folder),
        ("suggest", folder, "--to", "2x"),
        ("grow", folder, tmp_path / "b", "--method", "llama_pro", "--layers", 6),
        ("coalesce", folder, tmp_path / "b", "--layers", "0+1,2+3"),
        ("interpolate", folder, folder, tmp_path / "b", "--alpha", 0.5),
    ):
        assert "layer_types has 6 entries, but num" in refused(capsys, *command), command
    assert not (tmp_path / "b").exists()


def test_an_index_outside_the_model_is_an_error(tmp_path, capsys):
    folder = published(tmp_path / "a", "Qwen3MoeForCausalLM")
    change(folder, mlp_only_layers=[5])
    error = refused(capsys, "inspect", folder)
    assert "mlp_only_layers has layer 5, but num_hidden_layers is 4" in error
    change(folder, mlp_only_layers=[])
    called(capsys, "inspect", folder)


def test_the_text_part_of_a_model_of_images_is_checked(tmp_path):
    text = content(published(tmp_path / "a", "Gemma3ForCausalLM"))
    text["layer_types"] = [SLIDING] * 6
    change(tmp_path / "a", architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    with pytest.raises(CheckpointError, match="layer_types has 6 entries, but num_hidden_layers"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("key", tensor_names.FURTHER)
def test_layers_for_further_tokens_explain_surplus_entries(tmp_path, key, capsys):
    folder = published(tmp_path / "a", "Qwen3ForCausalLM", use_sliding_window=True)
    change(folder, layer_types=[FULL] * 5, **{key: 1})
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note.startswith(f"{key} is 1: these layers")
    assert "layer_types without the 1 entries" in note
    about = called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 6)
    assert note in about["notes"]
    grown = content(tmp_path / "b")
    assert grown["layer_types"] == [FULL] * 6 and key not in grown
    change(folder, layer_types=[FULL] * 6)
    assert "layer_types has 6 entries" in refused(capsys, "inspect", folder)


# --- numbers that are a shorter form of a list ---


def depths(capsys, folder, out):
    """Change the depth of a model of eight layers in every way; yield the new config.json."""
    (out / "data.npy").parent.mkdir(exist_ok=True)
    np.save(out / "data.npy", np.arange(32, dtype=np.int32).reshape(2, 16) % 11)
    ways = {
        "pro": ("grow", "--method", "llama_pro", "--layers", 12),
        "stack": ("grow", "--method", "stack", "--layers", 16),
        "interleave": ("grow", "--method", "interleave", "--layers", 16),
        "prune": ("prune", "--layers", 5, "--data", out / "data.npy"),
        "coalesce": ("coalesce", "--layers", "alike"),
        "decoalesce": ("decoalesce", "--layers", "0+1,2,3,4,5,6,7,8"),
    }
    for name, (command, *words) in ways.items():
        about = called(capsys, command, folder, out / name, *words)
        yield name, about, content(out / name)


SLOW = pytest.mark.slow
WINDOW, NO_WINDOW = {"use_sliding_window": True}, {"use_sliding_window": False}


@pytest.mark.extra
def test_an_interval_of_layers_is_positive():
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
    own = dict.fromkeys((*sizes, "num_hidden_layers"), 8) | {"no_rope_layer_interval": 0}
    with pytest.raises(ValueError, match="no_rope_layer_interval is 0, but must be at least 1"):
        FAMILIES["SmolLM3ForCausalLM"].from_hf(own)


@pytest.mark.extra
@pytest.mark.parametrize(("architecture", "key", "value", "more"), [
    ("Gemma3ForCausalLM", "sliding_window_pattern", 6, {}),
    pytest.param("Gemma3ForCausalLM", "sliding_window_pattern", 4, {}, marks=SLOW),
    pytest.param("SmolLM3ForCausalLM", "no_rope_layer_interval", 4, {}, marks=SLOW),
    ("Qwen2ForCausalLM", "max_window_layers", 5, WINDOW),
    pytest.param("Qwen3ForCausalLM", "max_window_layers", 2, WINDOW, marks=SLOW),
    pytest.param("Qwen2ForCausalLM", "max_window_layers", 8, NO_WINDOW, marks=SLOW),
])  # fmt: skip
def test_a_redundant_number_is_right_or_absent_after_a_change_of_depth(
    tmp_path, architecture, key, value, more, capsys
):
    window = {"sliding_window": 3} if more.get("use_sliding_window") else {}
    keys = {key: value, "num_hidden_layers": 8, **more, **window}
    folder = published(tmp_path / "a", architecture, **keys)
    assert "layer_types" not in content(folder)
    for name, about, new in depths(capsys, folder, tmp_path / "out"):
        grown = tmp_path / "out" / name
        kinds = open_checkpoint(grown).config.layer_kinds
        assert len([note for note in about["notes"] if key in note]) == (key not in new), name
        # A program that reads only the number finds the same layers, if a number describes them.
        change(grown, layer_types=None, no_rope_layers=None)
        fits = []
        for n in range(1, 18):
            change(grown, **{key: n})
            fits += [n] * (open_checkpoint(grown).config.layer_kinds == kinds)
        assert new[key] in fits if key in new else not fits, name


def test_a_change_of_width_keeps_the_number(tmp_path, capsys):
    folder = published(tmp_path / "a", "Gemma3ForCausalLM", sliding_window_pattern=2)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "lemon", "--mlp", 40)
    assert content(tmp_path / "b")["sliding_window_pattern"] == 2
    assert "layer_types" not in content(tmp_path / "b")


def test_a_number_that_contradicts_the_list_is_corrected(tmp_path, capsys):
    """Another tool has written the list, and left the number."""
    keys = {"sliding_window_pattern": 6, "layer_types": [SLIDING, FULL] * 2}
    folder = published(tmp_path / "a", "Gemma3ForCausalLM", **keys)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert content(tmp_path / "b")["sliding_window_pattern"] == 2


# --- synonyms ---

MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}


def test_every_name_of_the_number_of_experts_grows(tmp_path, capsys):
    more = {"experts_per_token": 2, "num_layers": 4}
    folder = published(tmp_path / "a", "MixtralForCausalLM", **MOE, **more)
    np.save(tmp_path / "data.npy", np.arange(32, dtype=np.int32).reshape(2, 16) % 11)
    fewer = ("--experts", 3, "--data", tmp_path / "data.npy")
    called(capsys, "prune", folder, tmp_path / "b", *fewer)
    deeper = ("--method", "llama_pro", "--layers", 6)
    called(capsys, "grow", tmp_path / "b", tmp_path / "c", *deeper)
    called(capsys, "convert", tmp_path / "c", tmp_path / "d", "--dtype", "bfloat16")
    for name, layers in (("b", 4), ("c", 6), ("d", 6)):
        new = content(tmp_path / name)
        assert {key: new[key] for key in MOE} == dict.fromkeys(MOE, 3)
        active = {new["num_experts_per_tok"], new["experts_per_token"]}
        assert active == {open_checkpoint(tmp_path / name).config.active}
        assert (new["num_hidden_layers"], new["num_layers"]) == (layers, layers)


@pytest.mark.parametrize("leftover", [{"num_experts": 0}, {"n_routed_experts": 1}])
def test_a_dense_model_with_a_number_of_experts_becomes_a_mixture(tmp_path, leftover, capsys):
    folder = published(tmp_path / "a", "MistralForCausalLM", **leftover)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "upcycle", "--experts", 4)
    new = content(tmp_path / "b")
    assert {new["num_local_experts"], *(new[key] for key in leftover)} == {4}


@pytest.mark.parametrize(("architecture", "key", "synonym"), [
    ("MixtralForCausalLM", "num_local_experts", "num_experts"),
    ("OlmoeForCausalLM", "num_experts", "num_local_experts"),
    ("GPT2LMHeadModel", "n_layer", "num_hidden_layers"),
    ("GPT2LMHeadModel", "n_embd", "hidden_size"),
    ("DistilBertForMaskedLM", "n_layers", "num_hidden_layers"),
])  # fmt: skip
def test_a_synonym_is_read_and_a_contradiction_is_an_error(
    tmp_path, architecture, key, synonym, capsys
):
    folder = published(tmp_path / "a", architecture)
    number, config = content(folder)[key], open_checkpoint(folder).config
    change(folder, **{key: None, synonym: number})
    assert open_checkpoint(folder).config == config
    called(capsys, "convert", folder, tmp_path / "b", "--dtype", "bfloat16")
    assert {content(tmp_path / "b")[name] for name in (key, synonym)} == {number}
    change(folder, **{key: number, synonym: number + 4})
    error = refused(capsys, "inspect", folder)
    assert f"{key} is {number}" in error and f"{synonym} is {number + 4}" in error
    change(folder, **{synonym: number})  # the way out
    called(capsys, "inspect", folder)


def test_width_changes_every_name_of_the_width(tmp_path, capsys):
    folder = published(tmp_path / "a", "GPT2LMHeadModel", hidden_size=16, num_attention_heads=4)
    wide = ("--method", "hypercloning", "--embed", 32, "--heads", 8, "--mlp", 128)
    called(capsys, "grow", folder, tmp_path / "b", *wide)
    new = content(tmp_path / "b")
    assert (new["hidden_size"], new["num_attention_heads"]) == (new["n_embd"], new["n_head"])


# --- the dtype ---


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_in_the_config_is_that_of_the_tensors(tmp_path, key, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM", "bfloat16", **{key: "float32"})
    change(folder, vision_config={key: "float32"})
    called(capsys, "convert", folder, tmp_path / "b", "--dtype", "bfloat16")
    called(capsys, "grow", folder, tmp_path / "c", "--method", "stack", "--layers", 8)
    called(capsys, "convert", folder, tmp_path / "o", "--to", "orbax")
    called(capsys, "convert", tmp_path / "o", tmp_path / "d", "--to", "hf", "--dtype", "float16")
    for name, dtype in (("b", "bfloat16"), ("c", "bfloat16"), ("d", "float16")):
        written = content(tmp_path / name)
        assert (written[key], written["vision_config"][key]) == (dtype, dtype)
    assert len({"dtype", "torch_dtype"} & content(tmp_path / "b").keys()) == 1


def test_a_dtype_that_some_tensors_have_is_kept(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM", torch_dtype="float32")
    called(capsys, "convert", folder, tmp_path / "b", "--shard-size", "5kB")
    assert content(tmp_path / "b")["torch_dtype"] == "float32"


# --- which layers are new ---


@pytest.mark.parametrize(("method", "layers", "new"), [
    ("llama_pro", 6, [2, 5]), ("stack", 8, [4, 5, 6, 7]), ("interleave", 8, [1, 3, 5, 7]),
    ("mslt", 6, [4, 5]), ("solar", 6, [3, 4]),
])  # fmt: skip
def test_the_new_layers_are_printed_and_recorded(tmp_path, method, layers, new, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    words = ("grow", folder, tmp_path / "b", "--method", method, "--layers", layers)
    assert called(capsys, *words)["new_layers"] == new
    assert json.loads((tmp_path / "b/jaxgrow.json").read_text())["new_layers"] == new
    assert program.main([*map(str, words), "--overwrite"]) == 0
    assert f"new layers, counted from 0: {', '.join(map(str, new))}" in capsys.readouterr().out
    about = called(capsys, "grow", folder, tmp_path / "c", "--method", "lemon", "--mlp", 40)
    assert "new_layers" not in about
