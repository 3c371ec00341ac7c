"""Run the plan of a config: ``python -m train.pretrain CONFIG [--workdir DIR] [--set a.b=c ...]``

CONFIG is a Python file, or one of the experiments that it names: ``configs/demo.py:scratch``.
Further parts after colons override fields: ``configs/demo.py:scratch:optim.peak_lr=2e-2``.
``--list`` prints the experiments of the file, and ``--show`` all fields of the experiment with
their values, defaults and types.

A stopped run continues with the same command and ends as an uninterrupted run would. These settings
may change in between, because they do not change the result: log_every, checkpoint_every,
checkpoint_minutes, loggers, parallel, data.cache, mesh, and the number of processes.

Several processes, on one host or on many, can share one run if all of them see its folder: start
the same command in each. They find each other if SLURM, Open MPI, Kubernetes or a TPU pod started
them; otherwise give ``--coordinator``, ``--processes`` and ``--process``. ``--processes 1`` runs a
single process under such a launcher.

Exit codes: 0, the run has finished. 75 (EX_TEMPFAIL), SIGTERM stopped the run after saving it, or
another process died. 2, the input is wrong: a config, data, a number that is not finite, a full
disk. 130, Ctrl-C, after saving; a second Ctrl-C ends at once. 1, with a traceback, a fault of
jaxgrow.
"""

from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from train.common.commands import Parser
from train.common.errors import UserError, exits_cleanly
from train.config.experiment import Experiment, listed, load
from train.config.overrides import settings
from train.engine import hosts
from train.engine.loop.trainer import run


def experiments(config: str) -> str:
    """The experiments of a config file, one a line, as they are named on the command line.

    Raises:
      UserError: there are none.
    """
    path, found = config.partition(":")[0], listed(config)
    if not found:
        raise UserError(
            f"{path} has no experiments: functions whose return annotation is Experiment"
        )
    return aligned(
        [(path if name == "config" else f"{path}:{name}", about) for name, about in found.items()]
    )


def fields(experiment: Experiment) -> str:
    """Every field of the experiment: its name for ``--set``, its value, its default and its type."""
    rows = [("setting", "value", "default", "type")]
    rows += [(s.name, _written(s.value), _written(s.default), s.type) for s in settings(experiment)]
    return aligned(rows)


def _written(value: Any) -> str:
    """A value as one would write it after ``--set a.b=``; a dataclass, whose fields have lines of their own, by its name."""
    if value is MISSING:
        return "required"
    if is_dataclass(value):
        return type(value).__name__
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"({', '.join(map(_written, value))})"
    return value if isinstance(value, str) else repr(value)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows of text in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def parser() -> Parser:
    parser = Parser("pretrain", __doc__)
    parser.add_argument("config", help="FILE.py:NAME, or FILE.py with config() -> Experiment")
    parser.add_argument(
        "--workdir", help="folder of the run (default: runs/NAME, by the experiment's field name)"
    )
    parser.add_set()
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="trace so many steps for xprof and Perfetto, in the folder profile of the run",
    )
    parser.add_argument(
        "--show", action="store_true", help="print all fields of the experiment, and run nothing"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the experiments of the file, and run nothing"
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0 with a free port, for several processes (default: found by JAX)",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (default: found by JAX)"
    )
    parser.add_argument(
        "--process",
        type=int,
        metavar="I",
        help="index of this process, from 0 (default: found by JAX)",
    )
    return parser


def main() -> None:
    arguments = parser().parse_args()
    if arguments.list:
        return print(experiments(arguments.config))
    if arguments.show:
        return print(fields(load(arguments.config, arguments.set)))
    if arguments.profile < 0:
        raise UserError(f"--profile takes a number of steps from 0, not {arguments.profile}")
    hosts.join(arguments.coordinator, arguments.processes, arguments.process)
    experiment = hosts.everywhere(lambda: load(arguments.config, arguments.set))
    run(experiment, arguments.workdir or Path("runs") / experiment.name, arguments.profile)


if __name__ == "__main__":
    exits_cleanly(main)
