"""Adapters are read in every spelling that PEFT loads, and not in others."""

import json

import chex
import numpy as np
import pytest
from checkpoints import change
from published import adapter, called, content, published, refused, store, stored
from safetensors.numpy import load_file

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.extras import hf_peft as peft

WEIGHTS = "adapter_model.safetensors"
BEGIN = "base_model.model."
SPELLINGS = [
    ("model.language_model.", ["q_proj"]),
    ("language_model.model.", ["q_proj"]),
    ("model.language_model.", r".*language_model.*q_proj"),
]


@pytest.mark.parametrize(("begin", "targets"), SPELLINGS)
def test_the_adapter_of_a_model_of_images_and_texts_is_read(tmp_path, begin, targets, capsys):
    plain, folder = (published(tmp_path / name, "Gemma3ForCausalLM") for name in ("plain", "a"))
    both = ["Gemma3ForConditionalGeneration"]
    change(folder, architectures=both, model_type="gemma3", text_config=content(folder))
    found = {f"language_model.{name}": x for name, x in stored(folder).items()}
    store(folder, found | {"vision_tower.x.weight": np.zeros(2, np.float32)})
    adapter(tmp_path / "own")
    vision = f"{BEGIN}model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    adapter(
        tmp_path / "lora",
        lambda name: BEGIN + name.replace("model.", begin, 1),
        {vision: np.zeros((2, 3), np.float32)},
        target_modules=targets,
    )
    deeper = ("--method", "stack", "--layers", 8, "--lora-only", "--lora")
    called(capsys, "grow", folder, tmp_path / "b", *deeper, tmp_path / "lora")
    called(capsys, "grow", plain, tmp_path / "c", *deeper, tmp_path / "own")
    other, same = (load_file(tmp_path / name / WEIGHTS) for name in "bc")
    assert same.keys() <= other.keys()
    chex.assert_trees_all_equal({name: other[name] for name in same}, same)


def test_tensors_are_named_as_peft_loads_them(tmp_path):
    """The name of the adapter may be in them. PEFT ignores tensors without its prefix."""
    config = open_checkpoint(published(tmp_path / "a", "LlamaForCausalLM")).config
    one = peft.read_peft(adapter(tmp_path / "lora"), config)
    marked = adapter(
        tmp_path / "marked", lambda name: BEGIN + name.replace(".weight", ".default.weight")
    )
    chex.assert_trees_all_equal(peft.read_peft(marked, config).factors, one.factors)
    with pytest.raises(CheckpointError, match="PEFT ignores tensors whose names do not begin with"):
        peft.read_peft(adapter(tmp_path / "ignored", lambda name: name), config)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_of_a_resized_vocabulary_grow_with_the_model(tmp_path, tied, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM", tie_word_embeddings=tied)
    rows = np.random.default_rng(0).standard_normal((2, 13, 16)).astype(np.float32)
    rows[1] = rows[0] if tied else rows[1]
    names = (f"{BEGIN}model.embed_tokens.weight", f"{BEGIN}lm_head.weight")
    adapter(tmp_path / "lora", more=dict(zip(names, rows, strict=True)))
    wide = ("--method", "hypercloning", "--embed", 32, "--heads", 8, "--kv-heads", 4)
    words = ("grow", folder, tmp_path / "b", *wide, "--mlp", 40, "--lora", tmp_path / "lora")
    note = next(note for note in called(capsys, *words)["notes"] if "embeddings" in note)
    assert "embeddings of 13 tokens, and its model of 11: call resize_token_embeddings(13)" in note
    grown = load_file(tmp_path / "b" / WEIGHTS)
    np.testing.assert_array_equal(grown[names[0]], np.concatenate([rows[0]] * 2, 1))
    assert (names[1] in grown) != tied
    about = json.loads((tmp_path / "b/adapter_config.json").read_text())
    assert "modules_to_save" not in about
    if tied:
        rows[1] += 1
        adapter(tmp_path / "other", more=dict(zip(names, rows, strict=True)))
        error = refused(capsys, *words[:-1], tmp_path / "other", "--overwrite")
        assert "which differ although the head of the model is tied" in error


def test_embeddings_without_values_are_named(tmp_path, capsys):
    """DeepSpeed saves such embeddings beside a LoRA."""
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    name = f"{BEGIN}model.embed_tokens.weight"
    adapter(tmp_path / "lora", more={name: np.zeros(0, np.float32)})
    deeper = ("--method", "stack", "--layers", 8, "--lora", tmp_path / "lora")
    error = refused(capsys, "grow", folder, tmp_path / "b", *deeper)
    assert f"these tensors have no values: {name}. " in error


@pytest.mark.parametrize(("settings", "merged"), [
    ({"peft_type": "LOHA"}, True),
    ({"peft_type": "PREFIX_TUNING"}, False),
    ({"alora_invocation_tokens": [1]}, False),
])  # fmt: skip
def test_a_merge_is_advised_only_if_peft_can_merge(tmp_path, settings, merged):
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    with pytest.raises(CheckpointError) as error:
        peft.read_peft(adapter(tmp_path / "lora", **settings), open_checkpoint(folder).config)
    assert ("merge_and_unload" in str(error.value)) == merged
    assert ("PEFT cannot merge it either" in str(error.value)) == (not merged)
