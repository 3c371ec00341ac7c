"""Model families: small Flax modules whose parameters name their axes."""

from jaxgrow.models.config import Config, Cost, from_json
from jaxgrow.models.gpt2 import GPT2Config
from jaxgrow.models.llama import LlamaConfig

__all__ = ["Config", "Cost", "GPT2Config", "LlamaConfig", "from_json"]
