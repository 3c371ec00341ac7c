"""What does a run need to know of its data?

`Dataset` is the interface of text (`train.data.text.Data`) and of the datasets of the extras. A
sample is ``(inputs, targets)``: the model's input, and the expected output.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import jax
import numpy as np

from jaxgrow.axes import Params, Tree
from jaxgrow.models import Config
from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.common.errors import UserError

if TYPE_CHECKING:  # its import takes seconds
    import grain

Batch: TypeAlias = tuple[Tree, Tree]  # (inputs, targets), pytrees with a leading axis


class Source(Protocol):
    """Samples with a length. ``sample`` is pure: all randomness comes from the generator."""

    @property
    def what(self) -> str:
        """The noun for its samples in error messages."""
        ...

    @property
    def workers(self) -> int:
        """The number of processes that prepare its samples; 0: a thread is enough."""
        ...

    def __len__(self) -> int: ...

    def sample(self, i: int, rng: np.random.Generator) -> Batch: ...


class MixedSource(ABC):
    """Samples of several sources. The order and the epochs of a source do not depend on the others.

    Attributes:
      parts: the sources, by name.
    """

    parts: Mapping[str, Source]

    @property
    def what(self) -> str:
        return next(iter(self.parts.values())).what

    @property
    def workers(self) -> int:
        return max(part.workers for part in self.parts.values())

    def __len__(self) -> int:
        """The number of different samples."""
        return sum(map(len, self.parts.values()))

    @abstractmethod
    def counts(self, samples: int) -> list[int]:
        """How many of the first ``samples`` samples are from each source."""

    @abstractmethod
    def samples(self, orders: Sequence[tuple[int, int]]) -> "grain.MapDataset":
        """An endless dataset of all sources.

        Args:
          orders: of each source, the random seed of its order, and how many samples of this order
            are skipped.
        """


# The datasets, by name. A config file can also have its own class.
DATASETS: "Registry[type[Dataset]]" = Registry("dataset", "train.extras")


@dataclass(frozen=True)
class Dataset(ABC):
    """The settings of the data of a run, and the data themselves.

    Methods that read the data raise a `UserError` if they are missing or damaged, or if the model
    cannot take them.
    """

    choices: ClassVar = DATASETS  # for messages
    modality: ClassVar[str]  # what its models read, as in `jaxgrow.models.Config`
    # Whether a run that starts from another run on the same data reads the samples that follow
    # those of the other run.
    goes_on: ClassVar[bool] = True

    @property
    def padded_length(self) -> int | None:
        """The length to which all samples are padded; None: they fill the context of the model."""
        return None

    @abstractmethod
    def sources(self, model: Config) -> "tuple[Source | MixedSource, dict[str, Source]]":
        """The training samples for ``model``, and the validation samples of each set by its name.

        The name of a validation set is empty if there is only one.
        """

    @abstractmethod
    def identity(self, model: Config) -> Json:
        """Describe the data by content: a name, and hashes of ``train``, ``valid`` and tokenizer.

        The hashes are computed from the data that the model is trained on. Equal data may have
        different names.
        """

    @abstractmethod
    def shapes(self, model: Config, samples: int) -> Batch:
        """The shapes of a training batch of ``samples`` for ``model``. No data are read."""

    @abstractmethod
    def more_validation(self, name: str = "") -> str:
        """The part of a message that says how to get more data of the validation set ``name``."""

    @abstractmethod
    def write_inputs(self, run: Path, config: Config, folder: Path) -> Json:
        """Write the files with which `transformers` prepares inputs for the model of a run.

        Args:
          run: folder of the run, into which a tokenizer of the data is copied.
          config: config of the model.
          folder: folder for the files.

        Returns:
          The entries of ``config.json`` about the inputs.
        """

    def report(self) -> list[str]:
        """Lines that summarise the data for the log."""
        return []

    def head(self, model: Config) -> Json:
        """The task and labels that a checkpoint records for its head."""
        return {}

    def scores(self, config: Config, params: Params, mesh: jax.sharding.Mesh) -> dict[str, float]:
        """The metrics of a model on the validation data, the main one first."""
        raise UserError(
            f"{type(self).__name__} has no metrics besides the loss: set best.by=val_loss in the method"
        )

    def check_modality(self, model: Config) -> None:
        """Check that a model reads this kind of data.

        Raises:
          UserError: the data are images and the model reads text, or the reverse.
        """
        if self.modality != model.modality:
            raise UserError(
                f"a {type(model).__name__} cannot take {type(self).__name__}: set data to a dataset that fits the model"
            )
