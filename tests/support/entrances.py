"""Where does the code open files, and which attacks does each of these places withstand?

An *entrance* is a function of `jaxgrow` or `train` that opens, writes, renames or deletes a file.
`scanned` finds all of them in the source. Each has a row in one of three tables:

- `entrances_library.ROWS`: `jaxgrow/`
- `entrances_data.ROWS`: `train/data/`
- `entrances_runs.ROWS`: all other folders and files of `train/`

A row has the names of functions of one file. A new entrance without a row fails
`tests/safety/test_entrances.py`. So does a row without entrance. The value of a row is one of:

- `attacked("config", "index")`: the names of `Subject` rows in ``SUBJECTS`` of the same table. Every
  attack runs on every subject. A test proves that the subject calls the entrance.
- `ours("why")`: it opens only paths that this process made, or that the user named to be written.
- `trusted("why")`: it reads a config in Python, or a file that is installed with the package.

The tables are separate files, so that several people can extend them at the same time.
"""

import ast
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("jaxgrow", "train")

# Names of functions and methods that open, write, rename or delete files.
OPENERS = {
    *("open", "fdopen", "open_regular", "checked_path", "inside", "chosen_file", "read_json"),
    *("checked_json", "read_record", "read_own", "read_regular", "load_experiment"),
    *("lock_file", "checkpoint_params", "load_adaptation"),
    *("read_text", "read_bytes", "write_text", "write_bytes", "unlink", "rmtree", "touch"),
    *("symlink_to", "hardlink_to", "load", "save", "savez", "savefig", "fromfile", "tofile"),
    *("memmap", "open_memmap", "loadtxt", "genfromtxt", "safe_open", "from_file", "metadata"),
    *("from_pretrained", "save_pretrained", "from_directory", "builder_from_directory"),
    *("load_from_disk", "load_dataset", "FileSystemReader", "FileSystemWriter", "Checkpointer"),
    *("copyfile", "copy2", "copytree", "copyfileobj", "move", "cmp", "cmpfiles", "dircmp"),
    *("ZipFile", "is_zipfile", "is_tarfile", "TarFile", "GzipFile", "BZ2File", "LZMAFile"),
    *("ParquetFile", "read_table", "open_file", "open_stream", "memory_map", "OSFile"),
    *("spec_from_file_location", "run_path", "SummaryWriter", "Connection", "connect"),
}
# Methods whose name has other meanings, such as `str.replace`, count only for these modules.
OF_MODULES = {
    "os": {"remove", "rename", "replace", "link", "symlink", "chmod", "truncate", "mkfifo"},
    "shutil": {"copy", "copymode", "copystat", "make_archive", "unpack_archive"},
    "pickle": {"loads", "Unpickler"},
}
# Functions that are also passed on without being called.
PASSED = {"gzip.open", "bz2.open", "lzma.open", "tarfile.open", "io.open", "codecs.open", "ts.open"}


class Row(NamedTuple):
    """The answer to the question why an entrance is safe."""

    subjects: tuple[str, ...]
    why: str = ""


def attacked(*subjects: str) -> Row:
    return Row(subjects)


def ours(why: str) -> Row:
    return Row((), why)


trusted = ours


@dataclass(frozen=True)
class Subject:
    """One untrusted file, and a command or a function that opens it.

    Attributes:
      make: builds a valid input in an empty folder, and returns the file to attack.
      use: opens the input in that folder. It may write to ``folder.parent / "out"``.
      named: writes another name into the input, for files that contain names; None: they do not.
      harmless: attacks that may succeed, with the reason. Also then, nothing outside may change,
        and no byte of a file outside may be in the output.
      skips: attacks that are not possible, with the reason.
      needs: the package without which the tests of the subject are skipped.
    """

    make: Callable[[Path], Path]
    use: Callable[[Path], Any]
    named: Callable[[Path, str], None] | None = None
    harmless: Mapping[str, str] = field(default_factory=dict)
    skips: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""


def largest(folder: Path, pattern: str) -> Path:
    return max((p for p in folder.glob(pattern) if p.is_file()), key=lambda p: p.stat().st_size)


# --- the scanner ---


def scanned() -> dict[str, set[str]]:
    """Find every entrance, such as ``"jaxgrow/cli/writing.py::put"``, with the openers it calls."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            for where, opener in _opened(tree, ()):
                name = f"{file.relative_to(ROOT).as_posix()}::{'.'.join(where) or '<module>'}"
                found.setdefault(name, set()).add(opener)
    return found


def _opened(
    node: ast.AST, where: tuple[str, ...], in_function: bool = False
) -> Iterator[tuple[tuple[str, ...], str]]:
    """A function inside of a function belongs to the outer one."""
    for child in ast.iter_child_nodes(node):
        inner = where
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if (function or isinstance(child, ast.ClassDef)) and not in_function:
            inner = (*where, child.name)
        elif isinstance(child, ast.Call) and (opener := _opener(child.func)):
            yield where, opener
        elif isinstance(child, ast.Attribute) and ast.unparse(child) in PASSED:
            yield where, ast.unparse(child)
        yield from _opened(child, inner, in_function or function)


def _opener(function: ast.expr) -> str | None:
    if isinstance(function, ast.Name):
        return function.id if function.id in OPENERS else None
    if not isinstance(function, ast.Attribute):
        return None
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr in OPENERS or function.attr in OF_MODULES.get(module, ()):
        return f"{module}.{function.attr}" if module else function.attr
    return None


# --- the attacks ---


class _Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["ENTRANCES_MARK"],)


# Attacks that change the file itself. After a move, the content behind a link stays valid, so only a
# check of the link can refuse it.
ATTACKS: dict[str, Callable[[Path, Path], Any]] = {
    "link": lambda file, outside: file.symlink_to(file.rename(outside / "linked")),
    "link of the parent": lambda file, outside: file.parent.symlink_to(
        file.parent.rename(outside / "folder")
    ),
    "loop": lambda file, outside: (file.unlink(), file.symlink_to(file.name)),
    "FIFO": lambda file, outside: (file.unlink(), os.mkfifo(file)),
    "missing": lambda file, outside: file.unlink(),
    "truncated": lambda file, outside: os.truncate(file, file.stat().st_size // 2),
    "wrong type": lambda file, outside: file.write_text('["\\u001b[31m", {"a": null}]'),
    "nested": lambda file, outside: file.write_text("[" * 200_000),
    "too large": lambda file, outside: os.truncate(file, 3 << 30),  # sparse
    "pickle": lambda file, outside: file.write_bytes(pickle.dumps(_Exploit())),
}
# Attacks that write a name into the file; ``{}`` is a folder outside.
NAMES: dict[str, str] = {
    "dot-dot": "../outside/secret",
    "dot-dot inside": "a/../../outside/secret",
    "dot-dot alone": "..",
    "absolute": "{}/secret",
    "escape": "\x1b[31mred",
    "NUL": "a\0b",
    "surrogate": "\udcff",
}
