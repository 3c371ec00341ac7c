"""How does one setting name several sources of text, with weights, or several validation sets?

On the command line and in Python, ``{wiki: 0.7, code: 0.3}`` and ``[wiki, code]``.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.data.text import Data, Paths, ValidPaths

_WILD = frozenset("*?[")
_NAME = re.compile(r"(\w[\w.-]*)?")


def checked_paths(data: Data) -> tuple[Paths, ValidPaths]:
    """``data.path`` and ``data.valid_path`` in their plain form.

    Raises:
      ValueError: a path is wrong, or the settings do not fit together.
    """
    path, valid_path = weighted_paths(data.path), named_paths(data.valid_path)
    paths = {"path": path, "valid_path": valid_path}
    several = [name for name, value in paths.items() if isinstance(value, tuple | dict)]
    if several and data.source not in ("text", "tokens"):
        raise ValueError(
            f"data.{several[0]} can name several paths only for data.source=text and data.source=tokens, but "
            f"data.source is {data.source}: set data.source=text"
        )
    if not 0 < data.valid_fraction <= 0.5:
        raise ValueError(f"valid_fraction must be between 0 and 0.5, but is {data.valid_fraction}")
    if data.source in ("text", "tokens") and path is None:
        raise ValueError(
            f"data.source={data.source} needs data.path, a file or folder of {data.source}"
        )
    if data.tokenizer == "none" and data.source != "tokens":
        raise ValueError(
            "data.tokenizer=none is for data.source=tokens; for text, name a tokenizer, or set data.tokenizer=bytes"
        )
    if data.source == "tokens" and data.bos != "auto":
        raise ValueError(
            "data.bos has no effect on data.source=tokens, whose ids are used as they are: set data.bos=auto"
        )
    if data.bos is True and data.tokenizer == "bytes":
        raise ValueError(
            "data.bos=true needs a tokenizer with a token that begins texts, but data.tokenizer is bytes: "
            "set data.bos=auto, or give a tokenizer"
        )
    if data.source != "tokens" and data.ids != "uint16":
        raise ValueError(
            f"data.ids is for data.source=tokens, and has no effect on {data.source}: leave it out"
        )
    if data.source == "tfds" and data.name is None:
        raise ValueError("data.source=tfds needs data.name, such as wiki40b/en")
    return path, valid_path


def weighted_paths(value: Any) -> Paths:
    """``data.path`` in its plain form: one path, several paths, or the weight of each path.

    A single path of several is the path itself.

    Raises:
      ValueError: the value does not list paths, or a weight is not positive.
    """
    pairs = _listed(value, "data.path", "{wiki: 0.7, code: 0.3}")
    if pairs is None:
        return value
    for path, weight in pairs:
        _check_path("data.path", path)
        if weight is None:
            continue
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise ValueError(
                f"data.path: the weight of {path} is {weight!r}, but it must be a positive number; leave out a path "
                "that should not be read"
            )
    paths = [path for path, _ in pairs]
    same = [os.path.abspath(os.path.expanduser(path)) for path in paths]
    if twice := [path for path, full in zip(paths, same, strict=True) if same.count(full) > 1]:
        raise ValueError(
            f"data.path names {twice[0]} and {twice[1]}, which are the same: give it once, with the sum of the weights"
        )
    weighed = [weight is not None for _, weight in pairs]
    if any(weighed) and not all(weighed):
        raise ValueError(
            f"data.path has no weight for {paths[weighed.index(False)]}: give one to each path, or to none"
        )
    if len(pairs) == 1:
        return paths[0]
    return {path: float(weight) for path, weight in pairs} if all(weighed) else tuple(paths)


def named_paths(value: Any) -> ValidPaths:
    """``data.valid_path`` in its plain form: one path, or the path of each name.

    Raises:
      ValueError: the value does not give a name to each path.
    """
    pairs = _listed(value, "data.valid_path", "{wiki: wiki.txt, code: code.txt}")
    if pairs is None:
        return value
    for name, path in pairs:
        if path is None or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"data.valid_path needs a name of letters and digits for each path, but has {name!r}: write it as "
                "{wiki: wiki.txt, code: code.txt}"
            )
        _check_path("data.valid_path", path)
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError(
            f"data.valid_path has a name twice: {', '.join(name for name, _ in pairs)}; give each set another name"
        )
    return dict(pairs)


def lists_paths(value: object) -> bool:
    """Whether a setting lists paths, and is not the name of a file with such characters."""
    if not isinstance(value, str):
        return isinstance(value, Mapping | list | tuple)
    text = value.strip()
    is_list = text.startswith("[") and text.endswith("]")
    return (text.startswith("{") or is_list) and not os.path.lexists(os.path.expanduser(value))


def refuse_several(value: object, kind: str) -> None:
    """Check that the path of images or of labelled data is not a mixture.

    Raises:
      ValueError: it is one.
    """
    if value is not None and lists_paths(value):
        raise ValueError(
            f"data.path={value}: only text and token ids (Data) can be a mixture of several paths; {kind} "
            "need one path: put the data into one folder"
        )


def source_names(paths: Sequence[str]) -> list[str]:
    """A short name for each path: the fewest last parts that differ between the paths.

    Trackers do not accept other characters than letters, digits and ``_-./``.
    """
    for depth in range(1, 2 + max(len(Path(path).parts) for path in paths)):
        ends = [Path(path).parts[-depth:] for path in paths]
        names = [re.sub(r"[^\w./-]", "_", "/".join(end)).strip("/") for end in ends]
        told = all(any(map(_WILD.isdisjoint, end)) or len(end) < depth for end in ends)
        if told and len({*names}) == len(paths) and all(names):
            return names
    return [str(number) for number in range(len(paths))]


def matching_paths(path: Path) -> list[Path]:
    """The files and folders that a path stands for: itself, or those that match it as a pattern."""
    if not is_pattern(path):
        return [path]
    base = fixed_part(path)
    return sorted(base.glob(str(path.relative_to(base))), key=lambda found: found.parts)


def is_pattern(path: Path) -> bool:
    """Whether a path has ``*``, ``?`` or ``[..]`` and is not itself the name of a file."""
    return not _WILD.isdisjoint(str(path)) and not os.path.lexists(path)


def fixed_part(path: Path) -> Path:
    """The folder below which a pattern looks for files; another path is returned as it is."""
    if not is_pattern(path):
        return path
    return next(above for above in path.parents if _WILD.isdisjoint(str(above)))


def _listed(value: Any, setting: str, form: str) -> list[tuple[Any, Any]] | None:
    """The pairs of a path and a weight, or of a name and a path; None: it is a single path."""
    if not lists_paths(value):
        return None
    if isinstance(value, str):
        pairs = list(_parsed_pairs(value.strip(), setting, form))
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        paired = all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
        pairs = [tuple(item) if paired else (item, None) for item in value]
    if not pairs:
        raise ValueError(f"{setting} is empty: name at least one file or folder, as in {form}")
    return pairs


def _parsed_pairs(text: str, setting: str, form: str) -> Iterator[tuple[str, str | float | None]]:
    """Read ``{a: 0.7, b: 0.3}``, ``{a: b.txt}`` or ``[a, b]``; quotes may be around each part.

    YAML would refuse ``*.txt``, convert ``2023``, and drop the first of two equal paths.
    """
    for entry in filter(None, map(str.strip, text[1:-1].split(","))):
        if text[0] == "[":
            yield _unquoted(entry), None
            continue
        weighted = setting == "data.path"
        left, colon, right = entry.rpartition(":") if weighted else entry.partition(":")
        number = _number(right) if weighted else _unquoted(right)
        if not (colon and left.strip() and right.strip()) or number is None or text[-1] != "}":
            raise ValueError(f"{setting}={text} cannot be read at {entry!r}: write it as {form}")
        yield _unquoted(left), number


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _unquoted(text: str) -> str:
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _check_path(setting: str, path: object) -> None:
    if not isinstance(path, str) or not path:
        raise ValueError(f"{setting} has {path!r} in place of the path of a file or folder")
