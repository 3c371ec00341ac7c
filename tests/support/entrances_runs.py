"""The entrances of `train/`, except `train/data/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import runs
import tiny
from checkpoints import CONFIG as CONFIG_OF_MODEL
from checkpoints import saved
from entrances import Row, Subject, attacked, ours, trusted

from jaxgrow.checkpoints import orbax
from jaxgrow.checkpoints.io.checksums import seal
from jaxgrow.extras.peft.lora import LoRA
from train import ligo_maps, predict, scaling, show
from train.common.files import write_arrays, write_record
from train.extras import adapting, run_params, sharing, timing, trackers
from train.extras import branching as origin
from train.extras.comparison_scores import kept_evaluations
from train.extras.evaluation import published, tasks
from train.extras.learned_maps import read_arrays
from train.extras.tensorboard import TensorBoard
from train.extras.tokenizers.loading import load_tokenizer
from train.store import intact, recorder, workdir
from train.store.checkpoint import Checkpoints
from train.store.workdir import Workdir

PARTS = "it writes a file with a random name, which it creates, and renames it"
WORK = "it deletes only files of this program, in a folder that it has locked"

CONFIG = "it loads a config in Python"
NAMED = "it writes files that the user named; what it loads is a config in Python"
SAVES = "it calls or is Checkpoints.save, which writes a new folder that it renames"
TASKS = "it names tasks of lm-eval, whose files are installed or given with --include"

LINKED = {"link of the parent": "the user named the folder of the run, which may be a link"}
UNREAD = {
    name: "the content of a lock is neither read nor changed"
    for name in ("truncated", "wrong type", "nested", "too large", "pickle", "missing")
}
COPIED = {name: "its bytes are copied" for name in ("truncated", "wrong type", "nested", "pickle")}
UNREAD_LOG = COPIED | {"too large": "it is cut to the size in the checkpoint"}
LEFT_OUT = {name: "it is left out" for name in ("link", "loop", "FIFO", "missing")}
NAMED_BY_USER = {name: "the user named the file" for name in ("link", "link of the parent")}
LINE = '{"phase": "train", "step": 1}\n'


def _written(name: str) -> Callable[[Path], Path]:
    """Return a function that writes a run with all small files, and returns one of them."""

    def make(folder: Path) -> Path:
        run = folder / "run"
        run.mkdir()
        for file in ("config", "result", "scores", "evaluated"):
            write_record(run / f"{file}.json", {"name": "a", "model": {}, "data": {}, "bytes": 30})
        (run / "metrics.jsonl").write_text('{"phase": "train", "step": 1}\n')
        (run / ".lock").write_text("ours")
        write_arrays(run / "maps.npz", {"a": 1}, {"x": np.arange(999)})
        return run / name

    return make


def _locked(folder: Path) -> None:
    with Workdir(folder / "run").alone():
        pass


def _run(name: str) -> Callable[[Path], Path]:
    """Return a function that writes a finished run with a model, and returns one of its files."""

    def make(folder: Path) -> Path:
        run = folder / "run"
        orbax.export_model(run, CONFIG_OF_MODEL, tiny.params(CONFIG_OF_MODEL, 0, "float32"))
        write_record(
            run / "config.json", {"name": "a", "model": {}, "data": {"Labelled": {"task": "sst2"}}}
        )
        phases = [{"phase": "train", "parameters": 9, "flops": 1.0}]
        write_record(run / "result.json", {"labels": ["no", "yes"], "phases": phases})
        (run / "metrics.jsonl").write_text(LINE)
        write_record(run / "trackers.json", {"json": "1"})
        for file in ("checkpoints/1/log", "checkpoints/1/step", "tensorboard/events.a"):
            (run / file).parent.mkdir(parents=True, exist_ok=True)
            (run / file).write_text("1\n" if file.endswith("step") else LINE)
        return next(iter(sorted(run.glob(name))))

    return make


def _sealed(folder: Path) -> Path:
    step = _run("checkpoints/1/step")(folder).parent
    (step / "models").mkdir()
    (step / "models" / "a").write_text("a")
    seal(step)
    return step / "SHA256SUMS"


def _beside(folder: Path) -> Workdir:
    """The folder of another run, which starts from the first one."""
    out = Workdir(folder.parent / "out")
    out.folder.mkdir()
    return out


def _copied(folder: Path) -> None:
    cost: Any = SimpleNamespace(events={"events.a": 3}, bytes=len(LINE))
    record: Any = SimpleNamespace(cost=cost)
    origin.Origin(folder / "run", 1).copy_log(_beside(folder), record)


def _tracked(folder: Path) -> None:
    experiment: Any = SimpleNamespace(loggers=("json",))
    with mock.patch.dict(trackers.SERVICES, json=lambda *about: SimpleNamespace(id=about[2])):
        trackers.opened_trackers(experiment, folder / "run")


def _compared(folder: Path) -> Path:
    run = {"run": "a", "parameters": 9, "tokens_per_parameter": 20.0}
    run |= {"saved_frontier": [0.1], "below_frontier": [False]}
    write_record(folder / "compare.json", {"rows": [run]})
    return folder / "compare.json"


def _questions(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "valid.jsonl").write_text('{"goal": "a", "sol1": "b", "sol2": "c"}\n' * 2)
    (folder / "data" / "valid-labels.lst").write_text("0\n1\n")
    return folder / "data" / "valid-labels.lst"


def _hub_copy(folder: Path) -> Path:
    """A copy of a dataset of the hub, whose README names its files."""
    copy = folder / "data" / "nyu-mll" / "blimp"
    copy.mkdir(parents=True)
    for name in ("own", "other"):
        (copy / f"{name}.jsonl").write_text('{"sentence_good": "a"}\n')
    _name_data(folder, "own.jsonl")
    return copy / "README.md"


def _name_data(folder: Path, name: str) -> None:
    front = json.dumps([{"config_name": "n", "data_files": [{"split": "train", "path": name}]}])
    readme = folder / "data" / "nyu-mll" / "blimp" / "README.md"
    readme.write_text(f"---\nconfigs: {front}\n---\n")


def _read_copy(folder: Path) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]

    cache = folder.parent / "out"
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", cache):
        return published.local_dataset("nyu-mll/blimp", "n", "blimp", ["train"], folder / "data")


def _model(folder: Path) -> Path:
    return saved(folder / "model") / "tokenizer.json"


def _applied(folder: Path) -> None:
    same: Any = SimpleNamespace(small=CONFIG_OF_MODEL, large=CONFIG_OF_MODEL, apply=lambda p: p)
    ligo_maps._apply(same, folder / "maps.npz", folder / "model", folder.parent / "out")


def _branched(folder: Path) -> None:
    """Another run begins at a checkpoint of the first one."""
    out = Workdir(folder / "out")
    out.folder.mkdir()
    about: Any = SimpleNamespace(cost=SimpleNamespace(events={"events.a": 3}))
    experiment = runs.experiment(folder.parent / "out")
    with mock.patch.object(workdir.checkpoint, "checkpoint_record", lambda kept: about):
        sharing._take(
            out, Workdir(folder / "run"), folder / "run" / "checkpoints" / "1", experiment
        )


OF_BYTES = replace(CONFIG_OF_MODEL, vocab=256).with_head("classes", 2)


def _finetuned(name: str) -> Callable[[Path], Path]:
    """Return a function that writes a fine-tuned model, a table and a text; it returns one of them."""

    def make(folder: Path) -> Path:
        run = folder / "run"
        config = OF_BYTES if name != "a.txt" else replace(CONFIG_OF_MODEL, vocab=256)
        orbax.export_model(run, config, tiny.params(config, 0, "float32"))
        about = {"task": "table", "path": "lost.tsv", "length": 7, "labels": ["no", "yes"]}
        data = {"Labelled": about | {"tokenizer": "bytes"}}
        write_record(run / "config.json", {"name": "a", "model": {}, "data": data})
        write_record(run / "result.json", {"labels": ["no", "yes"]})
        write_record(run / "tokenizer_config.json", {"model_max_length": 4})
        load_tokenizer("bytes").save(str(run / "tokenizer.json"))
        (folder / "data").mkdir()
        (folder / "data" / "table.tsv").write_text("text\tlabel\na text\tyes\nanother\tno\n")
        (folder / "data" / "a.txt").write_text("a text\n" * 9)
        return next(folder.rglob(name))

    return make


def _predicted(folder: Path) -> None:
    (folder.parent / "out").mkdir()
    names = [
        folder / "run",
        folder / "data" / "table.tsv",
        "--out",
        folder.parent / "out" / "a.tsv",
    ]
    # The model itself is not a part of the attack.
    outputs = mock.patch.object(predict, "model_outputs", lambda *rest: np.zeros((len(rest[2]), 2)))
    with outputs, mock.patch.object(sys, "argv", ["predict", *map(str, names)]):
        predict.main()


def _scored(folder: Path) -> Any:
    with mock.patch.object(tasks, "score_model", lambda model, task: {"validation": {"a": 1.0}}):
        return tasks.evaluate_tasks(folder / "run", ["cola"], folder)


def _measured(folder: Path) -> Any:
    return tasks.evaluate_tasks(folder / "run", [str(folder / "data" / "a.txt")], folder)


def _timed(folder: Path) -> Path:
    write_record(folder / "a-seconds.json", {"experiment": {"batch": 8}, "seconds": [0.5]})
    return folder / "a-seconds.json"


def _adapter(folder: Path) -> Path:
    params = {"a": np.arange(999)}
    adapting.save_adaptation(
        folder / "lora.npz", adapting.SavedAdapter(CONFIG_OF_MODEL, LoRA(rank=2), params)
    )
    return folder / "lora.npz"


SUBJECTS: dict[str, Subject] = {
    "config.json": Subject(_written("config.json"), lambda folder: Workdir(folder / "run").config, harmless=LINKED),
    "result.json": Subject(_written("result.json"), lambda folder: Workdir(folder / "run").result, harmless=LINKED),
    "scores.json": Subject(_written("scores.json"), lambda folder: Workdir(folder / "run").scores,
        harmless=LINKED | {"missing": "the run was not scored"}),
    "evaluated.json": Subject(_written("evaluated.json"), lambda folder: kept_evaluations(Workdir(folder / "run")),
        harmless=LINKED | {"missing": "the run was not evaluated"}),
    "metrics.jsonl": Subject(_written("metrics.jsonl"), lambda folder: Workdir(folder / "run").lines(), harmless=LINKED),
    ".lock": Subject(_written(".lock"), _locked, harmless=LINKED | UNREAD),
    "maps.npz": Subject(_written("maps.npz"), lambda folder: read_arrays(folder / "run" / "maps.npz", lambda *both: both,
        "maps", ""), harmless=LINKED),
    "result.json of a plan": Subject(_run("result.json"), lambda folder: show.plan_row(str(folder / "run")), harmless=LINKED),
    "compare.json": Subject(_compared, lambda folder: scaling.read_savings(f"a={folder / 'compare.json'}"),
        harmless=LINKED | {"link": "the user named the file, which may be a link"}),
    "labels": Subject(_questions, lambda folder: published.local_dataset("baber/piqa", None, "piqa", ["validation"],
        folder / "data"), harmless=LINKED, needs="datasets"),
    "README of a copied dataset": Subject(_hub_copy, _read_copy, _name_data, needs="datasets"),
    "tokenizer.json": Subject(_model, _applied, harmless=LINKED | COPIED | {"missing": "a model may have no tokenizer"},
        skips={"too large": "a file of any size is copied in parts"}),
    "lora.npz": Subject(_adapter, lambda folder: adapting.adapter_for(str(folder / "lora.npz"), CONFIG_OF_MODEL),
        harmless=LINKED),
    "log to continue": Subject(_run("metrics.jsonl"), lambda folder: recorder._opened_log(folder / "run/metrics.jsonl",
        len(LINE)).close(), harmless=LINKED | UNREAD_LOG),
    "trackers.json": Subject(_run("trackers.json"), _tracked, harmless=LINKED | {"missing": "the run then has a new id"}),
    "events to continue": Subject(_run("tensorboard/events.a"),
        lambda folder: TensorBoard(folder / "run/tensorboard", {"events.a": 3}).close(), harmless=UNREAD_LOG | LEFT_OUT),
    "events to copy": Subject(_run("tensorboard/events.a"), _copied, harmless=LINKED | UNREAD_LOG | LEFT_OUT),
    "log to copy": Subject(_run("checkpoints/1/log"), _copied,
        harmless=UNREAD_LOG | {x: "the log of the run is copied" for x in ("missing", "loop")}),
    "log to restore": Subject(_run("checkpoints/1/log"), lambda folder: Checkpoints(folder / "run/checkpoints",
        folder / "run/metrics.jsonl")._restore_log(1), harmless=COPIED
        | {x: "the log of the run stays" for x in ("missing", "loop")}
        | {"link of the parent": "a link is not an intact checkpoint, so it is not restored"}),
    "step": Subject(_run("checkpoints/1/step"), lambda folder: intact.checkpoint_steps(folder / "run" / "checkpoints"),
        harmless=LINKED | UNREAD_LOG | LEFT_OUT),
    "log to branch": Subject(_run("metrics.jsonl"), _branched, harmless=LINKED | UNREAD_LOG),
    "table to predict": Subject(_finetuned("table.tsv"), _predicted, harmless=NAMED_BY_USER),
    "config.json to predict": Subject(_finetuned("config.json"), _predicted, harmless=LINKED),
    "tokenizer_config.json to evaluate": Subject(_finetuned("tokenizer_config.json"), _scored,
        harmless=LINKED | {"missing": "the length is then the one of the model"}),
    "text to evaluate": Subject(_finetuned("a.txt"), _measured,
        harmless=NAMED_BY_USER | {x: "any text" for x in ("truncated", "wrong type", "nested", "pickle")}),
    "checksums of a checkpoint": Subject(_sealed, lambda folder: intact.added_files(folder / "run" / "checkpoints" / "1"),
        harmless=LINKED | COPIED | {"too large": "only names of sealed files count"}),
    "config.json of somebody": Subject(_written("config.json"), lambda folder: Workdir(folder / "run").check_unused(),
        harmless=LINKED | {"missing": "the folder is then a new one"}),
    "times of steps": Subject(_timed, lambda folder: timing._kept_seconds(folder / "a-seconds.json", {"batch": 8}, 1),
        harmless=LINKED | {"missing": "the steps are then measured"}),
    "array of a run": Subject(_run("params/state/manifest.ocdbt"), lambda folder: run_params.load_params(folder / "run"),
        harmless=LINKED),
}  # fmt: skip

ROWS: dict[str, dict[str, Row]] = {
    "train/advise.py": {"config_script": trusted(CONFIG), "main": ours(NAMED)},
    "train/extras/advice/evidence.py": {"_data_file": trusted("it reads a file that is installed with the package")},
    "train/extras/run_plots.py": {"save_figure": ours(NAMED)},
    "train/arguments.py": {"command_parser": trusted("it reads a module of this package")},
    "train/common/commands.py": {"config_text": trusted(CONFIG)},
    "train/extras/lengths.py": {"load_alike": trusted(CONFIG)},
    "train/common/files.py": {"write_text write_record write_arrays write_bytes": ours(PARTS),
        "read_record": attacked("config.json", "result.json", "scores.json", "evaluated.json"),
        "read_own": attacked("config.json", "result.json", "metrics.jsonl", "compare.json"), "delete_parts": ours(WORK),
        "locked_folder": ours("it opens the folder of the run, which it locks")},
    "train/extras/learned_maps.py": {"read_arrays _check_arrays": attacked("maps.npz")},
    "train/store/intact.py": {"_foreign": attacked("step"), "delete_replaced _delete_marked": ours(WORK),
        "added_files": attacked("checksums of a checkpoint")},
    "train/store/workdir.py": {"Workdir.check_unused": attacked("config.json of somebody"),
        "Workdir._lock": attacked(".lock"), "Workdir.config": attacked("config.json"),
        "Workdir.scores": attacked("scores.json"), "Workdir.result": attacked("result.json"),
        "Workdir.lines": attacked("metrics.jsonl")},
    "train/extras/sharing.py": {"_take": attacked("log to branch"), "copy_board": attacked("events to copy")},
    "train/common/endings.py": {"prepare_command": ours("it opens /dev/null in place of a closed output")},
    "train/common/output.py": {"_drop_output": ours("it opens /dev/null in place of a closed output")},
    "train/compare.py": {"_shorter": trusted(CONFIG)},
    "train/extras/listings.py": {"listed_settings": trusted(CONFIG)},
    "train/extras/comparison_report.py": {"write_report": ours(NAMED)},
    "train/config/experiment.py": {"_imported_config": trusted("it runs a config in Python")},
    "train/extras/timing.py": {"_kept_seconds": attacked("times of steps")},
    "train/extras/stated.py": {"paper_statements": trusted("it parses a config in Python")},
    "train/run/trainer.py": {"Trainer.between_steps Trainer.save RunSetup._begin": ours(SAVES)},
    "train/store/checkpoint.py": {"Checkpoints.save": ours(SAVES), "Checkpoints._restore_log": attacked("log to restore")},
    "train/extras/adapting.py": {"adapter_for": attacked("lora.npz")},
    "train/extras/run_params.py": {"load_params": attacked("array of a run")},
    "train/extras/branching.py": {"Origin.copy_log": attacked("log to copy", "events to copy")},
    "train/store/recorder.py": {"_opened_log": attacked("log to continue")},
    "train/extras/trackers.py": {"opened_trackers": attacked("trackers.json")},
    "train/extras/model_card.py": {"write_card": ours(PARTS)},
    "train/extras/tensorboard.py": {"TensorBoard.__init__": attacked("events to continue")},
    "train/extras/comparison_scores.py": {"kept_evaluations": attacked("evaluated.json")},
    "train/extras/evaluation/tasks.py": {"evaluate_tasks": attacked("text to evaluate"),
        "_learned": attacked("tokenizer_config.json to evaluate")},
    "train/finetune.py": {"main": ours(NAMED)},
    "train/ligo_maps.py": {"_apply": attacked("tokenizer.json")},
    "train/predict.py": {"main": attacked("table to predict", "config.json to predict")},
    "train/preflight.py": {"main": trusted(CONFIG)},
    "train/pretrain.py": {"main": trusted(CONFIG)},
    "train/race.py": {"main": ours(NAMED)},
    "train/show.py": {"plan_row": attacked("result.json of a plan")},
    "train/sweep.py": {"all_combinations": trusted(CONFIG), "main": ours(NAMED)},
    "train/extras/evaluation/benchmarks.py": {"Benchmarks.run Benchmarks.files Benchmarks._loaded": trusted(TASKS)},
    "train/extras/evaluation/published.py": {"local_dataset _piqa": attacked("labels"),
        "_check_urls": attacked("README of a copied dataset")},
    "train/scaling.py": {"read_savings": attacked("compare.json")},
    "train/tokenizer.py": {"main": ours(NAMED)},
}  # fmt: skip
