"""The LoRA of a fine-tuning is used with `transformers`: merged, and as an adapter of PEFT."""

import numpy as np
import pytest
import runs
from finetunings import FAMILIES, cola, tuning

from jaxgrow import checkpoints
from jaxgrow.checkpoints.source import leaves_by_path
from jaxgrow.extras import hf_peft as peft
from jaxgrow.extras.peft.lora import LoRA
from train.extras import adapting
from train.extras.labelled.tuning import tune_model
from train.extras.tokenizers.loading import load_tokenizer
from train.state.model import split_head

torch, hf, published = map(pytest.importorskip, ("torch", "transformers", "peft"))
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def test_a_merged_export_equals_the_adapter_of_peft(tmp_path):
    base, config = tmp_path / "base", FAMILIES["bert"]
    checkpoints.save(base, config, runs.fresh(config))
    load_tokenizer("bytes").save(str(base / "tokenizer.json"))
    tune = tuning(cola(tmp_path / "cola"), lora=LoRA(rank=2, alpha=4.0))
    tune_model(tune, base, tmp_path / "runs")
    run = tmp_path / "runs" / "cola-base-lr0.01-seed0"
    runs.export(run, tmp_path / "merged")

    saved = adapting.load_adaptation(run / "lora.npz")
    head = {
        path: np.asarray(x)
        for path, x in leaves_by_path(split_head(checkpoints.load(run)[1])[1]).items()
    }
    adapter = peft.PeftAdapter(saved.config, saved.adapter, saved.params, saved=head)
    peft.write_peft(tmp_path / "adapter", adapter)

    tokens = torch.tensor(np.random.default_rng(0).integers(1, 99, (3, 9)))
    classifier = hf.AutoModelForSequenceClassification
    with torch.no_grad():
        merged = classifier.from_pretrained(tmp_path / "merged").eval()(tokens).logits
        model = classifier.from_pretrained(base, num_labels=2, pad_token_id=0)
        before = model.eval()(tokens).logits
        model = published.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        np.testing.assert_allclose(model(tokens).logits, merged, rtol=0, atol=1e-5)
    assert abs(before - merged).max() > 1e-2
