"""The command grow with the methods untie and tie, which change only the head of a model."""

import argparse

import numpy as np

from jaxgrow import operators
from jaxgrow.checkpoints import Cast, CheckpointError, open_checkpoint, write
from jaxgrow.cli.errors import errors_with_options, refuse_options
from jaxgrow.cli.grow_commands import GROWING
from jaxgrow.cli.new_sizes import given_sizes
from jaxgrow.cli.writing import full_record, output_of, report_written
from jaxgrow.extras.changed_models import Reconfigured
from jaxgrow.operators.tying import EMBEDDING, HEAD, RETIED, untie_head


def retie_head(a: argparse.Namespace) -> None:
    """Give a model a separate head, or tie its head to the embedding."""
    why = f"{a.method} changes only the head of a model on disk"
    policy = () if a.optimizer == "drop" else ("optimizer",)
    others = ("experts", "active", "lora", "lora_only", "noise", "seed", "blend", "loop")
    refuse_options(a, why, *policy, "optimizer_state", *others, "format", "names", "head_dim")
    source = open_checkpoint(a.src)
    with errors_with_options():
        operators.OPERATORS[a.method](source.sizes(), given_sizes(a))
    tie = a.method == "tie"
    if source.config.predicts != "tokens" or source.config.tied == tie:
        raise CheckpointError(
            f"{a.method} needs a model that predicts tokens, with a head that is {'not ' * tie}tied to its "
            f"embedding, but {a.src} has none"
        )
    # Parameters are rounded once, when they are written.
    wide = Cast(source, "float32", at_least=True)
    old = {path: wide.read(path) for path in (EMBEDDING, HEAD) if path in source.leaves}
    new = RETIED[a.method](old)
    changes = {
        path: float(np.linalg.norm(untie_head(new)[path] - x) / np.linalg.norm(x))
        for path, x in old.items()
    }
    made = Reconfigured(source, {path: lambda x=x: x for path, x in new.items()}, tied=tie)
    record = full_record(a, {"method": a.method})
    with errors_with_options(sizes=False):
        written = write(made, output_of(a), record)
    notes = [f"{path} changed by {x:.1%} of its norm" for path, x in changes.items() if tie]
    report_written(a, written, record, notes, keeps=not tie)


for _name in RETIED:
    GROWING.add(_name, retie_head)
