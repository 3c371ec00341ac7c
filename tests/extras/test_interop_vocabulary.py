"""The rows of a changed vocabulary are those of `transformers`.

Old tokens have the logits that the model has after `resize_token_embeddings`, up to 1e-4 for two
implementations in float32.
"""

import json

import numpy as np
import pytest
from checkpoints import tensors
from transformers_models import assert_alike, given, made, run, theirs

from jaxgrow.checkpoints import open_checkpoint

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop

MODELS = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
KEEP = [0, 1, 2, 4, 5, 7, 8, 10]
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", MODELS)
def test_old_tokens_are_those_of_resized_embeddings(tmp_path, architecture, tied):
    folder = made(tmp_path / "a", architecture, more={"tie_word_embeddings": tied})
    config = open_checkpoint(folder).config
    run("grow", folder, tmp_path / "b", "--vocab", 5011)
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    model.resize_token_embeddings(5011)
    with torch.no_grad():
        expected = model(torch.tensor(given(config))).logits.numpy()
    np.testing.assert_array_equal(theirs(tmp_path / "b")[..., :11], expected[..., :11])
    assert_alike(tmp_path / "b")
    found = tensors(tmp_path / "b")
    resized = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(found[EMBEDDING][:11], resized[:11])
    old, new = np.float64(resized[:11]), np.float64(found[EMBEDDING][11:])
    spread = old.std(0)
    # transformers samples from a normal distribution of this mean and, scaled, this covariance.
    np.testing.assert_allclose((new.mean(0) - resized[11:].mean(0)) / spread, 0, atol=0.1)
    difference = np.cov(new.T) - np.cov(old.T, bias=True)
    np.testing.assert_allclose(difference / np.outer(spread, spread), 0, atol=0.15)


@pytest.mark.parametrize("architecture", MODELS)
def test_pruned_rows_are_the_kept_rows(tmp_path, architecture):
    folder = made(tmp_path / "a", architecture)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        content = json.loads(file.read_text()) | {
            "bos_token_id": 7,
            "eos_token_id": [8],
            "pad_token_id": 0,
        }
        file.write_text(json.dumps(content))
    (tmp_path / "keep.json").write_text(json.dumps({"keep": KEEP}))
    run("prune", folder, tmp_path / "b", "--vocab", tmp_path / "keep.json")
    np.testing.assert_array_equal(
        tensors(tmp_path / "b")[EMBEDDING], tensors(folder)[EMBEDDING][KEEP]
    )
    small, large = (
        getattr(transformers, architecture).from_pretrained(x).eval()
        for x in (tmp_path / "b", folder)
    )
    assert small.config.eos_token_id == small.generation_config.eos_token_id == [6]
    assert small.config.bos_token_id == 5
    tokens = np.array([[1, 2, 6, 7, 3]])
    with torch.no_grad():
        found = small(torch.tensor(tokens)).logits.numpy()
        expected = large(torch.tensor(np.array(KEEP)[tokens])).logits.numpy()
    # PyTorch sums the products of a smaller head in another order.
    np.testing.assert_allclose(found, expected[..., KEEP], rtol=0, atol=1e-6)
