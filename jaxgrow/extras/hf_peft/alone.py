"""How do commands write a grown LoRA without its model (``--lora-only``)?"""

import argparse

from jaxgrow.checkpoints import Grown
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.checkpoints.writing import COMPANIONS
from jaxgrow.cli.errors import errors_with_options
from jaxgrow.cli.writing import ADAPTERS, output_of, print_json, print_notes, sizes_as_text
from jaxgrow.growth.maps import Growth
from jaxgrow.typed import Json
from jaxgrow.untrusted import print_text


def write_lora_alone(a: argparse.Namespace, root: Checkpoint, growth: Growth, facts: Json) -> None:
    """Write a grown LoRA without its model, and print a summary.

    Args:
      a: the parsed arguments.
      root: the model.
      growth: the growth.
      facts: further entries of the JSON output. Its notes are also printed as text.
    """
    output = output_of(a)
    with errors_with_options():
        lora = COMPANIONS["lora"](root, growth, a.lora)
        sizes = Grown(root, growth).sizes()
        folders = [root.folder, *lora.folders]
        if a.dry_run:
            may_become(output.folder, folders, a.overwrite)
        else:
            with atomic_folder(output.folder, folders, a.overwrite) as part:
                lora.write(part, None, output)
    notes = [*facts["notes"], *lora.notes]
    if a.json:
        return print_json(
            {"dst": str(a.dst), "written": not a.dry_run, **facts, "sizes": sizes, "notes": notes}
        )
    print_text(
        f"{a.dst}: only the LoRA{'; nothing was written (--dry-run)' * a.dry_run}\n{sizes_as_text(sizes)}"
    )
    print_notes(notes)


ADAPTERS.add("lora", write_lora_alone)
