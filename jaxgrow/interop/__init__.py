"""Hugging Face checkpoints: read, transformed and written, tensor by tensor, without PyTorch."""

from jaxgrow.interop.bert import BertForMaskedLM, RobertaForMaskedLM
from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.gpt2 import GPT2LMHeadModel
from jaxgrow.interop.llama import LlamaForCausalLM, Qwen2ForCausalLM
from jaxgrow.interop.vit import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTForImageClassification,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        BertForMaskedLM,
        DeiTForImageClassification,
        DeiTForImageClassificationWithTeacher,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        Qwen2ForCausalLM,
        RobertaForMaskedLM,
        ViTForImageClassification,
    )
}

__all__ = ["FAMILIES", "Family", "Stored"]
