"""Adapters are read in every spelling that PEFT loads, and not in others."""

import numpy as np
import pytest
from checkpoints import change
from published import adapter, content, published, store, stored
from safetensors.numpy import load_file

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.extras import hf_peft as peft

pytestmark = pytest.mark.extra


def same(first, second) -> None:
    for name, x in load_file(first / "adapter_model.safetensors").items():
        other = load_file(second / "adapter_model.safetensors")
        np.testing.assert_array_equal(x, other[name], err_msg=name)


def multimodal(folder):
    """Turn the folder of a Gemma 3 into one for images and texts."""
    text = content(folder)
    both = ["Gemma3ForConditionalGeneration"]
    change(folder, architectures=both, model_type="gemma3", text_config=text)
    found = {f"language_model.{name}": x for name, x in stored(folder).items()}
    store(folder, found | {"vision_tower.x.weight": np.zeros(2, np.float32)})
    return folder


def test_the_name_of_the_adapter_may_be_in_the_names_of_tensors(tmp_path):
    config = open_checkpoint(published(tmp_path / "a", "LlamaForCausalLM")).config
    one = peft.read_peft(adapter(tmp_path / "lora"), config)
    marked = adapter(
        tmp_path / "marked",
        lambda name: "base_model.model." + name.replace(".weight", ".default.weight"),
    )
    two = peft.read_peft(marked, config)
    for x, y in zip(
        one.factors["blocks"]["attention"]["query"].values(),
        two.factors["blocks"]["attention"]["query"].values(),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_names_that_peft_ignores_are_an_error(tmp_path):
    config = open_checkpoint(published(tmp_path / "a", "LlamaForCausalLM")).config
    with pytest.raises(CheckpointError, match="PEFT ignores tensors whose names do not begin with"):
        peft.read_peft(adapter(tmp_path / "lora", lambda name: name), config)
