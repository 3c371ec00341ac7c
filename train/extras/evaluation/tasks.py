"""Evaluate a model on any tasks: texts, fine-tuned tasks, and the tasks of lm-eval."""

from pathlib import Path

from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.typed import Json, convert_json
from jaxgrow.untrusted import one_line
from train.common.errors import UserError
from train.common.files import read_record
from train.extras.evaluation.benchmarks import Benchmarks
from train.extras.evaluation.perplexity import files_of, is_text, text_perplexity
from train.extras.evaluation.scoring import Scorer
from train.extras.labelled.supervised import score_model
from train.extras.labelled.task import NAMES, Labelled
from train.extras.pretrained import config_of, open_text_model
from train.extras.tokenizers.loading import name_of
from train.store.workdir import Workdir


def evaluate_tasks(
    model: Path,
    names: list[str],
    data: Path | None,
    tokenizer: str | None = None,
    stride: int | None = None,
    benchmarks: Benchmarks | None = None,
) -> dict[str, Json]:
    """Evaluate a model on tasks.

    Args:
      model: folder of the model.
      names: names of the tasks, or paths of text files.
      data: folder of the files of the tasks; None: the working directory, and lm-eval downloads
        datasets.
      tokenizer: tokenizer of the model, as for `train.extras.pretrained.open_text_model`.
      stride: number of tokens between two windows over a text; None: the context length.
      benchmarks: settings for the tasks of lm-eval; None: the settings of each task.

    Returns:
      For each task, the name and the value of each metric.

    Raises:
      UserError: the model, a task or the files of a task do not exist.
    """
    here = data or Path(".")
    texts = {name: files_of(name, here) for name in names if is_text(name)}
    others = [name for name in names if name not in NAMES and name not in texts]
    benchmarks = benchmarks or Benchmarks(data)
    results: dict[str, Json] = {}
    if others:
        benchmarks.load(others)  # reports missing tasks before the model is loaded
    if texts or others:
        opened_model = open_text_model(model, tokenizer)
        scorer = Scorer(opened_model, progress=True)
        results |= {name: text_perplexity(scorer, files, stride) for name, files in texts.items()}
        results |= benchmarks.run(opened_model, others) if others else {}
    results |= {name: _learned(model, name, here, tokenizer) for name in names if name in NAMES}
    return {name: results[name] for name in names}


def _learned(model: Path, name: str, data: Path, tokenizer: str | None) -> Json:
    """Return the metrics of a task that the model was fine-tuned on.

    The length and the stride have the values of the fine-tuning, as far as they are known: a
    converted run has the length in ``tokenizer_config.json``.
    """
    where = data / name if (data / name).is_dir() else data
    home, _ = at_step(model)
    run = Workdir(home)
    was = run.config["data"].get("Labelled", {}) if run.finished else {}
    length = config_of(model).length
    if (file := home / "tokenizer_config.json").is_file():
        most = read_record(file, "restore it").get("model_max_length")
        with one_line(UserError, f"{file} has no usable model_max_length"):
            length = int(min(length, convert_json(most, float | None) or length))
    read: Json = {"length": length} | {k: was[k] for k in ("length", "stride") if k in was}
    task = Labelled(name, str(where), tokenizer=tokenizer or name_of(home), **read)
    scores = score_model(model, task)
    return {f"{metric}, {split}": x for split, of in scores.items() for metric, x in of.items()}
