"""The command report: compare the outputs of two models."""

import argparse
from dataclasses import asdict

from jaxgrow.checkpoints import open_checkpoint
from jaxgrow.cli.errors import errors_with_options
from jaxgrow.cli.writing import print_json, print_notes
from jaxgrow.extras.commands.model_inputs import inputs_for_both
from jaxgrow.extras.commands.model_outputs import outputs_of
from jaxgrow.extras.commands.tokenizer_files import tokenizer_notes
from jaxgrow.extras.preservation import measure_preservation
from jaxgrow.untrusted import print_text


def run_report(a: argparse.Namespace) -> None:
    """Run ``jaxgrow report``."""
    first, second = open_checkpoint(a.a), open_checkpoint(a.b)
    inputs, what = inputs_for_both(first, second, a.data)
    with errors_with_options():
        found = measure_preservation(
            outputs_of(first), outputs_of(second), inputs, (str(a.a), str(a.b))
        )
    notes = [*first.notes, *second.notes, *tokenizer_notes(first, second)]
    if a.json:
        about = {"a": str(a.a), "b": str(a.b), "inputs": what, **asdict(found), "notes": notes}
        return print_json(about)
    print_text(f"a: {a.a}, b: {a.b}, on {what}")
    print_text(found)
    print_notes(notes)
