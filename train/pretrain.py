"""Runs the plan of a config: ``python -m train.pretrain CONFIG [--workdir DIR] [--set a.b=c ...]``.

CONFIG is a Python file, or one of the experiments that it names: ``configs/demo.py:scratch``, with settings of its own after
more colons: ``configs/demo.py:scratch:optim.peak_lr=2e-2``.

A run that was stopped, however, goes on with the same command and ends as if it had never been stopped. What does not decide
what it computes may differ then: log_every, checkpoint_every, parallel, data.cache, mesh, and the number of processes.

Several processes, on one host or many, do one run, in a folder that all of them see: the same command in each. Where SLURM,
Open MPI, Kubernetes or a TPU pod started them, they find each other; else ``--coordinator``, ``--processes`` and ``--process``
say where. ``--processes 1`` is one alone, whatever started it.

The exit code is 0 when the run has finished, 75 (EX_TEMPFAIL) when SIGTERM stopped it and it has saved, 2 when something is
wrong: a config, data, a number that is not finite, a full disk; 130 on Ctrl-C, and 1 with a traceback on a fault of ours. It is
75, too, in the processes that are left when another one died.
"""

import argparse
from pathlib import Path

from train import hosts
from train.errors import exits_cleanly
from train.experiment import load
from train.loop.trainer import run


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", help="FILE.py:NAME, as configs/demo.py:scratch; or FILE.py, with config() -> Experiment"
    )
    parser.add_argument("--workdir", help="where the run lives (default: runs/<name of the experiment>)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the config")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of several processes: a free port at process 0")
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    arguments = parser.parse_args()
    hosts.join(arguments.coordinator, arguments.processes, arguments.process)
    experiment = hosts.everywhere(lambda: load(arguments.config, arguments.set))
    run(experiment, arguments.workdir or Path("runs") / experiment.name)


if __name__ == "__main__":
    exits_cleanly(main)
