"""Every architecture is saved by `transformers`, grown and written here, and loaded again there."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from checkpoints import change, tensors
from families import ENCODER, SETTINGS
from published import called, content, refused, store
from transformers_models import (
    ONE_PER_TYPE,
    answered,
    assert_alike,
    assert_kept,
    cases_by_type,
    given,
    made,
    ours,
    run,
    to,
)

from jaxgrow import checkpoints, grow, operators
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.cli import program
from jaxgrow.extras.models.upcycling import add_router_noise, as_mixture

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop

TASKS = ("SequenceClassification", "Answering", "TokenClassification")


def test_every_architecture_is_here():
    assert SETTINGS.keys() == FAMILIES.keys()


@cases_by_type
def test_read_grown_written_and_read_by_transformers(tmp_path, architecture, which):
    """Cover widening, which preserves the function, deepening, which does not, and the way back."""
    before = assert_alike(made(tmp_path / "a", architecture, which))
    config = checkpoints.open_checkpoint(tmp_path / "a").config
    heads = config.sizes().get("heads", 0)
    # A model without an axis 'heads' has stages, and 'far' gives each stage these groups.
    groups = ",".join(f"{i}+{i + heads}" for i in range(heads)) or "far"
    run("decoalesce", tmp_path / "a", tmp_path / "wide", "--heads", groups)
    assert_kept(assert_alike(tmp_path / "wide"), before)
    run("grow", tmp_path / "a", tmp_path / "deep", "--method", "stack", "--layers", to(config, 5))
    assert np.abs(assert_alike(tmp_path / "deep") - before).max() > 1e-2
    run("coalesce", tmp_path / "wide", tmp_path / "back", "--heads", groups)
    first, last = tensors(tmp_path / "a"), tensors(tmp_path / "back")
    for name in last.keys() - FAMILIES[architecture].copies(config).keys():
        np.testing.assert_allclose(last[name], first[name], rtol=0, atol=1e-6, err_msg=name)
    assert (tmp_path / "deep" / "tokenizer.json").read_text() == "{}"


# One architecture for each head of each class of models.
TASKED = {(FAMILIES[a].config, t): a for a in SETTINGS for t in TASKS if a.endswith(t)}


@pytest.mark.parametrize("architecture", TASKED.values())
def test_fine_tuned_models_keep_outputs_under_hypercloning(tmp_path, architecture):
    before = assert_alike(made(tmp_path / "a", architecture))
    sizes = checkpoints.open_checkpoint(tmp_path / "a").sizes()
    axes = [axis for axis in ("embed", "heads", "kv_heads", "mlp") if axis in sizes]
    words = " ".join(f"--{axis.replace('_', '-')} {2 * sizes[axis]}" for axis in axes)
    run(f"grow {tmp_path}/a {tmp_path}/b --method hypercloning {words}")
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", [*operators.DEPTH, *operators.WIDTH])
def test_a_model_that_has_grown_by_any_method_is_loaded(tmp_path, method):
    sizes = checkpoints.open_checkpoint(made(tmp_path / "a", "LlamaForCausalLM")).sizes()
    axes = ("layers",) if method in operators.DEPTH else ("embed", "heads", "kv_heads", "mlp")
    words = " ".join(f"--{axis.replace('_', '-')} {2 * sizes[axis]}" for axis in axes)
    if program.main(f"grow {tmp_path}/a {tmp_path}/b --method {method} {words}".split()) == 0:
        assert_alike(tmp_path / "b")


def test_longrope_needs_one_factor_per_pair_of_head_features(tmp_path, capsys):
    """`transformers` uses the width divided by the number of heads as head size."""
    folder = made(tmp_path / "a", "Phi3ForCausalLM", 2)
    before = assert_alike(folder)
    wide = ("grow", folder, tmp_path / "b", "--method", "hypercloning", "--embed", 64)
    assert "--heads 8 fits" in refused(capsys, *wide)
    run(*wide, "--heads 8 --kv-heads 4")
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), before, rtol=0, atol=1e-4)


SLIDING = {"use_sliding_window": True}
BEFORE = {"global_rope_theta": 30.0, "local_rope_theta": 9.0}


@pytest.mark.parametrize(("architecture", "more"), [
    ("LlamaForCausalLM", {"hidden_act": "swish"}),
    ("GPT2LMHeadModel", {"activation_function": "gelu_fast"}),
    ("ViTForImageClassification", {"hidden_act": "gelu_python"}),
    # The windows start at the third of two layers, so no layer has one, or they are as long as
    # any sequence.
    ("Qwen2ForCausalLM", SLIDING | {"sliding_window": 2, "max_window_layers": 2}),
    ("Qwen2ForCausalLM", SLIDING | {"sliding_window": 9, "max_window_layers": 0}),
    ("MistralForCausalLM", {"sliding_window": 9}),
    # The spelling before transformers 5.
    ("ModernBertForMaskedLM", BEFORE | {"global_attn_every_n_layers": 2}),
])  # fmt: skip
def test_settings_that_mean_what_is_computed(tmp_path, architecture, more):
    made(tmp_path / "a", architecture, more=more)
    assert_alike(tmp_path / "a")
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "stack", "--layers", 4)
    assert_alike(tmp_path / "b")


def test_what_is_grown_is_loaded_or_refused_with_a_size_that_is(tmp_path, capsys):
    """Llama's heads must divide the width; other architectures store a separate head size."""
    llama, qwen = (made(tmp_path / a, f"{a}ForCausalLM") for a in ("Llama", "Qwen2"))
    uneven = ("grow", llama, tmp_path / "wide", "--method", "lemon", "--embed")
    error = refused(capsys, *uneven, 18)
    assert "4 heads divide its hidden size 18; --embed 16 or --embed 20 fits" in error
    run(*uneven, 20)
    assert np.abs(assert_alike(tmp_path / "wide") - ours(llama)).max() < 1e-4
    run(f"grow {qwen} {tmp_path}/other --method fpi --embed 17")
    assert np.abs(assert_alike(tmp_path / "other") - ours(qwen)).max() > 1e-4


def test_labels_and_problem_type_are_kept_if_the_count_fits(tmp_path):
    folder = made(tmp_path / "a", "BertForSequenceClassification")
    labels = {"0": "entailment", "1": "neutral", "2": "contradiction"}
    ids = {name: int(i) for i, name in labels.items()}
    change(folder, id2label=labels, label2id=ids, problem_type="regression")
    config, params = checkpoints.load(folder)
    checkpoints.save(tmp_path / "b", config, params, like=folder)
    said = content(tmp_path / "b")
    assert said["id2label"] == labels and said["problem_type"] == "regression"
    one = dict(params) | {"classifier": {k: v[..., :1] for k, v in params["classifier"].items()}}
    checkpoints.save(tmp_path / "c", config.with_head("classes", 1), one, like=folder)
    said = content(tmp_path / "c")
    assert said["id2label"] == {"0": "LABEL_0"} and said["problem_type"] == "regression"
    assert_alike(tmp_path / "c")
    checkpoints.save(tmp_path / "d", config, params, like=tmp_path / "c")
    assert content(tmp_path / "d")["problem_type"] == "single_label_classification"


@pytest.mark.parametrize(("before", "head", "after"), [
    ("BertForMaskedLM", "classes", "BertForSequenceClassification"),
    ("XLMRobertaForMaskedLM", "classes", "XLMRobertaForSequenceClassification"),
    ("RobertaForMaskedLM", "spans", "RobertaForQuestionAnswering"),
    ("Qwen2ForCausalLM", "classes", "Qwen2ForSequenceClassification"),
    ("GPT2ForSequenceClassification", "tokens", "GPT2LMHeadModel"),
])  # fmt: skip
def test_changing_the_head_changes_the_saved_architecture(tmp_path, before, head, after):
    """Other settings that `save` copies, such as the ids of special tokens, stay unchanged."""
    folder = made(tmp_path / "a", before)
    change(folder, pad_token_id=1, their_own="key")
    config = checkpoints.load(folder)[0].with_head(head)
    checkpoints.save(tmp_path / "b", config, tiny.params(config, dtype="float32"), like=folder)
    said = content(tmp_path / "b")
    assert said["architectures"] == [after] and said["their_own"] == "key"
    assert checkpoints.load(tmp_path / "b")[0] == config
    assert_alike(tmp_path / "b")


def test_a_model_without_padding_classifies_a_single_text(tmp_path):
    """`transformers` refuses several texts, because it cannot find their ends."""
    config, params = checkpoints.load(made(tmp_path / "a", "GPT2ForSequenceClassification"))
    checkpoints.save(tmp_path / "b", config, params)
    model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "b").eval()
    text = given(config)[:1]
    with torch.no_grad():
        found = model(torch.tensor(text)).logits
    np.testing.assert_allclose(found, ours(tmp_path / "b")[:1], rtol=0, atol=1e-4)


def test_the_head_of_masked_tokens_in_files_of_pre_training_is_read(tmp_path, capsys):
    config = transformers.BertConfig(**SETTINGS["BertForMaskedLM"][0], initializer_range=0.3)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    said = refused(capsys, "inspect", tmp_path)
    assert 'another head in addition; write ["BertForMaskedLM"] there to read the model' in said
    change(tmp_path, architectures=["BertForMaskedLM"])
    model = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    tokens = given(checkpoints.open_checkpoint(tmp_path).config)
    np.testing.assert_allclose(ours(tmp_path), answered(model, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("change_to", "message"), [
    ({"layer_types": ["mamba", "attention"]}, 'layer_types is ["mamba", "attention"] and'),
    ({"layer_types": None}, 'layer_types is ["linear_attention"] and'),
    ({"num_local_experts": 4}, "num_local_experts is 4, but"),
])  # fmt: skip
def test_a_granite_4_with_other_layers_is_refused(tmp_path, capsys, change_to, message):
    folder = made(tmp_path / "a", "GraniteMoeHybridForCausalLM")
    change(folder, **change_to)
    assert message in refused(capsys, "inspect", folder)


def test_the_published_head_of_a_deberta_keeps_its_names(tmp_path):
    """The published files have the head that `transformers` reads only if ``legacy`` is false."""
    before = assert_alike(made(tmp_path / "a", "DebertaV2ForMaskedLM", more={"legacy": False}))
    run("convert", tmp_path / "a", tmp_path / "orbax", "--to", "orbax")
    run("convert", tmp_path / "orbax", tmp_path / "b", "--to", "hf")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert tensors(tmp_path / "a").keys() == tensors(tmp_path / "b").keys()
    assert "lm_predictions.lm_head.dense.weight" in tensors(tmp_path / "b")
    wide = ("--embed", 24, "--heads", 4, "--mlp", 40)
    run("grow", tmp_path / "b", tmp_path / "wide", "--method", "hypercloning", *wide)
    assert_kept(assert_alike(tmp_path / "wide"), before)


def test_bare_models_of_transformers_are_read_as_bodies(tmp_path):
    gpt2 = transformers.GPT2Config(**SETTINGS["GPT2LMHeadModel"][0], initializer_range=0.3)
    transformers.GPT2Model(gpt2).save_pretrained(tmp_path / "gpt2")
    assert_alike(tmp_path / "gpt2")
    change(tmp_path / "gpt2", architectures=["GPT2LMHeadModel"])
    assert_alike(tmp_path / "gpt2")  # the head is the token embedding


@pytest.mark.parametrize(("architecture", "prefix"), [
    ("BertModel", "bert."), ("ViTModel", "vit."), ("CLIPVisionModel", "vision_model."), ("XLMRobertaModel", "roberta."),
])  # fmt: skip
def test_headless_models_are_read_with_or_without_prefix(tmp_path, architecture, prefix):
    """Older versions, and models with a head, use other tensor names."""
    folder = made(tmp_path / "a", architecture)
    before = assert_alike(folder)
    found = tensors(folder).items()
    store(folder, {prefix + name: x for name, x in found if "pooler" not in name})
    np.testing.assert_allclose(ours(folder), before, rtol=0, atol=1e-6)
    run("grow", folder, tmp_path / "b", "--method", "stack", "--layers", 4)
    assert not any("pooler" in name for name in tensors(tmp_path / "b"))


@pytest.mark.parametrize("architecture", ["BertModel", "ViTModel", "SiglipVisionModel"])
def test_the_pooler_grows_with_the_model(tmp_path, architecture):
    """Its output equals the output of `transformers` and is preserved when the model grows."""

    def ours_and_theirs(folder: Path) -> np.ndarray:
        config, params = checkpoints.load(folder)
        x = given(config)
        texts = x.ndim == 2
        inputs = {"tokens": x, "mask": x != 1} if texts else x
        _, kept = config.module.apply({"params": params}, inputs, mutable=["intermediates"])
        model = getattr(transformers, architecture).from_pretrained(folder).eval()
        more = {"attention_mask": torch.tensor(x != 1).long()} if texts else {}
        with torch.no_grad():
            out = model(torch.tensor(x if texts else x.transpose(0, 3, 1, 2)), **more)
        (found,) = kept["intermediates"]["pooled"]
        np.testing.assert_allclose(found, out.pooler_output.numpy(), rtol=0, atol=1e-4)
        return np.asarray(found)

    before = ours_and_theirs(made(tmp_path / "a", architecture))
    words = ("--embed", 24, "--heads", 4, "--mlp", 40)
    run("grow", tmp_path / "a", tmp_path / "b", "--method", "hypercloning", *words)
    assert_kept(ours_and_theirs(tmp_path / "b"), before)


def test_only_even_copies_preserve_hidden_state_models(tmp_path, capsys):
    """No head compensates for features that have more copies than others."""
    folder = made(tmp_path / "a", "ViTModel")
    for embed, said in ((24, "the function is preserved"), (18, "the function is changed")):
        wide = f"--method lemon --embed {embed} --heads {embed // 6}"
        run(f"grow {folder} {tmp_path}/b{embed} {wide}")
        assert said in capsys.readouterr().out
    said = refused(capsys, "report", folder, tmp_path / "b24")
    assert "the hidden states have 12 and 24 features" in said


def test_the_text_model_of_a_multimodal_gemma_grows_alone(tmp_path, capsys):
    """Its logits on text equal the full model's; a published ``text_config`` omits defaults."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    text = SETTINGS["Gemma3ForCausalLM"][0] | heads | {"pad_token_id": 0}
    vision = ENCODER | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    special = {"mm_tokens_per_image": 4, "image_token_index": 10}
    special |= {"boi_token_index": 8, "eoi_token_index": 9}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **special)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "a")
    text = content(tmp_path / "a")["text_config"]
    change(tmp_path / "a", text_config={k: x for k, x in text.items() if k not in heads})
    tokens = np.random.default_rng(0).integers(2, 8, (3, 7))
    mask = torch.ones(3, 7, dtype=torch.long)
    with torch.no_grad():
        before = model(torch.tensor(tokens), attention_mask=mask).logits.numpy()
    words = ("--method", "hypercloning", "--embed", 32, "--heads", 16, "--kv-heads", 8)
    run("grow", tmp_path / "a", tmp_path / "b", *words)
    assert "Only its text model, a Gemma3ForCausalLM, is read" in capsys.readouterr().out
    config, params = checkpoints.load(tmp_path / "b")
    np.testing.assert_allclose(tiny.forward(config)(params, tokens), before, rtol=0, atol=1e-4)
    assert_alike(tmp_path / "b")


@pytest.mark.parametrize(("model", "tower"), [
    ("CLIPModel", "CLIPVisionModelWithProjection"), ("SiglipModel", "SiglipVisionModel"),
])  # fmt: skip
def test_a_model_of_images_and_texts_is_refused_with_its_tower(tmp_path, model, tower, capsys):
    folder = made(tmp_path / "a", "CLIPVisionModel")
    change(folder, architectures=[model], model_type=model.removesuffix("Model").lower())
    said = refused(capsys, "inspect", folder)
    assert f"Load its vision tower as {tower} in transformers, and save it" in said


def test_a_swin_without_some_layers_and_units_of_its_stages(tmp_path, capsys):
    folder = made(tmp_path / "a", "Swinv2ForImageClassification", more={"depths": [4, 2]})
    np.save(tmp_path / "images.npy", given(checkpoints.open_checkpoint(folder).config))
    said = refused(capsys, "grow", folder, tmp_path / "b", "--method", "stack", "--layers", 8)
    assert "2 stages; give one size per stage, such as --layers 8,8" in said
    run(f"prune {folder} {tmp_path}/b --layers 2,1 --mlp 6,12 --data {tmp_path}/images.npy")
    assert_alike(tmp_path / "b")


def test_a_dinov2_of_fewer_layers_has_no_features_of_others(tmp_path):
    """``config.json`` names the last stage. The token for masked patches is omitted."""
    folder = made(tmp_path / "a", "Dinov2ForImageClassification", more={"use_mask_token": True})
    run("coalesce", folder, tmp_path / "b", "--layers", "0+1")
    assert_alike(tmp_path / "b")
    assert content(tmp_path / "b")["out_features"] == ["stage1"]


@pytest.mark.parametrize(("architecture", "becomes"), [
    ("LlamaForCausalLM", "MixtralForCausalLM"),
    ("MistralForCausalLM", "MixtralForCausalLM"),
    ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    ("MistralForSequenceClassification", "MixtralForSequenceClassification"),
])  # fmt: skip
def test_upcycling_a_dense_model_preserves_its_outputs(tmp_path, architecture, becomes, capsys):
    """Each expert is a copy of the MLP, router noise breaks ties, and the gates add up to one."""
    window = {"sliding_window": 3} if architecture == "MistralForCausalLM" else {}
    source = made(tmp_path / "a", architecture, more={"intermediate_size": 24, **window})
    before = assert_alike(source)
    run(f"grow {tmp_path}/a {tmp_path}/b --method upcycle --experts 8 --active 2 --seed 3")
    assert "the function is preserved" in capsys.readouterr().out
    said = content(tmp_path / "b")
    assert said["architectures"] == [becomes] and said["num_experts_per_tok"] == 2
    np.testing.assert_allclose(assert_alike(tmp_path / "b"), before, rtol=0, atol=1e-4)
    one, single = as_mixture(*checkpoints.load(tmp_path / "a"))
    _, params = checkpoints.load(tmp_path / "b")
    copies = grow(operators.upcycle(one.sizes(), {"experts": 8}), single, one.axes())
    assert tiny.distance(params, add_router_noise(copies, one.axes(), 3)) == 0
    assert params["blocks"]["mlp"]["router"]["kernel"].std() == pytest.approx(0.02, rel=0.3)
    if architecture != "LlamaForCausalLM":
        return
    finer = ("--method", "virtual_groups", "--experts", 8, "--mlp", 12, "--active")
    run("grow", tmp_path / "a", tmp_path / "c", *finer, 4)
    np.testing.assert_allclose(assert_alike(tmp_path / "c"), before, rtol=0, atol=1e-4)
    run("grow", tmp_path / "a", tmp_path / "d", *finer, 3)
    assert "the function is changed" in capsys.readouterr().out.splitlines()[-1]
    # With three active experts, the choice between two equal gates is arbitrary.
    assert np.abs(ours(tmp_path / "d") - before).max() > 1e-3


UP, GROUPS = "upcycle --experts 8", "virtual_groups --experts 4 --mlp 4"
NO_MIXTURES = [
    ("Qwen3ForCausalLM", UP, "Qwen3MoeForCausalLM has no setting for kinds sf (it would be s)"),
    ("Qwen2ForCausalLM", UP, "MixtralForCausalLM has no setting for qkv_bias True"),
    ("GPT2LMHeadModel", UP, "a dense decoder of the Llama family, but this GPT2Config"),
    ("MixtralForCausalLM", UP, "has 4 experts already"),
    ("GPTNeoXForCausalLM", UP, "experts can only be made from gated MLPs without biases"),
    ("BertForMaskedLM", GROUPS, "but this BERTConfig is another kind of model"),
    ("Swinv2ForImageClassification", GROUPS, "but this SwinConfig is another kind of model"),
    ("ModernBertForMaskedLM", "virtual_groups --experts 4", "no architecture stores a ModernBERTConfig that predicts"),
    ("LlamaForCausalLM", f"{UP} --active 0", "to at least 1 and at most 8 experts"),
    ("LlamaForCausalLM", "upcycle --experts 2000000", "--experts 2000000: the maximum is 1,048,576"),
    ("LlamaForCausalLM", "stack --layers 4 --experts 8", "create experts, and stack does not"),
]  # fmt: skip


def test_what_no_mixture_stores_is_told(tmp_path, capsys):
    made(tmp_path / "Qwen3ForCausalLM", "Qwen3ForCausalLM", 1)  # a window in every other layer
    for architecture, words, told in NO_MIXTURES:
        folder = tmp_path / architecture
        if not folder.exists():
            made(folder, architecture)
        status = program.main(f"grow {folder} {tmp_path}/b --method {words}".split())
        # The rows of a Llama are wrong for every model, so they are usage errors.
        assert status == (2 if architecture == "LlamaForCausalLM" else 1), words
        assert told in capsys.readouterr().err, words
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_layer_types_that_the_family_ignores_follow_the_depth(tmp_path, architecture, capsys):
    """transformers 5 loads no config whose `layer_types` has another length."""
    folder = made(tmp_path / "a", architecture)
    deeper = ("--method", "stack", "--layers", 4)
    change(folder, layer_types=["full_attention"] * 2)
    run("grow", folder, tmp_path / "b", *deeper)
    assert "layer_types" not in content(tmp_path / "b")
    assert_alike(tmp_path / "b")
    # With the same depth, it is kept.
    run("convert", folder, tmp_path / "same", "--dtype", "bfloat16")
    assert content(tmp_path / "same")["layer_types"] == ["full_attention"] * 2
    change(folder, layer_types=["full_attention", "sliding_attention"])
    told = refused(capsys, "grow", folder, tmp_path / "c", *deeper)
    assert "layer_types of config.json has 2 entries, but the new model has 4 layers" in told


def test_a_pooler_that_nobody_asks(tmp_path):
    """Some saved ViT folders contain an unused pooler."""
    folder = made(tmp_path / "a", "ViTForImageClassification")
    store(folder, tensors(folder) | {"vit.pooler.dense.bias": np.ones(12, np.float32)})
    run("grow", folder, tmp_path / "b", "--method", "stack", "--layers", 4)
    assert_alike(tmp_path / "b")


def test_a_gemma_in_bfloat16_comes_back_to_the_bit(tmp_path):
    """Includes the norms: the stored weights minus one are kept in a wider type in jaxgrow."""
    made(tmp_path / "a", "Gemma2ForCausalLM")
    model = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    run("convert", tmp_path / "half", tmp_path / "orbax", "--to", "orbax")
    run("convert", tmp_path / "orbax", tmp_path / "back", "--to", "hf")
    before, after = tensors(tmp_path / "half"), tensors(tmp_path / "back")
    for name in after:
        assert before[name].dtype == after[name].dtype
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.third_party
def test_a_swin_of_timm_has_the_same_logits(tmp_path):
    """Windows divide the image: else timm shifts before it pads them, and `transformers` afterwards."""
    timm = pytest.importorskip("timm.models.swin_transformer_v2", reason="pip install timm")
    folder = made(tmp_path / "a", "Swinv2ForImageClassification", more={"window_size": 5})
    options = {"img_size": 20, "patch_size": 2, "window_size": 5, "num_classes": 5}
    options |= {"embed_dim": 8, "mlp_ratio": 1.5, "depths": (2, 2), "num_heads": (2, 4)}
    model = timm.SwinTransformerV2(**options, pretrained_window_sizes=(0, 0)).eval()
    named, found = tensors(folder), {}
    for name, tensor in named.items():
        for old, new in TIMM.items():
            name = name.replace(old, new)
        if "downsample" in name:
            name = name.replace("layers.0", "layers.1")
        found[name] = torch.tensor(tensor)
    for block in {name.rpartition("query")[0] for name in found if "query" in name}:
        parts = [found.pop(f"{block}{part}.weight") for part in ("query", "key", "value")]
        found[f"{block}qkv.weight"] = torch.cat(parts)
        for part in "query", "value":
            found[f"{block}{part[0]}_bias"] = found.pop(f"{block}{part}.bias")
    told = model.load_state_dict(found, strict=False)
    assert not told.unexpected_keys
    assert all("relative" in key or "k_bias" in key for key in told.missing_keys)
    config, params = checkpoints.load(folder)
    with torch.no_grad():
        expected = model(torch.tensor(given(config).transpose(0, 3, 1, 2))).numpy()
    found = tiny.forward(config)(params, given(config))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


TIMM = {
    "swinv2.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "swinv2.embeddings.norm": "patch_embed.norm",
    "swinv2.encoder.": "",
    "swinv2.layernorm": "norm",
    "classifier": "head.fc",
    "attention.self.continuous_position_bias_mlp": "attn.cpb_mlp",
    "attention.self.": "attn.",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}


@pytest.mark.parametrize(("architecture", "more"), [
    ("ModernBertForMaskedLM", {}),
    ("BertForMaskedLM", {"tie_word_embeddings": False}),
    ("MixtralForCausalLM", {}),
])  # fmt: skip
def test_the_size_that_is_told_is_that_of_the_tensors(tmp_path, architecture, more, capsys):
    """Parameters are counted as in `transformers`, and bytes as on disk, also in half precision."""
    made(tmp_path / "a", architecture, more=more)
    run("convert", tmp_path / "a", tmp_path / "half", "--dtype", "bfloat16")
    capsys.readouterr()
    deeper = ("grow", tmp_path / "half", tmp_path / "b", "--method", "stack", "--layers", 6)
    dry, wet = called(capsys, *deeper, "--dry-run"), called(capsys, *deeper)
    stored = tensors(tmp_path / "b")
    assert dry["bytes"] == wet["bytes"] == sum(x.nbytes for x in stored.values())
    grown = getattr(transformers, architecture).from_pretrained(tmp_path / "b")
    unused = {"cls.predictions.bias"} if more else set()  # a separate decoder has another bias
    expected = sum(p.numel() for name, p in grown.named_parameters() if name not in unused)
    assert dry["parameters"] == wet["parameters"] == expected


@pytest.mark.parametrize(("architecture", "more", "kinds"), [
    ("Gemma3ForCausalLM", {"num_hidden_layers": 26, "layer_types": None}, "sssfsssssfsss"),
    ("ModernBertForMaskedLM", {"num_hidden_layers": 22}, "fss" * 3 + "fs"),
])  # fmt: skip
def test_layers_are_paired_with_those_of_their_kind(tmp_path, architecture, more, kinds, capsys):
    folder = made(tmp_path / "a", architecture, more=more)
    coalesce = ("coalesce", folder, tmp_path / "b", "--layers")
    for groups in ("far", "adjacent"):
        assert "use --layers alike or your own groups" in refused(capsys, *coalesce, groups)
    run(*coalesce, "alike")
    assert_alike(tmp_path / "b")
    assert checkpoints.open_checkpoint(tmp_path / "b").config.layer_kinds == kinds
    groups = json.loads((tmp_path / "b" / "jaxgrow.json").read_text())["arguments"]["layers"]
    back = ",".join("+".join(map(str, g)) for g in groups)
    run(f"decoalesce {tmp_path}/b {tmp_path}/c --layers {back}")
    assert_alike(tmp_path / "c")
    first, last = (checkpoints.open_checkpoint(tmp_path / name).config for name in "ac")
    assert last.layer_kinds == first.layer_kinds


GROUPED = [a for a in ONE_PER_TYPE if "kv_heads" in FAMILIES[a].config.__dataclass_fields__]


@pytest.mark.parametrize("architecture", GROUPED)
def test_heads_grow_without_an_option_that_has_no_setting(tmp_path, architecture):
    """Key/value heads follow the query heads unless ``config.json`` can tell their number."""
    source = checkpoints.open_checkpoint(made(tmp_path / "a", architecture))
    sizes = source.sizes()
    twice = f"--embed {2 * sizes['embed']} --heads {2 * sizes['heads']}"
    run(f"grow {tmp_path}/a {tmp_path}/b --method hypercloning {twice}")
    assert_alike(tmp_path / "b")
    found = checkpoints.open_checkpoint(tmp_path / "b").sizes()
    assert found["heads"] == 2 * sizes["heads"]
    follows = not source.hf_config.get("num_key_value_heads")
    assert found["kv_heads"] == (found["heads"] if follows else sizes["kv_heads"])
