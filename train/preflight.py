"""Will it fit, and what will it take? Every program of a plan, compiled for a machine that need not be there:

``python -m train.preflight CONFIG [CONFIG ...] --on h100:8 [--set a.b=c ...] [--utilisation 0.4] [--json FILE] [--plot FILE]``

A row is a program: what it needs on every device, what a run of it computes and exchanges, and the time that it takes at least:
FLOPs over the devices' peak, or what is in memory, read and written once, over its bandwidth, or what is exchanged over the
links, whichever is largest. Real steps take longer, by how much nobody knows beforehand: ``--utilisation`` says which part of
the peak to assume for the days and device hours. Where something does not fit, settings with which it would are looked for.
No data are read.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import jax

from train.ahead import estimate
from train.ahead.machines import CHIPS, Machine, described
from train.ahead.rehearsal import Program, Rehearsal
from train.errors import UserError, exits_cleanly
from train.experiment import load
from train.results import plots
from train.results.runs import markdown

GB = 1e9


def table(programs: list[Program], machine: Machine) -> str:
    """Markdown: memory of one device in GB, and of a run of each program what all devices compute and each one sends."""
    head = ["phase", "program", "parameters", "moments", "other", "temporary", "left", "FLOPs", "sent", "exchanges"]
    head += ["at least", "by", "tokens/s at most"]
    rows = []
    for p in programs:
        memory = [f"{x / GB:.3g}" for x in (p.parameters, p.moments, p.other, p.temporary, machine.memory - p.memory)]
        kinds: dict[str, int] = {}
        for c in p.collectives:
            kinds[c.kind] = kinds.get(c.kind, 0) + c.times
        bound = estimate.bound(p, machine)
        time = ["", "", ""]
        if bound is not None and bound.seconds:
            time = [f"{bound.seconds * 1e3:.1f} ms", bound.by, f"{p.tokens / bound.seconds:,.0f}" if p.tokens else ""]
        sent = f"{sum(c.sent for c in p.collectives) / GB:.3g}"
        exchanges = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        rows.append([p.phase, p.what, *memory, f"{p.flops:.3g}", sent, exchanges, *time])
    return markdown(head, rows)


def total(programs: list[Program], machine: Machine, utilisation: float) -> str:
    """A line on the whole plan."""
    bounds = [(p, estimate.bound(p, machine, utilisation)) for p in programs]
    if any(b is None for _, b in bounds):
        return f"{machine.name}: nobody states what this machine computes a second, so no times."
    seconds = sum(p.steps * b.seconds for p, b in bounds if b is not None)
    devices = len(machine.devices)
    return (
        f"{machine.name}, at {utilisation:.0%} of the peak of its products: {seconds / 86400:.2f} days, "
        f"{seconds * devices / 3600:,.1f} device hours for {sum(p.steps for p in programs if p.tokens):,} steps."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="FILE.py:NAME, or FILE.py")
    parser.add_argument("--on", required=True, metavar="KIND:SIZE", help=f"h100:8, v5e:2x4, .. of {', '.join(CHIPS)}")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the configs")
    parser.add_argument("--utilisation", type=float, default=0.4, help="part of the peak that is assumed (0.4)")
    parser.add_argument("--json", type=Path, help="where to write all of it")
    parser.add_argument("--plot", type=Path, help="where to draw the memory of each program")
    arguments = parser.parse_args()
    if not 0 < arguments.utilisation <= 1:
        raise UserError(f"--utilisation lies between 0 and 1, but is {arguments.utilisation}")
    jax.config.update("jax_platforms", "cpu")  # no device is needed, and none that is there is taken
    machine = described(arguments.on)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    found, missing = {}, False
    for config in arguments.configs:
        experiment = load(config, arguments.set)
        programs = found[config] = Rehearsal(experiment, machine, say).run()
        memory = f"{machine.memory / GB:.1f} GB a device"
        print(f"\n{config} on {machine.name}, {len(machine.devices)} devices, {memory}\n\n{table(programs, machine)}\n")
        print(total(programs, machine, arguments.utilisation))
        if not estimate.fits(programs, machine):
            missing = True
            changes = estimate.fitting(experiment, machine, say)
            wayout = (
                f"it would with --set {' --set '.join(' '.join(changes).split())}" if changes else "nothing tried does"
            )
            print(f"{config} does not fit {machine.name}: {wayout}")
    if arguments.json:
        everything = {c: [asdict(p) | {"memory": p.memory} for p in programs] for c, programs in found.items()}
        about = {"machine": machine.name, "devices": len(machine.devices), "memory": machine.memory}
        arguments.json.write_text(json.dumps(about | {"configs": everything}, indent=1) + "\n")
    if arguments.plot:
        plots.memory(found, machine.memory, machine.name, arguments.plot)
    if missing:
        raise UserError(f"not everything fits {machine.name}")


if __name__ == "__main__":
    exits_cleanly(main)
