"""The command report: compare the outputs of two models."""

import argparse
from dataclasses import asdict

import jax

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
    of_a, of_b = outputs_of(first)(inputs), outputs_of(second)(inputs)
    every = [logits.shape[-1] for logits, _ in (of_a, of_b)]
    # Models may have different vocabularies, but not different classes.
    common = min(every) if first.config.predicts == "tokens" else max(every)
    with errors_with_options():
        found = measure_preservation(
            lambda _: (of_a[0][..., :common], of_a[1]),
            lambda _: (of_b[0][..., :common], of_b[1]),
            inputs,
            (str(a.a), str(a.b)),
        )
    notes = [*first.notes, *second.notes, *tokenizer_notes(first, second)]
    for name, (logits, _) in (("a", of_a), ("b", of_b)):
        if more := logits.shape[-1] - common:
            share = float(jax.nn.softmax(logits)[..., common:].sum(-1).mean())
            notes.append(
                f"the logits of the first {common} tokens are compared; the other {more} tokens of "
                f"{name} have together a mean probability of {share:.3g}"
            )
    if a.json:
        about = {"a": str(a.a), "b": str(a.b), "inputs": what, **asdict(found), "notes": notes}
        return print_json(about)
    print_text(f"a: {a.a}, b: {a.b}, on {what}")
    print_text(found)
    print_notes(notes)
