"""Growths: how does a parameter tree change size?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["apply", "maps", "matrices", "merge", "moments", "symmetry"]
)
