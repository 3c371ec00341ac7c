"""The entrances of `train/`, except `train/data/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from entrances import Row, Subject, attacked, ours, todo, trusted

from train.common.files import read_arrays, write_arrays, write_json
from train.engine.run.workdir import Workdir

PARTS = "it writes a file with a random name, which it creates, and renames it"
WORK = "it deletes only files of this program, in a folder that it has locked"

LINKED = {"link of the parent": "the user named the folder of the run, which may be a link"}
UNREAD = {
    name: "the content of a lock is neither read nor changed"
    for name in ("truncated", "wrong type", "nested", "too large", "pickle", "missing")
}


def _written(name: str) -> Callable[[Path], Path]:
    """Return a function that writes a run with all small files, and returns one of them."""

    def make(folder: Path) -> Path:
        run = folder / "run"
        run.mkdir()
        for file in ("config", "result", "scores", "evaluated"):
            write_json(run / f"{file}.json", {"name": "a", "model": {}, "data": {}, "bytes": 30})
        (run / "metrics.jsonl").write_text('{"phase": "train", "step": 1}\n')
        (run / ".lock").write_text("ours")
        write_arrays(run / "maps.npz", {"a": 1}, {"x": np.arange(999)})
        return run / name

    return make


def _locked(folder: Path) -> None:
    with Workdir(folder / "run").alone():
        pass


SUBJECTS: dict[str, Subject] = {
    "config.json": Subject(
        _written("config.json"), lambda folder: Workdir(folder / "run").config, harmless=LINKED
    ),
    "result.json": Subject(
        _written("result.json"), lambda folder: Workdir(folder / "run").result, harmless=LINKED
    ),
    "scores.json": Subject(
        _written("scores.json"),
        lambda folder: Workdir(folder / "run").scores,
        harmless=LINKED | {"missing": "the run was not scored"},
    ),
    "evaluated.json": Subject(
        _written("evaluated.json"),
        lambda folder: Workdir(folder / "run").evaluated,
        harmless=LINKED | {"missing": "the run was not evaluated"},
    ),
    "metrics.jsonl": Subject(
        _written("metrics.jsonl"), lambda folder: Workdir(folder / "run").lines(), harmless=LINKED
    ),
    ".lock": Subject(_written(".lock"), _locked, harmless=LINKED | UNREAD),
    "maps.npz": Subject(
        _written("maps.npz"),
        lambda folder: read_arrays(folder / "run" / "maps.npz", lambda *both: both, "maps", ""),
        harmless=LINKED,
    ),
}

ROWS: dict[str, Row] = {
    "train/advise.py::script": todo("no subject yet"),
    "train/advise.py::main": todo("no subject yet"),
    "train/analysis/evidence.py::_read": todo("no subject yet"),
    "train/analysis/plots.py::saved": todo("no subject yet"),
    "train/common/files.py::appears_whole": ours(PARTS),
    "train/common/files.py::write_text": ours(PARTS),
    "train/common/files.py::write_json": ours(PARTS),
    "train/common/files.py::read_json": attacked(
        "config.json", "result.json", "scores.json", "evaluated.json"
    ),
    "train/common/files.py::write_arrays": ours(PARTS),
    "train/common/files.py::read_arrays": attacked("maps.npz"),
    "train/common/files.py::lock": attacked(".lock"),
    "train/common/files.py::_check_arrays": attacked("maps.npz"),
    "train/common/files.py::read_own": attacked("config.json", "result.json", "metrics.jsonl"),
    "train/engine/run/intact.py::_foreign": todo("no subject yet"),
    "train/engine/run/workdir.py::Workdir._check_unused": todo("no subject yet"),
    "train/engine/run/workdir.py::Workdir._take": todo("no subject yet"),
    "train/common/endings.py::begin": ours("it opens /dev/null in place of a closed output"),
    "train/common/output.py::drop": ours("it opens /dev/null in place of a closed output"),
    "train/common/files.py::delete_parts": ours(WORK),
    "train/common/files.py::lock_folder": ours("it opens the folder of the run, which it locks"),
    "train/common/files.py::write_bytes": ours(PARTS),
    "train/engine/run/intact.py::delete_unfinished": ours(WORK),
    "train/compare.py::main": todo("no subject yet"),
    "train/compare.py::_frontier": todo("no subject yet"),
    "train/compare.py::_write": todo("no subject yet"),
    "train/config/experiment.py::_module": trusted("it runs a config in Python"),
    "train/config/stated.py::statements": trusted("it parses a config in Python"),
    "train/engine/loop/trainer.py::Trainer.between_steps": todo("no subject yet"),
    "train/engine/loop/trainer.py::Trainer.save": todo("no subject yet"),
    "train/engine/loop/trainer.py::_mesh": todo("no subject yet"),
    "train/engine/run/checkpoint.py::Checkpoints.save": todo("no subject yet"),
    "train/engine/run/checkpoint.py::Checkpoints._delete_old": ours(WORK),
    "train/engine/run/checkpoint.py::Checkpoints._restore_log": todo("no subject yet"),
    "train/engine/loop/trainer.py::_opened": todo("no subject yet"),
    "train/engine/run/origin.py::copy_log": todo("no subject yet"),
    "train/engine/run/workdir.py::Workdir.copy_board": todo("no subject yet"),
    "train/engine/run/recorder.py::_continued": todo("no subject yet"),
    "train/engine/run/trackers.py::opened": todo("no subject yet"),
    "train/engine/run/trackers.py::TensorBoard.__init__": todo("no subject yet"),
    "train/engine/run/workdir.py::Workdir.config": attacked("config.json"),
    "train/engine/run/workdir.py::Workdir.scores": attacked("scores.json"),
    "train/engine/run/workdir.py::Workdir.evaluated": attacked("evaluated.json"),
    "train/engine/run/workdir.py::Workdir.result": attacked("result.json"),
    "train/engine/run/workdir.py::Workdir.lines": attacked("metrics.jsonl"),
    "train/engine/run/workdir.py::Workdir.params": todo("no subject yet"),
    "train/engine/run/workdir.py::Workdir.keep_tokenizer": todo("no subject yet"),
    "train/engine/run/workdir.py::load": todo("no subject yet"),
    "train/engine/state/heads.py::_of_older_run": todo("no subject yet"),
    "train/evaluate.py::evaluate": todo("no subject yet"),
    "train/evaluate.py::_learned": todo("no subject yet"),
    "train/export.py::export": todo("no subject yet"),
    "train/export.py::_tokenizer": todo("no subject yet"),
    "train/export.py::_of_task": todo("no subject yet"),
    "train/finetune.py::main": todo("no subject yet"),
    "train/ligo_maps.py::_apply": todo("no subject yet"),
    "train/plan/adapting.py::keep_adapter": todo("no subject yet"),
    "train/plan/adapting.py::loaded": todo("no subject yet"),
    "train/plan/learning.py::Learn.finish": todo("no subject yet"),
    "train/predict.py::main": todo("no subject yet"),
    "train/preflight.py::_checked": todo("no subject yet"),
    "train/pretrain.py::main": todo("no subject yet"),
    "train/race.py::main": todo("no subject yet"),
    "train/scaling.py::measured": todo("no subject yet"),
    "train/show.py::row": todo("no subject yet"),
    "train/sweep.py::combinations": todo("no subject yet"),
    "train/sweep.py::main": todo("no subject yet"),
    "train/tasks/benchmarks.py::Benchmarks.run": todo("no subject yet"),
    "train/tasks/benchmarks.py::Benchmarks.files": todo("no subject yet"),
    "train/tasks/benchmarks.py::Benchmarks._loaded": todo("no subject yet"),
    "train/tasks/published.py::local": todo("no subject yet"),
    "train/tasks/published.py::_piqa": todo("no subject yet"),
    "train/tokenizer.py::main": todo("no subject yet"),
}

# The number of rows that still need a subject.
OPEN = 49
