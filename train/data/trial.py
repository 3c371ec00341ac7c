"""The files of a tokenizer are tried before a process of this program loads them."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgrow.untrusted import UntrustedError, file_limits, open_regular
from train.data.bounded import child
from train.data.decoding import in_folder

# Characters that the replacements of a tokenizer may make of one.
_GROWTH = 64
_tried: set[tuple[Any, ...]] = set()


def check_tokenizer(path: Path, files: Sequence[Path]) -> None:
    """Load a tokenizer in a process with limits, and encode a few texts with it.

    A worker process loads only what the main process has tried.

    Args:
      path: ``tokenizer.json``, or the folder of ``vocab.json`` and ``merges.txt``.
      files: its files.

    Raises:
      UntrustedError: it is damaged, or needs too much time or memory.
    """
    if multiprocessing.parent_process() is not None:
        return
    real = [in_folder(path, file) if path.is_dir() else file.resolve() for file in files]
    for file in real:
        open_regular(file).close()
        file_limits().check(str(file), bytes=file.stat().st_size)
    key = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in real)
    if key in _tried:
        return
    if path.is_dir():
        child.ask(str(path), job="tokenizer", folder=list(map(str, real)))
    else:
        _check_growth(json.loads(real[0].read_bytes()), path)
        child.ask(str(path), job="tokenizer", file=str(real[0]))
    _tried.add(key)


def _check_growth(about: Any, path: Path) -> None:
    """Refuse replacements that together multiply the length of a text."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(about.get(part)) if isinstance(about, dict) else 1
        if growth > _GROWTH:
            raise UntrustedError(
                f"the {part} of {path} makes up to {growth:,.0f} characters of one, more than {_GROWTH}"
            )


def _growth(part: Any) -> float:
    if not isinstance(part, dict):
        return 1.0
    growth = 1.0
    for each in [
        *part.get("normalizers", []),
        *part.get("pretokenizers", []),
        *part.get("decoders", []),
    ]:
        growth *= _growth(each)
    if part.get("type") == "Replace":
        pattern = part.get("pattern") or {}
        # A regular expression may match the places between characters.
        least = len(pattern["String"]) if pattern.get("String") else 1
        between = 0 if pattern.get("String") else 1
        growth *= max(1.0, len(part.get("content") or "") / least + between)
    return growth
