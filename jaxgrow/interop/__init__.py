"""Hugging Face checkpoints: read, transformed and written, tensor by tensor, without PyTorch."""

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.gpt2 import GPT2LMHeadModel
from jaxgrow.interop.vit import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTForImageClassification,
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        DeiTForImageClassification,
        DeiTForImageClassificationWithTeacher,
        GPT2LMHeadModel,
        ViTForImageClassification,
    )
}

__all__ = ["FAMILIES", "Family", "Stored"]
