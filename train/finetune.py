"""Fine-tunes a model on a task, with each of some rates and seeds:

``python -m train.finetune CONFIG --model MODEL [--lr 1e-5,2e-5] [--seeds 0,1,2] [--workdir DIR] [--set data.path=DIR ...]``

CONFIG is a Python file, or one of the fine-tunings that it names: ``configs/finetune.py:sst2``. MODEL is the folder of a
finished run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face folder, with its tokenizer.

Each rate and seed is a run in a folder of its own, which `train.pretrain` would run alike: stopped, it goes on by the same
command; its cost is counted, with that of the run it begins from. Writes ``<name>-<model>.md`` and ``.json`` into the work
directory: what each scores on the development data, all of them, and the best rate by its mean over the seeds. (Papers choose
rates so, too: the best of many rates on the data that judge is a little too good.)
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import TypeAlias

from train.errors import exits_cleanly
from train.experiment import load_as, warn
from train.finetuning import FineTuning
from train.loop.trainer import run
from train.overrides import numbers
from train.run.workdir import Workdir
from train.tasks.supervised import score

Scores: TypeAlias = Mapping[str, Mapping[str, float]]  # split -> metric -> value


def finetune(tuning: FineTuning, model: Path, workdir: Path) -> dict[float, list[Scores]]:
    """Runs, or reads, every rate with every seed: rate -> scores, one a seed."""
    model = model.expanduser().resolve()
    return {rate: [_one(tuning, model, rate, seed, workdir) for seed in tuning.seeds] for rate in tuning.rates}


def _one(tuning: FineTuning, model: Path, rate: float, seed: int, workdir: Path) -> Scores:
    experiment = tuning.of(model, rate, seed)
    warn(experiment)
    folder = workdir / f"{experiment.name}-seed{seed}"
    run(experiment, folder)
    kept = Workdir(folder)
    if (scores := kept.scores) is None:
        scores = score(folder, experiment.data)  # type: ignore[arg-type]
        kept.keep_scores(scores)
    return scores


def best(found: Mapping[float, Sequence[Scores]]) -> float:
    """The rate with the greatest mean of the task's own metric."""
    return max(found, key=lambda rate: mean(own(scores) for scores in found[rate]))


def own(scores: Scores) -> float:
    """The task's own metric."""
    return next(iter(next(iter(scores.values())).values()))


def table(tuning: FineTuning, model: Path, found: Mapping[float, Sequence[Scores]]) -> str:
    """Markdown: a line a rate, the best one marked."""
    splits = next(iter(found.values()))[0]
    names = [(split, metric) for split, metrics in splits.items() for metric in metrics]
    heads = [metric if len(splits) == 1 else f"{metric}, {split}" for split, metric in names]
    lines = [f"| rate | {' | '.join(heads)} |", "|" + " --- |" * (len(heads) + 1)]
    for rate, runs in found.items():
        cells = [_cell([scores[split][metric] for scores in runs]) for split, metric in names]
        lines.append(f"| {rate:g}{' (best)' * (rate == best(found))} | {' | '.join(cells)} |")
    seeds = ", ".join(map(str, tuning.seeds))
    about = f"{tuning.name} by {model.name}: {tuning.epochs:g} epochs, batch {tuning.batch}, seeds {seeds}"
    said = f"{about}; several seeds: the mean, ± the deviation, and in brackets each."
    if len(found) > 1 and best(found) in (min(found), max(found)):
        said += (
            f" The best rate is the {'least' if best(found) == min(found) else 'greatest'} that was tried: try others."
        )
    return "\n".join([*lines, "", said]) + "\n"


def _cell(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values):.4f} [{', '.join(f'{v:.4f}' for v in values)}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="FILE.py:NAME, as configs/finetune.py:sst2")
    parser.add_argument("--model", type=Path, required=True, help="its folder")
    parser.add_argument("--lr", default="", help="peak rates in place of the config's, such as 1e-5,2e-5")
    parser.add_argument("--seeds", default="", help="in place of the config's, such as 0,1,2")
    parser.add_argument("--workdir", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a field of the config")
    arguments = parser.parse_args()
    tuning = load_as(FineTuning, arguments.config, arguments.set)[1]
    if rates := numbers(arguments.lr, float, "--lr"):
        tuning = replace(tuning, rates=tuple(rates))
    if seeds := numbers(arguments.seeds, int, "--seeds"):
        tuning = replace(tuning, seeds=tuple(seeds))
    found = finetune(tuning, arguments.model, arguments.workdir)
    text, name = table(tuning, arguments.model, found), f"{tuning.name}-{arguments.model.resolve().name}"
    summary = {"task": tuning.name, "model": str(arguments.model), "best": best(found), "seeds": tuning.seeds}
    summary |= {"rates": {f"{rate:g}": runs for rate, runs in found.items()}}
    (arguments.workdir / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (arguments.workdir / f"{name}.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    exits_cleanly(main)
