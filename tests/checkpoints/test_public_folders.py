"""Folders of weights in the forms that users publish: indices, prefixes, fused experts, scales."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import change
from published import called, content, published, refused, store, stored

from jaxgrow import checkpoints
from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.checkpoints.source import flat

EXPERTS = [
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
]


def same(folder, params) -> None:
    """Check that a folder has these parameters."""
    found = flat(open_checkpoint(folder).params())
    for path, x in flat(params).items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


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
    for name in (
        "params.json",
        "trainer_state.json",
        "hf_quant_config.json",
        "generation_config.json",
    ):
        (folder / name).write_text("{}")
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note.startswith(
        "model.safetensors were read; these other weights were not: consolidated"
    )
    assert index.name in note
    same(folder, params)
    about = called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert note in about["notes"]
    kept = {"config.json", "generation_config.json", "jaxgrow.json", "model.safetensors"}
    assert {file.name for file in (tmp_path / "b").iterdir()} == kept
    (folder / "model.safetensors").unlink()
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note.endswith("were read; these other weights were not: consolidated.safetensors")


# --- the index decides ---


def test_the_index_may_name_tensors_that_are_not_needed(tmp_path, capsys):
    folder = published(tmp_path / "a", "Gemma3ForCausalLM")
    params = open_checkpoint(folder).params()
    folder, file, index = sharded(folder, tmp_path, capsys)
    first = min(index["weight_map"].values())
    index["weight_map"] |= {"lm_head.weight": first, "mtp.layers.0.fc.weight": first}
    file.write_text(json.dumps(index))
    same(folder, params)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params = open_checkpoint(folder).params()
    folder, file, index = sharded(folder, tmp_path, capsys)
    one, *_, last = sorted(set(index["weight_map"].values()))
    others = {n: np.zeros_like(x) for n, x in load_file(folder / one).items()}
    save_file(load_file(folder / last) | others | {"left": np.zeros(2)}, folder / last)
    same(folder, params)
    needed = next(name for name, of in index["weight_map"].items() if of == one)
    index["weight_map"][needed] = "model-00009-of-00009.safetensors"
    save_file({"x": np.zeros(2)}, folder / index["weight_map"][needed])
    file.write_text(json.dumps(index))
    error = refused(capsys, "inspect", folder)
    assert f"missing: {needed}" in error and error.count("\n") == 1


# --- one cause, one sentence ---


@pytest.mark.parametrize(
    "prefix",
    [
        "_orig_mod.",
        "module.",
        "base_model.model.",
        "module._orig_mod.",
        "model.",
        "_forward_module.",
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3Model"])
@pytest.mark.parametrize("bare", [False, True])
def test_a_prefix_is_removed_with_a_note(tmp_path, prefix, architecture, bare):
    folder = published(tmp_path / "a", architecture)
    params = open_checkpoint(folder).params()
    body = ("model.", "transformer.")
    found = stored(folder)
    for begin in body if bare else ():
        found = {name.removeprefix(begin): x for name, x in found.items()}
    store(folder, {prefix + name: x for name, x in found.items()})
    same(folder, params)
    notes = open_checkpoint(folder).notes
    usual = prefix == "model." and (bare or architecture.endswith("Qwen3Model"))
    assert bool(notes) or usual
    assert all("removed" in note for note in notes)


def test_wrappers_within_names_are_removed(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params = open_checkpoint(folder).params()
    found = {n.replace("self_attn.", "self_attn._orig_mod."): x for n, x in stored(folder).items()}
    store(folder, {f"_fsdp_wrapped_module.{name}": x for name, x in found.items()})
    same(folder, params)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert not [name for name in stored(tmp_path / "b") if name[0] == "_" or "_mod" in name]


def test_a_lora_that_is_not_merged_is_named(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    found = {
        f"base_model.model.{n.replace('q_proj', 'q_proj.base_layer')}": x
        for n, x in stored(folder).items()
    }
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    store(folder, found | {f"{module}.lora_A.default.weight": np.zeros((2, 16), np.float32)})
    error = refused(capsys, "inspect", folder)
    assert "merge_and_unload" in error and "\n" not in error


@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("ending", ["", ".weight"])
def test_fused_experts_are_read(tmp_path, architecture, ending, capsys):
    """The form of the modules of transformers 5."""
    folder = published(tmp_path / "a", architecture)
    params = open_checkpoint(folder).params()
    found, fused = stored(folder), {}
    for name in list(found):
        if ".experts.0." not in name:
            continue
        every = [found.pop(name.replace("experts.0", f"experts.{i}")) for i in range(4)]
        mlp, part = name.split(".experts.0.")
        part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part[:2], part[:-7])
        fused[mlp.replace("block_sparse_moe", "mlp"), part] = np.stack(every)
    for (mlp, part), x in fused.items():
        if part == "down_proj":
            found[f"{mlp}.experts.down_proj{ending}"] = x
        if part == "gate_proj":
            both = np.concatenate([x, fused[mlp, "up_proj"]], 1)
            found[f"{mlp}.experts.gate_up_proj{ending}"] = both
    store(folder, {n.replace("block_sparse_moe", "mlp"): x for n, x in found.items()})
    same(folder, params)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert len([name for name in stored(tmp_path / "b") if ".experts.3." in name]) == 24
    name = f"model.layers.0.mlp.experts.down_proj{ending}"
    store(folder, stored(folder) | {name: np.zeros((4, 3, 3), np.float32)})
    error = refused(capsys, "inspect", folder)
    assert "has shape (4, 3, 3), but fused experts of this config have (4, 16, " in error
    assert "\n" not in error


def test_empty_tensors_are_one_line(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    store(folder, {name: np.zeros(0, np.float32) for name in stored(folder)})
    error = refused(capsys, "inspect", folder)
    assert "39 tensors have no values" in error and "zero_to_fp32.py" in error
    assert "\n" not in error


def test_a_body_under_the_name_of_a_language_model_opens_as_a_body(tmp_path, capsys):
    folder = published(tmp_path / "a", "Qwen3ForCausalLM", tie_word_embeddings=False)
    found = stored(folder)
    del found["lm_head.weight"]
    for names in (lambda name: name, lambda name: name.removeprefix("model.")):
        store(folder, {names(name): x for name, x in found.items()})
        source = open_checkpoint(folder)
        assert source.config.predicts == "states"
        assert "lm_head.weight is missing, so the model is read as a Qwen3Model" in source.notes[0]
    called(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert content(tmp_path / "b")["architectures"] == ["Qwen3Model"]
    assert "embed_tokens.weight" in stored(tmp_path / "b")
    # transformers has no architecture for the body of this one that jaxgrow knows.
    folder = published(tmp_path / "c", "GPT2LMHeadModel", tie_word_embeddings=False)
    found = stored(folder)
    del found["lm_head.weight"]
    store(folder, found)
    error = refused(capsys, "inspect", folder)
    assert "missing: lm_head.weight, so this is a model without its head" in error
    assert "\n" not in error
    change(folder, tie_word_embeddings=True)
    called(capsys, "inspect", folder)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("said", [3, 6])
def test_another_number_of_layers_is_one_line(tmp_path, architecture, said, capsys):
    folder = published(tmp_path / "a", architecture)
    key = "n_layer" if architecture.startswith("GPT2") else "num_hidden_layers"
    change(folder, **{key: said})
    error = refused(capsys, "inspect", folder)
    assert f"{key} is {said}, but the folder has the tensors of 4 layers. Set {key} to 4" in error
    assert "\n" not in error
    change(folder, **{key: 4})
    called(capsys, "inspect", folder)


def test_layers_for_further_tokens_are_left_out(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    params, found = open_checkpoint(folder).params(), stored(folder)
    more = {n.replace("layers.3", "layers.4"): x for n, x in found.items() if "layers.3." in n}
    store(folder, found | more)
    change(folder, num_nextn_predict_layers=1)
    same(folder, params)
    change(folder, num_nextn_predict_layers=None)
    store(folder, found | {"mtp.fc.weight": np.zeros((2, 2), np.float32)})
    same(folder, params)
    (note,) = called(capsys, "inspect", folder)["notes"]
    assert note == "1 tensors that predict further tokens, such as mtp.fc.weight, are not read"


# --- quantised models ---


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


@pytest.mark.parametrize("where", ["top", "text", "alone"])
def test_a_quantisation_in_the_config_is_named_before_anything_else(tmp_path, where, capsys):
    folder = published(tmp_path / "a", "Gemma3ForCausalLM")
    text = content(folder)
    how = {"quantization_config": {"quant_method": "fp8"}}
    (folder / "model.safetensors").unlink()
    if where == "alone":
        change(folder, **how)
    else:
        inner = text | how if where == "text" else text
        outer = how if where == "top" else {}
        both = ["Gemma3ForConditionalGeneration"]
        change(folder, architectures=both, text_config=inner, **outer)
    error = refused(capsys, "inspect", folder)
    assert "the model is quantised (config.json has quantization_config)" in error


# --- hints and reasons ---


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "DeciLMForCausalLM"])
def test_a_similar_name_of_another_layout_is_not_a_hint(tmp_path, name, capsys):
    folder = published(tmp_path / "a", "Qwen3ForCausalLM")
    change(folder, architectures=[name], model_type=name[:6].lower())
    assert "Qwen3" not in refused(capsys, "inspect", folder)
    assert "Phi3" not in refused(capsys, "inspect", folder)
    # A misspelt name of the same layout is one.
    change(folder, architectures=["Qewn3ForCausalLM"], model_type="qwen3")
    assert "its tensors are those of a Qwen3ForCausalLM" in refused(capsys, "inspect", folder)
    found = stored(folder)
    store(folder, found | {"model.layers.0.self_attn.kv_a_proj.weight": np.zeros(2)})
    assert "those of a" not in refused(capsys, "inspect", folder)


@pytest.mark.parametrize(
    "architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM"]
)
def test_an_upcycling_that_cannot_be_stored_has_one_reason(tmp_path, architecture, capsys):
    head_dim = None if architecture.startswith("Olmo") else 4
    folder = published(tmp_path / "a", architecture, head_dim=head_dim)
    words = ("grow", folder, tmp_path / "b", "--method", "upcycle", "--experts", 4)
    error = refused(capsys, *words)
    assert error.count("has no setting for") == 1 and error.count("--to orbax") == 1
    assert "no architecture stores this" in error and "\n" not in error
    called(capsys, *words, "--to", "orbax")


def test_the_index_still_leads_to_no_other_folder(tmp_path, capsys):
    folder, file, index = sharded(published(tmp_path / "a", "LlamaForCausalLM"), tmp_path, capsys)
    index["weight_map"]["left"] = "../a/model.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not the name of a file in this folder"):
        checkpoints.open_checkpoint(folder)
