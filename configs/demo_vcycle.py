"""`configs/demo.py:vcycle`, by a name of its own."""

from configs.demo import vcycle as config

__all__ = ["config"]
