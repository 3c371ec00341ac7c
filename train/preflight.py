"""Will it fit, and what will it take at least? Compiles every program of a plan for a machine that need not be there:

``python -m train.preflight CONFIG [CONFIG ...] --on h100:8 [--set a.b=c ...] [--utilisation 0.4] [--json FILE] [--plot FILE]``

A row is a program. Its memory is that of one device, its FLOPs are those of all devices in one run,
and "at least" is a roofline of the compiled program: the sum over its kernels of max(FLOPs / peak,
bytes / bandwidth), or the time that the links between devices and hosts are busy, if that is
longer. "MFU at most" is the model FLOPs utilisation of a step that reaches it. Real steps take
longer, and how much longer only a measurement shows: ``--utilisation`` is the part of the peak to
assume for days and device hours. If something does not fit, settings with which it would are looked
for; if memory is left over, settings that use it. No data are read. A config is ``FILE.py:NAME``,
or ``FILE.py:NAME:batch=16`` with settings of its own.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import jax

from jaxgrow import sharding
from train.analysis import plots
from train.analysis.runs import markdown
from train.aot import estimate
from train.aot.compilation import Program, Rehearsal
from train.aot.machines import CHIPS, Machine, described
from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import write_json
from train.config.experiment import Experiment, load

GB = 1e9


def table(programs: list[Program], machine: Machine) -> str:
    """Markdown: memory of one device in GB, and what a run of each program computes and takes at least."""
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
    ]
    head += ["at least", "longest part", "MFU at most", "tokens/s at most"]
    rows = []
    for p in programs:
        sizes = (p.parameters, p.moments, p.other, p.temporary, machine.memory - p.memory)
        row = [
            p.phase,
            p.what,
            f"{p.steps:,}" if p.steps else "",
            *map(gigabytes, sizes),
            f"{p.flops:.3g}",
        ]
        bound = estimate.bound(p, machine)
        time = ["", "", "", ""]
        if bound is not None and bound.seconds:
            time = [f"{bound.seconds * 1e3:.1f} ms", longest(bound), "", ""]
            if p.steps and p.tokens:
                time[2:] = [f"{bound.utilisation:.1%}", f"{p.tokens / bound.seconds:,.0f}"]
        rows.append(row + time)
    return markdown(head, rows)


def gigabytes(size: float) -> str:
    """GB, to three digits; less than a megabyte is 0."""
    return f"{size / GB:.3g}" if abs(size) >= 1e6 else "0"


def longest(bound: estimate.Bound) -> str:
    if bound.by == "links":
        return f"links {bound.links / bound.seconds:.0%}"
    return f"{bound.by} {bound.parts[bound.by] / bound.seconds:.0%}"


def folded(programs: list[Program]) -> tuple[list[Program], list[Program]]:
    """``(programs of the table, those that take less memory than a step and run once or for evaluation)``."""
    most = max((p.memory for p in programs if p.steps and p.tokens), default=0.0)
    small = [p for p in programs if p.what in ("initialisation", "evaluation") and p.memory <= most]
    return [p for p in programs if p not in small], small


def notes(programs: list[Program], machine: Machine) -> list[str]:
    """Of each training step: the parts of its time, what helps the longest one, and what its devices exchange."""
    out = []
    for p in programs:
        bound = estimate.bound(p, machine)
        if bound is None or not (p.steps and p.tokens) or not bound.seconds:
            continue
        parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in bound.parts.items())
        out.append(f"{p.phase}, {p.what}: {parts} ms; links {bound.links * 1e3:.1f} ms")
        if bound.by in estimate.HELP:
            out.append(f"  longest: {bound.by}. What helps: {estimate.HELP[bound.by]}")
        if p.collectives:
            out.append(f"  one device sends {exchanged(p)}")
    return out


def exchanged(program: Program) -> str:
    """What one device sends in a run: GB and number of each kind of exchange, and how much of it may overlap with compute."""
    out = []
    for kind in sorted({c.kind for c in program.collectives}):
        same = [c for c in program.collectives if c.kind == kind]
        sent = sum(c.sent for c in same)
        if sent < 1e6:
            continue
        overlapped = sum(c.sent for c in same if c.asynchronous) / sent
        out.append(
            f"{sent / GB:.3g} GB in {sum(c.times for c in same):,} {kind} ({overlapped:.0%} asynchronous)"
        )
    return ", ".join(out) or "less than a megabyte"


def total(programs: list[Program], machine: Machine, utilisation: float) -> str:
    """A line on the whole plan."""
    days = estimate.days(programs, machine, utilisation)
    if days is None:
        return f"{machine.name}: the manufacturer states no figures for this machine, so there are no times."
    count = len(machine.devices)
    steps = sum(p.steps for p in programs if p.tokens)
    return (
        f"{machine.name}, at {utilisation:.0%} of the peak of its products: {days:.2f} days, "
        f"{days * 24 * count:,.1f} device hours for {steps:,} steps."
    )


def report(
    config: str,
    experiment: Experiment,
    programs: list[Program],
    machine: Machine,
    utilisation: float,
) -> str:
    """Everything about one config."""
    count = len(machine.devices)
    rows, small = folded(programs)
    out = [
        f"{config} on {machine.name}: {count} device{'s' * (count > 1)} of {machine.memory / GB:.1f} GB",
        table(rows, machine),
    ]
    if small:
        out.append(
            f"Also compiled, with less memory than a step: {', '.join(f'{p.phase}, {p.what}' for p in small)}."
        )
    mesh = experiment.mesh.over(list(machine.devices))
    out += [f"Warning: {line}." for line in sharding.whole(experiment.model.sizes(), mesh)]
    out += ["\n".join(notes(rows, machine))] if notes(rows, machine) else []
    return "\n\n".join([*out, total(programs, machine, utilisation)])


def main() -> None:
    parser = Parser("preflight", __doc__)
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="CONFIG",
        help="FILE.py:NAME or FILE.py, with settings after more colons: FILE.py:NAME:batch=16",
    )
    parser.add_argument(
        "--on",
        required=True,
        metavar="KIND:SIZE",
        help=f"machine, such as h100:8 or v5e:2x4; KIND is one of {', '.join(CHIPS)}",
    )
    parser.add_set("override fields of every config")
    parser.add_argument(
        "--utilisation", type=float, default=0.4, help="assumed fraction of the devices' peak"
    )
    parser.add_argument(
        "--json", type=Path, help="also write all numbers to this file (default: none)"
    )
    parser.add_argument(
        "--plot", type=Path, help="also draw the memory of each program (default: none)"
    )
    arguments = parser.parse_args()
    if not 0 < arguments.utilisation <= 1:
        raise UserError(f"--utilisation lies between 0 and 1, but is {arguments.utilisation}")
    jax.config.update(
        "jax_platforms", "cpu"
    )  # no device is needed, and none that is there is taken
    machine = described(arguments.on)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    found, missing = {}, False
    for config in arguments.configs:
        experiment, programs = estimate.settled(load(config, arguments.set), machine, say)
        programs = found[config] = programs or Rehearsal(experiment, machine, say).run()
        print(f"\n{report(config, experiment, programs, machine, arguments.utilisation)}")
        if not estimate.fits(programs, machine):
            missing = True
            changes = estimate.fitting(experiment, machine, say)
            wayout = f"it would with --set {' '.join(changes)}" if changes else "nothing tried does"
            print(f"{config} does not fit {machine.name}: {wayout}")
        elif better := estimate.using(experiment, programs, machine, say):
            print(better)
    if arguments.json:
        everything = {
            c: [asdict(p) | {"memory": p.memory} for p in programs] for c, programs in found.items()
        }
        about = {"machine": machine.name, "devices": len(machine.devices), "memory": machine.memory}
        write_json(arguments.json, about | {"configs": everything})
    if arguments.plot:
        plots.memory(found, machine.memory, machine.name, arguments.plot)
    if missing:
        raise UserError(f"not everything fits {machine.name}")


if __name__ == "__main__":
    exits_cleanly(main)
