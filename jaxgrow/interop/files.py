"""Folders of checkpoints: files that may be trusted to lie in one, and new ones that appear whole or not at all."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LARGEST_JSON = 100 << 20  # bytes: as much as safetensors allows a header
LARGEST_EXTRA = 100 << 20  # bytes of a file that is carried over with a checkpoint: a tokenizer's is a few MB
RECORD = "jaxgrow.json"
_WEIGHTS = (  # of any framework, and what lies beside them
    *(".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".keras", ".msgpack", ".npz", ".ot", ".pdparams"),
    *(".gguf", ".ggml", ".onnx", ".onnx_data", ".onnx.data", ".tflite", ".mlmodel", ".pb", ".index.json"),
)


class CheckpointError(ValueError):
    """What is wrong with a checkpoint or with what was asked of it: the file, the tensor, the axis, and the way out."""


def inside(folder: Path, name: str) -> Path:
    """The regular file ``name`` of ``folder``; a link must stay in it, or in the store of Hugging Face's cache around it.

    Raises:
      CheckpointError: the name leaves the folder, or there is no such file.
    """
    if Path(name).name != name or "\\" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError(f"{folder}: {name!r} is no file of the folder itself; only those are read")
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{file} is {'no regular file' if file.exists() else 'missing'}")
    real, home = file.resolve(), folder.resolve()
    if home != real.parent and not (home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"):
        raise CheckpointError(f"{file} is a link to {real}, outside the folder; put the file itself there")
    return file


def read_json(file: Path) -> dict[str, Any]:
    """
    Raises:
      CheckpointError: the file holds no JSON object.
    """
    if file.stat().st_size > LARGEST_JSON:
        raise CheckpointError(f"{file} has more than {LARGEST_JSON} bytes: that is no JSON to read")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not an object")
    return content


def write_json(file: Path, content: Any) -> None:
    with file.open("w") as out:
        out.write(json.dumps(content, indent=2) + "\n")
        sync(out)


def sync(out: Any) -> None:
    out.flush()
    os.fsync(out.fileno())


def copy(file: Path, target: Path) -> None:
    with file.open("rb") as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
        sync(out)


def extras(folder: Path) -> list[Path]:
    """What lies beside the weights: a tokenizer, a card, a licence.

    Raises:
      CheckpointError: one of them is a link that leads out of the folder.
    """
    found = []
    for file in sorted(folder.iterdir()):
        own = file.name in (RECORD, "config.json") or file.name.startswith(".") or file.name.lower().endswith(_WEIGHTS)
        if not own and file.is_file() and file.stat().st_size <= LARGEST_EXTRA:
            found.append(inside(folder, file.name))
    return found


@contextmanager
def appearing(target: Path, sources: list[Path], overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which becomes ``target`` when the block ends well; otherwise nothing is left.

    It is a hidden sibling meanwhile, locked by this process. What a killed process left there is removed by the next one. A
    target that exists is replaced at the end.

    Raises:
      CheckpointError: the target exists and may not be replaced, it overlaps a source, or another process writes it.
    """
    target = Path(os.path.abspath(target.expanduser()))
    _may_become(target, sources, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    lock = _locked(part, target)
    try:
        for left in part.iterdir():
            _remove(left)
        yield part
        _sync_folder(part)
        _may_become(target, sources, overwrite)  # it may have appeared meanwhile
        if target.exists():
            old = target.with_name(f".{target.name}.old")
            _remove(old)
            target.rename(old)
            part.rename(target)
            _remove(old)
        else:
            part.rename(target)
        _sync_folder(target.parent)
    except BaseException:
        _remove(part)
        raise
    finally:
        os.close(lock)


def _may_become(target: Path, sources: list[Path], overwrite: bool) -> None:
    for source in sources:
        a, b = target.resolve(), source.resolve()
        if a == b or a.is_relative_to(b) or b.is_relative_to(a):
            raise CheckpointError(f"{target} is, holds or lies in the source {source}; name another folder")
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} exists and is no folder; name another one")
    if not overwrite:
        raise CheckpointError(f"{target} exists; --overwrite replaces it")
    if any(target.iterdir()) and not any((target / name).is_file() for name in (RECORD, "config.json")):
        raise CheckpointError(f"{target} exists and holds no checkpoint, so it is not replaced; name another folder")


def _locked(part: Path, target: Path) -> int:
    """A descriptor of the folder ``part``, which no other process holds."""
    with suppress(FileExistsError):
        part.mkdir()
    lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(part)):  # not one that was just renamed
            return lock
    except OSError:
        pass
    os.close(lock)
    raise CheckpointError(f"another process is writing {target}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
