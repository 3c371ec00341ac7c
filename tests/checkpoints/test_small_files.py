"""Small files are durable, and reading one reports damage with the file and the remedy."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from jaxgrow.checkpoints.io.folders import atomic_file
from train import pretrain
from train.analysis.runs import Run
from train.common import files
from train.common.errors import UserError
from train.common.files import read_record, write_record
from train.extras.comparison_scores import kept_evaluations
from train.store.workdir import Workdir


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run an experiment with a checkpoint every 2 steps; return it with the folder of the run."""
    folder = tmp_path_factory.mktemp("finished")
    experiment = runs.experiment(folder, checkpoint_every=2)
    pretrain.run_experiment(experiment, folder / "run")
    return experiment, folder / "run"


def copied(finished, folder: Path, *without: str) -> Path:
    """Copy the finished run without some of its files."""
    shutil.copytree(finished[1], folder / "run")
    for name in without:
        (folder / "run" / name).unlink()
    return folder / "run"


# --- writing ---


def name_of(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(name_of(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: events.append((str(a), str(b))))
    write_record(tmp_path / "a.json", {})
    part = events[0]
    assert re.fullmatch(rf"{tmp_path}/\.a\.json\.[0-9a-f]{{16}}\.part", part)
    assert events == [part, (part, f"{tmp_path}/a.json"), str(tmp_path)]


def test_a_write_that_fails_keeps_the_old_content(tmp_path):
    write_record(tmp_path / "a.json", {"x": 1})
    with pytest.raises(OSError, match="gone"), atomic_file(tmp_path / "a.json") as part:
        part.write_text("half")
        raise OSError("the disk is gone")
    assert read_record(tmp_path / "a.json", "") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_finished_run_is_synced_before_its_result_is_written(finished, tmp_path, monkeypatch):
    run, synced = copied(finished, tmp_path, "result.json"), []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(name_of(handle)))
    pretrain.run_experiment(finished[0], run)
    last = next(i for i, path in enumerate(synced) if path.startswith(f"{run}/.result.json."))
    expected = "config.json jaxgrow.json metrics.jsonl tokenizer.json params/SHA256SUMS"
    assert {f"{run}/{name}" for name in expected.split()} <= {*synced[:last]}


# --- reading ---


@pytest.mark.parametrize(("content", "says"), [
    (None, "is missing"),
    (b"", "is damaged: it is empty"),
    (b" \n", "is damaged: it is empty"),
    (b'{"a": 1', "is damaged: it is not JSON"),
    (b"\xff\xfe\x00", "is damaged: it is not JSON"),
    (b"[" * 100_000, "is damaged: its lists are nested too deeply"),
    (b"[1]", "is damaged: it contains list, not a JSON object"),
    (b'{"b": 1}', "is damaged: it has no 'a'"),
])  # fmt: skip
def test_what_is_no_object_with_these_keys_is_refused(tmp_path, content, says):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/x.json {says}") + ".*; delete it$"):
        read_record(tmp_path / "x.json", "delete it", ["a"])


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2 + 3]


@pytest.mark.parametrize(("name", "way_out"), [
    ("config.json", "restore it from a backup, or copy the one that the same command writes"),
    ("result.json", "delete .*result.json and run the command of the run again"),
    ("metrics.jsonl", "delete .*result.json and run the command of the run again"),
    ("scores.json", "delete it, and the command that wrote it computes it again"),
    ("evaluated.json", "delete it, and the command that wrote it computes it again"),
])  # fmt: skip
def test_damaged_files_of_a_finished_run_are_named_with_a_fix(finished, tmp_path, name, way_out):
    run = copied(finished, tmp_path)
    write_record(run / "scores.json", {"valid": {"accuracy": 0.5}})
    write_record(run / "evaluated.json", {"wikitext2": {"bits_per_byte": 1.0}})
    (run / name).write_bytes(cut((run / name).read_bytes()))
    reading = {
        "config.json": lambda: Run("tiny", 0, run).config,
        "result.json": lambda: Run("tiny", 0, run).result,
        "metrics.jsonl": lambda: Run("tiny", 0, run).curve,
        "scores.json": lambda: Workdir(run).scores,
        "evaluated.json": lambda: kept_evaluations(Workdir(run)),
    }
    with pytest.raises(UserError, match=f"^{re.escape(str(run / name))} is damaged: .*{way_out}"):
        reading[name]()
    if name in ("config.json", "result.json"):
        with pytest.raises(UserError, match=f"^{re.escape(str(run / name))} is damaged: "):
            pretrain.run_experiment(finished[0], run)


def test_lost_and_changed_lines_of_a_log_are_found(finished, tmp_path):
    run = copied(finished, tmp_path)
    whole = (run / "metrics.jsonl").read_bytes()
    *rest, last = whole.splitlines(keepends=True)
    for damaged, says in [
        (b"".join(rest), f"only {len(whole) - len(last)} of its {len(whole)} bytes exist"),
        (whole.replace(b'{"phase', b'("phase', 1), "line 1: it is not JSON"),
        (None, "only 0 of its"),
    ]:
        if damaged is None:
            (run / "metrics.jsonl").unlink()
        else:
            (run / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(UserError, match=f"metrics.jsonl is damaged: {says}"):
            Workdir(run).lines()


# --- recovery ---


@pytest.mark.parametrize("damage", ["cut", pytest.param("lost", marks=pytest.mark.slow)])
def test_a_damaged_log_is_restored_from_the_checkpoint(finished, tmp_path, capsys, damage):
    experiment, whole = finished
    run = tmp_path / "run"
    runs.killed(experiment, run, 4)
    log = run / "metrics.jsonl"
    if damage == "lost":
        log.unlink()
    else:
        log.write_bytes(cut(log.read_bytes()))
    capsys.readouterr()
    pretrain.run_experiment(experiment, run)
    assert f"{log} was damaged; restored it from checkpoint 4" in capsys.readouterr().err
    runs.assert_same_end(run, whole)


def test_deleting_a_damaged_result_or_log_restores_the_run(finished, tmp_path):
    experiment, whole = finished
    run = copied(finished, tmp_path, "result.json")
    (run / "metrics.jsonl").write_bytes(b"")
    pretrain.run_experiment(experiment, run)
    runs.assert_same_end(run, whole)
    same = ("steps", "flops", "tokens", "val_loss", "corpus", "model")
    assert [Workdir(run).result[k] for k in same] == [Workdir(whole).result[k] for k in same]


def test_a_finished_run_without_config_rejects_any_config(finished, tmp_path, monkeypatch):
    experiment, _ = finished
    run = copied(finished, tmp_path, "config.json")
    says = r"config.json is missing; restore it from a backup, or copy the one that"
    for asked in (replace(experiment, steps=9), experiment):
        with pytest.raises(UserError, match=says):
            pretrain.run_experiment(asked, run)
    with pytest.raises(runs.Killed), monkeypatch.context() as patch:  # the remedy: a new run
        trainer = pretrain.run_experiment.__globals__["Trainer"]
        patch.setattr(trainer, "run", lambda self: (_ for _ in ()).throw(runs.Killed))
        pretrain.run_experiment(experiment, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", run / "config.json")
    assert pretrain.run_experiment(experiment, run)["steps"] == 8
    says = r"contains a run of another config \(values there and here: steps: 8 and 9\)"
    with pytest.raises(UserError, match=says):
        pretrain.run_experiment(replace(experiment, steps=9), run)
    assert json.loads((run / "config.json").read_text()) == Workdir(run).config


def test_an_unfinished_folder_without_its_config_is_refused_too(finished, tmp_path):
    run = copied(finished, tmp_path, "config.json", "result.json")
    with pytest.raises(UserError, match=r"config.json is missing"):
        pretrain.run_experiment(finished[0], run)
    assert files.read_record(run / "jaxgrow.json", "")  # the record is untouched
