"""Damaged checkpoints are detected and reported, and the newest intact checkpoint is used."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import grain
import jax
import numpy as np
import optax
import pytest
import runs

from jaxgrow.checkpoints import CheckpointError, open_checkpoint
from train import pretrain
from train.common.errors import UserError
from train.extras.run_params import load_params
from train.plan.record import CostRecord, RunRecord
from train.state.model import TrainState
from train.store import checkpoint
from train.store.checkpoint import Checkpoints, read_models
from train.store.workdir import imported_model

RECORD = RunRecord(step=3, cost=CostRecord(steps=3))


def position(step: int) -> Any:
    """Return a data iterator that has produced ``step`` samples."""
    data = iter(grain.MapDataset.range(30).to_iter_dataset())
    for _ in range(step):
        next(data)
    return data


def model(step: int) -> TrainState:
    params = jax.tree.map(lambda x: np.float32(x + step), runs.fresh(runs.MODEL))
    return TrainState(params, None, runs.MODEL)


def save(folder: Path, *steps: int) -> None:
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            record = replace(RECORD, step=step)
            checkpoints.save(step, {"large": model(step)}, position(step), record)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a run with checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "checkpoints", 3, 6)
    return folder


@pytest.fixture
def where(saved, tmp_path):
    """Copy these checkpoints into ``tmp_path`` and return their folder."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def largest(folder: Path) -> Path:
    return max(files(folder), key=lambda path: path.stat().st_size)


def loaded(run: Path, **of) -> int:
    """Load parameters and return the step of their checkpoint."""
    found = load_params(run, **of)["token_embedding"]
    return next(s for s in (3, 6, 9) if (found == model(s).params["token_embedding"]).all())


def restored(run: Path) -> int:
    """Restore a checkpoint, check that it is complete, and return its step."""
    data = position(0)
    with Checkpoints(run / "checkpoints") as checkpoints:
        found = checkpoints.restore(lambda record: {"large": model(0)}, data, runs.mesh())
    assert found is not None
    models, record = found
    step = record.step
    chex.assert_trees_all_equal(jax.device_get(models["large"].params), model(step).params)
    assert record == replace(RECORD, step=step) and next(data) == step
    return step


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << 3
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = [cut, Path.unlink, flip]


def test_an_unharmed_checkpoint_is_restored_without_a_word(saved, capsys):
    assert restored(saved) == loaded(saved) == 6 and loaded(saved, step=3) == 3
    assert "damaged" not in capsys.readouterr().err
    # A run that grows has only its small model at first.
    with pytest.raises(UserError, match=r"checkpoint 6 in .* has no model 'grown', only large;"):
        load_params(saved, "grown")


def test_a_changed_file_is_found_and_the_previous_one_used(saved, tmp_path, capsys):
    """Every kind of damage is found in the array file, and one kind in every other file.

    One kind suffices for the other files because checksums cover every byte.
    """
    paths = files(saved / "checkpoints" / "6")
    cases = [(path, DAMAGES[i % 3]) for i, path in enumerate(paths)]
    cases += [(largest(saved / "checkpoints" / "6"), damage) for damage in DAMAGES]
    assert len(paths) > 8
    for path, damage in cases:
        run = tmp_path / "run"
        shutil.copytree(saved, run)
        # An empty file can only be deleted.
        (damage if path.stat().st_size else Path.unlink)(run / path.relative_to(saved))
        # Reading a damaged checkpoint does not move it.
        assert loaded(run) == restored(run) == 3, path
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2 and said[0] == said[1] and said[0].endswith("; using 3"), said
        assert said[0].startswith("checkpoint 6 is damaged (") and path.name in said[0]
        assert names(run / "checkpoints") == ["3", "damaged-6"]
        shutil.rmtree(run)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_second_moments_that_no_training_makes_are_an_error(tmp_path, value):
    tx = optax.adam(1e-3)
    params = runs.fresh(runs.MODEL)
    state, rest = tx.init(params)
    bad = jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), state.nu)

    def with_squares(nu):
        return TrainState(params, (state._replace(nu=nu), rest), runs.MODEL)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"large": with_squares(state.nu)}, position(3), RECORD)
        checkpoints.save(6, {"large": with_squares(bad)}, position(6), replace(RECORD, step=6))
    shapes = {"large": with_squares(state.nu)}
    message = r"6 has NaN, .* in large/opt/0/nu/.*--from"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=message) as error:
        checkpoints.restore(lambda record: shapes, position(0), runs.mesh())
    assert "\n" not in str(error.value)
    read_models(tmp_path / "3", shapes, runs.mesh())


def test_without_an_intact_checkpoint_nothing_is_moved(where, tmp_path):
    for step in ("3", "6"):
        flip(largest(where / step))
    before = files(tmp_path)
    both = r"no checkpoint in .* is intact \(6: \S+ has changed; 3: \S+ has changed\)"
    for reading in (restored, load_params):
        with pytest.raises(UserError, match=both):
            reading(tmp_path)
    for step, says in ((6, r"is intact \(6: \S+ has changed\)"), (9, "there is no checkpoint in")):
        with pytest.raises(UserError, match=says):
            load_params(tmp_path, step=step)
    assert files(tmp_path) == before


INCOMPLETE = "checkpoint 9 is incomplete: its save was interrupted; deleted it\n"


@pytest.mark.parametrize("at", ["seal", "sync", "sync_folder"])
def test_a_kill_while_saving_leaves_no_damaged_checkpoint(where, tmp_path, monkeypatch, capsys, at):
    """The process dies after Orbax has written all files.

    It dies before the checksums, before the renaming, or directly after the renaming.
    """

    def dies(folder):
        raise runs.Killed

    with monkeypatch.context() as patch, pytest.raises(runs.Killed):
        patch.setattr(checkpoint, at, dies)
        save(where, 9)
    capsys.readouterr()
    whole = 9 if at == "sync_folder" else 6
    assert loaded(tmp_path) == restored(tmp_path) == whole
    assert capsys.readouterr().err == ("" if whole == 9 else INCOMPLETE)
    assert names(where) == (["3", "6", "9"] if whole == 9 else ["3", "6"])
    # The next save replaces the incomplete checkpoint.
    save(where, 9 + whole)
    assert names(where) == sorted([str(whole), str(9 + whole)])


def test_a_checkpoint_without_checksums_is_damaged_and_kept(where, tmp_path, capsys):
    """A save seals its folder before the rename, so the checksums were lost later."""
    (where / "6" / "SHA256SUMS").unlink()
    assert loaded(tmp_path) == 3
    capsys.readouterr()
    assert restored(tmp_path) == 3
    assert capsys.readouterr().err.startswith("checkpoint 6 is damaged (it has no SHA256SUMS")
    assert names(where) == ["3", "damaged-6"]

    (where / "3" / "SHA256SUMS").unlink()
    for reading in (load_params, restored, restored):  # the same command again changes nothing
        with pytest.raises(
            UserError, match=r"no checkpoint .* is intact \(3: it has no SHA256SUMS"
        ):
            reading(tmp_path)
    assert names(where) == ["3", "damaged-6"]
    # A damaged checkpoint shows that the run has not just begun.
    shutil.rmtree(where / "3")
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is intact, but it contains damaged-6"
    ):
        restored(tmp_path)
    assert names(where) == ["damaged-6"]


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def linked(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.parent.parent / "elsewhere"))


def only_sums(folder: Path) -> None:
    emptied(folder)
    (folder / "SHA256SUMS").write_text("\n")


def temporary(folder: Path) -> None:
    emptied(folder)
    (folder / "models.orbax-checkpoint-tmp").mkdir()
    (folder / "_CHECKPOINT_METADATA").touch()


@pytest.mark.parametrize("harm", [
    *(emptied, linked, only_sums, temporary),
    lambda folder: (folder / "SHA256SUMS").write_text(""),
    lambda folder: shutil.rmtree(folder / "models"),
    lambda folder: (folder / "notes.txt").touch(),
])  # fmt: skip
def test_a_harmed_checkpoint_is_renamed_at_most(where, tmp_path, harm):
    harm(where / "6")
    before = files(where / "6")
    assert restored(tmp_path) == 3
    assert names(where) == ["3", "damaged-6"]
    assert len(files(where / "damaged-6")) == len(before)
    (emptied if harm is linked else harm)(where / "3")
    everything = names(where)
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact \(3: "):
        restored(tmp_path)
    assert names(where) == everything


def test_folders_of_the_user_are_not_touched(where, tmp_path, capsys):
    kept = ("20250101", ".saving-notes", ".saving-7", ".old-5", "damaged-6", "notes")
    for name in (*kept, "6.bak"):
        (where / name).mkdir()
        (where / name / "notes.txt").write_text(name)
    shutil.copytree(where / "6", where / "20250102")  # a copy by date
    (where / ".saving-8").symlink_to(where / "notes")
    before = names(where), files(where)
    assert restored(tmp_path) == 6
    said = capsys.readouterr().err
    assert f"{where / '20250101'} is not a checkpoint: it is neither used nor changed" in said
    assert f"{where / '20250102'} is a copy of checkpoint 6: it is neither used nor" in said
    assert f"{where / '.saving-7'} is not an unfinished save of this run: left as it is" in said
    assert (names(where), files(where)) == before
    save(where, 9, 12)
    assert set(names(where)) == set(before[0]) - {"3", "6"} | {"9", "12"}
    assert all((where / name / "notes.txt").exists() for name in kept)


def test_only_marked_checkpoints_and_sealed_files_are_deleted(where, tmp_path):
    """A user may rename a checkpoint, or add files to one."""
    shutil.copytree(where / "3", where / ".old-2")
    (where / "3" / "models" / "notes.txt").write_text("mine")
    shutil.copytree(where / "6", where / ".old-1")
    (where / ".old-1" / ".deleting").touch()
    shutil.rmtree(where / ".old-1" / "models")
    (where / ".old-4").mkdir()
    shutil.copytree(where / "6", where / ".saving-9")
    (where / ".saving-9" / "SHA256SUMS").write_text("")  # killed while it was sealed
    kept = files(where / ".old-2")
    assert restored(tmp_path) == 6
    save(where, 9, 12)
    assert files(where / ".old-2") == kept
    assert (where / "3" / "models" / "notes.txt").read_text() == "mine"
    assert {*names(where)} == {"3", "9", "12", ".old-2"}


@pytest.mark.parametrize("name", ["models", "models/d", "SHA256SUMS"])
def test_a_checkpoint_with_a_link_is_not_deleted(where, tmp_path, name):
    """A user may move a part of a checkpoint to another disk."""
    moved = (where / "3" / name).rename(tmp_path / "moved")
    (where / "3" / name).symlink_to(moved)
    before = files(where / "3"), files(moved)
    save(where, 9, 12)
    assert names(where) == ["12", "3", "9"]
    assert (files(where / "3"), files(moved)) == before
    assert (where / "3" / name).is_symlink()


def test_a_save_replaces_no_other_folder(tmp_path):
    for name, step in {"6": 6, ".saving-9": 9}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
        with pytest.raises(UserError, match=rf"{name} exists and is not a checkpoint .*; move it"):
            save(tmp_path, step)
        assert (tmp_path / name / "notes.txt").exists()


def test_damaged_checkpoints_are_never_deleted(where, tmp_path):
    """The user may still repair them; the run cannot know."""
    for expected in (["damaged-6"], ["damaged-6", "damaged-6.2"]):
        flip(largest(where / "6"))
        assert restored(tmp_path) == 3
        assert names(where) == sorted(["3", *expected])
        save(where, 6)


def test_unwritable_checksums_are_an_error_at_the_next_save(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "seal", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 3, 6)
    assert not (tmp_path / "6").exists()


def test_the_export_of_a_finished_run_is_intact(tmp_path, capsys):
    run, experiment = tmp_path / "run", runs.experiment(tmp_path)
    result = pretrain.run_experiment(experiment, run)
    params = load_params(run)["token_embedding"]
    np.testing.assert_array_equal(params, load_params(run, step=result["steps"])["token_embedding"])
    assert open_checkpoint(run).config == runs.MODEL
    flip(largest(run / "params"))
    says = (
        r"is damaged: .* has changed.*; delete .*result.json and run the command of the run again"
    )
    for reading in (load_params, lambda folder: imported_model(folder, runs.MODEL, runs.mesh())):
        with pytest.raises(UserError, match=says):
            reading(run)
    with pytest.raises(CheckpointError, match=r"is damaged: .* has changed"):
        open_checkpoint(run)
    (run / "result.json").unlink()
    assert pretrain.run_experiment(experiment, run)["phases"][0]["steps"] == 8
    np.testing.assert_array_equal(load_params(run)["token_embedding"], params)
    assert "resuming at step 8 of training" in capsys.readouterr().err
