"""Folders are written completely or not at all, and replace nothing other than a checkpoint."""

import ctypes
import errno
import gc
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from checkpoints import CONFIG, change, contents, saved
from handlers import python_handlers

from jaxgrow import checkpoints, operators
from jaxgrow.checkpoints import CheckpointError, Loaded, Output
from jaxgrow.checkpoints.io import folders, safetensors
from jaxgrow.checkpoints.io.folders import atomic_folder
from jaxgrow.cli.program import main
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.models import BERTConfig

SIZES = {"layers": 4, "embed": 12, "heads": 4, "mlp": 20}
DEEPER = operators.stack(SIZES, {"layers": 5})
ROOT = str(Path(checkpoints.__file__).parents[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Save a checkpoint that no test changes."""
    return saved(tmp_path_factory.mktemp("source") / "gpt")


@pytest.fixture(autouse=True)
def synced(monkeypatch) -> set[int]:
    """Record the inodes that were made durable, and skip the slow wait for the disk."""
    inodes: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: inodes.add(os.fstat(handle).st_ino))
    return inodes


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def deepen(source, target: Path, kind: Any = None, **options) -> None:
    checkpoints.transform(source, Output(target, kind, **options), DEEPER)


# --- complete or not at all ---


def test_everything_is_on_the_disk_before_the_folder_appears(tmp_path, folder, synced, monkeypatch):
    place, seen = folders._place, []

    def recorded(new, *others):
        seen.append({f.name: f.stat().st_ino in synced for f in [new, *new.rglob("*")]})
        place(new, *others)

    monkeypatch.setattr(folders, "_place", recorded)
    deepen(folder, tmp_path / "b", shard=5000)
    deepen(folder, tmp_path / "o", "orbax")
    for files in seen:
        assert len(files) > 6
        assert all(files.values()), files
    assert tmp_path.stat().st_ino in synced


def test_files_of_the_user_in_a_folder_need_be_neither_writable_nor_regular(
    tmp_path, synced, monkeypatch
):
    """A run's folder may hold a read-only file, a named pipe, and a tracker's link to its last log."""
    (tmp_path / "notes").write_text("")
    (tmp_path / "latest.log").symlink_to("deleted.log")
    os.mkfifo(tmp_path / "pipe")
    opened = Path.open

    def for_reading(path, mode="r", *rest, **more):
        if path.name == "notes" and "+" in mode:  # root may write everywhere
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", for_reading)
    folders.sync(tmp_path)
    assert (tmp_path / "notes").stat().st_ino in synced


def test_an_existing_folder_is_replaced_only_at_the_end(tmp_path, folder):
    target = saved(tmp_path / "b", seed=3)
    before = contents(target)
    with pytest.raises(CheckpointError, match=r"replaces it \(in Python: overwrite=True\)"):
        deepen(folder, target)

    class Broken(Loaded):
        def read(self, path, layer=None):
            raise OSError("gone")

    broken = Broken(CONFIG, tiny.params(CONFIG, dtype="float32"))
    with pytest.raises(OSError, match="gone") as error:
        checkpoints.write(broken, Output(target, "hf", overwrite=True))
    assert error.value.__notes__ == [f"{target} is unchanged"]
    assert contents(target) == before
    assert names(tmp_path) == ["b"]


def test_folders_on_the_way_are_taken_back_too(tmp_path, folder):
    with (
        pytest.raises(OSError, match="gone") as error,
        atomic_folder(tmp_path / "a/b/c", [folder], False) as new,
    ):
        (new / "x").touch()
        raise OSError("gone")
    assert error.value.__notes__ == ["nothing was written"]
    assert not names(tmp_path)
    with atomic_folder(tmp_path / "a/b/c", [folder], False):
        pass
    # The mode follows the umask and not the mode of the hidden folder.
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o777 & ~umask()
    with atomic_folder(tmp_path / ("n" * 255), [folder], False):  # the longest possible name
        pass


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.parametrize("where", [".", "inner", ".."])
def test_a_target_that_overlaps_its_source_is_refused(tmp_path, where):
    folder = saved(tmp_path / "out" / "a")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="contains it, or is inside it"):
        deepen(folder, folder / where, overwrite=True)
    assert contents(tmp_path) == before


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, folder, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="but 100 are free"):
        deepen(folder, tmp_path / "b")
    assert not names(tmp_path)


# --- what may be replaced ---


def edited(folder: Path) -> Path:
    """Turn the folder into a user's project, with `{"editor": "vim"}` and a thesis."""
    (folder / ".git").mkdir(parents=True)
    (folder / "config.json").write_text('{"editor": "vim"}')
    (folder / "thesis.tex").write_text("All that I know")
    return folder


def orbax(folder: Path) -> Path:
    model = Loaded(CONFIG, tiny.params(CONFIG, dtype="float32"))
    checkpoints.write(model, Output(folder, "orbax"))
    return folder


def with_more(*files: str, make: Callable[[Path], Path] = saved) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        for file in files:
            path = make(folder) / file if file == files[0] else folder / file
            path.parent.mkdir(exist_ok=True)
            path.mkdir() if file.endswith("/") else path.write_text("mine")
        return folder

    return made


REFUSED = {
    "a project": (edited, "holds no checkpoint .*: .git/, thesis.tex. Choose another folder"),
    "a repository": (with_more(".git/"), r"holds other files besides a checkpoint.*: .git/\."),
    "weights of others": (with_more("optimizer.pt", "pytorch_model.bin"), r"optimizer.pt, pytorch_model.bin\."),
    "weights that look like a shard": (with_more("model-best-of-three.safetensors"), "model-best-of-three"),
    "a folder of a known name": (with_more("README.md/"), r"README.md/\."),
    "a hundred files": (with_more(*(f"{i:03}.txt" for i in range(100))), r"018.txt, 019.txt, and 80 more\."),
    "among parameters": (with_more("params/thesis.tex", make=orbax), "params/thesis.tex"),
    "another architecture": (lambda f: (change(saved(f), architectures=["T5Model"]), (f / "jaxgrow.json").unlink()),
        "holds no checkpoint"),
    "no weights": (lambda f: ((saved(f) / "model.safetensors").unlink(), (f / "jaxgrow.json").unlink()),
        "holds no checkpoint"),
    "another record": (lambda f: (f.mkdir(), (f / "jaxgrow.json").write_text('{"editor": "vim", "files": ["thesis.tex"]}')),
        "holds no checkpoint"),
    "a link": (lambda f: f.symlink_to(saved(f.with_name("there"))), "exists and is not a folder"),
    "a file": (lambda f: f.write_text(""), "exists and is not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_only_a_checkpoint_and_nothing_else_is_replaced(tmp_path, folder, what, capsys):
    make, message = REFUSED[what]
    make(tmp_path / "b")
    before = contents(tmp_path), names(tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "b"), "--to", "hf", "--overwrite"]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert (contents(tmp_path), names(tmp_path)) == before


def test_overwrite_is_not_advised_if_it_would_be_refused(tmp_path, folder, capsys):
    with_more("thesis.tex")(tmp_path / "b")
    assert main(["convert", str(folder), str(tmp_path / "b"), "--to", "hf"]) == 1
    error = capsys.readouterr().err
    assert "holds other files besides a checkpoint" in error and "--overwrite" not in error


def as_downloaded(folder: Path) -> None:
    """Save shards without a jaxgrow record, with the other files of a model on the hub."""
    saved(folder, shard=2000)
    (folder / "jaxgrow.json").unlink()
    for name in "README.md LICENSE .gitattributes generation_config.json vocab.json".split():  # noqa: SIM905
        (folder / name).write_text("")


@pytest.mark.parametrize("make", [as_downloaded, Path.mkdir, orbax, saved])
def test_checkpoints_and_empty_folders_are_replaced(tmp_path, folder, make):
    make(tmp_path / "b")
    deepen(folder, tmp_path / "b", overwrite=True)
    assert checkpoints.load(tmp_path / "b")[0].layers == 5
    assert names(tmp_path) == ["b"]


def test_a_dtype_that_is_not_written_is_refused(tmp_path):
    params = tiny.params(CONFIG, dtype="float8_e4m3fn")
    message = "has dtype float8_e4m3fn, which is not written; convert it to one of float64, float32"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(tmp_path / "a", CONFIG, params)
    assert not list(tmp_path.iterdir())


def test_what_came_along_with_a_model_is_a_part_of_it(tmp_path):
    source = saved(tmp_path / "a")
    (source / "labels.txt").write_text("cat")
    for _ in range(2):
        deepen(source, tmp_path / "b", overwrite=True)
    assert (tmp_path / "b/labels.txt").read_text() == "cat"
    (tmp_path / "b/more.txt").write_text("dog")
    with pytest.raises(CheckpointError, match=r"replaced: more\.txt"):
        deepen(source, tmp_path / "b", overwrite=True)


def test_files_added_during_a_replacement_are_kept(tmp_path, folder):
    target = saved(tmp_path / "b")
    before = contents(target)
    with (
        pytest.raises(CheckpointError, match="other files besides a checkpoint"),
        atomic_folder(target, [folder], True),
    ):
        (target / "thesis.tex").write_text("All that I know")
    assert contents(target) == before | {"thesis.tex": b"All that I know"}
    assert names(tmp_path) == ["b"]


# --- interrupts ---


class Calls:
    """Count the system calls of a block, before and after each one, and interrupt one of them."""

    # These functions only change the text of a path.
    _OF_TEXT = frozenset(("fspath", "_path_normpath", "_path_splitroot", "_path_splitroot_ex"))

    def __init__(self, at: int):
        self.count, self._at = 0, at

    def __enter__(self):
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _seen(self, frame, event, what):
        of = getattr(what, "__self__", None)
        where = getattr(what, "__module__", None) or type(of).__module__
        if event not in ("c_call", "c_return") or what.__name__ in self._OF_TEXT:
            return
        if where in ("posix", "fcntl", "io", "_io"):
            self.count += 1
            if self.count == self._at:
                signal.raise_signal(signal.SIGINT)


GPT2 = b'{"architectures": ["GPT2LMHeadModel"]}'
TWO_RENAMES = ("CDLL", lambda name: object())  # without `renameat2`


def model(folder: Path, numbers: bytes) -> None:
    (folder / "model.safetensors").write_bytes(numbers)
    (folder / "config.json").write_bytes(GPT2)


def users(folder: Path, stands: bool) -> None:
    """Create a user's folders with names that jaxgrow could also use."""
    for name in (".b.part", ".b.old", ".jaxgrow-"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine").touch()
    if stands:
        (folder / "b").mkdir()
        model(folder / "b", b"old")


def rewritten(folder: Path) -> None:
    with atomic_folder(folder / "b", [], True) as new:
        model(new, b"new")


# about files that were interrupted before they had an owner
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("how", ["new", "exchange", "two renames"])
def test_an_interrupt_leaves_the_old_or_new_folder_and_says_so(tmp_path, monkeypatch, how):
    stands = how != "new"
    monkeypatch.setattr(folders, "_LATE", 0)  # no thread of Orbax writes here
    if how == "two renames":
        monkeypatch.setattr(ctypes, *TWO_RENAMES)
    outcomes: set[tuple[str, ...]] = set()
    for at in itertools.count(1):
        home = tmp_path / str(at)
        users(home, stands)
        before = contents(home)
        said, calls = None, Calls(at)
        with python_handlers():
            try:
                with calls:
                    rewritten(home)
            except KeyboardInterrupt as error:
                said = getattr(error, "__notes__", [])
        assert (said is not None) == (calls.count >= at)
        if said is None:  # the block has fewer calls
            break
        kept = {name: x for name, x in before.items() if not name.startswith("b/")}
        if said == [f"{home / 'b'} is complete"]:
            expected = kept | {"b/config.json": GPT2, "b/model.safetensors": b"new"}
        else:
            old = f"{home / 'b'} is unchanged" if stands else "nothing was written"
            assert said in ([], [old]), at
            expected = before
        assert contents(home) == expected, at
        # No empty folder remains.
        assert names(home) == sorted({name.split("/")[0] for name in expected}), at
        outcomes.add(tuple(text.removeprefix(str(home)) for text in said))
    gc.collect()
    assert at > 100
    assert len(outcomes) == 3  # not begun, not done, done


def test_two_renames_of_which_the_second_fails_are_taken_back(tmp_path, monkeypatch):
    users(tmp_path, True)
    before = contents(tmp_path)
    monkeypatch.setattr(ctypes, *TWO_RENAMES)
    rename = os.rename

    def failing(a, b):
        if Path(a).name == "new":
            raise OSError(errno.EBUSY, "busy")
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="busy") as caught:
        rewritten(tmp_path)
    assert caught.value.__notes__ == [f"{tmp_path / 'b'} is unchanged"]
    assert contents(tmp_path) == before


def test_a_replaced_folder_is_kept_if_it_is_the_last_copy(tmp_path, monkeypatch):
    """If neither of two renames can be undone, a message says where it is. The next run restores it."""
    users(tmp_path, True)
    before = contents(tmp_path)
    monkeypatch.setattr(ctypes, *TWO_RENAMES)
    rename = os.rename

    def failing(a, b):
        if Path(b).name == "b":
            raise OSError(errno.EIO, "the cable is out")
        rename(a, b)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="cable") as caught:
        patch.setattr(os, "rename", failing)
        rewritten(tmp_path)
    note, left = caught.value.__notes__
    assert left.endswith(" could not be removed")
    where = Path(note.removeprefix(f"the previous content of {tmp_path / 'b'} is in "))
    assert (where / "model.safetensors").read_bytes() == b"old"
    with (
        pytest.raises(CheckpointError, match="exists; --overwrite replaces it"),
        atomic_folder(tmp_path / "b", [], False),
    ):
        pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("number", "stands"), [
    (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False),
])  # fmt: skip
def test_signals_end_the_command_cleanly_with_a_true_message(
    tmp_path, folder, capsys, monkeypatch, number, stands
):
    if stands:
        saved(tmp_path / "b", seed=3)
    before = contents(tmp_path)
    command = ["convert", str(folder), str(tmp_path / "b"), "--to", "hf", "--overwrite"]
    write = safetensors.Tensor.copy
    # interrupt at the first of many tensors
    interrupted = lambda *a: (write(*a), signal.raise_signal(number))  # noqa: E731
    monkeypatch.setattr(safetensors.Tensor, "copy", interrupted)
    with python_handlers():
        assert main(command) == 128 + number
    said = f"{tmp_path / 'b'} is unchanged" if stands else "nothing was written"
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted; {said}"
    assert contents(tmp_path) == before
    assert names(tmp_path) == ["b"] * stands

    place = folders._place
    monkeypatch.undo()
    monkeypatch.setattr(folders, "_place", lambda *a: (place(*a), signal.raise_signal(number)))
    with python_handlers():
        assert main(command) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted; {tmp_path / 'b'} is complete"
    np.testing.assert_equal(checkpoints.load(tmp_path / "b")[1], checkpoints.load(folder)[1])
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("what", ["save", "load"])
def test_orbax_is_interrupted_when_its_threads_have_ended(
    tmp_path, folder, capsys, monkeypatch, what
):
    """These threads would otherwise write into a folder that is being removed."""
    from jaxgrow.checkpoints.orbax import ocp

    orbax(tmp_path / "a")
    act, done = getattr(ocp, what), []

    def interrupted(*a):
        signal.raise_signal(signal.SIGINT)
        return act(*a), done.append(True)

    monkeypatch.setattr(ocp, what, lambda *a: interrupted(*a)[0])
    with python_handlers():
        assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "orbax"]) == 130
    assert done
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted")
    assert names(tmp_path) == ["a"]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, folder, monkeypatch):
    """For example under `nohup`."""
    monkeypatch.setattr(folders, "_place", lambda *a: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["convert", str(folder), str(tmp_path / "b"), "--to", "hf"]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


IMPORTING = """
import signal, sys
class Interrupted:
    def find_spec(name, path=None, target=None):
        if name == "jax":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted)
signal.signal(signal.SIGINT, signal.default_int_handler)
import jaxgrow_command
sys.argv[1:] = ["architectures"]
sys.exit(jaxgrow_command.main())
"""


def test_an_interrupt_during_the_jax_import_has_no_traceback():
    command = [sys.executable, "-c", IMPORTING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    expected = (130, "", "interrupted; nothing was written\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


COLLECTING = """
import gc, signal, sys
from jaxgrow.checkpoints.io import safetensors
from jaxgrow.cli.program import main
copy = safetensors.Tensor.copy
def interrupt(*_):
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGINT)
def collecting(self, out):
    if not sys.argv.count("collected"):
        sys.argv.append("collected")
        gc.callbacks.append(interrupt)
        gc.collect()
    while True:
        copy(self, out)
safetensors.Tensor.copy = collecting
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupt_that_python_ignores_is_not_lost(tmp_path, folder):
    """In a callback of the garbage collector, an exception ends nothing."""
    arguments = ["grow", str(folder), str(tmp_path / "b"), "--method", "stack", "--layers", "6"]
    command = [sys.executable, "-c", COLLECTING, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


# --- other processes ---


KILLED = """
import sys, time
from jaxgrow import checkpoints
from jaxgrow.checkpoints.io import safetensors
copy = safetensors.Tensor.copy
def slow(self, out):
    copy(self, out)
    out.flush()
    print("copied", flush=True)
    time.sleep(1)
safetensors.Tensor.copy = slow
from jaxgrow.cli.program import main
main(sys.argv[1:])
"""


def test_leftovers_of_a_killed_process_are_cleaned_up_later(tmp_path, folder):
    arguments = ["grow", str(folder), str(tmp_path / "b"), "--method", "stack", "--layers", "6"]
    command = [sys.executable, "-c", KILLED, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    with process.stdout as out:
        assert out.readline() == b"copied\n"
        says = f"another process is writing .*: process {process.pid} on "
        with pytest.raises(CheckpointError, match=says):
            deepen(folder, tmp_path / "b")
        deepen(folder, tmp_path / "c")  # no other process writes it
        process.kill()
        process.wait()
    (left,) = [f for f in tmp_path.iterdir() if f.name not in "bc"]
    deepen(folder, tmp_path / "d")  # a write to d keeps the remains of b
    assert left.exists()
    about = json.loads((left / "about.json").read_text())
    # Locks of another host may be invisible here.
    (left / "about.json").write_text(json.dumps(about | {"host": "another"}))
    deepen(folder, tmp_path / "b")
    assert left.exists()
    (left / "about.json").write_text(json.dumps(about))
    deepen(folder, tmp_path / "b", overwrite=True)
    assert names(tmp_path) == ["b", "c", "d"]


def test_the_lock_is_on_a_file_that_is_open_for_writing(tmp_path, monkeypatch):
    """NFS and CIFS support locks only on such files."""
    fcntl = pytest.importorskip("fcntl")
    modes, mode = [], lambda file: fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    monkeypatch.setattr(fcntl, "flock", lambda file, how: modes.append(mode(file)))
    with atomic_folder(tmp_path / "b", [], False):
        pass
    assert modes == [os.O_RDWR]


def test_a_failed_lock_is_logged_and_the_folder_is_written(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), atomic_folder(tmp_path / "b", [], False) as new:
        model(new, b"new")
        # Without this file, the folder is not mistaken for the remains of a killed process.
        assert not (new.parent / "about.json").exists()
    (line,) = caplog.messages
    assert "no locks" in line and "another process" not in line
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("config", [
    BERTConfig(vocab=32, context=8, layers=1, embed=8, heads=2, head_dim=4, mlp=16, masked=0.25),
    ModernBERTConfig(vocab=32, context=8, layers=3, embed=8, heads=2, head_dim=4, mlp=16, kv_heads=2, masked=0.25),
])  # fmt: skip
def test_encoders_with_any_masked_part_are_written(tmp_path, config):
    """The part of masked tokens is a setting of the training; `transformers` does not store it."""
    checkpoints.save(tmp_path / "hf", config, tiny.params(config, dtype="float32"))
    found, _ = checkpoints.load(tmp_path / "hf")
    assert found == replace(config, masked=found.masked)


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_a_lora_in_the_folder_of_a_model_is_not_left_behind(tmp_path, folder, kind):
    checkpoints.transform(folder, Output(tmp_path / "a", kind), {})
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    source = checkpoints.open_checkpoint(tmp_path / "a")
    for write in (
        lambda to: checkpoints.write(source, to),
        lambda to: checkpoints.transform(source, to, DEEPER, optimizer=("copy", None)),
    ):
        with pytest.raises(CheckpointError, match="contains an adapter in addition"):
            write(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_system_without_locks_writes_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "fcntl", None)
    users(tmp_path, True)
    rewritten(tmp_path)
    assert (tmp_path / "b/model.safetensors").read_bytes() == b"new"
