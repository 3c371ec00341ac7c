"""A run writes only into its own folder, only alone, and deletes no file of somebody else."""

import errno
import fcntl
import io
import json
import os
import stat
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs
from limits import using_limits

from jaxgrow.checkpoints import open_checkpoint, orbax
from jaxgrow.checkpoints.io.folders import lock_file
from jaxgrow.untrusted import UntrustedError
from train import pretrain
from train.common import files
from train.common.errors import UserError
from train.common.files import write_arrays, write_record
from train.extras.learned_maps import read_arrays
from train.extras.tensorboard import TensorBoard
from train.store.checkpoint import Checkpoints
from train.store.workdir import Workdir


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a private key")
    return path


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


# --- small files ---


def test_a_lock_is_not_truncated_and_no_link(run, secret):
    lock = run / ".lock"
    for made, says in (
        (lambda: lock.symlink_to(secret), "lock is a link"),
        (lambda: os.mkfifo(lock), "lock is not a regular file"),
    ):
        made()
        with pytest.raises(UntrustedError, match=says), Workdir(run).alone():
            pass
        lock.unlink()
    os.link(secret, lock)
    with Workdir(run).alone():
        pass
    assert secret.read_text() == "a private key"


def test_a_written_file_has_a_name_that_nobody_can_guess(run, secret):
    for name in ("config.json.part", "config.json"):
        (run / name).symlink_to(secret)
    write_record(run / "config.json", {"x": 1})
    assert json.loads((run / "config.json").read_text()) == {"x": 1}
    assert not (run / "config.json").is_symlink()
    assert secret.read_text() == "a private key"


def test_a_written_file_is_not_more_open_than_before(run):
    path, mask = run / "config.json", os.umask(0)
    os.umask(mask)
    write_record(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o600)
    write_record(path, {"x": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_remains_of_killed_writes_are_deleted_and_nothing_else(run):
    kept = [".notes.part", ".a.0123456789abcdef0.part", "a.0123456789abcdef.part"]
    for name in (*kept, ".config.json.0123456789abcdef.part"):
        (run / name).touch()
    (run / ".b.0123456789abcdef.part").symlink_to(run / kept[0])
    with Workdir(run).alone():
        pass
    assert {p.name for p in run.iterdir()} == {*kept, ".b.0123456789abcdef.part", ".lock"}


def test_arrays_do_not_claim_more_than_their_file_has(run):
    path = run / "maps.npz"

    def read():
        return read_arrays(path, lambda about, arrays: about, "maps", "")

    def write(content, **options):
        with zipfile.ZipFile(path, "w", **options) as file:
            file.writestr("x.npy", content)

    write_arrays(path, {"a": 1}, {"x": np.arange(3.0)})
    assert read() == {"a": 1}
    array = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(array, header)
    for content in (array.getvalue(), b"no array"):
        write(content)
        with pytest.raises(UserError, match="no readable maps"):
            read()
    write(bytes(1 << 22), compression=zipfile.ZIP_DEFLATED)
    says = r"decompresses to too much: .* with --limits bytes=8388608"
    with using_limits(bytes=1 << 20), pytest.raises(UserError, match=says):
        read()


# --- TensorBoard ---


def test_event_files_of_others_are_never_changed(run):
    board = run / "tensorboard"
    first = TensorBoard(board, {})
    first.write(1, {"loss": 1.0})
    sizes = first.sizes()
    first.write(2, {"loss": 1.0})
    first.close()
    killed = TensorBoard(board, sizes)
    killed.write(3, {"loss": 1.0})
    killed.close()
    own = {path.name for path in board.iterdir()}
    (board / "events.out.tfevents.1.other.host").write_text("of another program")
    (board / "events-notes.txt").write_text("notes")
    (board / ("events" + killed._mark + "1")).symlink_to(run / "metrics.jsonl")
    others = {path.name for path in board.iterdir()} - own
    new = TensorBoard(board, sizes)
    assert {name: (board / name).stat().st_size for name in sizes} == sizes
    now = {path.name for path in board.iterdir()}
    assert others < now and len(now - others) == 2
    assert set(new.sizes()) == now - others
    new.close()


def test_a_folder_of_a_run_is_not_a_link(run, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "events.mine").touch()
    uses = {"tensorboard": lambda path: TensorBoard(path, {}), "checkpoints": Checkpoints}
    for name, use in uses.items():
        (run / name).symlink_to(mine)
        with pytest.raises(UserError, match=f"{name} is a link, which a run does not follow"):
            use(run / name)
    assert [p.name for p in mine.iterdir()] == ["events.mine"]


# --- one process at a time ---


def taken(folder):
    """Check that another process may not use a folder."""
    with (
        pytest.raises(UserError, match=r"another process uses .*; wait until it has saved"),
        Workdir(folder).alone(),
    ):
        pass


def test_a_removed_lock_lets_no_second_process_in(run):
    with Workdir(run).alone():
        (run / ".lock").unlink()
        taken(run)
        (run / ".lock").unlink(missing_ok=True)
        Workdir(run).still_alone()
    with Workdir(run).alone():
        pass


def test_where_only_files_can_be_locked_a_removed_lock_ends_the_run(run, monkeypatch):
    """NFS does not lock folders, so the run checks its lock before each save."""
    flock = fcntl.flock

    def of_files(file, how):
        if stat.S_ISDIR(os.fstat(file if isinstance(file, int) else file.fileno()).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", of_files)
    workdir = Workdir(run)
    with workdir.alone():
        taken(run)
        workdir.still_alone()
        (run / ".lock").unlink()
        with pytest.raises(UserError, match=r"\.lock was moved, removed or replaced"):
            workdir.still_alone()


def test_a_lock_on_a_file_that_was_replaced_does_not_count(run, monkeypatch):
    flock, paths = fcntl.flock, [run / ".lock"]

    def late(file, how):
        flock(file, how)
        if paths:
            paths.pop().unlink()

    monkeypatch.setattr(files.fcntl, "flock", late)
    with lock_file(run / ".lock", wait=True) as file:
        assert os.path.samestat(os.fstat(file.fileno()), (run / ".lock").stat())


def test_a_file_system_without_locks_is_told_with_a_way_out(run, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", none)
    says = r"cannot be locked \(flock: No locks .*: mount the file system"
    with pytest.raises(UserError, match=says), Workdir(run).alone():
        pass


def test_a_run_is_alone_from_its_first_look_at_the_folder_to_its_last_save(tmp_path, monkeypatch):
    """Otherwise another experiment could begin between the look and the lock.

    A job may also be restarted while the previous job still saves.
    """
    experiment, run, looked = runs.experiment(tmp_path, checkpoint_every=4), tmp_path / "run", []

    def locked(real):
        def call(*given):
            taken(run)
            looked.append(real.__name__)
            return real(*given)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Workdir, "claim", locked(Workdir.claim))
        patch.setattr(Checkpoints, "save", locked(Checkpoints.save))
        pretrain.run_experiment(experiment, run)
    assert looked == ["claim", "save", "save"]


def test_a_folder_that_is_moved_during_the_run_leaves_no_stray_one(tmp_path, monkeypatch):
    experiment, run = runs.experiment(tmp_path, steps=4, checkpoint_every=1), tmp_path / "run"
    save = Checkpoints.save

    def moved(self, step, *rest):
        if step == 3:
            self.wait()
            run.rename(tmp_path / "moved")
        save(self, step, *rest)

    says = r"run was moved, .* give the present folder of the run"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=says):
        patch.setattr(Checkpoints, "save", moved)
        pretrain.run_experiment(experiment, run)
    assert not run.exists()
    assert pretrain.run_experiment(experiment, tmp_path / "moved")["steps"] == 4


# --- files of others ---


def test_a_run_is_not_more_open_than_the_models_it_starts_from(run, tmp_path):
    sources = [tmp_path / "a", tmp_path / "b"]
    for source, mode in zip(sources, (0o750, 0o705), strict=True):
        source.mkdir(mode)
        source.chmod(mode)
    run.chmod(0o755)
    Workdir(run).close_like(sources[:1])
    assert stat.S_IMODE(run.stat().st_mode) == 0o750
    Workdir(run).close_like(sources)
    assert stat.S_IMODE(run.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["config.json", "jaxgrow.json", "params", "tokenizer.json"])
def test_a_run_does_not_begin_in_the_folder_of_a_model(tmp_path, run, name):
    (run / name).write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(
        UserError, match=rf"contains {name}, which a run would replace; give another"
    ):
        pretrain.run_experiment(runs.experiment(tmp_path), run)
    assert (run / name).read_text().startswith('{"arch')


def test_an_export_replaces_only_exports(run):
    params = runs.fresh(runs.MODEL)
    orbax.export_model(run, runs.MODEL, params)
    orbax.export_model(run, runs.MODEL, params)
    assert {p.name for p in run.iterdir()} == {"params", "jaxgrow.json"}
    (run / "params" / "SHA256SUMS").unlink()
    mine = (".exporting-notes", ".exporting-0123456789abcde/")
    for name in mine:
        (run / name).mkdir()
    (run / ".exporting-0123456789abcdef").mkdir()  # of a killed export
    orbax.export_model(run, runs.MODEL, params)
    names = {p.name for p in run.iterdir()}
    (aside,) = (name for name in names if name.startswith("damaged-params-"))
    assert [path for path in (run / aside).rglob("*") if path.is_file()]
    assert names == {"params", "jaxgrow.json", aside, *(name.rstrip("/") for name in mine)}
    elsewhere = (run / "params").rename(run / "elsewhere")
    (run / "params").symlink_to(elsewhere)
    before = sorted(p.name for p in elsewhere.iterdir())
    orbax.export_model(run, replace(runs.MODEL), params)
    assert sorted(p.name for p in elsewhere.iterdir()) == before
    open_checkpoint(run)


def test_a_kill_during_the_export_is_repaired(tmp_path, run, monkeypatch):
    experiment = runs.experiment(tmp_path, steps=2)

    def dies(*_):
        raise runs.Killed

    for at in ("seal", "_move_export"):
        with monkeypatch.context() as patch, pytest.raises(runs.Killed):
            patch.setattr(orbax, at, dies)
            pretrain.run_experiment(experiment, run)
    assert pretrain.run_experiment(experiment, run)["steps"] == 2
    assert not [*run.glob(".exporting-*")]
    open_checkpoint(run)
