"""Does a plan fit on a machine, and how long does it take at least? Compiles all programs of the plan without the machine:

``python -m train.preflight CONFIG [CONFIG ...] --on h100:8 [--set a.b=c ...] [--utilisation 0.4] [--json FILE] [--plot FILE]``

The table has a row for each program. The memory is for one device. Programs may use the part of it
that JAX allocates: 75 % on GPUs, or XLA_CLIENT_MEM_FRACTION. The FLOPs are the sum over
all devices in one run of the program. The column "at least" is a roofline of the compiled program:
the sum over its kernels of max(FLOPs / peak, bytes / bandwidth), or the time that the links between
devices and hosts are busy, if that is longer. The column "MFU at most" is the model FLOPs
utilisation of a step that takes this minimum time. Real steps take longer, and only a measurement
shows how much longer. ``--utilisation`` is the assumed fraction of the peak, from which days and
device hours are computed. If a program does not fit, the command searches for settings with which
it fits. If memory is left over, it searches for settings that use it. No data are read, so a config
with ``epochs`` needs a number of steps, such as ``FILE.py:NAME:steps=100_000``. A config is
``FILE.py:NAME``, or ``FILE.py:NAME:batch=16`` with individual settings.
"""

from argparse import Namespace
from dataclasses import asdict

import jax

from jaxgrow import sharding
from jaxgrow.tables import markdown_table
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import write_record
from train.common.output import note, say
from train.config.experiment import Experiment, load_experiment
from train.extras import plots
from train.extras.aot import estimate
from train.extras.aot.compilation import AotRun, Program
from train.extras.aot.machines import Machine, describe_machine
from train.plan.training import Train
from train.state.mesh import Mesh
from train.step import xla

GB = 1e9


def program_table(programs: list[Program], machine: Machine) -> str:
    """Return a Markdown table of memory, FLOPs and minimum time of each program.

    Memory is in GB on one device. FLOPs and time are for one run of the program.
    """
    head = [
        "phase",
        "program",
        "runs",
        "parameters",
        "optimizer",
        "other",
        "temporary",
        "left",
        "FLOPs",
        "at least",
        "longest part",
        "MFU at most",
        "tokens/s at most",
    ]
    rows = []
    for p in programs:
        sizes = (p.parameters, p.moments, p.other, p.temporary, machine.memory - p.memory)
        row = [
            p.phase,
            p.what,
            f"{p.steps:,}" if p.steps else "",
            *map(as_gigabytes, sizes),
            f"{p.flops:.3g}",
        ]
        bound = estimate.time_bound(p, machine)
        time = ["", "", "", ""]
        if bound is not None and bound.seconds:
            time = [f"{bound.seconds * 1e3:.1f} ms", longest_part(bound), "", ""]
            if p.steps and p.tokens:
                time[2:] = [f"{bound.utilisation:.1%}", f"{p.tokens / bound.seconds:,.0f}"]
        rows.append(row + time)
    return markdown_table(head, rows)


def as_gigabytes(size: float) -> str:
    """Write a size in GB with three digits; sizes below one megabyte are written as 0."""
    return f"{size / GB:.3g}" if abs(size) >= 1e6 else "0"


def longest_part(bound: estimate.Bound) -> str:
    if bound.by == "links":
        return f"links {bound.links / bound.seconds:.0%}"
    return f"{bound.by} {bound.parts[bound.by] / bound.seconds:.0%}"


def split_rows(programs: list[Program]) -> tuple[list[Program], list[Program]]:
    """Split the programs into the rows of the table and the programs without a row.

    The latter take less memory than a training step, and run once or for evaluation.
    """
    most = max((p.memory for p in programs if p.steps and p.tokens), default=0.0)
    small = [p for p in programs if p.what in ("initialisation", "evaluation") and p.memory <= most]
    return [p for p in programs if p not in small], small


def step_notes(programs: list[Program], machine: Machine) -> list[str]:
    """Describe each training step.

    The description has the parts of the minimum time, how to shorten the longest part, and the data
    that the devices exchange.
    """
    out = []
    for p in programs:
        bound = estimate.time_bound(p, machine)
        if bound is None or not (p.steps and p.tokens) or not bound.seconds:
            continue
        parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in bound.parts.items())
        out.append(f"{p.phase}, {p.what}: {parts} ms; links {bound.links * 1e3:.1f} ms")
        if bound.by in estimate.HELP:
            out.append(f"  longest: {bound.by}. What helps: {estimate.HELP[bound.by]}")
        if p.collectives:
            out.append(f"  one device sends {exchanged_data(p)}")
    return out


def exchanged_data(program: Program) -> str:
    """Describe the data that one device sends in one run of a program.

    For each kind of collective: GB, number, and the fraction that matrix products overlap with.
    """
    out = []
    for kind in sorted({c.kind for c in program.collectives}):
        same = [c for c in program.collectives if c.kind == kind]
        sent = sum(c.sent for c in same)
        if sent < 1e6:
            continue
        overlapped = sum(c.sent for c in same if c.asynchronous and c.products) / sent
        out.append(
            f"{sent / GB:.3g} GB in {sum(c.times for c in same):,} {kind} ({overlapped:.0%} during matrix products)"
        )
    return ", ".join(out) or "less than a megabyte"


def plan_line(programs: list[Program], machine: Machine, utilisation: float) -> str:
    """Return one line about the complete plan."""
    days = estimate.plan_days(programs, machine, utilisation)
    if days is None:
        return f"{machine.name}: the manufacturer does not publish figures for this machine, so no times are given."
    count = len(machine.devices)
    steps = sum(p.steps for p in programs if p.tokens)
    return (
        f"{machine.name}, at {utilisation:.0%} of the peak FLOPs of matrix products: {days:.2f} days, "
        f"{days * 24 * count:,.1f} device hours for {steps:,} steps."
    )


def config_report(
    config: str,
    experiment: Experiment,
    programs: list[Program],
    machine: Machine,
    utilisation: float,
) -> str:
    """Return the complete report of one config."""
    count = len(machine.devices)
    rows, small = split_rows(programs)
    out = [
        f"{config} on {machine.name}: {count} device{'s' * (count > 1)} of {machine.memory / GB:.1f} GB",
        program_table(rows, machine),
    ]
    if small:
        out.append(
            f"Also compiled (they need less memory than a training step): {', '.join(f'{p.phase}, {p.what}' for p in small)}."
        )
    mesh = experiment.mesh.over(list(machine.devices))
    out += dict.fromkeys(
        f"Warning: {line}."
        for phase in experiment.plan
        if isinstance(phase, Train)
        for line in sharding.replicated_axes(phase.config.sizes(), mesh)
    )
    out += ["\n".join(step_notes(rows, machine))] if step_notes(rows, machine) else []
    return "\n\n".join([*out, plan_line(programs, machine, utilisation)])


def main() -> None:
    arguments = command_parser("preflight").parse_args()
    # Compilation needs no device, and must not occupy one.
    jax.config.update("jax_platforms", "cpu")
    machine = describe_machine(arguments.on)
    for file in filter(None, (arguments.json, arguments.plot)):
        file.parent.mkdir(parents=True, exist_ok=True)  # an error here comes before the work
    # Compiling may take hours, so a mesh or a batch of any config that does not fit is an error before.
    experiments = {
        config: AotRun(load_experiment(config, arguments.set, corpus=False), machine).experiment
        for config in arguments.configs
    }
    found = {
        config: _checked_programs(config, experiment, machine, arguments)
        for config, experiment in experiments.items()
    }
    if arguments.json:
        everything = {
            config: [asdict(p) | {"memory": p.memory} for p in programs]
            for config, programs in found.items()
        }
        about = {"machine": machine.name, "devices": len(machine.devices), "memory": machine.memory}
        about["xla"] = xla.recorded(Mesh().over(list(machine.devices)))
        write_record(arguments.json, about | {"configs": everything})
    if arguments.plot:
        plots.plot_memory(found, machine.memory, machine.name, arguments.plot)
    if not all(estimate.memory_fits(programs, machine) for programs in found.values()):
        raise UserError(f"at least one config does not fit {machine.name}")


def _checked_programs(
    config: str, experiment: Experiment, machine: Machine, arguments: Namespace
) -> list[Program]:
    """Print the report of a config, and settings that fit or help. Return its programs."""
    experiment, programs = estimate.resolve_auto(experiment, machine, note)
    programs = programs or AotRun(experiment, machine, note).run()
    say(f"\n{config_report(config, experiment, programs, machine, arguments.utilisation)}")
    if estimate.memory_fits(programs, machine):
        if better := estimate.find_faster(experiment, programs, machine, note):
            say(better)
        return programs
    changes = estimate.find_fitting(experiment, machine, note)
    way_out = "no settings that were tried fit"
    if changes:
        way_out = f"it fits with --set {' '.join(changes)}"
    say(f"{config} does not fit {machine.name}: {way_out}")
    return programs


if __name__ == "__main__":
    exits_cleanly(main)
