"""Small models of `transformers` of every architecture, and their outputs here and there."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from families import SETTINGS

from jaxgrow import checkpoints
from jaxgrow.checkpoints import FAMILIES
from jaxgrow.cli import program

torch = pytest.importorskip("torch", reason="pip install -e '.[interop-test]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop-test]'")

LENGTHS = np.array([7, 4, 1])  # of classified texts; the remainder is padding
CASES = [(a, i) for a, models in SETTINGS.items() for i in range(len(models))]
ONE_PER_TYPE = {FAMILIES[a].model_type: a for a in reversed(SETTINGS)}.values()
cases = pytest.mark.parametrize(("architecture", "which"), CASES)
# All settings of one architecture of each model type. The others differ from it in their heads.
cases_by_type = pytest.mark.parametrize(
    ("architecture", "which"), [(a, i) for a, i in CASES if a in ONE_PER_TYPE]
)


def made(
    folder: Path, architecture: str, which: int = 0, more: dict | None = None, **options
) -> Path:
    """Save a model with `transformers`, with random weights, norms and biases."""
    settings = SETTINGS[architecture][which] | (more or {})
    config = transformers.AutoConfig.for_model(FAMILIES[architecture].model_type, **settings)
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator) / 4
            p.copy_(drawn + (p.ndim == 1 and name.endswith("weight")))
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def given(config) -> np.ndarray:
    if config.modality == "images":
        shape = (3, config.image, config.image, 3)
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)
    # The tokens exclude 0, 1 and 2, which some models treat as padding.
    tokens = np.random.default_rng(0).integers(3, 11, (3, 7))
    # The hidden states of a decoder are compared at all positions, so its texts have no padding.
    whole = config.head == "tokens" or (config.causal and config.head == "states")
    return tokens if whole else np.where(np.arange(7) < LENGTHS[:, None], tokens, 1)


def ours(folder: Path) -> np.ndarray:
    config, params = checkpoints.load(folder)
    x = given(config)
    if not config.causal and config.modality == "text":
        x = {"tokens": x, "mask": x != 1}
    elif config.predicts == "classes" and x.ndim == 2:
        x = {"tokens": x, "lengths": LENGTHS}
    return np.asarray(tiny.forward(config)(params, x))


def theirs(folder: Path) -> np.ndarray:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, architecture)
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told[f"{name}_keys"] for name in ("missing", "unexpected", "mismatched")), told
    return answered(model, given(checkpoints.open_checkpoint(folder).config))


def answered(model, x: np.ndarray) -> np.ndarray:
    """Return the output of a `transformers` model."""
    with torch.no_grad():
        if x.ndim == 4:
            out = model.eval()(torch.tensor(x.transpose(0, 3, 1, 2)))
        else:
            mask, pad = x != 1, getattr(model.config, "pad_token_id", None)
            # A decoder that classifies finds the end of a text by the padding token of its config.
            if hasattr(model, "score") and pad is not None:
                x = np.where(mask, x, pad)
            out = model.eval()(torch.tensor(x), attention_mask=torch.tensor(mask).long())
        if "image_embeds" in out:
            return out.image_embeds.numpy()
        if "last_hidden_state" in out:
            # CLIP computes the norm after the layers only for the class token.
            states = out.last_hidden_state
            of_clip = type(model).__name__ == "CLIPVisionModel"
            return (model.post_layernorm(states) if of_clip else states).numpy()
    if "start_logits" in out:
        return torch.stack([out.start_logits, out.end_logits], -1).numpy()
    return out.logits.numpy()


def assert_alike(folder: Path) -> np.ndarray:
    found = ours(folder)
    np.testing.assert_allclose(found, theirs(folder), rtol=0, atol=1e-4)
    assert found.std() > 1e-2
    return found


def assert_kept(after: np.ndarray, before: np.ndarray) -> None:
    """Assert that the outputs are the same, where wider hidden states are copies."""
    copies = after.shape[-1] // before.shape[-1]
    np.testing.assert_allclose(after, np.concatenate([before] * copies, -1), rtol=0, atol=1e-4)


def run(*words: object) -> None:
    """Run a command, given as one line, as words, or as both."""
    assert program.main(" ".join(map(str, words)).split()) == 0


def to(config, layers: int) -> str:
    """Return the value of ``--layers``."""
    return ",".join([str(layers)] * len(config.depths))
