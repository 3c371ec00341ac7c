"""Hugging Face checkpoints: read, transformed and written, tensor by tensor, without PyTorch."""

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.gpt2 import GPT2LMHeadModel
from jaxgrow.interop.llama import LlamaForCausalLM, Qwen2ForCausalLM

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM)
}

__all__ = ["FAMILIES", "Family", "Stored"]
