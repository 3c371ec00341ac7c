"""Batches of samples for training and validation: deterministic, sharded and resumable."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from train.common.errors import UserError
from train.data.dataset import Batch, MixedSource, Source
from train.data.workers import end_with_parent

_AHEAD = 4  # batches that are read ahead
# Samples that a worker prepares at once. A small number lets the worker end quickly.
_CHUNK = 32


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
            len(self._rows) // chunk, batch_fn=_joined_chunks
        )
        return iter(grain.experimental.ThreadPrefetchIterDataset(read, prefetch_buffer_size=_AHEAD))

    def resize(self, batch: int, rows: np.ndarray) -> None:
        """Let the next batches have ``batch`` samples, of which only ``rows`` are read."""
        if batch != self._batch:
            self.close()
            self._batch, self._rows = batch, rows

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


def _joined_chunks(chunks: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)


def training_batches(
    source: Source | MixedSource,
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
    if isinstance(source, MixedSource):
        usual = [(seed_of(seed, number), 0) for number in range(len(source.parts))]
        samples = source.samples(orders or usual)
    else:
        samples = endless_samples(source, seed)
    mine = np.arange(batch) if rows is None else rows
    return Stream(samples, batch, mine, source.workers, first)


def validation_batches(
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


def probe_batches(
    sources: Mapping[str, Source],
    batch: int,
    used: int,
    micro: int,
    count: int,
    rows: np.ndarray | None = None,
    more: Callable[[], str] = lambda: "give more validation data",
) -> Batch | None:
    """Micro-batches of validation data that `validation_batches` does not read, stacked along a new axis.

    Data that decide how a model is trained must be separate from the data that evaluate it.

    Args:
      sources: the validation samples of each set.
      batch: samples per batch of `validation_batches`.
      used: the number of batches that `validation_batches` reads.
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


def _batch(source: Source, indices: np.ndarray) -> Batch:
    return _stack([_fixed(source, i) for i in indices])


def _fixed(source: Source, i: int) -> Batch:
    return source.sample(int(i), np.random.default_rng(int(i)))


def _stack(samples: list[Batch]) -> Batch:
    return jax.tree.map(lambda *rows: np.stack(rows), *samples)


def seed_of(seed: int, number: int) -> int:
    """The seed for the order of a source of a mixture; the first source has the seed of the run."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def endless_samples(source: Any, seed: int) -> grain.MapDataset:
    """The samples of a source, shuffled again each epoch."""
    return (
        grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat().random_map(source.sample)
    )
