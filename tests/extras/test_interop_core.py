"""Settings of GPT-2, BERT, RoBERTa, Llama and Qwen2 have the meaning that they have in `transformers`.

`test_interop_families` grows models, and tests all architectures. The tolerance is 1e-4 in float32,
and 1e-10 in float64.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from checkpoints import tensors
from families import SETTINGS
from transformers_models import assert_alike, made

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 100.0}
UNTIED = {"tie_word_embeddings": False}
LLAMAS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied, a key each": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": None}),
    "llama 3.1, one key": ("LlamaForCausalLM",
        {"rope_parameters": LLAMA3, "max_position_embeddings": 40, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", UNTIED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}  # fmt: skip
EPS = {"layer_norm_eps": 1e-3}  # changes the result visibly
ENCODERS = {
    "bert": ("BertForMaskedLM", EPS | {"type_vocab_size": 4}),
    "roberta, untied": ("RobertaForMaskedLM", EPS | UNTIED),
}
CORE = LLAMAS | ENCODERS | {"gpt2, untied": ("GPT2LMHeadModel", UNTIED)}


@pytest.mark.parametrize(("architecture", "more"), CORE.values(), ids=CORE)
def test_logits_match_and_files_round_trip_bitwise(tmp_path, architecture, more):
    """Tensors that are not written are copies of others."""
    folder = made(tmp_path / "a", architecture, more=more)
    assert_alike(folder)
    config, params = checkpoints.load(folder)
    checkpoints.save(tmp_path / "b", config, params, like=folder)
    first, last = tensors(folder), tensors(tmp_path / "b")
    # Models do not use these copies of another bias.
    unused = {"cls.predictions.bias", "lm_head.bias"}
    for name in last.keys() - unused:
        np.testing.assert_array_equal(last[name], first[name], err_msg=name)
    for name in first.keys() - last.keys() - unused:
        assert any(np.array_equal(first[name], x) for x in last.values()), name
    assert_alike(tmp_path / "b")


@pytest.mark.parametrize(("architecture", "more"), ENCODERS.values(), ids=ENCODERS)
def test_types_and_padding_of_encoders_match_in_float64(tmp_path, architecture, more):
    folder = made(tmp_path / "a", architecture, more=more)
    config, params = checkpoints.load(folder)
    config = replace(config, dtype="float64")
    params = jax.tree.map(lambda x: x.astype("float64"), params)
    rng = np.random.default_rng(0)
    mask = np.arange(7) < np.array([[7], [4]])
    tokens = np.where(mask, rng.integers(2, 11, (2, 7)), 1)  # RoBERTa pads with token 1.
    given = {"tokens": tokens, "types": rng.integers(0, config.types, (2, 7)), "mask": mask}
    names = {"tokens": "input_ids", "types": "token_type_ids", "mask": "attention_mask"}
    model = getattr(transformers, architecture).from_pretrained(folder).eval().double()
    with torch.no_grad():
        expected = model(**{names[k]: torch.tensor(x) for k, x in given.items()}).logits.numpy()
    with jax.enable_x64():
        found = np.asarray(tiny.forward(config)(params, given))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_padding_is_masked_on_either_side(tmp_path):
    folder = made(tmp_path / "a", "LlamaForCausalLM")
    config, params = checkpoints.load(folder)
    tokens, mask = tiny.tokens(3, 9), np.ones((3, 9), bool)
    mask[0, :4], mask[1, 6:] = False, False
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.tensor(tokens), attention_mask=torch.tensor(mask).long())
    found = np.asarray(config.module.apply({"params": params}, tokens, mask))
    np.testing.assert_allclose(found[mask], expected.logits.numpy()[mask], rtol=0, atol=1e-4)
    alone = np.asarray(tiny.forward(config)(params, tokens[:1, 4:]))
    # Only relative positions matter.
    np.testing.assert_allclose(found[0, 4:], alone[0], rtol=0, atol=1e-4)
    assert np.abs(found - tiny.forward(config)(params, tokens))[0, 4:].max() > 1e-2


@pytest.mark.parametrize(("architecture", "more"), LLAMAS.values(), ids=LLAMAS)
def test_both_config_json_forms_are_read_and_written_compatibly(architecture, more):
    family = FAMILIES[architecture]
    settings = SETTINGS[architecture][0] | more
    theirs = transformers.AutoConfig.for_model(family.model_type, **settings)
    new = theirs.to_dict()
    ours = family.from_hf(new)
    rope = dict(new.pop("rope_parameters"))
    new["rope_theta"] = rope.pop("rope_theta")
    new["rope_scaling"] = rope if "factor" in rope else None
    assert family.from_hf(new) == ours
    written = {key: getattr(ours, field) for key, field in family.fields.items()}
    written |= family.derived(ours)
    written |= {key: allowed[0] for key, allowed in family.settings.items()}
    assert family.from_hf(written) == ours
    assert family.from_hf(type(theirs)(**written).to_dict()) == ours
