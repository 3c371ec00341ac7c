"""Tune a config: run it with every combination of some settings.

``python -m train.sweep CONFIG --set optim.peak_lr=5e-3,1e-2,2e-2 [--set optim.warmup=50,100]
[--frontier 0.75] [--seeds 0] [--halving 0.25,0.5] [--workdir DIR]``

``--frontier`` runs the config with this fraction of its steps, to tune a point of the frontier.
``--halving`` first runs every combination with each of these fractions of the steps, with a fully
decayed learning rate, and keeps the better half each time (successive halving; Jamieson &
Talwalkar, 2016). The report includes the cost of these runs. A setting with one value applies to
all runs and is not part of their names. Write tuples in brackets:
``--set 'model.layers=(1,2),(2,2)'``.

The work directory (``--workdir``, default: runs/sweep) contains one folder for each run. The same
command therefore continues a stopped sweep. If the config imports a small model, the finished runs
of this model must be in the same directory. The results are written to ``NAME.md`` and
``NAME.json`` there, with the best settings first, and with a warning if the best value is the
smallest or the largest of the values that were tried. If a run averages its weights (``optim.ema``),
the loss of the average decides.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from train.analysis.comparing import attempt_run, check_devices, shortened_experiment
from train.analysis.runs import refuse_unlike
from train.arguments import command_parser
from train.common.errors import exits_cleanly
from train.common.files import write_record, write_text
from train.common.output import say
from train.config.experiment import Experiment, experiment_json, load_experiment
from train.config.overrides import refuse_seeds
from train.extras.advice.settings import AVERAGE, Tried, settings_table

# Maximum bytes of the name of a run: file systems allow 255, and the seed is appended.
LONGEST = 200


def all_combinations(
    config: str, listed: dict[str, list[str]], fraction: float | None
) -> list[tuple[dict[str, str], Experiment]]:
    """Return the experiment of every combination, with the settings that differ.

    All experiments are checked here, before the first run of the sweep.
    """
    out = []
    for combination in itertools.product(*listed.values()):
        settings = dict(zip(listed, combination, strict=True))
        base = load_experiment(config, [f"{name}={value}" for name, value in settings.items()])
        swept = {name: value for name, value in settings.items() if len(listed[name]) > 1}
        out.append((swept, base if fraction is None else shortened_experiment(base, fraction)))
    return out


def run_name(experiment: str, settings: dict[str, str]) -> str:
    """Return the name of a run: the name of its experiment and the settings that differ.

    A long name is cut and ends in a hash of the complete name.
    """
    name = "-".join(
        [experiment, *(f"{field}={value}".replace("/", "_") for field, value in settings.items())]
    )
    if len(name.encode()) <= LONGEST:
        return name
    return f"{name.encode()[: LONGEST - 17].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _halved(
    experiments: Sequence[tuple[dict[str, str], Experiment]],
    fractions: Sequence[float],
    seeds: Sequence[int],
    workdir: Path,
) -> list[Tried]:
    """Run all combinations, and continue with the better half of them after each fraction.

    Args:
      experiments: settings of each combination, with the experiment of all steps.
      fractions: increasing fractions of the steps; the last runs have all steps.
      seeds: random seeds of each combination.
      workdir: folder of all runs.

    Returns:
      The combinations. The longest runs come first, and among equally long runs, the best one.
    """
    tried = []
    left = list(experiments)
    for fraction in [*fractions, None]:
        shortened = [_named(settings, full, fraction) for settings, full in left]
        check_devices(shortened, seeds, workdir)
        rung = []
        for (settings, full), experiment in zip(left, shortened, strict=True):
            runs = [attempt_run(experiment, seed, workdir, {}) for seed in seeds]
            rung.append((Tried(settings, runs, fraction), full))
        rung.sort(key=lambda pair: pair[0].loss)
        tried = [t for t, _ in rung] + tried
        better = rung[: -(-len(rung) // 2)]
        left = [(t.settings, full) for t, full in better if t.loss < math.inf]
    return tried


def _named(settings: dict[str, str], full: Experiment, fraction: float | None) -> Experiment:
    """The experiment of a run, with a fraction of the steps."""
    experiment = full if fraction is None else shortened_experiment(full, fraction)
    return replace(experiment, name=run_name(experiment.name, settings))


def main() -> None:
    arguments = command_parser("sweep").parse_args()
    listed = arguments.set
    swept = {name: each for name, each in listed.items() if len(each) > 1}
    experiments = all_combinations(arguments.config, listed, arguments.frontier)
    refuse_unlike([(run_name(e.name, of), experiment_json(e)) for of, e in experiments])
    refuse_seeds(e for _, e in experiments)
    tried = _halved(experiments, arguments.halving, arguments.seeds, arguments.workdir)
    text = settings_table(tried, swept)
    name = experiments[0][1].name
    write_text(arguments.workdir / f"{name}.md", text)
    results = []
    for t in tried:
        losses = [None if r is None else r.loss for r in t.runs]
        part = {"of the steps": t.fraction} if t.fraction else {}
        averages = [None if r is None else r.result.get(AVERAGE) for r in t.runs]
        part |= {AVERAGE: averages} if any(averages) else {}
        results.append({"settings": t.settings, "loss": losses} | part)
    write_record(arguments.workdir / f"{name}.json", results)
    say(f"\n{text}")


if __name__ == "__main__":
    exits_cleanly(main)
