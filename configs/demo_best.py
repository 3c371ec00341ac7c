"""`configs/demo.py:best`, by a name of its own."""

from configs.demo import best as config

__all__ = ["config"]
