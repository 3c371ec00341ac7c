"""Batches of samples for training and validation: deterministic, sharded and resumable.

A sample is ``(inputs, targets)``: the model's input, and the expected output. A source has a length
and ``sample(i, rng)``, which is pure: all randomness (masks, augmentation) comes from ``rng``.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import grain
import jax
import numpy as np
from absl import flags

from jaxgrow.checkpoints.hf.labels import named
from jaxgrow.models import Config, TextConfig
from train.common.errors import UserError
from train.data.corpora import corpora
from train.data.documents import next_tokens_of_documents, window_segments
from train.data.masking import BYTES, MaskedWindows, vocabulary
from train.data.mixture import Mixture, endless, seed_of
from train.data.text import Data, holds_out, mixed_data, tokenizer
from train.data.workers import end_with_parent
from train.extras.images.images import Images, images
from train.extras.labelled.task import Labelled, task

Batch: TypeAlias = tuple[Any, Any]  # (inputs, targets), pytrees with a leading axis
_AHEAD = 4  # batches that are read ahead
# Samples that a worker prepares at once. A small number lets the worker end quickly.
_CHUNK = 32


class Source(Protocol):
    @property
    def what(self) -> str:
        """The noun for its samples in error messages."""
        ...

    @property
    def workers(self) -> int:
        """The number of processes that prepare its samples; 0: a thread is enough."""
        ...

    def __len__(self) -> int: ...

    def sample(self, i: int, rng: np.random.Generator) -> tuple[Any, Any]: ...


def next_tokens(windows: Any) -> Batch:
    """Split windows ``[..., length + 1]`` of text into inputs and targets."""
    return windows[..., :-1], windows[..., 1:]


class Windows:
    """Windows of ``length`` tokens, with the next token as the target of each.

    Each epoch predicts every token once. With ``begins``, the positions at which documents begin,
    attention stops at the ends of documents, and their last tokens have no target.
    """

    workers = 0

    def __init__(self, tokens: np.ndarray, length: int, begins: np.ndarray | None = None):
        self.tokens = tokens
        self.length = length
        self.begins = begins
        self.what = f"windows of {length} tokens"

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def sample(self, i: int, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
        first = i * self.length
        tokens = np.asarray(self.tokens[first : first + self.length + 1], np.int32)
        if self.begins is None:
            return next_tokens(tokens)
        segments = window_segments(self.begins, first, len(tokens))
        return next_tokens_of_documents(tokens, segments)


def identity(data: Data | Images | Labelled, model: Config) -> dict[str, Any]:
    """Describe the data by content: a name, and hashes of ``train``, ``valid`` and the tokenizer.

    The hashes are computed from the data that the model is trained on. If the corpus is the standard
    library, the identity also contains the version of Python. Equal data may have different names.

    Raises:
      UserError: the data cannot be read.
    """
    if isinstance(data, Labelled):
        return task(data, model).identity  # type: ignore[arg-type]
    return images(data).identity if isinstance(data, Images) else corpora(data).identity


def report(data: Data | Images | Labelled) -> list[str]:
    """Lines that summarise a corpus of text; empty for images and labelled data."""
    return corpora(data).report if isinstance(data, Data) else []


def labels(data: Data | Images | Labelled) -> list[str]:
    """The class names of images, in the order of the class numbers; empty for other data."""
    return list(images(data).classes) if isinstance(data, Images) else []


def head(data: Data | Images | Labelled, model: Config) -> dict[str, Any]:
    """The task and labels that a checkpoint records for its head; empty for a corpus of text."""
    if isinstance(data, Labelled):
        return task(data, model).settings  # type: ignore[arg-type]
    return named(labels(data))


def sources(data: Data | Images | Labelled, model: Config) -> tuple[Source | Mixture, Source]:
    """The training source and the first validation source of ``model``.

    Raises:
      UserError: the data cannot be read, or the model cannot take them.
    """
    training, validation = named_sources(data, model)
    return training, next(iter(validation.values()))


def named_sources(
    data: Data | Images | Labelled, model: Config
) -> tuple[Source | Mixture, dict[str, Source]]:
    """The training source and the validation sources of ``model``, by name.

    The name of a validation source is empty if there is only one.

    Raises:
      UserError: the data cannot be read, or the model cannot take them.
    """
    if data.modality != model.modality:
        raise UserError(
            f"a {type(model).__name__} cannot take {type(data).__name__}: set data to a dataset that fits the model"
        )
    if isinstance(data, Labelled):
        training, validation = _of_task(data, model)  # type: ignore[arg-type]
        return training, {"": validation}
    if isinstance(data, Images):
        training, validation = _pictures(data, model)
        return training, {"": validation}
    return _texts(data, model)


def _pictures(data: Images, model: Config) -> tuple[Source, Source]:
    split = images(data)
    sizes = model.integers()
    fits = {
        "pixels a side": (split.shape[0], sizes["image"]),
        "channels": (split.shape[2], sizes["channels"]),
        "classes": (len(split.classes), sizes["classes"]),
    }
    wrong = [
        f"{name}: {has} in the images, {takes} in the model"
        for name, (has, takes) in fits.items()
        if has != takes
    ]
    if wrong:
        raise UserError(f"the images do not fit the model: {'; '.join(wrong)}")
    return split.train, split.valid


def _texts(data: Data, model: Config) -> tuple[Source | Mixture, dict[str, Source]]:
    text = corpora(data)
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
    return Mixture(train, text.shares), valid


def _windows(data: Data, model: Config) -> Callable[[np.ndarray, np.ndarray], Source]:
    """The function that divides tokens, with the begins of documents, into samples of ``model``."""
    used = data.attend == "document"
    if used and not getattr(model, "segments", False):
        raise UserError(
            f"attention of a {type(model).__name__} cannot stop at the ends of documents: set data.attend=row"
        )
    if not model.masked:
        return lambda part, begins: Windows(part, model.length, begins if used else None)
    if data.tokenizer == "none":
        raise UserError(
            "a masked model needs the mask of a tokenizer, but data.tokenizer is none: name the tokenizer of the tokens"
        )
    known = BYTES if data.tokenizer == "bytes" else vocabulary(tokenizer(data.tokenizer))
    if data.whole_words and known.whole_word is None:
        raise UserError(
            f"data.whole_words: the tokenizer {data.tokenizer} does not mark tokens that continue a word; set it to false"
        )
    known = known if data.whole_words else known._replace(whole_word=None)
    return lambda part, begins: MaskedWindows(
        part, model.length, *known, masked=model.masked, begins=begins if used else None
    )


def _of_task(data: Labelled, model: TextConfig) -> tuple[Source, Source]:
    prepared = task(data, model)
    if (model.head, model.classes) != (prepared.head, prepared.classes):
        raise UserError(
            f"{data.task} needs a model with head={prepared.head} and classes={prepared.classes}, but it has "
            f"head={model.head} and classes={model.classes}"
        )
    return prepared.train, next(iter(prepared.valid.values()))


def shapes(data: Data | Images | Labelled, model: Config, samples: int) -> Batch:
    """The shapes of a training batch of ``samples`` for ``model``. No data are read."""
    if isinstance(data, Labelled):
        return model.task_shapes(samples, data.length)
    inputs, targets = model.batch_shapes(samples)
    if isinstance(data, Data) and data.attend == "document":
        if not isinstance(inputs, dict):
            weights = jax.ShapeDtypeStruct(inputs.shape, np.float32)
            inputs = {"tokens": inputs, "weights": weights}
        return inputs | {"segments": inputs["tokens"]}, targets
    if isinstance(data, Images) and data.augment.softens:
        classes = model.integers()["classes"]
        targets = jax.ShapeDtypeStruct((samples, classes), np.float32)
    return inputs, targets


class Stream(grain.DatasetIterator):
    """Batches of ``samples``, an endless `grain.MapDataset`.

    The first ``first`` samples are skipped.

    A thread and ``workers`` processes read ahead. Of each batch, only ``rows`` are read. The state
    is the number of samples that were taken, in full batches. Samples that were only read ahead are
    not counted. `close` ends the processes, and the next batch would start them again. They also
    end when this process ends, even if it is killed.
    """

    def __init__(
        self,
        samples: grain.MapDataset,
        batch: int,
        rows: np.ndarray,
        workers: int = 0,
        first: int = 0,
    ):
        super().__init__()
        self._samples = samples
        self._batch = batch
        self._rows = rows
        self._workers = workers
        self._taken = first
        self._ahead = None
        self._end = lambda: None

    def __next__(self) -> Batch:
        if self._ahead is None:
            self._ahead = self._begin()
            # Also close when Python exits, because Python aborts if grain's thread is still running.
            self._end = weakref.finalize(self, self._ahead.close)
        result = next(self._ahead)
        self._taken += self._batch
        return result

    def _begin(self) -> Any:
        if self._workers and not flags.FLAGS.is_parsed():
            # grain reads some of its absl flags before it starts a process.
            flags.FLAGS.mark_as_parsed()
        # Workers take turns at chunks, and several chunks are joined to a batch afterwards. The
        # samples of a chunk therefore do not depend on the number of workers.
        # the boundaries of the rows of this process
        edges = np.flatnonzero(np.diff(np.isin(np.arange(-1, self._batch + 1), self._rows)))
        chunk = math.gcd(self._batch, self._taken, _CHUNK, *edges.tolist())
        chunks = self._samples.batch(chunk, drop_remainder=True)[self._taken // chunk :]
        if len(self._rows) < self._batch:
            chunks = _Part(chunks, self._rows[::chunk] // chunk, self._batch // chunk)
        processes = grain.MultiprocessingOptions(
            num_workers=self._workers,
            per_worker_buffer_size=math.ceil(
                _AHEAD * len(self._rows) / chunk / max(1, self._workers)
            ),
        )
        read = chunks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        read = read.mp_prefetch(processes, end_with_parent).batch(
            len(self._rows) // chunk, batch_fn=_joined
        )
        return iter(grain.experimental.ThreadPrefetchIterDataset(read, prefetch_buffer_size=_AHEAD))

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        self.close()
        self._taken = state["next_index"]

    def close(self) -> None:
        self._end()
        self._ahead = None


class _Part(grain.MapDataset):
    """The elements ``mine`` of every ``of`` elements of an endless ``parent``.

    Other elements are not computed.
    """

    def __init__(self, parent: grain.MapDataset, mine: np.ndarray, of: int):
        super().__init__(parent)
        self._whole = parent
        self._mine = mine.tolist()
        self._of = of

    def __len__(self) -> int:
        return len(self._whole) // self._of * len(self._mine)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        batch, i = divmod(index, len(self._mine))
        return self._whole[batch * self._of + self._mine[i]]


def _joined(chunks: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)


def training(
    source: Source | Mixture,
    batch: int,
    seed: int,
    rows: np.ndarray | None = None,
    first: int = 0,
    orders: Sequence[tuple[int, int]] = (),
) -> Stream:
    """An endless iterator of training batches, reshuffled each epoch.

    The batches are the same for any number of processes. The state (``get_state``, ``set_state``)
    goes into the checkpoint.

    Args:
      source: the training samples.
      batch: samples per batch, over all processes.
      seed: random seed of the order and of the random part of each sample.
      rows: the rows of each batch that this process reads; None: all.
      first: number of samples of this order that are skipped.
      orders: of each source of a mixture, the seed of its order, and the number of samples of this
        order that are skipped; empty: they follow from ``seed``, and none is skipped.

    Raises:
      UserError: there are fewer samples than one batch.
    """
    if len(source) < batch:
        raise UserError(
            f"the training data has {len(source)} {source.what}, less than one batch of {batch}: lower batch, or give more data"
        )
    if isinstance(source, Mixture):
        usual = [(seed_of(seed, number), 0) for number in range(len(source.parts))]
        samples = source.samples(orders or usual)
    else:
        samples = endless(source, seed)
    mine = np.arange(batch) if rows is None else rows
    return Stream(samples, batch, mine, source.workers, first)


def more_validation(data: Data | Images | Labelled, name: str = "") -> str:
    """The part of a message that says how to get more data of the validation set ``name``."""
    given = getattr(data, "valid_path", None)
    if isinstance(given, dict):
        return f"give more of them in data.valid_path={given[name]}, the set {name}"
    if name and given is None and isinstance(data, Data):
        return f"{more_validation(mixed_data(data)[name])} for {name}, or set data.valid_path"
    if (path := getattr(data, "valid_path", None)) is not None:
        return f"give more of them in data.valid_path={path}"
    if isinstance(data, Labelled):
        return "give more of them in data.path"
    held = images(data).held if isinstance(data, Images) else holds_out(data)
    if held and data.valid_fraction < 0.5:
        return f"raise data.valid_fraction={data.valid_fraction:g} (at most 0.5)"
    return "give more data" if held else "give more of them in the validation split of the data"


def validation(
    source: Source,
    batch: int,
    count: int,
    rows: np.ndarray | None = None,
    more: Callable[[], str] = lambda: "give more validation data",
) -> list[Batch]:
    """A fixed list of validation batches, spread evenly over the validation data.

    Args:
      source: the validation samples.
      batch: samples per batch, over all processes.
      count: the number of batches; fewer are returned if the data do not suffice.
      rows: the rows of each batch that this process reads; None: all.
      more: function that returns how to get more validation data, for an error message.

    Raises:
      UserError: there is not even one batch.
    """
    count = min(count, len(source) // batch)
    if count == 0:
        raise UserError(
            f"the validation data has {len(source)} {source.what}, less than one batch of {batch}: lower batch, or {more()}"
        )
    chosen = _spread(len(source), batch, count)
    chosen = chosen if rows is None else chosen[:, rows]
    return [_batch(source, indices) for indices in chosen]


def probe(
    sources: Mapping[str, Source],
    batch: int,
    used: int,
    micro: int,
    count: int,
    rows: np.ndarray | None = None,
    more: Callable[[], str] = lambda: "give more validation data",
) -> Batch | None:
    """Micro-batches of validation data that `validation` does not read, stacked along a new axis.

    Data that decide how a model is trained must be separate from the data that evaluate it.

    Args:
      sources: the validation samples of each set.
      batch: samples per batch of `validation`.
      used: the number of batches that `validation` reads.
      micro: samples per micro-batch.
      count: the number of micro-batches; 0: return None.
      rows: the rows of each micro-batch that this process reads; None: all.
      more: function that returns how to get more validation data, for an error message.

    Raises:
      UserError: there are not enough samples.
    """
    if not count:
        return None
    free = [
        (source, i)
        for source in sources.values()
        for i in np.setdiff1d(
            np.arange(len(source)), _spread(len(source), batch, min(used, len(source) // batch))
        )
    ]
    if len(free) < count * micro:
        what = next(iter(sources.values())).what
        raise UserError(
            f"measuring sensitivities needs {count} micro-batches of {micro} {what} that evaluation does not read, "
            f"but the validation data has {len(free)} left: lower eval_batches or the batches of the measurement, or {more()}"
        )
    chosen = np.linspace(0, len(free) - 1, count * micro).astype(int).reshape(count, micro)
    chosen = chosen if rows is None else chosen[:, rows]
    return _stack([_stack([_fixed(*free[i]) for i in indices]) for indices in chosen])


def _spread(samples: int, batch: int, count: int) -> np.ndarray:
    return np.linspace(0, samples - 1, count * batch).astype(int).reshape(count, batch)


def _batch(source: Source, indices: np.ndarray) -> Any:
    return _stack([_fixed(source, i) for i in indices])


def _fixed(source: Source, i: int) -> tuple[Any, Any]:
    return source.sample(int(i), np.random.default_rng(int(i)))


def _stack(samples: list[Any]) -> Any:
    return jax.tree.map(lambda *rows: np.stack(rows), *samples)
