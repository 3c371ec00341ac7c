"""Run the plan of a config: ``python -m train.pretrain CONFIG [--workdir DIR] [--set a.b=c ...]``

CONFIG names a Python file, or an experiment that the file defines: ``configs/demo.py:scratch``.
Further parts after colons override fields: ``configs/demo.py:scratch:optim.peak_lr=2e-2``.
``--list`` prints the experiments of the file, and ``--show`` prints all fields of the experiment
with their values, defaults and types.

The same command continues a stopped run, which then ends like an uninterrupted run. Settings of the
execution may change in between, because they change what the run computes only by rounding:
accumulate, mesh, parallel, model.remat, model.attention, model.scan_layers, model.head_positions,
eval_every, eval_batches, log_every, checkpoint_every, checkpoint_minutes, keep_every, on_nan,
most_skipped, loggers, data.cache, and the number of processes. The key "changes" of config.json and
result.json lists each change with its step.

--from RUN[@STEP] starts a new run from a checkpoint of another run, with its optimizer state, its
position in the data, its log and its cost so far. CONFIG may have more steps, or another schedule,
learning rate, batch or corpus, but the same model and optimizer. With the same config and seed, the
new run ends bitwise like the other one on a CPU. If the data or their order differ, they start from
the beginning, and a line says so. The same command continues the new run, too.

Settings for long runs, besides those that --show prints with their defaults:
  keep_every=K      never delete every K-th checkpoint (0: keep only the two newest ones)
  on_nan=skip       leave out the update of a step whose loss or gradients are not finite, instead of
                    ending the run (on_nan=stop)
  most_skipped=N    with on_nan=skip, end the run after more than N such steps in a row

Settings of text:
  data.attend=document  a token sees only its own document, and no token predicts the next document;
                        attend=row (the default): a token sees all documents of its row

Data of several sources (docs/howto/data.md):
  data.path='{wiki: 0.7, code/*.jsonl.gz: 0.3}'   files, folders or patterns with their weights
  data.path='[wiki, code]'                        without weights: in proportion to their tokens
  data.valid_path='{wiki: w.txt, code: c.txt}'    validation sets with names; val_loss/wiki is the
                                                  loss of one, and val_loss the mean over all tokens

Several processes, on one host or on many, can share one run if all of them can access its folder.
Start the same command in each process. The processes find each other if SLURM, Open MPI, Kubernetes
or a TPU pod started them. Otherwise give ``--coordinator``, ``--processes`` and ``--process``.
``--processes 1`` runs a single process under such a launcher.

Exit codes: 0: the run has finished. 75 (EX_TEMPFAIL): SIGTERM, SIGHUP or a closed output stopped
the run after saving it, or another process ended early. 2: the input is wrong (a config, data, a number that is not finite) or
the disk is full. 130: Ctrl-C, after saving; a second Ctrl-C exits immediately. 1, with a traceback:
an error in jaxgrow.
"""

from pathlib import Path

from train.arguments import LISTINGS, command_parser
from train.common import hosts
from train.common.errors import exits_cleanly
from train.common.output import say
from train.config.experiment import load_experiment
from train.run.trainer import run_experiment


def main() -> None:
    arguments = command_parser("pretrain").parse_args()
    if arguments.list or arguments.show:
        return say(LISTINGS["settings"](arguments))
    by_hand = (arguments.coordinator, arguments.processes, arguments.process)
    hosts.JOINING["processes"](*by_hand)
    experiment = hosts.on_all_processes(lambda: load_experiment(arguments.config, arguments.set))
    folder = arguments.workdir or Path("runs") / experiment.name
    result = run_experiment(experiment, folder, arguments.profile, start=arguments.start)
    if experiment.seconds:
        compiling = result["compile_seconds"]
        hosts.print_note(
            f"{experiment.name}: {experiment.seconds:g} s of training were planned, and "
            f"{result['seconds'] - compiling:.1f} s were used, without {compiling:.1f} s of compilation"
        )


if __name__ == "__main__":
    exits_cleanly(main)
