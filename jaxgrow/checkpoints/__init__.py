"""Read, transform and write Hugging Face and Orbax checkpoints without PyTorch.

A Hugging Face checkpoint is transformed with one tensor in memory at a time. An Orbax checkpoint is
loaded completely.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
