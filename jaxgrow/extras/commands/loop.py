"""The growth of the method loop: a model without a loop, whose layers are the passes of a loop."""

import argparse
from dataclasses import replace

from jaxgrow import operators
from jaxgrow.checkpoints import Source
from jaxgrow.cli.errors import UsageError, errors_with_options, refuse_options
from jaxgrow.cli.grow_commands import GROWTHS
from jaxgrow.cli.new_sizes import given_sizes
from jaxgrow.growth.maps import Growth
from jaxgrow.models.stack import Loop
from jaxgrow.typed import Json


def growth_of_loop(a: argparse.Namespace, source: Source) -> tuple[Growth, Json]:
    """The growth to a model without a loop whose layers are the passes of ``--loop``."""
    refuse_options(a, "loop only repeats layers", "blend", "seed")
    if a.loop is None:
        raise UsageError("loop requires the layers that run again, such as --loop 4-7x2")
    with errors_with_options():
        operators.loop(source.sizes(), given_sizes(a))
        passes = replace(source.config, loop=Loop(*a.loop)).traits["passes"]
        return operators.unloop(source.sizes(), {}, passes), {"method": a.method, "passes": passes}


GROWTHS.add("loop", growth_of_loop)
