"""Compare training runs at equal loss: run the configs that have not run yet, and report the FLOPs that each saved.

``python -m train.compare BASELINE CONFIG ... [--seeds 0,1,2] [--frontier 0.4,0.75] [--seconds S]
[--workdir DIR] [--set a.b=c ...]``

A config is ``FILE.py:NAME``, such as ``configs/demo.py:scratch``, or ``FILE.py``. The first one is
the baseline. A config can have individual settings after more colons, such as
``configs/demo.py:ligo:optim.peak_lr=2e-2``. They are applied after the settings of ``--set``, which
apply to all configs: ``--set steps=N`` sets the steps of the baseline, and all other configs keep
their fraction of them. The report says if relative costs change nevertheless. Use `train.sweep` to
tune each config first.

``--seconds 120`` compares with equal time: every config trains for this time on this machine, and
its stages are fractions of the time (`train.extras.timing`). A config with its own time has
``CONFIG:seconds=60``. Compilation, validation and checkpoints are not part of the time; the report
lists them.

``--frontier`` also runs the baseline with these fractions of its steps. The learning rate of each
of these runs decays fully. Savings are measured against the line through them. A fraction can have
individual settings in addition to the settings of the baseline:
``--frontier 0.4:optim.peak_lr=2e-2:optim.warmup=50,0.75``. A run without them whose first steps are
those of the baseline starts from a checkpoint of the baseline, so with ``optim.schedule=wsd`` it
trains only its decay. Its cost includes the shared steps.

``--evaluate wikitext2,piqa [--data DIR]`` adds the scores of `train.evaluate` to each run, on the
local files in DIR.
``--finetune configs/finetune.py:sst2`` adds the scores after fine-tuning (`train.finetune`) with
the best learning rate. These options show whether an equal loss means an equal score.

The command writes these files into the work directory: ``compare.md`` (the report),
``compare.json`` (all numbers, for each seed), ``compare.png`` (loss against FLOPs),
``compare_seconds.png`` (loss against wall-clock time without compilation) and, if layers are
dropped, ``compare_keep.png``.

It is an error if runs were not evaluated on the same data (corpus, tokenizer, split, context,
evaluation batches). A run whose loss becomes infinite or NaN is marked as diverged, and the other
runs continue.
"""

from argparse import Namespace
from dataclasses import replace

from train.analysis.comparing import (
    LENGTHS,
    REPORTS,
    SCORERS,
    run_comparison,
    set_losses,
    shortened_experiment,
)
from train.arguments import command_parser
from train.common.errors import exits_cleanly
from train.config.experiment import Experiment, load_experiment, with_fitting_steps


def main() -> None:
    arguments = command_parser("compare").parse_args()
    folder = arguments.workdir
    loaded, notes = LENGTHS["alike"](arguments.configs, arguments.set)
    configs = [with_fitting_steps(e, folder) for e in loaded]
    notes += [f"{e.name}: {e.seconds:g} s of training were planned." for e in loaded if e.seconds]
    # A scorer reports missing files before the first run.
    scorers = [SCORERS[name](arguments) for name in SCORERS if getattr(arguments, name)]
    shorter = _shorter(arguments, configs[0].steps)
    comparison = run_comparison(configs, shorter, arguments.seeds, folder)
    runs = [*comparison.runs, *comparison.frontier]
    scores = set_losses(runs)
    try:
        for scorer in scorers:
            scores |= scorer(runs)
    finally:  # all runs have finished, so their comparison does not depend on the scores
        REPORTS["markdown"](replace(comparison, notes=tuple(notes), scores=scores), folder)


def _shorter(arguments: Namespace, steps: int) -> list[Experiment]:
    """Return the shorter runs that ``--frontier`` names of a baseline with a number of steps."""
    baseline = f"{arguments.configs[0]}:steps={steps}"
    return [
        shortened_experiment(
            load_experiment(":".join([baseline, *settings]), arguments.set), fraction
        )
        for fraction, settings in arguments.frontier
    ]


if __name__ == "__main__":
    exits_cleanly(main)
