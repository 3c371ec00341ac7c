"""Folders of weights in the forms that users publish: indices, prefixes, fused experts, scales."""

import json

import ml_dtypes
import numpy as np
import pytest
from cases import cases
from checkpoints import change
from published import assert_params, called, content, published, refused, store, stored

from jaxgrow.checkpoints import open_checkpoint


def sharded(folder, tmp_path, capsys):
    """Write the model in two files, and return the folder and its index."""
    called(capsys, "convert", folder, tmp_path / "sharded", "--shard-size", "6kB")
    file = tmp_path / "sharded/model.safetensors.index.json"
    return file.parent, file, json.loads(file.read_text())


# --- two sets of weights ---


def test_a_note_says_which_weights_were_read(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params = open_checkpoint(folder).params()
    other, index, _ = sharded(folder, tmp_path, capsys)
    for file in other.glob("model-*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / index.name).write_bytes(index.read_bytes())
    (folder / "consolidated.safetensors").write_bytes(b"other")
    for name in ("params", "trainer_state", "hf_quant_config", "generation_config"):
        (folder / f"{name}.json").write_text("{}")
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note.startswith("model.safetensors were read; these other weights were not: consol")
    assert index.name in note
    assert_params(folder, params)
    about = called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert note in about["notes"]
    kept = "README.md config.json generation_config.json jaxgrow.json model.safetensors"
    assert {file.name for file in (tmp_path / "b").iterdir()} == {*kept.split()}
    (folder / "model.safetensors").unlink()
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note.endswith("were read; these other weights were not: consolidated.safetensors")


# --- the index decides ---


def test_the_index_may_name_tensors_that_are_not_needed(tmp_path, capsys):
    folder = published(tmp_path / "a", "Gemma3ForCausalLM")
    params = open_checkpoint(folder).params()
    folder, file, index = sharded(folder, tmp_path, capsys)
    first = min(index["weight_map"].values())
    index["weight_map"] |= {"lm_head.weight": first}
    file.write_text(json.dumps(index))
    assert_params(folder, params)


def test_a_shard_is_not_required_if_no_tensor_of_it_is(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params = open_checkpoint(folder).params()
    folder, file, index = sharded(folder, tmp_path, capsys)
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = "left.safetensors"
    file.write_text(json.dumps(index))
    assert_params(folder, params)
    one, *_ = sorted(folder.glob("model-*"))
    one.unlink()
    error = refused(capsys, "inspect", folder)
    assert f"{one.name}, which the index names" in error
    assert error.count("missing: ") == 3


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params = open_checkpoint(folder).params()
    folder, file, index = sharded(folder, tmp_path, capsys)
    one, *_, last = sorted(set(index["weight_map"].values()))
    others = {n: np.zeros_like(x) for n, x in load_file(folder / one).items()}
    save_file(load_file(folder / last) | others | {"left": np.zeros(2)}, folder / last)
    assert_params(folder, params)
    needed = next(name for name, of in index["weight_map"].items() if of == one)
    index["weight_map"][needed] = "model-00009-of-00009.safetensors"
    save_file({"x": np.zeros(2)}, folder / index["weight_map"][needed])
    file.write_text(json.dumps(index))
    error = refused(capsys, "inspect", folder)
    assert f"missing: {needed}" in error


# --- one cause, one sentence ---


PREFIXES = [
    "_orig_mod.",
    "module.",
    "base_model.model.",
    "module._orig_mod.",
    "model.",
    "_forward_module.",
]


@pytest.mark.parametrize(("prefix", "architecture", "bare"), [
    *((prefix, "LlamaForCausalLM", False) for prefix in PREFIXES),
    ("_orig_mod.", "GPT2LMHeadModel", True),
    ("model.", "LlamaForCausalLM", True),
    ("module.", "LlamaModel", True),
    ("model.", "LlamaModel", False),
])  # fmt: skip
def test_a_prefix_is_removed_with_a_note(tmp_path, prefix, architecture, bare):
    folder = published(tmp_path / "a", architecture)
    params = open_checkpoint(folder).params()
    body = ("model.", "transformer.")
    found = stored(folder)
    if bare:
        found = {n.removeprefix(body[0]).removeprefix(body[1]): x for n, x in found.items()}
    store(folder, {prefix + name: x for name, x in found.items()})
    assert_params(folder, params)
    notes = open_checkpoint(folder).notes
    usual = prefix == "model." and (bare or architecture.endswith("LlamaModel"))
    assert bool(notes) or usual
    assert all("removed" in note for note in notes)


def test_wrappers_within_names_are_removed(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params = open_checkpoint(folder).params()
    found = {n.replace("self_attn.", "self_attn._orig_mod."): x for n, x in stored(folder).items()}
    store(folder, {f"_fsdp_wrapped_module.{name}": x for name, x in found.items()})
    assert_params(folder, params)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert not [name for name in stored(tmp_path / "b") if name[0] == "_" or "_mod" in name]


# --- quantised models ---


def test_a_lora_that_is_not_merged_is_named(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    found = {n.replace("q_proj", "q_proj.base_layer"): x for n, x in stored(folder).items()}
    found["model.layers.0.self_attn.q_proj.lora_A.default.weight"] = np.zeros((2, 16), np.float32)
    store(folder, {f"base_model.model.{name}": x for name, x in found.items()})
    error = refused(capsys, "inspect", folder)
    assert "merge_and_unload" in error and "\n" not in error


def test_layers_for_further_tokens_are_left_out(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params, found = open_checkpoint(folder).params(), stored(folder)
    more = {n.replace("layers.3", "layers.4"): x for n, x in found.items() if "layers.3." in n}
    store(folder, found | more)
    change(folder, num_nextn_predict_layers=1)
    assert_params(folder, params)
    change(folder, num_nextn_predict_layers=None)
    store(folder, found | {"mtp.fc.weight": np.zeros((2, 2), np.float32)})
    assert_params(folder, params)
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note == "the tensors that predict further tokens are not read: mtp.fc.weight"


def fp8(found):
    weights = {n: x.astype(ml_dtypes.float8_e4m3fn) for n, x in found.items() if "proj" in n}
    return found | weights | {f"{name}_scale": np.ones((), np.float32) for name in weights}


def cache_scales(found):
    names = [n.removesuffix("k_proj.weight") for n in found if "k_proj" in n]
    return found | {f"{n}{x}_scale": np.ones((), np.float32) for n in names for x in "kv"}


def packed(found):
    return {n.replace("q_proj.weight", "q_proj.qweight"): x for n, x in found.items()}


@pytest.mark.parametrize("change_tensors", [fp8, cache_scales, packed])
def test_quantised_tensors_are_named(tmp_path, change_tensors, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    found = stored(folder)
    store(folder, change_tensors(found))
    (folder / "hf_quant_config.json").write_text("{}")
    for architecture in ("LlamaForCausalLM", "UnknownForCausalLM"):
        change(folder, architectures=[architecture])
        error = refused(capsys, "inspect", folder)
        assert "the model is quantised (tensor" in error and "before it was quantised" in error
        assert "and the folder has hf_quant_config.json" in error and "\n" not in error
    change(folder, architectures=["LlamaForCausalLM"])
    store(folder, found)  # A file that is left over
    called(capsys, "inspect", folder)


QUANTISED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize("where", cases(["alone", "top", "text"], ["alone"]))
def test_a_quantisation_in_the_config_is_named_before_anything_else(tmp_path, where, capsys):
    """In the config of a model, or of a model for images and texts, or of its text model."""
    folder = published(tmp_path / "a", "Gemma3ForCausalLM")
    (folder / "model.safetensors").unlink()
    text = content(folder)
    both = {"architectures": ["Gemma3ForConditionalGeneration"]}
    changes = {
        "alone": QUANTISED,
        "top": both | {"text_config": text} | QUANTISED,
        "text": both | {"text_config": text | QUANTISED},
    }
    change(folder, **changes[where])
    error = refused(capsys, "inspect", folder)
    assert "the model is quantised (config.json has quantization_config)" in error


# --- hints and reasons ---


def test_an_upcycling_that_cannot_be_stored_has_one_reason(tmp_path, capsys):
    folder = published(tmp_path / "a", "Gemma3ForCausalLM")
    words = ("grow", folder, tmp_path / "b", "--method", "upcycle", "--experts", 4)
    error = refused(capsys, *words)
    assert error.count("has no setting for") == 1 and error.count("--to orbax") == 1
    assert "no architecture stores this" in error and "\n" not in error
    called(capsys, *words, "--to", "orbax")


# --- one cause of many misfits ---


@pytest.mark.parametrize(("architecture", "key"), [
    *(("LlamaForCausalLM", key) for key in ("vocab_size", "hidden_size", "intermediate_size")),
    ("GPT2LMHeadModel", "vocab_size"),
    ("BertForMaskedLM", "max_position_embeddings"),
    pytest.param("MixtralForCausalLM", "num_local_experts", marks=pytest.mark.extra),
    pytest.param("Qwen3MoeForCausalLM", "moe_intermediate_size", marks=pytest.mark.extra),
])  # fmt: skip
def test_one_wrong_size_is_one_cause(tmp_path, architecture, key, capsys):
    folder = published(tmp_path / "a", architecture)
    right = content(folder)[key]
    change(folder, **{key: 2 * right})
    error = refused(capsys, "inspect", folder)
    assert f"{key} is {2 * right}, but the weights have {right}: " in error
    assert f"Set {key} to {right}, or give the weights" in error
    assert "\n" not in error
    change(folder, **{key: right})
    called(capsys, "inspect", folder)


def test_a_size_with_several_causes_is_not_guessed(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    change(folder, num_attention_heads=2 * content(folder)["num_attention_heads"], head_dim=None)
    assert "but the weights have" not in refused(capsys, "inspect", folder)


def test_empty_tensors_are_one_line(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    store(folder, {name: np.zeros(0, np.float32) for name in stored(folder)})
    error = refused(capsys, "inspect", folder)
    assert "no values: lm_head.weight, model.embed_tokens.weight, and 37" in error
    assert "zero_to_fp32.py" in error and "\n" not in error


@pytest.mark.parametrize(("architecture", "key", "said"), [
    ("LlamaForCausalLM", "num_hidden_layers", 3), ("GPT2LMHeadModel", "n_layer", 6),
])  # fmt: skip
def test_another_number_of_layers_is_one_line(tmp_path, architecture, key, said, capsys):
    folder = published(tmp_path / "a", architecture)
    change(folder, **{key: said})
    error = refused(capsys, "inspect", folder)
    assert f"{key} is {said}, but the folder has the tensors of 4 layers. Set {key} to 4" in error
    assert ("use `jaxgrow prune --layers 3` then" in error) == (said == 3)
    assert "\n" not in error
    change(folder, **{key: 4})
    called(capsys, "inspect", folder)


@pytest.mark.parametrize("of", ["layers.3.", "mlp."])
def test_missing_files_are_no_other_number_of_layers(tmp_path, of, capsys):
    folder, file, index = sharded(published(tmp_path / "a", "LlamaForCausalLM"), tmp_path, capsys)
    where = index["weight_map"]
    where |= {name: "lost.safetensors" for name in where if of in name}
    file.write_text(json.dumps(index))
    error = refused(capsys, "inspect", folder)
    assert "Download lost.safetensors, which the index names" in error
    assert "num_hidden_layers" not in error


def test_another_head_is_loaded_as_a_body(tmp_path, capsys):
    """Another supported head would have random weights."""
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    change(folder, architectures=["LlamaForCausalLMEagle3"])
    assert "another head as LlamaModel in transformers" in refused(capsys, "inspect", folder)


# --- every way out works ---


def without(folder, *names):
    store(folder, {name: x for name, x in stored(folder).items() if name not in names})


Q = "model.layers.0.self_attn.q_proj."
LORA = f"{Q}lora_A.weight"
# For each row: what is wrong, its message, and what the message says.
WAYS_OUT = {
    "layers": (lambda f: change(f, layer_types=["full_attention"] * 4, num_hidden_layers=3), "or correct num_hidden_layers",
     lambda f: change(f, num_hidden_layers=4)),
    "indices": (lambda f: change(f, full_attention_layers=[1, 4]),
     "so the last layer is 3. Write the indices of layers of this model", lambda f: change(f, full_attention_layers=[0, 3])),
    "quantised in place": (lambda f: change(f, quantization={"bits": 4}), "config.json has quantization",
     lambda f: change(f, quantization=None)),
    "another name": (lambda f: change(f, architectures=["LamaForCausalLM"]), "Write its class there, one of LlamaForCausalLM",
     lambda f: change(f, architectures=["LlamaForCausalLM"])),
    "quantised": (lambda f: change(f, quantization_config={"quant_method": "gptq"}), "dequantize this one in transformers",
     lambda f: change(f, quantization_config=None)),
    "no name": (lambda f: change(f, architectures=None), "Write its class there, one of LlamaForCausalLM",
     lambda f: change(f, architectures=["LlamaForCausalLM"])),
    "tied": (lambda f: change(f, tie_word_embeddings=True), 'Set "tie_word_embeddings" to false',
     lambda f: change(f, tie_word_embeddings=False)),
    "tied, remove": (lambda f: change(f, tie_word_embeddings=True), "or remove lm_head.weight from model.safetensors",
     lambda f: without(f, "lm_head.weight")),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS_OUT)
def test_the_advice_of_messages_about_folders_works(tmp_path, name, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM", tie_word_embeddings=False)
    damage, message, repair = WAYS_OUT[name]
    damage(folder)
    error = refused(capsys, "inspect", folder)
    assert message in error and str(folder) in error and "\n" not in error
    repair(folder)
    called(capsys, "inspect", folder)


def test_an_unknown_list_is_removed_or_orbax_is_written(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM", full_attn_idxs=[1, 3])
    words = ("grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert "Remove full_attn_idxs from config.json" in refused(capsys, *words)
    called(capsys, *words, "--to", "orbax")
    change(folder, full_attn_idxs=None)
    called(capsys, *words, "--overwrite")
