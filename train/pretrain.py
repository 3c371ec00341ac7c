"""Runs the plan of a config: ``python -m train.pretrain CONFIG [--workdir DIR] [--set a.b=c ...]``.

CONFIG is a Python file, or one of the experiments that it names: ``configs/demo.py:scratch``, with settings of its own after
more colons: ``configs/demo.py:scratch:optim.peak_lr=2e-2``.

A run that was stopped, however, goes on with the same command and ends as if it had never been stopped. What does not decide
what it computes may differ then: log_every, checkpoint_every, parallel, data.cache.

The exit code is 0 when the run has finished, 75 (EX_TEMPFAIL) when SIGTERM stopped it and it has saved, 2 when something is
wrong: a config, data, a number that is not finite, a full disk; 130 on Ctrl-C, and 1 with a traceback on a fault of ours.
"""

import argparse
from pathlib import Path

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
    arguments = parser.parse_args()
    experiment = load(arguments.config, arguments.set)
    run(experiment, arguments.workdir or Path("runs") / experiment.name)


if __name__ == "__main__":
    exits_cleanly(main)
