"""The architectures that are read and written."""

from jaxgrow.interop.family import Family
from jaxgrow.interop.gpt2 import GPT2LMHeadModel

FAMILIES: dict[str, Family] = {family.architecture: family for family in (GPT2LMHeadModel,)}
