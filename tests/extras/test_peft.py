"""LoRAs of PEFT are read, grown with their model and written, and PEFT computes the same with them.

The reference is PEFT itself: it merges an adapter into its model, and the merged weights are
compared. The tolerance is 1e-5, in float32.
"""

import dataclasses
import inspect
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace

import chex
import numpy as np
import pytest
from checkpoints import tensors
from published import called, refused
from safetensors.numpy import load_file
from transformers_models import made

from jaxgrow import checkpoints, grow, operators
from jaxgrow.checkpoints import CheckpointError
from jaxgrow.checkpoints.io.files import read_json
from jaxgrow.cli.program import main
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.hf_peft import peft_settings
from jaxgrow.extras.hf_peft.places import name_in_memory
from jaxgrow.operators.targets import layer_axes

torch, transformers, published = (
    pytest.importorskip(name, reason="pip install -e '.[interop-test]'")
    for name in ("torch", "transformers", "peft")
)

# PEFT reads a property of transformers by its old name.
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

FUSED = ["GPTNeoXForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel"]
UNEVEN = ["Qwen3ForCausalLM", "Olmo2ForCausalLM", "Gemma3ForCausalLM"]
OTHERS = """
    BertForMaskedLM MixtralForCausalLM ModernBertForMaskedLM DebertaV2ForMaskedLM OPTForCausalLM
    ViTForImageClassification Dinov2ForImageClassification DeiTForImageClassification Qwen3Model
    SmolLM3ForCausalLM DistilBertForMaskedLM OlmoForCausalLM GraniteForCausalLM CLIPVisionModel
    Qwen2MoeForCausalLM GptOssForCausalLM SiglipVisionModel GraniteMoeHybridForCausalLM
    OlmoeForCausalLM CamembertForMaskedLM Dinov2WithRegistersForImageClassification
    Swinv2ForImageClassification"""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS.split()]


def modules(model):
    """Return every module of a layer that may have a LoRA."""
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, linear)]
    return [name for name in names if re.search(r"\.\d+\.", name) and "downsample" not in name]


def opened(folder, architecture=None):
    """Return the model of a folder, or another one with its weights."""
    name = architecture or read_json(folder / "config.json")["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder)


def trained(folder, lora, architecture=None, **settings):
    """Save a PEFT LoRA with random factors, and return the merged tensors of its model."""
    base = opened(folder, architecture)
    usual = {"r": 2, "lora_alpha": 3.0, "target_modules": modules(base)}
    usual["fan_in_fan_out"] = type(base).__name__.startswith("GPT2")
    model = published.get_peft_model(base, published.LoraConfig(**usual | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "magnitude" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
    model.save_pretrained(lora)
    return merged(model)


def merged(model):
    return {name: x.numpy() for name, x in model.merge_and_unload().state_dict().items()}


def theirs(folder, lora, architecture=None):
    """Return the tensors of a model after PEFT has merged an adapter into it."""
    model = published.PeftModel.from_pretrained(opened(folder, architecture), lora)
    read = [p.any() for name, p in model.named_parameters() if "lora_B" in name]
    assert read and all(read)
    return merged(model)


def assert_same(found, expected, family):
    """Assert that the merged tensors agree, except those of experts, which have no LoRA.

    transformers has other names in memory than in files; earlier versions have fewer of them.
    """
    for name, x in found.items():
        there = next((n for n in (name_in_memory(family, name), name) if n in expected), None)
        if there is not None:
            np.testing.assert_allclose(x, expected[there], rtol=0, atol=1e-5, err_msg=name)
        else:
            assert "block_sparse_moe" in name or ".mlp.experts." in name


def check(tmp_path, base, growth=None, **settings):
    """Read, merge, grow and write a LoRA: PEFT gives the same weights before and after."""
    expected = trained(base, tmp_path / "lora", **settings)
    source = checkpoints.open_checkpoint(base)
    own = peft.read_peft(tmp_path / "lora", source.config, like=base)
    merged = own.merged(checkpoints.load(base)[1])
    found = written(tmp_path / "merged", base, own.config, merged)
    assert_same(found, expected, source.family)
    sizes = source.sizes()
    if growth is None:
        growth = operators.stack(sizes, {axis: sizes[axis] + 1 for axis in layer_axes(sizes)})
    checkpoints.transform(source, tmp_path / "large", growth)
    peft.write_peft(tmp_path / "large-lora", own.grown(growth), like=tmp_path / "large")
    grown = grow(growth, merged, own.config.axes())
    found = written(tmp_path / "grown", base, own.config.resized(growth), grown)
    assert_same(found, theirs(tmp_path / "large", tmp_path / "large-lora"), source.family)
    return own


def written(folder, like, config, params):
    checkpoints.save(folder, config, params, like)
    return tensors(folder)


@pytest.mark.parametrize("architecture", FUSED + SLOW)
def test_peft_merges_the_same_before_and_after_a_growth(tmp_path, architecture):
    check(tmp_path, made(tmp_path / "base", architecture))
    about = read_json(tmp_path / "large-lora" / peft.CONFIG)
    # Queries, keys and values of a fused kernel share one ``a``, which is written once.
    assert about["r"] == 2 and "rank_pattern" not in about


@pytest.mark.parametrize("architecture", UNEVEN)
def test_lemon_folds_its_query_factors_into_the_lora(tmp_path, architecture):
    """At an indivisible width, query and key norms need another eps, stored in the kernels."""
    base = made(tmp_path / "base", architecture)
    config = checkpoints.open_checkpoint(base).config
    growth = operators.lemon(config.sizes(), {"embed": 24, "mlp": 30}, **lemon_options(config))
    assert config.resized(growth).query_eps != 0
    check(tmp_path, base, growth)


def lemon_options(config):
    takes = inspect.signature(operators.lemon).parameters
    return {name: value for name, value in config.traits.items() if name in takes} | {"seed": 0}


PATTERNS = {
    "rsLoRA": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\..*": 1}, "alpha_pattern": {"v_proj": 7.0}},
    "rsLoRA with patterns": {"use_rslora": True, "rank_pattern": {"^model.layers.0.self_attn.k_proj": 3}},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["q_proj", "down_proj"]},
    "pattern of modules": {"target_modules": r".*\.0\.self_attn\.[qv]_proj"},
    "all but some": {"exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]},
    **{f"init_lora_weights={x}": {"init_lora_weights": x} for x in ("gaussian", "orthogonal", False)},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
}  # fmt: skip


@pytest.mark.parametrize("which", PATTERNS)
def test_ranks_scales_and_layers_as_peft_reads_them(tmp_path, which):
    own = check(tmp_path, made(tmp_path / "base", "LlamaForCausalLM"), **PATTERNS[which])
    about = read_json(tmp_path / "large-lora" / peft.CONFIG)
    assert ("rank_pattern" in about) == ("pattern" in which and "modules" not in which)
    assert bool(own.saved) == (which == "whole modules")


COPIES = [
    ("LlamaForCausalLM", "hypercloning", {"embed": 24, "heads": 8, "kv_heads": 4, "mlp": 40}),
    ("GPTNeoXForCausalLM", "hypercloning", {"embed": 32, "heads": 4, "kv_heads": 4, "mlp": 40}),
    ("Qwen3ForCausalLM", "lemon", {"mlp": 30}),
    ("GPT2LMHeadModel", "net2net", {"mlp": 60}),
    ("LlamaForCausalLM", "llama_pro", {"layers": 4}),
    ("Phi3ForCausalLM", "stack", {"layers": 3}),
]


@pytest.mark.parametrize(("architecture", "method", "target"), COPIES)
def test_a_dora_grows_by_copies_in_width_and_depth(tmp_path, architecture, method, target):
    """The norms of grown kernels differ, and the magnitudes change with them."""
    base = made(tmp_path / "base", architecture)
    config = checkpoints.open_checkpoint(base).config
    options = {"lemon": lemon_options(config), "net2net": {"seed": 0}}.get(method, {})
    growth = (operators.WIDTH | operators.DEPTH)[method](config.sizes(), target, **options)
    scale = {"use_rslora": architecture == "GPTNeoXForCausalLM"}
    own = check(tmp_path, base, growth, use_dora=True, rank_pattern={r".*\.0\..*": 3}, **scale)
    assert own.gains.keys() == set(own.lora.targets)
    assert all(np.abs(gain - 1).max() > 0.01 for gain in own.gains.values())
    assert read_json(tmp_path / "large-lora" / peft.CONFIG)["use_dora"] is True


def test_a_dora_of_some_modules_and_one_that_cannot_grow(tmp_path, capsys):
    base = made(tmp_path / "base", "LlamaForCausalLM")
    some = {"layers_to_transform": [1], "target_modules": ["q_proj", "down_proj"]}
    check(tmp_path, base, use_dora=True, **some)
    source = checkpoints.open_checkpoint(base)
    with pytest.raises(
        CheckpointError, match=r"use_dora is true.* give the folder of the base mod"
    ):
        peft.read_peft(tmp_path / "lora", source.config)
    own = peft.read_peft(tmp_path / "lora", source.config, like=source)
    with pytest.raises(CheckpointError, match=r"the adapter is a DoRA.* give its folder"):
        peft.write_peft(tmp_path / "alone", replace(own, family=None))
    to = (base, tmp_path / "b", "--lora", tmp_path / "lora")
    error = refused(capsys, "coalesce", *to, "--heads", "far")
    assert "sums outputs (or layers) that have different magnitudes in the DoRA" in error
    error = refused(capsys, "grow", *to, "--method", "lemon", "--embed", 16)
    assert "some outputs of layer 1 have only zero weights, and a DoRA divides by" in error
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_the_head_of_a_classifier_is_read_and_grows(tmp_path, architecture):
    """The base model predicts tokens; the adapter has the head of its task.

    The adapter of the BERT also has its pooler, and is written without the settings of PEFT, as
    one that was not read from a file.
    """
    base, bert = made(tmp_path / "base", architecture), architecture.startswith("Bert")
    task = architecture.split("For")[0].removesuffix("LMHeadModel") + "ForSequenceClassification"
    more = {"modules_to_save": ["pooler", "classifier"]} if bert else {}
    trained(base, tmp_path / "lora", task, task_type="SEQ_CLS", **more)
    config = checkpoints.open_checkpoint(base).config
    own = peft.read_peft(tmp_path / "lora", config)
    assert (own.config.head, own.config.classes) == ("classes", 2)
    heads = {"classifier/kernel", "classifier/bias", "pooler/kernel", "pooler/bias"}
    assert {*own.saved} == (heads if bert else {"classifier/kernel"})
    growth = operators.stack(config.sizes(), {"layers": 3})
    checkpoints.transform(base, tmp_path / "large", growth)
    own = replace(own, about={}) if bert else own
    peft.write_peft(tmp_path / "large-lora", own.grown(growth))
    params = grow(growth, own.merged(checkpoints.load(base)[1]), own.config.axes())
    found = written(tmp_path / "grown", base, own.config.resized(growth), params)
    assert_same(found, theirs(tmp_path / "large", tmp_path / "large-lora", task), own.family)


def test_the_modules_of_transformers_4(tmp_path):
    """The modules of a ViT have other names there, which are read, and written again."""
    base = made(tmp_path / "base", "ViTForImageClassification")
    trained(base, tmp_path / "lora")
    own = peft.read_peft(tmp_path / "lora", checkpoints.open_checkpoint(base).config)
    if own.older:
        pytest.skip("the installed version of transformers has these names itself")
    peft.write_peft(tmp_path / "older", replace(own, older=True))
    again = peft.read_peft(tmp_path / "older", own.config)
    assert again.older and not own.older
    modules = read_json(tmp_path / "older" / peft.CONFIG)["target_modules"]
    assert "vit.encoder.layer.0.attention.attention.query" in modules
    chex.assert_trees_all_equal(again.factors, own.factors)


REFUSED = {
    "peft_type": ("LOHA", 'peft_type "LOHA"'),
    "bias": ("all", 'bias "all"'),
    "lora_bias": (True, "lora_bias true"),
    "layer_replication": ([[0, 2]], "layer_replication.*PEFT cannot merge it either"),
    "trainable_token_indices": ([1], "trainable_token_indices"),
    "target_parameters": (["mlp.experts"], "target_parameters"),
    "use_qalora": (True, "use_qalora true"),
    "alora_invocation_tokens": ([1, 2], "alora_invocation_tokens.*PEFT cannot merge it either"),
    "a_key_of_another_version": ({"scale": 2}, "a_key_of_another_version"),
    "init_lora_weights": ("olora", '"olora". .*path_initial_model_for_weight_conversion'),
    "r": (0, "r is 0, but should be a positive number"),
    "lora_alpha": ("8", 'lora_alpha is "8", but should be a positive number'),
    "rank_pattern": ({"q_proj": 2.5}, r'rank_pattern\["q_proj"\] is 2.5'),
    "alpha_pattern": ({"(": 2}, r"alpha_pattern has .* not a regular expression"),
    "target_modules": (7, "target_modules is 7, but should be a list of names"),
    "layers_to_transform": (["1"], "layers_to_transform is .* but should be a list of layer indices"),
    "layers_pattern": ("(", "layers_pattern has .* not a regular expression"),
    "exclude_modules": (["q_proj"], "has no LoRA of a kernel in the layers of LlamaForCausalLM"),
    "modules_to_save": (["lm_head"], "lacks lm_head.weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Save a model and a LoRA for it."""
    folder = tmp_path_factory.mktemp("plain")
    trained(made(folder / "base", "LlamaForCausalLM"), folder / "lora", target_modules=["q_proj"])
    return folder


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_are_not_computed_here_are_refused(tmp_path, plain, key):
    shutil.copytree(plain / "lora", tmp_path / "lora")
    value, message = REFUSED[key]
    file = tmp_path / "lora" / peft.CONFIG
    file.write_text(json.dumps(read_json(file) | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        peft.read_peft(tmp_path / "lora", checkpoints.open_checkpoint(plain / "base").config)


def test_every_peft_setting_is_read_without_effect_or_refused(plain, tmp_path):
    """The value is one that PEFT does not define."""
    shutil.copytree(plain / "lora", tmp_path / "lora")
    file = tmp_path / "lora" / peft.CONFIG
    about, config = read_json(file), checkpoints.open_checkpoint(plain / "base").config
    for key in (field.name for field in dataclasses.fields(published.LoraConfig)):
        file.write_text(json.dumps(about | {key: {"another": ["value"]}}))
        without_effect = key in peft_settings.WITHOUT_EFFECT
        with nullcontext() if without_effect else pytest.raises(CheckpointError, match=key):
            peft.read_peft(tmp_path / "lora", config)


@pytest.mark.filterwarnings("ignore:.* changes the base weights of the model:UserWarning")
@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_adapters_that_peft_converted_are_read(tmp_path, how):
    """PEFT writes the change of such an adapter as a LoRA of the original base model."""
    folder = made(tmp_path / "base", "LlamaForCausalLM")
    about = published.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=how)
    model = published.get_peft_model(opened(folder), about)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = how
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) / 5)
    initial = str(tmp_path / "initial")
    model.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=initial)
    source = checkpoints.open_checkpoint(folder)
    own = peft.read_peft(tmp_path / "lora", source.config, like=folder)
    params = own.merged(checkpoints.load(folder)[1])
    found = written(tmp_path / "merged", folder, own.config, params)
    assert_same(found, merged(model), source.family)


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
    "ignore:Input and output embeddings are no longer tied:UserWarning",
)
def test_a_tied_embedding_that_was_trained_alone_is_refused(tmp_path):
    base = made(tmp_path / "base", "GemmaForCausalLM")
    trained(base, tmp_path / "lora", modules_to_save=["embed_tokens"])
    with pytest.raises(CheckpointError, match="the head of this model is tied to it"):
        peft.read_peft(tmp_path / "lora", checkpoints.open_checkpoint(base).config)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT warns as well
def test_a_lora_of_a_tied_embedding_is_merged_after_the_head_is_separated(tmp_path, capsys):
    """A merge into the tied model changes the head as well, and so the function."""
    base = made(tmp_path / "base", "GemmaForCausalLM")
    trained(base, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"])
    stack = ("grow", base, tmp_path / "b", "--method", "stack", "--layers", 4, "--lora")
    error = refused(capsys, *stack, tmp_path / "lora")
    assert "after its head was separated from the embedding" in error
    ran(capsys, "grow", base, tmp_path / "untied", "--method", "untie")
    tokens = torch.tensor(np.random.default_rng(0).integers(2, 11, (2, 7)))

    def logits(model):
        with torch.no_grad():
            return model.eval()(tokens).logits.numpy()

    adapted = published.PeftModel.from_pretrained(opened(base), tmp_path / "lora")
    right = logits(adapted)
    assert np.abs(logits(adapted.merge_and_unload()) - right).max() > 1e-2
    untied = published.PeftModel.from_pretrained(opened(tmp_path / "untied"), tmp_path / "lora")
    np.testing.assert_allclose(logits(untied.merge_and_unload()), right, rtol=0, atol=1e-4)


WIDER = ("--embed", 32, "--heads", 8, "--kv-heads", 4, "--mlp", 40)


def ran(capsys, *words):
    """Run a command that succeeds, and return what it prints."""
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("architecture", "dora"), [("Phi3ForCausalLM", False), ("Qwen3ForCausalLM", True)]
)
def test_a_lora_grows_with_its_model_or_alone(tmp_path, capsys, architecture, dora):
    """The two results are the same LoRA; PEFT and transformers load both, and the logits agree."""
    base = made(tmp_path / "base", architecture)
    trained(base, tmp_path / "lora", use_dora=dora)
    grow_it = ("grow", base, "--method", "hypercloning", *WIDER, "--lora", tmp_path / "lora")
    modules = "with LoRA: 7 modules of rank 2"
    assert modules in ran(capsys, *grow_it, tmp_path / "dry", "--dry-run")
    assert not (tmp_path / "dry").exists()
    said = ran(capsys, *grow_it, tmp_path / "both")
    note = "note: transformers 5 loads a DoRA in the folder of its model without the magnitudes"
    assert modules in said and (note in said) == dora
    said = ran(capsys, *grow_it, tmp_path / "alone", "--lora-only")
    assert modules in said and f"{tmp_path / 'alone'}: only the LoRA\n" in said
    assert sorted(file.name for file in (tmp_path / "alone").iterdir()) == list(peft.ADAPTER)
    chex.assert_trees_all_equal(
        *(load_file(tmp_path / n / peft.WEIGHTS) for n in ("both", "alone"))
    )
    # transformers loads the adapter of the folder as well.
    tokens = torch.tensor(np.random.default_rng(0).integers(2, 11, (2, 7)))
    before = published.PeftModel.from_pretrained(opened(base), tmp_path / "lora")
    with torch.no_grad():
        after, before = (m.eval()(tokens).logits for m in (opened(tmp_path / "both"), before))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)


def test_a_folder_with_a_model_and_its_lora(tmp_path, capsys):
    """A model with a LoRA needs --lora; then both grow, and the result may be replaced."""
    base = made(tmp_path / "base", "LlamaForCausalLM")
    trained(base, tmp_path / "lora")
    for file in (tmp_path / "lora").iterdir():
        if file.name.startswith("adapter_"):
            shutil.copy(file, base)
    deeper = ("grow", base, tmp_path / "b", "--method", "stack", "--layers", 3)
    for words in (deeper, ("convert", base, tmp_path / "b", "--to", "orbax")):
        assert f"pass --lora {base} to grow" in refused(capsys, *words)
    with pytest.raises(CheckpointError, match="contains an adapter in addition to its model"):
        checkpoints.transform(base, tmp_path / "b", {})
    assert not (tmp_path / "b").exists()
    ran(capsys, *deeper, "--lora", base)
    ran(capsys, *deeper, "--lora", base, "--overwrite")
    again = peft.read_peft(tmp_path / "b", checkpoints.open_checkpoint(tmp_path / "b").config)
    assert again.config.layers == 3
    growth = operators.stack(checkpoints.open_checkpoint(base).sizes(), {"layers": 3})
    checkpoints.transform(base, tmp_path / "python", growth, lora=base)
    python, command = (load_file(tmp_path / name / peft.WEIGHTS) for name in ("python", "b"))
    assert python.keys() == command.keys()
    # The adapter of the template folder is not copied.
    checkpoints.save(tmp_path / "own", *checkpoints.load(base), like=base)
    assert not (tmp_path / "own" / "adapter_config.json").exists()


def test_wrong_arguments_about_loras(tmp_path, capsys, plain):
    deeper = ("grow", plain / "base", tmp_path / "b", "--method", "stack", "--layers", 3)
    alone = (*deeper, "--lora", plain / "lora", "--lora-only")
    error = refused(capsys, *alone, "--dtype", "bfloat16", status=2)
    assert "--dtype: --lora-only writes no model" in error
    about = called(capsys, *alone, "--dry-run")
    assert about["sizes"]["layers"] == 3 and not about["written"]
    assert not (tmp_path / "b").exists()
    ran(capsys, *alone)
    assert "--overwrite replaces it" in refused(capsys, *alone)
    ran(capsys, *alone, "--overwrite")
    error = refused(capsys, *deeper, "--lora", tmp_path / "nowhere", "--overwrite")
    assert "adapter_config.json is missing" in error


def test_a_classifier_without_its_pooler_is_refused(tmp_path, capsys):
    base = made(tmp_path / "base", "BertForMaskedLM")
    task = {"task_type": "SEQ_CLS", "target_modules": ["query"]}
    trained(base, tmp_path / "lora", "BertForSequenceClassification", **task)
    deeper = f"grow {base} {tmp_path}/b --method stack --layers 3 --lora {tmp_path}/lora".split()
    error = refused(capsys, *deeper)
    assert "needs pooler/bias, pooler/kernel, which neither it nor" in error
