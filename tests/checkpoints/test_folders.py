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

import jax
import numpy as np
import pytest
import tiny
from checkpoints import CONFIG, change, contents, saved
from handlers import python_handlers

from jaxgrow import checkpoints, operators
from jaxgrow.checkpoints import CheckpointError, Loaded
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


# --- complete or not at all ---


def test_everything_is_on_the_disk_before_the_folder_appears(tmp_path, folder, synced, monkeypatch):
    place, seen = folders._place, []

    def recorded(new, *others):
        seen.append({f.name: f.stat().st_ino in synced for f in [new, *new.rglob("*")]})
        place(new, *others)

    monkeypatch.setattr(folders, "_place", recorded)
    checkpoints.transform(folder, checkpoints.Output(tmp_path / "b", shard=5000), DEEPER)
    checkpoints.transform(folder, checkpoints.Output(tmp_path / "o", "orbax"), DEEPER)
    for files in seen:
        assert len(files) > 6
        assert all(files.values()), files
    assert tmp_path.stat().st_ino in synced


def test_a_link_may_lead_to_a_missing_file(tmp_path, synced):
    """A tracker, for example, has a link to its latest log in the folder of a run."""
    (tmp_path / "latest.log").symlink_to("deleted.log")
    (tmp_path / "file").write_text("")
    folders.sync(tmp_path)
    assert (tmp_path / "file").stat().st_ino in synced


def test_files_of_the_user_in_a_folder_need_not_be_writable(tmp_path, synced, monkeypatch):
    """A user may keep a read-only file or a named pipe in the folder of a run."""
    (tmp_path / "notes").write_text("")
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
        checkpoints.transform(folder, target, DEEPER)

    class Broken(Loaded):
        def read(self, path, layer=None):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone") as error:
        checkpoints.write(
            Broken(CONFIG, tiny.params(CONFIG, dtype="float32")),
            checkpoints.Output(target, "hf", overwrite=True),
        )
    assert error.value.__notes__ == [f"{target} is unchanged"]
    assert contents(target) == before
    assert names(tmp_path) == ["b"]
    checkpoints.transform(folder, checkpoints.Output(target, overwrite=True), DEEPER)
    assert checkpoints.load(target)[0].layers == 5
    assert names(tmp_path) == ["b"]


def test_folders_on_the_way_are_taken_back_too(tmp_path, folder):
    with (
        pytest.raises(OSError, match="gone") as error,
        atomic_folder(tmp_path / "a/b/c", [folder], False) as new,
    ):
        (new / "x").touch()
        raise OSError("the disk is gone")
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
        checkpoints.transform(folder, checkpoints.Output(folder / where, overwrite=True), DEEPER)
    assert contents(tmp_path) == before


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, folder, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="but 100 are free"):
        checkpoints.transform(folder, tmp_path / "b", DEEPER)
    assert not names(tmp_path)


# --- what may be replaced ---


def edited(folder: Path) -> Path:
    """Turn the folder into a user's project, with `{"editor": "vim"}` and a thesis."""
    (folder / ".git").mkdir(parents=True)
    (folder / "config.json").write_text('{"editor": "vim"}')
    (folder / "thesis.tex").write_text("All that I know")
    return folder


def orbax(folder: Path) -> Path:
    checkpoints.write(
        Loaded(CONFIG, tiny.params(CONFIG, dtype="float32")), checkpoints.Output(folder, "orbax")
    )
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
    "a thesis": (with_more("thesis.tex"), r"holds other files besides a checkpoint.*: thesis.tex\."),
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


def as_downloaded(folder: Path) -> Path:
    """Save shards without a jaxgrow record, with the other files of a model on the hub."""
    saved(folder, shard=2000)
    (folder / "jaxgrow.json").unlink()
    names = "README.md LICENSE .gitattributes generation_config.json vocab.json merges.txt"
    for name in names.split():
        (folder / name).write_text("")
    return folder


def an_empty_one(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("make", [as_downloaded, an_empty_one, orbax, saved])
def test_checkpoints_and_empty_folders_are_replaced(tmp_path, folder, make):
    checkpoints.transform(folder, checkpoints.Output(make(tmp_path / "b"), overwrite=True), DEEPER)
    assert checkpoints.load(tmp_path / "b")[0].layers == 5
    assert names(tmp_path) == ["b"]


def test_a_dtype_that_is_not_written_is_refused(tmp_path):
    params = jax.tree.map(
        lambda x: x.astype(jax.numpy.float8_e4m3fn), CONFIG.init(jax.random.key(0))
    )
    message = "has dtype float8_e4m3fn, which is not written; convert it to one of float64, float32"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(tmp_path / "a", CONFIG, params)
    assert not list(tmp_path.iterdir())


def test_what_came_along_with_a_model_is_a_part_of_it(tmp_path):
    source = saved(tmp_path / "a")
    (source / "labels.txt").write_text("cat")
    for _ in range(2):
        checkpoints.transform(source, checkpoints.Output(tmp_path / "b", overwrite=True), DEEPER)
    assert (tmp_path / "b/labels.txt").read_text() == "cat"
    (tmp_path / "b/more.txt").write_text("dog")
    with pytest.raises(CheckpointError, match=r"replaced: more\.txt"):
        checkpoints.transform(source, checkpoints.Output(tmp_path / "b", overwrite=True), DEEPER)


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
    """Count the system calls of a block and interrupt one of them.

    Each call counts twice: before and after it. Functions that only change the text of a path are
    no system calls.
    """

    _OF_TEXT = frozenset(("fspath", "_path_normpath", "_path_splitroot", "_path_splitroot_ex"))

    def __init__(self, at: int = -1, number: int = signal.SIGINT):
        self.count, self._at, self._number = 0, at, number

    def __enter__(self):
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _seen(self, frame, event, what):
        where = (
            getattr(what, "__module__", None) or type(getattr(what, "__self__", None)).__module__
        )
        if event not in ("c_call", "c_return") or what.__name__ in self._OF_TEXT:
            return
        if where in ("posix", "fcntl", "io", "_io"):
            self.count += 1
            if self.count == self._at:
                signal.raise_signal(self._number)


GPT2 = b'{"architectures": ["GPT2LMHeadModel"]}'


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
@pytest.mark.parametrize(
    ("stands", "exchange"),
    [(False, True), (True, True), (True, False)],
    ids=["new", "exchange", "two renames"],
)
def test_an_interrupt_leaves_the_old_or_new_folder_and_says_so(
    tmp_path, monkeypatch, stands, exchange
):
    monkeypatch.setattr(folders, "_LATE", 0)  # no thread of Orbax writes here
    if not exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # without `renameat2`
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
            assert said in (
                [],
                [f"{home / 'b'} is unchanged" if stands else "nothing was written"],
            ), at
            expected = before
        assert contents(home) == expected, at
        # No empty folder remains.
        assert names(home) == sorted({name.split("/")[0] for name in expected}), at
        outcomes.add(tuple(text.removeprefix(str(home)) for text in said))
    gc.collect()
    assert at > 100
    assert len(outcomes) == 3  # not begun, not done, done


@pytest.mark.parametrize(
    "error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_two_renames_of_which_the_second_fails_are_taken_back(tmp_path, monkeypatch, error):
    users(tmp_path, True)
    before = contents(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # without `renameat2`
    rename = os.rename

    def failing(a, b):
        if Path(a).name == "new":
            raise error
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(type(error)) as caught:
        rewritten(tmp_path)
    assert caught.value.__notes__ == [f"{tmp_path / 'b'} is unchanged"]
    assert contents(tmp_path) == before


def test_a_replaced_folder_is_kept_if_it_is_the_last_copy(tmp_path, monkeypatch):
    """If neither of two renames can be undone, a message says where the model is.

    The next run restores it.
    """
    users(tmp_path, True)
    before = contents(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # without `renameat2`
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


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
)
@pytest.mark.parametrize("stands", [False, True], ids=["new", "replaced"])
def test_signals_end_the_command_cleanly_with_a_true_message(
    tmp_path, folder, capsys, monkeypatch, number, stands
):
    if stands:
        saved(tmp_path / "b", seed=3)
    before = contents(tmp_path)
    command = ["convert", str(folder), str(tmp_path / "b"), "--to", "hf", "--overwrite"]
    write = safetensors.Tensor.copy
    monkeypatch.setattr(
        safetensors.Tensor,
        "copy",
        # interrupt at the first of many tensors
        lambda *a: (write(*a), signal.raise_signal(number)),
    )
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
    monkeypatch.setattr(
        ocp, what, lambda *a: (signal.raise_signal(signal.SIGINT), act(*a), done.append(True))[1]
    )
    with python_handlers():
        assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "orbax"]) == 130
    assert done
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted")
    assert names(tmp_path) == ["a"]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, folder, monkeypatch):
    """For example under `nohup`."""
    place = folders._place
    monkeypatch.setattr(
        folders, "_place", lambda *a: (place(*a), signal.raise_signal(signal.SIGHUP))
    )
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
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "interrupted; nothing was written\n",
    )


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
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.models import BERTConfig
main(sys.argv[1:])
"""


def test_leftovers_of_a_killed_process_are_cleaned_up_later(tmp_path, folder):
    arguments = ["grow", str(folder), str(tmp_path / "b"), "--method", "stack", "--layers", "6"]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == b"copied\n"
        with pytest.raises(
            CheckpointError, match=f"another process is writing .*: process {process.pid} on "
        ):
            checkpoints.transform(folder, tmp_path / "b", DEEPER)
        checkpoints.transform(folder, tmp_path / "c", DEEPER)  # no other process writes it
        process.kill()
        process.wait()
    (left,) = [f for f in tmp_path.iterdir() if f.name not in "bc"]
    checkpoints.transform(folder, tmp_path / "d", DEEPER)  # a write to d keeps the remains of b
    assert left.exists()
    about = json.loads((left / "about.json").read_text())
    # Locks of another host may be invisible here.
    (left / "about.json").write_text(json.dumps(about | {"host": "another"}))
    checkpoints.transform(folder, tmp_path / "b", DEEPER)
    assert left.exists()
    (left / "about.json").write_text(json.dumps(about))
    checkpoints.transform(folder, checkpoints.Output(tmp_path / "b", overwrite=True), DEEPER)
    assert names(tmp_path) == ["b", "c", "d"]


def test_the_lock_is_on_a_file_that_is_open_for_writing(tmp_path, monkeypatch):
    """NFS and CIFS support locks only on such files."""
    fcntl = pytest.importorskip("fcntl")
    modes = []
    monkeypatch.setattr(
        fcntl,
        "flock",
        lambda file, how: modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE),
    )
    with atomic_folder(tmp_path / "b", [], False), atomic_folder(tmp_path / "c", [], False):
        pass
    assert modes == [os.O_RDWR] * 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_failed_lock_is_logged_and_the_folder_is_written(tmp_path, monkeypatch, caplog, number):
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), atomic_folder(tmp_path / "b", [], False) as new:
        model(new, b"new")
        # Without this file, the folder is not mistaken for the remains of a killed process.
        assert not (new.parent / "about.json").exists()
    (line,) = caplog.messages
    assert os.strerror(number) in line
    assert "another process" not in line
    assert names(tmp_path) == ["b"]


def test_a_system_without_locks_writes_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "fcntl", None)
    users(tmp_path, True)
    rewritten(tmp_path)
    assert (tmp_path / "b/model.safetensors").read_bytes() == b"new"


@pytest.mark.parametrize("config", [BERTConfig, ModernBERTConfig])
def test_encoders_with_any_masked_part_are_written(tmp_path, config):
    """The part of masked tokens is a setting of the training; `transformers` does not store it."""
    sizes = dict(vocab=32, context=8, layers=1, embed=8, heads=2, head_dim=4, mlp=16)
    sizes |= {"kv_heads": 2, "layers": 3} if config is ModernBERTConfig else {}
    own = config(**sizes, masked=0.25)
    params = own.init(jax.random.key(0))
    checkpoints.save(tmp_path / "hf", own, params)
    found, again = checkpoints.load(tmp_path / "hf")
    assert found == replace(own, masked=found.masked)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_a_lora_in_the_folder_of_a_model_is_not_left_behind(tmp_path, folder, kind):
    checkpoints.transform(folder, checkpoints.Output(tmp_path / "a", kind), {})
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    source = checkpoints.open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="contains an adapter in addition"):
        checkpoints.write(source, tmp_path / "b")
    with pytest.raises(CheckpointError, match="contains an adapter in addition"):
        checkpoints.transform(source, tmp_path / "b", DEEPER, optimizer=("copy", None))
    assert not (tmp_path / "b").exists()
