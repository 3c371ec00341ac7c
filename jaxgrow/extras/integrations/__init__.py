"""How are models and checkpoints of other frameworks grown?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    [
        "command",
        "formats",
        "nnx",
        "orbax_run",
        "orbax_tree",
        "torch_optimizer",
        "torch_tree",
        "trees",
    ],
)
