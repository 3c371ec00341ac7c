"""Settings are read in the spellings of published files, which lack keys, and have others."""

import json
from pathlib import Path

import numpy as np
import pytest
from cases import cases

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")
pytestmark = pytest.mark.interop
from transformers_models import answered, assert_alike, given, ours, run, to  # noqa: E402

# One line for each model: its name, and its `config.json` with small sizes.
FILE = Path(__file__).parents[1] / "support" / "published.jsonl"
PUBLISHED = [json.loads(line) for line in FILE.read_text().splitlines()]
# One model for each kind of error that these files revealed; the others take a minute.
FAST = ("gemma-2b", "gpt-neox-20b", "Cerebras-GPT", "dinov2-base-imagenet1k-1-layer")
FAST += (
    "granite-4.0-micro",
    "a Gemma 3 whose few layers all have windows",
    "Phi-3, the context before its scaling only in rope_scaling",
    "siglip-so400m-patch14-384, its vision tower",
)


@pytest.mark.parametrize("said", cases({m["name"]: m["config"] for m in PUBLISHED}, FAST, ()))
def test_published_spellings_are_computed_grown_and_reloaded(tmp_path, said):
    (architecture,) = said["architectures"]
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps(said))
    about = transformers.AutoConfig.from_pretrained(tmp_path / "a")
    model = getattr(transformers, architecture)(about)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.2)
    model.save_pretrained(tmp_path / "a")
    file.write_text(json.dumps(said))
    config = checkpoints.open_checkpoint(tmp_path / "a").config
    expected = answered(model, given(config))
    np.testing.assert_allclose(ours(tmp_path / "a"), expected, rtol=0, atol=1e-4)
    run(f"convert {tmp_path}/a {tmp_path}/same --to hf")
    written = json.loads((tmp_path / "same" / "config.json").read_text())
    assert written == said | FAMILIES[architecture].always(config)
    run(f"grow {tmp_path}/a {tmp_path}/b --method stack --layers {to(config, 4)}")
    assert_alike(tmp_path / "b")
