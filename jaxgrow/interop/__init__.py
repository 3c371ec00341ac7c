"""Hugging Face checkpoints: read, transformed and written, tensor by tensor, without PyTorch."""

from jaxgrow.interop.family import Family, Stored
from jaxgrow.interop.gpt2 import GPT2LMHeadModel

FAMILIES: dict[str, Family] = {family.architecture: family for family in (GPT2LMHeadModel,)}

__all__ = ["FAMILIES", "Family", "Stored"]
