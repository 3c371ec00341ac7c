"""Grow, coalesce and interpolate Transformers: pure functions on pytrees with named axes."""

import lazy_loader

# Nothing is imported before its first use: `jaxgrow --help` must not wait for JAX, nor a script that
# grows a tree for NNX, Optax or Chex. `__init__.pyi` lists the names, for readers and type checkers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
