"""The maps that LiGO learned in a run: how are they read from the file?"""

import json
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from jaxgrow import typed
from jaxgrow.axes import Tree
from jaxgrow.models import from_json
from jaxgrow.operators.ligo import LiGO
from jaxgrow.typed import Json
from jaxgrow.untrusted import checked_path, file_limits
from train.common.errors import UserError
from train.plan.learning import Maps

T = TypeVar("T")


def load_maps(path: Path) -> Maps:
    """Read the maps that `save_maps` wrote.

    Raises:
      UserError: the file is missing, damaged, or has other content.
    """

    def parsed(about: typed.Json, arrays: dict[str, np.ndarray]) -> Maps:
        coefficients: dict[str, Tree] = {"depth": {}, "width": {}}
        for name, m in arrays.items():
            kind, which, *role = name.split(":")
            if kind == "depth":
                coefficients["depth"][which] = m
            else:
                coefficients["width"].setdefault(which, {})[role[0]] = m
        return Maps(
            from_json(about["small"]),
            from_json(about["large"]),
            typed.build_dataclass(LiGO, about["ligo"]),
            coefficients,
        )

    return read_arrays(path, parsed, "maps", "a run that learns them writes maps.npz")


def read_arrays(
    path: Path, make: Callable[[Json, dict[str, np.ndarray]], T], what: str, way_out: str
) -> T:
    """Return ``make(about, arrays)`` for a file that `write_arrays` wrote.

    Args:
      path: the file.
      make: function that builds the result from the description and the arrays.
      what: name of the content, for error messages.
      way_out: end of the error message for a missing file, which says how to get it.

    Raises:
      UserError: the file is missing, damaged, or has other content.
    """
    if not os.path.lexists(path):
        raise UserError(f"there is no file {path} with {what}; {way_out}")
    try:
        with checked_path(path.parent, path.name).open() as raw:
            _check_arrays(path, raw)
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        return make(json.loads(str(arrays.pop("about"))), arrays)
    except Exception as error:
        raise UserError(
            f"{path} has no readable {what}: {type(error).__name__}: {error}"
        ) from error


def _check_arrays(path: Path, raw: BinaryIO) -> None:
    """Check that the arrays of an npz file are not larger than its members, nor those than the file.

    Raises:
      ValueError: they are larger, and would fill the memory.
    """
    size = os.fstat(raw.fileno()).st_size
    with zipfile.ZipFile(raw) as members:
        file_limits().check_expansion(str(path), sum(m.file_size for m in members.infolist()), size)
        for member in members.infolist():
            with members.open(member) as file:
                version = np.lib.format.read_magic(file)
                one = version == (1, 0)
                header = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0  # fmt: skip
                shape, _, dtype = header(file)
            if math.prod(shape) * dtype.itemsize > member.file_size:
                raise ValueError(f"{member.filename} ends before its array of shape {shape}")
    raw.seek(0)
