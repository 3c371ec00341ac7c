"""Evaluate a model without training it: ``python -m train.evaluate MODEL --tasks wikitext2,lambada_openai,blimp [--data DIR]``

MODEL is the folder of a run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face
folder.

A task is one of

    wikitext2 wikitext103 ptb bits_per_byte   perplexity by token and by word, bits per byte (bits_per_byte: of all .txt files)
    FILE                                      the same numbers for any text file
    cola sst2 ... squad1 squad2               the metrics of a task that the model was fine-tuned on (`train.finetune`)
    lambada_openai blimp piqa hellaswag ...   any task or group of the lm-evaluation-harness (``pip install -e '.[eval]'``)

Texts and the tasks of `train.finetune` are read from the published files in DIR or in DIR/TASK.
Nothing is downloaded for them. Each token of a text is predicted once, from the tokens before it
(up to one context). Windows advance by ``--stride`` tokens (by default, by the context length).

The harness itself runs the tasks of the harness. The numbers are therefore the numbers of the
harness, with standard errors. With ``--data DIR`` the datasets are local: the published files of
LAMBADA, BLiMP, PIQA, HellaSwag, ARC and WikiText, or copies of the dataset repositories, such as
DIR/allenai/sciq. Without ``--data`` the harness downloads datasets. ``--include`` names a folder of
YAML files with your own tasks. A masked model scores a continuation by its pseudo-likelihood: each
token is masked in turn (Salazar et al., 2020).
"""

from argparse import Namespace

from jaxgrow.tables import align_columns
from jaxgrow.typed import Json
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.files import write_record
from train.common.output import say
from train.extras.evaluation.benchmarks import Benchmarks
from train.extras.evaluation.perplexity import is_text
from train.extras.evaluation.tasks import evaluate_tasks
from train.extras.labelled.task import NAMES


def results_table(results: dict[str, Json]) -> str:
    """Return the results as text, with one line for each number."""
    rows = [
        (task, name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
        for task, result in results.items()
        for name, value in result.items()
        if isinstance(value, int | float)
    ]
    return align_columns((), rows, right=[2])


def _check_options(a: Namespace) -> None:
    """Check that each option is for one of the tasks.

    Raises:
      UserError: no task uses an option.
    """
    texts = [name for name in a.tasks if is_text(name)]
    others = [name for name in a.tasks if name not in (*NAMES, *texts)]
    for option, what, names in (
        ("--stride", "the perplexity of a text, such as wikitext2", texts),
        *((name, "tasks of lm-eval", others) for name in ("--few-shot", "--limit", "--include")),
    ):
        if (value := getattr(a, option[2:].replace("-", "_"))) is not None and not names:
            raise UserError(
                f"{option} {value} has no effect on {', '.join(a.tasks)}: it is for {what}; leave out {option}"
            )


def main() -> None:
    a = command_parser("evaluate").parse_args()
    _check_options(a)
    if a.json is not None:
        a.json.parent.mkdir(parents=True, exist_ok=True)  # an error here comes before the work
    benchmarks = Benchmarks(a.data, a.few_shot, a.limit, a.include)
    results = evaluate_tasks(a.model, a.tasks, a.data, a.tokenizer, a.stride, benchmarks)
    if a.json is not None:
        write_record(a.json, {"model": str(a.model), "tasks": results})
    say(results_table(results))


if __name__ == "__main__":
    exits_cleanly(main)
