"""Prepared datasets of tensorflow-datasets, whose description is checked before it is opened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgrow.typed import Json
from jaxgrow.untrusted import checked_path
from train.common.errors import UserError
from train.data.text import Data
from train.extras.decoding import json_object, readable_file
from train.extras.text.corpora import VALIDATIONS, Corpus
from train.extras.text.formats import Document, cut_pieces
from train.extras.text.reading import CORPORA

_INFO = "dataset_info.json"
_FEATURES = "features.json"
_OUT = "prepare the dataset again"
# tensorflow-datasets imports the module of a feature by its name.
_PACKAGE = "tensorflow_datasets.core.features."


def check_versions(folder: Path) -> None:
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
    with readable_file(folder / _INFO, _OUT):
        for name in (_INFO, _FEATURES):
            if (folder / name).exists():
                checked_path(folder, name)
        about = json_object(folder / _INFO, _OUT)
        for part in (about, *about.get("splits", [])):
            # The names of the files are made of these.
            for key in ("name", "configName", "version", "filepathTemplate", "fileFormat"):
                _check_name(str(part.get(key)), folder / _INFO)
        for file in folder.iterdir():
            if ".array_record" in file.name:
                checked_path(folder, file.name)
        if (folder / _FEATURES).exists():
            _check_classes(json_object(folder / _FEATURES, _OUT), folder / _FEATURES)


def _check_name(name: str, file: Path) -> None:
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


def tfds_corpus(data: Data) -> Corpus:
    """A corpus of tensorflow-datasets, whose feature ``data.field`` holds the documents."""
    assert data.name is not None and (data.path is None or isinstance(data.path, str))
    name, field = data.name, data.field
    builder = prepared_dataset(name, data.path)

    def documents(split: str) -> Iterator[Document]:
        for example in builder.as_data_source(split):
            if field not in example:
                raise UserError(
                    f"{name} has no feature {field!r}, only {', '.join(example)}; set data.field"
                )
            document = example[field]
            if not isinstance(document, bytes):
                raise UserError(
                    f"feature {field!r} of {name} is not text, but {type(document).__name__}; set data.field"
                )
            yield cut_pieces(document.decode("utf-8", errors="replace"))

    split = next((s for s in VALIDATIONS if s in builder.info.splits), None)
    key = [
        builder.info.full_name,
        field,
        {k: s.num_examples for k, s in builder.info.splits.items()},
    ]
    return Corpus(key, documents("train"), documents(split) if split else None)


def prepared_dataset(name: str, path: str | None) -> Any:
    """The builder of the tensorflow-datasets dataset ``name``, prepared under ``path``.

    Raises:
      UserError: the dataset cannot be prepared.
    """
    import tensorflow_datasets as tfds

    # This import registers the text corpora. The import above does so only with TensorFlow.
    import tensorflow_datasets.text
    from tensorflow_datasets.core import constants

    folder = None if path is None else Path(path).expanduser()
    check_versions((folder or Path(constants.DATA_DIR)) / name.partition("/")[0])
    try:
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:
        raise UserError(
            f"tensorflow-datasets cannot prepare {name!r} ({type(error).__name__}: {error}); some datasets need TensorFlow "
            f"for this: run tfds.builder({name!r}, file_format='array_record').download_and_prepare() once where it is "
            "installed, and name the folder in data.path"
        ) from error
    return builder


def tfds_split(builder: Any, split: str) -> Any:
    """The examples of a split of a prepared dataset.

    Raises:
      UserError: the dataset has no such split.
    """
    if split not in builder.info.splits:
        raise UserError(
            f"{builder.info.full_name} has no split {split!r}, only {', '.join(builder.info.splits)}"
        )
    return builder.as_data_source(split)


def dataset_records(path: Path) -> Iterator[tuple[str, Json]]:
    """Yield the place, in words, and the fields of each row of a split, from its first file."""
    import tensorflow_datasets as tfds

    split = path.name.partition(".")[0].rpartition("-")[2]
    with readable_file(path, "prepare it again"):
        checked_info(path.parent)
        rows: Any = tfds.builder_from_directory(path.parent).as_data_source(split)  # type: ignore[call-arg]
        for n, row in enumerate(rows):
            fields = {name: _json_value(value) for name, value in row.items()}
            yield f"{path.parent}, {split}, row {n}", fields


def _json_value(value: Any) -> Any:
    """The value with JSON types only."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {name: _json_value(v) for name, v in value.items()}
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
        return [_json_value(v) for v in value]
    return value.item() if hasattr(value, "item") else value


CORPORA.add("tfds", tfds_corpus)
