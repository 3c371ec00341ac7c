"""`configs/demo.py:scratch`, by a name of its own."""

from configs.demo import scratch as config

__all__ = ["config"]
