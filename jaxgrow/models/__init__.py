"""Model families: small Flax modules whose parameters have axis names.

A family is a subclass of `Config` in a module of this folder. Importing this package imports every
module, and each config class registers itself in ``Config.families``.
"""

import importlib
import pkgutil

from jaxgrow.models.bert import BERTConfig
from jaxgrow.models.bottleneck import Adapter
from jaxgrow.models.config import Config, Cost, TextConfig, from_json
from jaxgrow.models.encoder import EncoderConfig
from jaxgrow.models.gpt2 import GPT2Config
from jaxgrow.models.llama import LlamaConfig
from jaxgrow.models.stack import Loop
from jaxgrow.models.vit import ViTConfig

__all__ = [
    "Adapter",
    "BERTConfig",
    "Config",
    "Cost",
    "EncoderConfig",
    "GPT2Config",
    "LlamaConfig",
    "Loop",
    "TextConfig",
    "ViTConfig",
    "from_json",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
