"""The architectures that are read and written."""

from jaxgrow.interop.bert import BertForMaskedLM, RobertaForMaskedLM, XLMRobertaForMaskedLM
from jaxgrow.interop.family import Family
from jaxgrow.interop.gpt2 import GPT2LMHeadModel
from jaxgrow.interop.llama import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from jaxgrow.interop.vit import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTForImageClassification,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        BertForMaskedLM,
        RobertaForMaskedLM,
        XLMRobertaForMaskedLM,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        Qwen2ForCausalLM,
        MistralForCausalLM,
        ViTForImageClassification,
        DeiTForImageClassification,
        DeiTForImageClassificationWithTeacher,
    )
}
