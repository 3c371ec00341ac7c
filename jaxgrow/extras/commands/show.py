"""The command show: draw the maps of a growth."""

import argparse

import jax

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from jaxgrow.cli.errors import errors_with_options
from jaxgrow.cli.grow_commands import growth_of
from jaxgrow.cli.preservation import keeps_function
from jaxgrow.cli.writing import kept_as_text, print_json, sizes_as_text
from jaxgrow.extras import plot
from jaxgrow.untrusted import print_text


def run_show(a: argparse.Namespace) -> None:
    """Run ``jaxgrow show``."""
    source = open_checkpoint(a.src)
    growth, arguments = growth_of(a, source)
    names = {path: leaf.names for path, leaf in source.leaves.items()}
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in source.leaves.items()
    }
    try:
        with errors_with_options():
            figure = plot.plot_growth(growth, shapes, names)
            figure.savefig(a.out, format=a.out.suffix[1:] or "png")
    except ImportError as error:
        raise CheckpointError(str(error)) from error
    sizes = source.config.resized(growth).sizes()
    kept = keeps_function(growth, source.config, a.method)
    if a.json:
        about = {"src": str(a.src), "out": str(a.out), "arguments": arguments}
        return print_json({**about, "sizes": sizes, "keeps": kept})
    print_text(f"{a.out}: growth to {sizes_as_text(sizes)}\n{kept_as_text(kept)}")
