"""Named axes: what does each axis of a parameter mean?

`names` defines the notation, `naming` infers names for third-party models, `stacking` stacks layers
that are separate subtrees, and `fused` splits fused kernels.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
