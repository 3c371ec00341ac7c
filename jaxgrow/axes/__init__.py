"""Named axes: what does each axis of a parameter mean?

`names` defines the notation, and `stacking` stacks layers that are separate subtrees.
`jaxgrow.extras.other_models` names the axes of models of others.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
