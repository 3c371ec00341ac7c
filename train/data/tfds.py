"""The files that describe a prepared dataset of tensorflow-datasets, checked before it is opened."""

import json
from pathlib import Path
from typing import Any

from jaxgrow.untrusted import checked_path
from train.common.errors import UserError
from train.data.decoding import json_object, readable

_INFO = "dataset_info.json"
_FEATURES = "features.json"
_OUT = "prepare the dataset again"
# tensorflow-datasets imports the module of a feature by its name.
_PACKAGE = "tensorflow_datasets.core.features."


def check_all(folder: Path) -> None:
    """Check the description of each prepared version of a dataset, as `checked_info` does."""
    for depth in ("*", "*/*"):  # version, or configuration/version
        for file in folder.glob(f"{depth}/{_INFO}"):
            checked_info(file.parent)


def checked_info(folder: Path) -> None:
    """Check the names in the description of a prepared dataset.

    Raises:
      UserError: the description is damaged, or names files outside the folder or a module outside
        tensorflow-datasets.
    """
    if not (folder / _INFO).exists():
        raise UserError(f"{folder / _INFO} is missing; {_OUT}")
    with readable(folder / _INFO, _OUT):
        for name in (_INFO, _FEATURES):
            if (folder / name).exists():
                checked_path(folder, name)
        about = json_object(folder / _INFO, _OUT)
        for part in (about, *about.get("splits", [])):
            # The names of the files are made of these.
            for key in ("name", "configName", "version", "filepathTemplate", "fileFormat"):
                _plain(str(part.get(key)), folder / _INFO)
        for file in folder.iterdir():
            if ".array_record" in file.name:
                checked_path(folder, file.name)
        if (folder / _FEATURES).exists():
            _check_classes(json_object(folder / _FEATURES, _OUT), folder / _FEATURES)


def _plain(name: str, file: Path) -> None:
    if {"/", "\\", "\0"} & {*name} or name in (".", ".."):
        raise UserError(f"{file}: {json.dumps(name)} is not the name of a file in its folder")


def _check_classes(value: Any, file: Path) -> None:
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            _check_classes(part, file)
    for key in ("pythonClassName", "python_class_name"):
        name = value.get(key) if isinstance(value, dict) else None
        if name is not None and not str(name).startswith(_PACKAGE):
            raise UserError(
                f"{file}: {json.dumps(name)} is not a feature of tensorflow-datasets, and importing it "
                f"could run code; {_OUT}"
            )
