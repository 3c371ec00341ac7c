"""How are parameters updated: Muon, CompleteP, and frozen parameters?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["completep", "freeze", "muon"])
