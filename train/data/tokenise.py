"""Tokenisation: streamed, in parallel processes, in constant memory.

A corpus is one ordered sequence of pieces. Progress is recorded after each shard, so that a
tokenisation that was killed skips the finished pieces; it only has to read them again.
"""

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tqdm import tqdm

from train.common.errors import UserError
from train.common.files import read_json, write_json
from train.data.cache import PROGRESS, again
from train.data.corpus import Corpus, Counts
from train.data.formats import Document
from train.data.special import DocumentFrame
from train.data.splitting import held_out
from train.data.workers import end_with_parent

# Pieces, and whether each begins its document -> (token ids of each piece, tokens around a document).
Encode: TypeAlias = Callable[[list[Any], list[bool]], tuple[list[Any], DocumentFrame]]
# The parts of a document, whose edges are arbitrary -> pieces that are encoded one by one.
Cut: TypeAlias = Callable[[Iterable[Any]], Iterable[Any]]

BATCH = 1 << 20  # characters that are encoded in one call
# A corpus of fewer batches is encoded by this process, because starting others takes longer.
ALONE = 8
SHARD = 64  # batches between two records of the progress


class Piece(NamedTuple):
    text: Any  # a text, or token ids
    begins: bool  # whether it begins its document
    ends: bool  # whether it ends its document
    held: bool = False  # whether it is held out


class Batch(NamedTuple):
    pieces: list[Any]
    begins: list[bool]  # whether a document begins with the piece
    ends: list[bool]  # whether a document ends with the piece
    held: list[bool]  # whether it is held out


def dtype(vocab: int) -> type:
    return np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32


def tokenise(
    corpus: Corpus,
    encoder: Callable[[], Encode],
    kind: type,
    held: Fraction,
    workers: int,
    work: Path,
    cut: Cut = iter,
) -> None:
    """Write the tokens of a corpus to ``work/train`` and ``work/valid``, or continue writing them.

    Args:
      corpus: the documents. Without validation text, the fraction ``held`` of them is held out.
      encoder: creates the function that encodes pieces.
      kind: the dtype of the tokens.
      held: the part of the pieces that is held out.
      workers: the number of processes that encode; 1: this process encodes.
      work: the working folder.
      cut: cuts documents into pieces; the default keeps those of the reader.
    """
    done = {"pieces": 0, "train": 0, "valid": 0}
    if (work / PROGRESS).exists():
        done = read_json(work / PROGRESS, again(work), tuple(done))
    stream = itertools.islice(sequence(corpus, held, cut), done["pieces"], None)
    bar = tqdm(desc="tokenise", unit=" characters", unit_scale=True, disable=None, leave=False)
    with bar, open(work / "train", "ab") as train, open(work / "valid", "ab") as valid:
        files = {"train": train, "valid": valid}
        for name, file in files.items():
            file.truncate(done[name])
        for i, (batch, ids, sizes) in enumerate(
            _encoded(_batches(stream), encoder, kind, workers), 1
        ):
            mask = np.repeat(batch.held, sizes)
            train.write(ids[~mask].tobytes())
            valid.write(ids[mask].tobytes())
            done["pieces"] += len(batch.pieces)
            bar.update(sum(map(len, batch.pieces)))
            if i % SHARD == 0:
                _note(work, files, done)


def _note(work: Path, files: dict[str, Any], done: dict[str, int]) -> None:
    for name, file in files.items():
        file.flush()
        os.fsync(file.fileno())
        done[name] = file.tell()
    write_json(work / PROGRESS, done)


def sequence(corpus: Corpus, held: Fraction, cut: Cut = iter) -> Iterator[Piece]:
    """Yield the pieces of the training documents, and then those of the validation documents."""
    for n, piece in enumerate(_marked(corpus.train, corpus.counts, cut), 1):
        yield piece._replace(held=corpus.valid is None and held_out(n, held))
    for piece in _marked(corpus.valid or (), corpus.counts, cut):
        yield piece._replace(held=True)


def _marked(documents: Iterable[Document], counts: Counts, cut: Cut) -> Iterator[Piece]:
    """Count the pieces, and yield each piece with its place in its document."""
    for document in documents:
        before = None
        for piece in cut(_cleaned(document)):
            counts.add(piece)
            if before is not None:
                yield before
            before = Piece(piece, before is None, False)
        if before is not None:
            counts.documents += 1
            yield before._replace(ends=True)


def _cleaned(document: Document) -> Iterator[Any]:
    """The pieces without a byte-order mark at the start, and with U+FFFD in place of NUL.

    The zero byte is the token that ends documents of bytes.
    """
    for i, piece in enumerate(document):
        if isinstance(piece, np.ndarray):  # token ids
            yield piece
            continue
        text = piece.removeprefix("\ufeff") if i == 0 else piece
        if text:
            yield text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _batches(stream: Iterable[Piece]) -> Iterator[Batch]:
    taken: list[Piece] = []
    size = 0
    for piece in stream:
        taken.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield Batch(*map(list, zip(*taken, strict=True)))
            taken = []
            size = 0
    if taken:
        yield Batch(*map(list, zip(*taken, strict=True)))


def _encoded(
    batches: Iterator[Batch], encoder: Callable[[], Encode], kind: type, workers: int
) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """Yield batches in order, with their token ids and the number of tokens of each piece."""
    few = list(itertools.islice(batches, ALONE)) if workers > 1 else []
    if len(few) < ALONE:
        encode = encoder()
        for batch in itertools.chain(few, batches):
            yield batch, *_ids(encode, batch, kind)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(encoder, kind)
    )
    try:
        ahead: deque[Any] = deque()
        for batch in itertools.chain(few, batches):
            ahead.append((batch, pool.submit(_work, batch)))
            if len(ahead) > 2 * workers:
                batch, future = ahead.popleft()
                yield batch, *future.result()
        for batch, future in ahead:
            yield batch, *future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenising process was killed, perhaps because memory ran out; repeat the command to continue"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _ids(encode: Encode, batch: Batch, kind: type) -> tuple[np.ndarray, np.ndarray]:
    encoded, frame = encode(batch.pieces, batch.begins)
    begin, end = (np.asarray(part, kind) for part in frame)
    none = np.zeros(0, kind)
    parts = [
        np.concatenate([begin if begins else none, np.asarray(ids, kind), end if ends else none])
        for ids, begins, ends in zip(encoded, batch.begins, batch.ends, strict=True)
    ]
    return np.concatenate(parts), np.array([len(p) for p in parts])


# --- in a worker ---

_encoder: list[tuple[Encode, type]] = []


def _begin(encoder: Callable[[], Encode], kind: type) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
    _encoder.append((encoder(), kind))


def _work(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    encode, kind = _encoder[0]
    return _ids(encode, batch, kind)
