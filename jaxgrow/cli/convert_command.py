"""The command convert: write a model in another format, without changing it."""

import argparse

from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.cli.errors import UsageError
from jaxgrow.cli.writing import write_model


def run_convert(a: argparse.Namespace) -> None:
    """Run ``jaxgrow convert``."""
    source = open_checkpoint(a.src)
    if a.to is None and source.of_run:
        a.to = "hf"
    if a.to is None and a.dtype is None and a.shard_size is None:
        raise UsageError("convert needs at least one of --to, --dtype and --shard-size")
    write_model(a, source, {})
