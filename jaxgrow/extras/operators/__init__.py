"""Growth operators that a reader of the methods may skip. `jaxgrow.operators` also provides them."""

from jaxgrow.extras.operators import depth, experts, loops, pruning, width
from jaxgrow.operators import LATER

for _module in (depth, loops, experts, width, pruning):
    for _name in _module.__all__:
        LATER.add(_name, getattr(_module, _name))
