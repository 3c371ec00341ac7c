"""Parameter-efficient fine-tuning: how is a frozen model adapted with few trained parameters?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["adapters", "lora"])
