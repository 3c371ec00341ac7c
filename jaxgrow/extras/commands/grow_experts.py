"""The command grow with experts: turn the MLPs of a model into experts."""

import argparse

from jaxgrow import operators
from jaxgrow.checkpoints import Cast, open_checkpoint, write
from jaxgrow.cli.errors import UsageError, errors_with_options, refuse_options
from jaxgrow.cli.grow_commands import GROWING
from jaxgrow.cli.new_sizes import given_sizes
from jaxgrow.cli.writing import full_record, output_of, report_written
from jaxgrow.extras.families.upcycled import Single, Upcycled
from jaxgrow.extras.rounding import rounding_notes


def grow_to_experts(a: argparse.Namespace) -> None:
    """Turn the MLPs of a model into experts."""
    refuse_options(
        a,
        f"PEFT does not support LoRA on the experts that {a.method} creates. First merge the LoRA into SRC with PEFT",
        *("lora", "lora_only"),
    )
    policy = () if a.optimizer == "drop" else ("optimizer",)
    refuse_options(
        a,
        f"not supported for {a.method}, which does not grow an optimizer state",
        *(*policy, "optimizer_state", "format", "names", "head_dim"),
    )
    refuse_options(a, f"{a.method} does not average layers", "blend")
    refuse_options(a, "the routers of new experts are random, by --seed", "noise")
    refuse_options(a, f"{a.method} makes no loop", "loop")
    source = open_checkpoint(a.src)
    copies = a.method == "expert_copies"
    if copies:
        refuse_options(a, "each token uses as many experts as before", "active")
    own: int = getattr(source.config, "active", 2) if copies else 2
    active = own if a.active is None else a.active
    if a.experts is None:
        raise UsageError(f"{a.method} requires the number of experts, such as --experts 8")
    if not 0 < active <= a.experts:
        default = " (the default)" if a.active is None else ""
        raise UsageError(
            f"--active {active}{default}: each token is routed to at least 1 and at most {a.experts} "
            "experts"
        )
    model = source if copies else Single(source)
    seed = a.seed or 0
    target = given_sizes(a)
    sizes = model.sizes()
    output = output_of(a)
    arguments = {"method": a.method, "target": target, "active": active, "seed": seed}
    record = full_record(a, arguments)
    with errors_with_options():
        growth = operators.EXPERTS[a.method](sizes, target)
        wide = source if a.dtype is None else Cast(source, a.dtype, at_least=True)
        grown = Upcycled(wide, growth, active, seed)
        written = write(grown, output, record)
        kept = not copies and active % (sizes["mlp"] // grown.sizes()["mlp"]) == 0
        rounded = rounding_notes(source, written.model, growth, output) if kept else []
    notes = [
        f"each token still uses {active} of the experts, among which may be an expert and its copies"
    ]
    report_written(a, written, record, notes * copies, rounded, keeps=kept)


for _name in operators.EXPERTS:
    GROWING.add(_name, grow_to_experts)
