"""Judges a model without training it: ``python -m train.evaluate MODEL --tasks wikitext2,lambada,blimp [--data DIR]``

MODEL is the folder of a finished run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face folder.

A task is one of

    wikitext2 wikitext103 ptb bits_per_byte   perplexity by token and by word, bits per byte (the last: all .txt files)
    lambada                                   the last word: accuracy, perplexity
    blimp                                     minimal pairs: accuracy, over all phenomena and of each
    piqa hellaswag arc_easy arc_challenge     multiple choice: accuracy, and by likelihood per character
    FILE                                      any text, as wikitext2
    cola sst2 .. squad1 squad2                of a model that was fine-tuned on it: the task's metrics (`train.finetune`)

read from the published files in DIR, or in DIR/TASK, or from sets that tensorflow-datasets has prepared in DIR; nothing is
downloaded. Each token of a text is predicted once, from up to a context of tokens before it; windows move on by ``--stride``
tokens (by default, a context). Formats and counts are those of the lm-evaluation-harness, which itself runs on any of these
models by `train.tasks.harness`.
"""

from pathlib import Path
from typing import Any

from train.commands import Parser
from train.data.labelled.task import NAMES, Labelled
from train.data.text import name_of
from train.errors import UserError, exits_cleanly
from train.files import write_json
from train.run.workdir import Workdir
from train.state.opened import config_of, opened
from train.tasks.scoring import Scorer
from train.tasks.supervised import score
from train.tasks.zero_shot import evaluate, found


def judged(
    model: Path, names: list[str], data: Path, tokenizer: str | None = None, stride: int | None = None
) -> dict[str, dict[str, Any]]:
    """What the model scores in each task.

    Raises:
      UserError: there is no such model, no such task, or its files lack.
    """
    learned = [name for name in names if name in NAMES]
    others = [name for name in names if name not in NAMES]
    results: dict[str, dict[str, Any]] = {}
    if others:
        found(others, data)  # before anything is loaded
        results = evaluate(Scorer(opened(model, tokenizer), progress=True), others, data, stride)
    for name in learned:
        where = data / name if (data / name).is_dir() else data
        # As it was fine-tuned, where the folder says: other windows would give other answers.
        run = Workdir(model)
        was = run.config["data"].get("Labelled", {}) if run.finished else {}
        read: dict[str, Any] = {"length": config_of(model).length} | {
            k: was[k] for k in ("length", "stride") if k in was
        }
        task = Labelled(name, str(where), tokenizer=tokenizer or name_of(model), **read)
        scores = score(model, task)
        results[name] = {f"{metric}, {split}": value for split, of in scores.items() for metric, value in of.items()}
    return {name: results[name] for name in names}


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a number."""
    rows = [
        (task, name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
        for task, result in results.items()
        for name, value in result.items()
        if isinstance(value, int | float)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def main() -> None:
    parser = Parser("evaluate", __doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--tasks", required=True, metavar="A,B", help="such as wikitext2,lambada")
    parser.add_argument("--data", type=Path, default=Path("."), metavar="DIR", help="folder of their files")
    parser.add_argument("--tokenizer", help="tokenizer.json, a folder, or bytes (default: that of MODEL)")
    parser.add_argument("--stride", type=int, help="tokens between windows over a text (default: the context)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file (default: none)")
    arguments = parser.parse_args()
    names = [name for name in arguments.tasks.split(",") if name]
    if not names:
        raise UserError("--tasks names none")
    results = judged(
        arguments.model.expanduser(), names, arguments.data.expanduser(), arguments.tokenizer, arguments.stride
    )
    if arguments.json:
        write_json(arguments.json, {"model": str(arguments.model), "tasks": results})
    print(table(results))


if __name__ == "__main__":
    exits_cleanly(main)
