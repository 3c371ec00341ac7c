"""Models in the spelling of public files: transformers and PEFT compute the same after a growth."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import change
from published import adapter, called, content, published, store, stored

from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.extras import hf_peft as peft

torch, transformers, library = (
    pytest.importorskip(name, reason="pip install -e '.[interop-test]'")
    for name in ("torch", "transformers", "peft")
)
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TOKENS = np.random.default_rng(0).integers(3, 11, (2, 9))


def loaded(folder):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model, tokens=TOKENS) -> np.ndarray:
    """Return the logits of a model, or of the model in a folder."""
    with torch.no_grad():
        model = loaded(model) if isinstance(model, Path) else model.eval()
        return model(torch.tensor(tokens)).logits.numpy()


def adapted(model, folder, embeddings="auto"):
    """Return a model with a LoRA of its queries, which is also in the folder."""
    torch.manual_seed(0)  # PEFT draws the factors, and large ones amplify the rounding of float32
    about = library.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = library.get_peft_model(model, about)
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return model


SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 5}


@pytest.mark.parametrize(("architecture", "keys"), [
    ("LlamaForCausalLM", {"layer_types": ["full_attention"] * 8}),
    ("Qwen2ForCausalLM", SLIDING),
    ("Qwen3ForCausalLM", SLIDING),
    ("Gemma3ForCausalLM", {"sliding_window_pattern": 6}),
    ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 4, "pad_token_id": 0}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    ("MixtralForCausalLM", {"num_experts": 4, "n_routed_experts": 4}),
    ("OlmoeForCausalLM", {"num_local_experts": 4}),
    ("GptOssForCausalLM", {"num_experts": 4, "experts_per_token": 2, "pad_token_id": 0}),
    ("GPT2LMHeadModel", {"n_layer": 8, "hidden_size": 16}),
    ("Gemma2ForCausalLM", {}),
    ("Olmo3ForCausalLM", {}),
    ("GraniteForCausalLM", {"num_layers": 8}),
])  # fmt: skip
def test_llama_pro_keeps_the_logits_of_public_configs(tmp_path, architecture, keys, capsys):
    folder = published(tmp_path / "a", architecture, num_hidden_layers=8, **keys)
    before = logits(folder)
    called(capsys, "grow", folder, tmp_path / "b", "--method", "llama_pro", "--layers", 12)
    np.testing.assert_allclose(logits(tmp_path / "b"), before, rtol=0, atol=1e-4)
    # Earlier versions read only the number, if there is one.
    short = {"sliding_window_pattern", "no_rope_layer_interval", "max_window_layers"} & keys.keys()
    if short & content(tmp_path / "b").keys():
        change(tmp_path / "b", layer_types=None, no_rope_layers=None)
        np.testing.assert_allclose(logits(tmp_path / "b"), before, rtol=0, atol=1e-4)


def test_experts_as_the_modules_of_transformers_have_them(tmp_path, capsys):
    folder = published(tmp_path / "a", "MixtralForCausalLM")
    before, model = logits(folder), loaded(folder)
    found = {f"_orig_mod.{n}": x.numpy().copy() for n, x in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in found)
    store(folder, found)
    called(capsys, "convert", folder, tmp_path / "b", "--shard-size", "9kB")
    np.testing.assert_allclose(logits(tmp_path / "b"), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("architecture", "prefix"), [
    ("Gemma3ForCausalLM", "model."), ("GPT2LMHeadModel", "transformer."), ("GPTNeoXForCausalLM", "gpt_neox."),
])  # fmt: skip
def test_a_body_opens_in_transformers(tmp_path, architecture, prefix, capsys):
    folder = published(tmp_path / "a", architecture, tie_word_embeddings=False)
    heads = ("lm_head.weight", "embed_out.weight")
    tensors = stored(folder).items()
    store(folder, {n.removeprefix(prefix): x for n, x in tensors if n not in heads})
    called(capsys, "convert", folder, tmp_path / "b", "--shard-size", "9kB")
    models = [transformers.AutoModel.from_pretrained(f).eval() for f in (folder, tmp_path / "b")]
    with torch.no_grad():
        both = [m(torch.tensor(TOKENS)).last_hidden_state.numpy() for m in models]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-4)


# --- adapters ---


@pytest.mark.parametrize(("begin", "end", "read"), [
    ("base_model.model.", ".default.weight", True), ("", ".weight", False),
])  # fmt: skip
def test_peft_reads_the_names_that_are_read_here(tmp_path, recwarn, begin, end, read):
    """`test_adapter_names` has the names that are read here, and those that are an error."""
    folder = published(tmp_path / "a", "LlamaForCausalLM")
    adapter(tmp_path / "lora", lambda name: begin + name.replace(".weight", end))
    model = library.PeftModel.from_pretrained(loaded(folder), tmp_path / "lora")
    assert any("missing adapter keys" in str(w.message) for w in recwarn) != read
    found = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(found) == 4 and all(p.any().item() == read for p in found)


def test_resized_embeddings_are_read_by_peft_after_a_growth(tmp_path, capsys):
    folder = published(tmp_path / "a", "LlamaForCausalLM", tie_word_embeddings=False)
    base = loaded(folder)
    base.resize_token_embeddings(13)
    before = logits(adapted(base, tmp_path / "lora", True))
    wide = ("--method", "hypercloning", "--embed", 32, "--heads", 8, "--kv-heads", 4, "--mlp", 40)
    called(capsys, "grow", folder, tmp_path / "model", *wide)
    lora = ("--lora", tmp_path / "lora", "--lora-only")
    called(capsys, "grow", folder, tmp_path / "b", *wide, *lora)
    large = loaded(tmp_path / "model")
    large.resize_token_embeddings(13)
    grown = library.PeftModel.from_pretrained(large, tmp_path / "b")
    np.testing.assert_allclose(logits(grown), before, rtol=0, atol=1e-4)


def test_the_adapter_of_a_gemma_3_for_images_and_texts(tmp_path, capsys):
    text = content(published(tmp_path / "text", "Gemma3ForCausalLM", tie_word_embeddings=True))
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=10
    )
    base = transformers.Gemma3ForConditionalGeneration(config).eval()
    base.save_pretrained(tmp_path / "a")
    before = logits(adapted(base, tmp_path / "lora"), TOKENS % 9)
    own = peft.read_peft_beside(tmp_path / "lora", open_checkpoint(tmp_path / "a"))
    assert own.lora.targets == ("blocks/attention/query",)
    pro = ("--method", "llama_pro", "--layers", 6)
    called(capsys, "grow", tmp_path / "a", tmp_path / "b", *pro, "--lora", tmp_path / "lora")
    assert json.loads((tmp_path / "b/adapter_config.json").read_text())["r"] == 2
    after = logits(tmp_path / "b", TOKENS % 9)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)
