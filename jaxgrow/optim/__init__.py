"""How are parameters updated: Muon and CompleteP?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["muon", "scaling"])
