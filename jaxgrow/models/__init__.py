"""Model families: small Flax modules whose parameters name their axes."""

from jaxgrow.models.bert import BERTConfig
from jaxgrow.models.config import Config, Cost, from_json
from jaxgrow.models.gpt2 import GPT2Config

__all__ = ["BERTConfig", "Config", "Cost", "GPT2Config", "from_json"]
