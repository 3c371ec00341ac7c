"""Hugging Face checkpoints: read, transformed and written, tensor by tensor, without PyTorch."""

from jaxgrow.interop.bert import BertForMaskedLM, RobertaForMaskedLM
from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.gpt2 import GPT2LMHeadModel

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (GPT2LMHeadModel, BertForMaskedLM, RobertaForMaskedLM)
}

__all__ = ["FAMILIES", "Family", "Stored"]
