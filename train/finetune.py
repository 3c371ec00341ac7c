"""Fine-tune a model on a task with several learning rates and seeds:

``python -m train.finetune CONFIG --model MODEL [--lr 1e-5,2e-5] [--seeds 0,1,2] [--workdir DIR] [--set data.path=DIR ...]``

CONFIG names a Python file, or a fine-tuning that the file defines: ``configs/finetune.py:sst2``.
MODEL is the folder of a run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face
folder with its tokenizer.

The work directory (``--workdir``, default: runs/finetune) contains one folder for each learning
rate and seed. Each of these runs works like a run of `train.pretrain`: the same command continues
it after a stop, and its cost includes the cost of the run that it starts from. The command writes
the scores of every run on the development data to ``CONFIG-MODEL.md`` and ``.json`` there. If there
are several learning rates, the one with the best mean over the seeds is marked. (As in papers, the
learning rate is chosen on the data that also evaluate it, so the best score is slightly too good.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from jaxgrow.tables import markdown_table
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import write_record, write_text
from train.common.output import say
from train.config.experiment import load_as
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.tuning import Scores, best_rate, tune_model


def tuning_table(tuning: FineTuning, model: Path, found: Mapping[float, Sequence[Scores]]) -> str:
    """Return the results as Markdown: one line for each learning rate, with the best one marked."""
    splits = next(iter(found.values()))[0]
    names = [(split, metric) for split, metrics in splits.items() for metric in metrics]
    heads = [metric if len(splits) == 1 else f"{metric}, {split}" for split, metric in names]
    rows = []
    for rate, runs in found.items():
        cells = [_score_cell([of[split][metric] for of in runs]) for split, metric in names]
        marked = " (best)" if len(found) > 1 and rate == best_rate(found) else ""
        rows.append((f"{rate:g}{marked}", *cells))
    seeds = ", ".join(map(str, tuning.seeds))
    about = f"{tuning.name} with {model.name}: {tuning.epochs:g} epochs, batch {tuning.batch}, seeds {seeds}"
    text = f"{about}."
    if len(tuning.seeds) > 1:
        text += " Scores: mean ± standard deviation [value of each seed]."
    lost = [f"{rate:g}" for rate in tuning.learning_rates if rate not in found]
    if lost:
        text += f" Diverged: {', '.join(lost)}."
    if len(found) > 1 and best_rate(found) in (min(found), max(found)):
        which = "smallest" if best_rate(found) == min(found) else "largest"
        text += f" The best learning rate is the {which} that was tried: try others."
    return f"{markdown_table(('learning rate', *heads), rows)}\n\n{text}\n"


def _score_cell(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values):.4f} [{', '.join(f'{v:.4f}' for v in values)}]"


def main() -> None:
    arguments = command_parser("finetune").parse_args()
    tuning = load_as(FineTuning, arguments.config, arguments.set)[1]
    learning_rates = tuple(arguments.lr) or tuning.learning_rates
    seeds = tuple(arguments.seeds) if arguments.seeds else tuning.seeds
    try:
        tuning = replace(tuning, learning_rates=learning_rates, seeds=seeds)
    except ValueError as error:
        raise UserError(str(error)) from error
    found = tune_model(tuning, arguments.model, arguments.workdir)
    text = tuning_table(tuning, arguments.model, found)
    name = f"{tuning.name}-{arguments.model.resolve().name}"
    summary = {
        "task": tuning.name,
        "model": str(arguments.model),
        "seeds": tuning.seeds,
        **({"best": best_rate(found)} if len(found) > 1 else {}),
        "rates": {f"{rate:g}": runs for rate, runs in found.items()},
    }
    write_record(arguments.workdir / f"{name}.json", summary)
    write_text(arguments.workdir / f"{name}.md", text)
    say(f"\n{text}")


if __name__ == "__main__":
    exits_cleanly(main)
