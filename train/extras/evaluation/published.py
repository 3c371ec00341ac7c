"""Local files of the datasets that lm-eval's tasks read from a hub.

A dataset is read from the files that its authors published, or from a copy of its repository on the
hub. Records have the columns of the hub's dataset, so that a task gives the same numbers.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jaxgrow.checkpoints.io.files import CARD
from jaxgrow.typed import Json
from jaxgrow.untrusted import checked_path
from train.common.errors import UserError
from train.extras.bounded import child
from train.extras.decoding import in_folder, read_regular, readable_file
from train.extras.evaluation.perplexity import files_matching
from train.extras.text import formats
from train.extras.text.tfds import dataset_records

# The formats of ``datasets`` that a copied dataset may have, and the types of its values.
_BUILDERS = ("arrow", "csv", "json", "parquet", "text")
_VALUES = {"Value", "ClassLabel", "Json", "Translation", "TranslationVariableLanguages"}
_CARD = f"correct data_files in its {CARD}"
Record: TypeAlias = Json
Splits: TypeAlias = Json  # name -> a `datasets.Dataset`


@dataclass(frozen=True)
class PublishedDataset:
    """The published files of a dataset.

    Args:
      short: name of the subfolder that may contain the files.
      splits: split -> patterns of its file, in the order of the search; ``{name}`` is the name of
        the part.
      read: reads a file as records of the hub's dataset.
    """

    short: str
    splits: dict[str, tuple[str, ...]]
    read: Callable[[Path], Iterator[Record]]


def local_dataset(
    path: str, name: str | None, task: str, splits: Sequence[str], folder: Path
) -> tuple[Splits, list[Path]]:
    """Read splits of a dataset from local files.

    Args:
      path: the dataset's name on the hub.
      name: name of a part of it.
      task: name of lm-eval's task, which may be the name of a subfolder.
      splits: the splits that are read.
      folder: the folder that is searched.

    Returns:
      The splits, and the files that were read.

    Raises:
      UserError: the files are missing or damaged.
    """
    import datasets  # pyright: ignore[reportMissingImports]

    published = PUBLISHED.get(path)
    wanted = ""
    if published is not None:
        folders = (folder / task, folder / published.short, folder)
        patterns = {}
        files = {}
        for split in splits:
            patterns[split] = [p.format(name=name) for p in published.splits.get(split, ())]
            files[split] = _found(patterns[split], folders)
        missing = [split for split, file in files.items() if file is None]
        if not missing:
            read = {
                split: _read_records(published, file)
                for split, file in files.items()
                if file is not None
            }
            return {split: datasets.Dataset.from_list(rows) for split, rows in read.items()}, [
                *filter(None, files.values())
            ]
        wanted = (
            f"{' or '.join(patterns[missing[0]])} in {folder / published.short} or {folder}, or "
        )
    for copy in (folder / path, folder / Path(path).name):
        if copy.is_dir() and any(copy.iterdir()):
            files = sorted(file for file in copy.rglob("*") if file.is_file())
            with readable_file(copy):
                in_folder(folder, copy)
                for file in files:
                    in_folder(copy, file)
                _check_urls(copy)
                _check_builder(copy, datasets.load_dataset_builder(str(copy), name))
                found: Any = datasets.load_dataset(str(copy), name)
                _check_features(copy, found)
                return dict(found), files
    raise UserError(
        f"{task} needs {wanted}a copy of the dataset {path} at {folder / path}; put it there, name another folder with --data, "
        "or leave out --data to download the dataset"
    )


def _check_urls(copy: Path) -> None:
    """Check that a copied dataset names no files elsewhere, before ``datasets`` looks for them.

    Raises:
      UserError: it names a URL, or has a second description.
      UntrustedError: the README.md is a link that leads out of the folder, or needs too much memory.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK  # pyright: ignore[reportMissingImports]

    if os.path.lexists(copy / ".huggingface.yaml"):
        raise UserError(f"{copy} has a .huggingface.yaml; move its content into {CARD}")
    if not os.path.lexists(copy / CARD):
        return
    text = read_regular(checked_path(copy, CARD).path).decode("utf-8-sig")
    front = REGEX_YAML_BLOCK.search(text)
    about = json.loads(child.ask(str(copy / CARD), job="yaml", text=front[2])[0]) if front else None
    named = jax.tree.leaves(about.get("configs")) if isinstance(about, dict) else ()
    for name in named:
        if isinstance(name, str) and ("://" in name or "::" in name):
            raise UserError(
                f"{copy / CARD} names {name!r}, which is not a file in this folder; {_CARD}"
            )


def _check_builder(copy: Path, builder: Any) -> None:
    """Check the files and the format of a copied dataset.

    Args:
      copy: folder of the copy.
      builder: the builder of ``datasets`` for it.

    Raises:
      UserError: the format is not one of rows, or a file is outside of the folder.
      UntrustedError: a name contains ``..``, or a link leads out of the folder.
    """
    if (kind := type(builder).__module__.rpartition(".")[2]) not in _BUILDERS:
        raise UserError(
            f"{copy} has files of the format {kind}, which is not read; the formats are {', '.join(_BUILDERS)}"
        )
    folder = Path(os.path.abspath(copy))
    named = (builder.config.data_files or {}).values()
    for file in [Path(file) for files in named for file in files]:
        if not file.is_relative_to(folder):
            raise UserError(
                f"{copy} names {file} as its data, which is not in this folder; {_CARD}"
            )
        in_folder(folder, file)


def _check_features(copy: Path, splits: Mapping[str, Any]) -> None:
    """Check that no column is decoded when it is read. Images may name other files and programs.

    Raises:
      UserError: a column has images, sounds or other values that are decoded.
    """
    for split in splits.values():
        for column, feature in split.features.items():
            if decoded := sorted({*_value_types(feature)} - _VALUES):
                raise UserError(
                    f"{copy}: column {column!r} has values of type {decoded[0]}, which are not read; remove the column"
                )


def _value_types(feature: Any) -> Iterator[str]:
    inner = [feature.feature] if hasattr(feature, "feature") else feature
    inner = inner.values() if isinstance(inner, Mapping) else inner
    if isinstance(inner, Iterable):
        for part in inner:
            yield from _value_types(part)
    else:
        yield type(feature).__name__


def _found(patterns: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """The first file that exists."""
    for pattern, folder in product(patterns, folders):
        if files := files_matching(folder, pattern):
            return files[0]
    return None


def _read_records(published: PublishedDataset, file: Path) -> list[Record]:
    with readable_file(file):
        records = list(published.read(file))
    if not records:
        raise UserError(f"{file} has no records; download it again")
    return records


# --- records ---


def _records(file: Path) -> Iterator[tuple[str, Record]]:
    of_tfds = ".array_record" in file.name
    return dataset_records(file) if of_tfds else formats.table_records(file)


def _lambada(file: Path) -> Iterator[Record]:
    for where, record in _records(file):
        text = _record_field(where, record, "passage" if "passage" in record else "text")
        if " " not in text:
            raise UserError(
                f"{where} is a single word, so there is no last word to predict from others"
            )
        yield {"text": text}


def _blimp(file: Path) -> Iterator[Record]:
    for where, record in _records(file):
        yield {
            name: _record_field(where, record, name) for name in ("sentence_good", "sentence_bad")
        }


def _piqa(file: Path) -> Iterator[Record]:
    """Records of ``valid.jsonl``.

    The labels are in ``valid-labels.lst`` of the same folder, or in a column.
    """
    answers = file.with_name(f"{file.name.partition('.')[0]}-labels.lst")
    labels = None
    if os.path.lexists(answers):
        with readable_file(answers):
            labels = [*map(int, read_regular(in_folder(file.parent, answers)).split())]
    for i, (where, record) in enumerate(_records(file)):
        if labels is not None and i >= len(labels):
            raise UserError(
                f"{answers} has {len(labels)} labels, but there are more questions in {file}"
            )
        label = labels[i] if labels is not None else _record_field(where, record, "label", int)
        if label not in (0, 1):
            raise UserError(f"{where}: the label is {label}, not 0 or 1")
        yield {name: _record_field(where, record, name) for name in ("goal", "sol1", "sol2")} | {
            "label": label
        }


def _hellaswag(file: Path) -> Iterator[Record]:
    for where, record in _records(file):
        endings = _record_field(where, record, "endings", list)
        label = str(record.get("label"))
        if not label.isdigit() or int(label) >= len(endings):
            raise UserError(
                f"{where}: the label is {label!r}, but there are {len(endings)} endings"
            )
        texts = {
            name: _record_field(where, record, name)
            for name in ("activity_label", "ctx_a", "ctx_b")
        }
        yield texts | {"endings": endings, "label": label}


def _arc(file: Path) -> Iterator[Record]:
    """Records of ARC, as published or with the columns of the hub.

    The published form is ``{"question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}``.
    """
    for where, record in _records(file):
        question = _record_field(where, record, "question", (str, dict))
        key = str(record.get("answerKey"))
        if isinstance(question, dict):
            options = _record_field(where, question, "choices", list)
            choices = {
                "text": [option["text"] for option in options],
                "label": [option["label"] for option in options],
            }
            question = _record_field(where, question, "stem")
        else:
            choices = _record_field(where, record, "choices", dict)
        labels = [str(label) for label in choices["label"]]
        if key not in labels:
            raise UserError(
                f"{where}: the answer is {key!r}, but the choices are {', '.join(labels)}"
            )
        yield {
            "question": question,
            "choices": {"text": [*choices["text"]], "label": labels},
            "answerKey": key,
        }


def _wikitext(file: Path) -> Iterator[Record]:
    """The articles of WikiText. Each begins with its title, a heading of the first level."""
    page: list[str] = []
    for line in "".join(formats.text_pieces(file)).split("\n"):
        if _is_title(line.strip()) and "".join(page).strip():
            yield {"page": "\n".join(page)}
            page = []
        page.append(line)
    yield {"page": "\n".join(page)}


def _is_title(line: str) -> bool:
    return (
        line.startswith("= ")
        and line.endswith(" =")
        and not line.startswith("= =")
        and not line.endswith("= =")
    )


def _record_field(where: str, record: Record, name: str, kind: Any = str) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        what = (
            f"is {value!r:.60}"
            if name in record
            else f"is missing; there are {', '.join(record) or 'no fields'}"
        )
        raise UserError(f"{where}: {name} {what}")
    return value


# The first file of a split of tensorflow-datasets. The other files are read with it.
_TFDS = "array_record-00000-of-*"


def _of_arc(split: str, published: str) -> tuple[str, ...]:
    return (
        f"{{name}}-{published}.jsonl",
        f"{{name}}/{split}*.parquet",
        f"ai2_arc/{{name}}/*/ai2_arc-{split}.{_TFDS}",
    )


# Name of the dataset on the hub -> its published files.
PUBLISHED = {
    "EleutherAI/lambada_openai": PublishedDataset(
        "lambada",
        {
            "test": (
                "lambada_test*.jsonl",
                "lambada*.jsonl",
                "test*.parquet",
                f"lambada/*/lambada-test.{_TFDS}",
            )
        },
        _lambada,
    ),
    "nyu-mll/blimp": PublishedDataset(
        "blimp",
        {
            "train": (
                "{name}.jsonl",
                "{name}/train*.parquet",
                f"blimp/{{name}}/*/blimp-train.{_TFDS}",
            )
        },
        _blimp,
    ),
    "baber/piqa": PublishedDataset(
        "piqa",
        {
            "train": ("train.jsonl", f"piqa/*/piqa-train.{_TFDS}"),
            "validation": ("valid.jsonl", f"piqa/*/piqa-validation.{_TFDS}"),
        },
        _piqa,
    ),
    "Rowan/hellaswag": PublishedDataset(
        "hellaswag",
        {"train": ("hellaswag_train.jsonl",), "validation": ("hellaswag_val.jsonl",)},
        _hellaswag,
    ),
    "allenai/ai2_arc": PublishedDataset(
        "ai2_arc", {"train": _of_arc("train", "Train"), "test": _of_arc("test", "Test")}, _arc
    ),
    "EleutherAI/wikitext_document_level": PublishedDataset(
        "wikitext2", {"train": ("wiki.train.raw",), "test": ("wiki.test.raw",)}, _wikitext
    ),
}
