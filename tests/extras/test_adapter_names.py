"""Adapters are read in every spelling that PEFT loads, and not in others."""

import numpy as np
import pytest
from published import adapter, published

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.extras import hf_peft as peft


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
