"""Text as the data of a run: the settings of a corpus, and its samples.

A run reads one corpus or a mixture of several, and divides the tokens into samples for its model.
`train.extras.text` reads the files of texts, and `train.extras.tokenizers` turns them into tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import jax
import numpy as np

from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.fields import GIVEN
from train.data.dataset import DATASETS, Batch, Dataset, MixedSource, Source
from train.data.windows import MaskedWindows, Vocabulary, Windows

Paths: TypeAlias = str | tuple[str, ...] | dict[str, float] | None
ValidPaths: TypeAlias = str | dict[str, str] | None


@dataclass(frozen=True)
class Data(Dataset):
    """A corpus and its tokenizer.

    ``source="stdlib"`` is the source text of Python's standard library, which needs no files.
    ``"text"`` is a file or folder at ``path``: text (``.txt``, one document per file) and JSON
    Lines (``.jsonl``), both also compressed (``.gz``, ``.xz``, ``.zst``), Parquet, or a folder that
    Hugging Face `datasets` wrote with ``save_to_disk``. Markdown, Python and CSV files (``.md``,
    ``.py``, ``.csv``) are read if ``path`` is the file itself. ``"tfds"`` is the
    tensorflow-datasets corpus ``name``, which is prepared under ``path`` if necessary; it is read
    without TensorFlow. A document that is empty or null is left out; a document without ``field``
    is an error.

    ``"tokens"`` is a file or folder of token ids (`train.extras.text.token_files`), which are used as they
    are. All of them must be in the vocabulary of ``tokenizer``, which the run keeps.

    Documents are plain text: the name of a special token in them, such as ``<|endoftext|>``, is
    encoded as any other characters. Around each document are the tokens that the files of the
    tokenizer ask for, and at least its end of text.
    """

    modality = "text"
    source: Literal["stdlib", "text", "tokens", "tfds"] = "stdlib"
    # A file, a folder or a pattern; or a mixture of several: {wiki: 0.7, "code/*.jsonl.gz": 0.3}, whose
    # weights are divided by their sum, or [wiki, code], whose weights are their sizes.
    path: Paths = None
    # For "text" and "tokens": the validation text, or several: {wiki: wiki.txt, code: code.txt}. None: the
    # files or the split that have the name of a validation split, if there are any.
    valid_path: ValidPaths = None
    # For "text" and "tokens": "auto" leaves out test files and validates on validation files, by their names;
    # "ignore" reads all files as training text.
    splits: Literal["auto", "ignore"] = "auto"
    name: str | None = None  # for "tfds", e.g. "wiki40b/en"
    # The feature, column or key of the documents, such as "text" or the nested "meta.text". For
    # "tokens", the default is "input_ids".
    field: str = "text"
    # For "tokens": the type of the numbers in raw .bin files.
    ids: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    # "bytes", a tokenizer.json, or a folder with vocab.json and merges.txt. For "tokens", also "none".
    tokenizer: str = "bytes"
    # Whether a token begins each document; "auto": as the files of the tokenizer say.
    bos: bool | Literal["auto"] = "auto"
    # Whether a token sees only its document, whose positions then count from 0, or its entire row.
    attend: Literal["row", "document"] = "row"
    whole_words: bool = False  # masked language models: mask all pieces of a word together
    # The part that is held out if there is no validation text or split.
    valid_fraction: float = 0.02
    cache: str = "~/.cache/jaxgrow"

    # The choices that use a field (`train.extras.effect`).
    used_with = {
        "path": {"source": ("text", "tokens", "tfds")},
        "valid_path": {"source": ("text", "tokens")},
        "splits": {"source": ("text", "tokens")},
        "name": {"source": ("tfds",)},
        "field": {"source": ("text", "tokens", "tfds")},
        "whole_words": {"/model.masked": GIVEN},
        "valid_fraction": {"valid_path": (None,)},
    }

    def __post_init__(self):
        path, valid_path = TEXTS["files"].checked_paths(self)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "valid_path", valid_path)

    def sources(self, model: Config) -> tuple[Source | MixedSource, dict[str, Source]]:
        self.check_modality(model)
        return text_sources(self, model)

    def identity(self, model: Config) -> Json:
        """Describe the text by content; the standard library also by the version of Python."""
        return TEXTS["files"].read(self).identity

    def report(self) -> list[str]:
        return TEXTS["files"].read(self).report

    def shapes(self, model: Config, samples: int) -> Batch:
        inputs, targets = model.batch_shapes(samples)
        if self.attend == "document":
            if not isinstance(inputs, dict):
                weights = jax.ShapeDtypeStruct(inputs.shape, np.float32)
                inputs = {"tokens": inputs, "weights": weights}
            inputs = inputs | {"segments": inputs["tokens"]}
        return inputs, targets

    def more_validation(self, name: str = "") -> str:
        return TEXTS["files"].more_validation(self, name)

    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        return TEXTS["files"].write_inputs(self, run, config, folder)


@dataclass(frozen=True)
class Corpora:
    """Tokens by the name of their source or validation set; the name is empty if there is only one.

    Attributes:
      train: training tokens of each source.
      shares: share of each source in the samples.
      valid: tokens of each validation set.
      begins: positions at which the documents of each source begin.
      valid_begins: positions at which the documents of each validation set begin.
      vocab: one more than the largest id.
      identity: JSON value that identifies the tokens by content, and the shares.
      report: summary lines, and warnings.
    """

    train: dict[str, np.ndarray]
    shares: list[Fraction]
    valid: dict[str, np.ndarray]
    begins: dict[str, np.ndarray]
    valid_begins: dict[str, np.ndarray]
    vocab: int
    identity: Json
    report: list[str]


class TextFiles(Protocol):
    """What extras do with the files of texts and tokenizers.

    The methods after the first one raise a `UserError` if the files are missing or damaged.
    """

    def checked_paths(self, data: Data) -> tuple[Paths, ValidPaths]:
        """``data.path`` and ``data.valid_path`` in their plain form.

        Raises:
          ValueError: a path is wrong, or the settings do not fit together.
        """
        ...

    def read(self, data: Data) -> Corpora:
        """The tokens of all sources and validation sets, from the cache if they are in it.

        Without ``data.valid_path``, each source holds out a part of its text.
        """
        ...

    def more_validation(self, data: Data, name: str) -> str:
        """As `train.data.dataset.Dataset.more_validation`."""
        ...

    def masking(self, data: Data) -> Vocabulary:
        """What masked models need to know of the tokenizer."""
        ...

    def write_inputs(self, data: Data, run: Path, config: Config, folder: Path) -> Json:
        """As `train.data.dataset.Dataset.write_inputs`."""
        ...

    def mixture(self, parts: Mapping[str, Source], shares: Sequence[Fraction]) -> MixedSource:
        """Mix the samples of sources, by their shares, which sum to 1."""
        ...


TEXTS: Registry[TextFiles] = Registry("text", "train.extras")


def text_sources(data: Data, model: Config) -> tuple[Source | MixedSource, dict[str, Source]]:
    """The training samples of ``model``, and the samples of each validation set by its name.

    Raises:
      UserError: the text cannot be read, or the model cannot take it.
    """
    text = TEXTS["files"].read(data)
    vocab = model.sizes()["vocab"]
    if text.vocab > vocab:
        what = "tokens" if data.tokenizer == "none" else "tokenizer"
        raise UserError(
            f"the largest id of the {what} is {text.vocab - 1}, but model.vocab is {vocab}; "
            f"raise model.vocab to {text.vocab}"
        )
    windows = _windows(data, model)
    train = {name: windows(part, text.begins[name]) for name, part in text.train.items()}
    valid = {name: windows(part, text.valid_begins[name]) for name, part in text.valid.items()}
    if len(train) == 1:
        return next(iter(train.values())), valid
    if empty := [name for name, part in train.items() if not len(part)]:
        what = f"less than one sample of {model.length} tokens"
        raise UserError(
            f"the training text of {empty[0]} in data.path is {what}: give more text, or leave it out"
        )
    return TEXTS["files"].mixture(train, text.shares), valid


def _windows(data: Data, model: Config) -> Callable[[np.ndarray, np.ndarray], Source]:
    """The function that divides tokens, with the begins of documents, into samples of ``model``."""
    used = data.attend == "document"
    if used and not getattr(model, "segments", False):
        raise UserError(
            f"attention of a {type(model).__name__} cannot stop at the ends of documents: set data.attend=row"
        )
    if not model.masked:
        return lambda part, begins: Windows(part, model.length, begins if used else None)
    known = TEXTS["files"].masking(data)
    return lambda part, begins: MaskedWindows(
        part, model.length, *known, masked=model.masked, begins=begins if used else None
    )


DATASETS.add("Data", Data)
