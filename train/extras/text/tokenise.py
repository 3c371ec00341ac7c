"""Tokenisation: streamed, in parallel processes, in constant memory.

A corpus is one ordered sequence of pieces. Progress is recorded after each shard, so that a
tokenisation that was killed skips the finished pieces; it only has to read them again.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from train.common.files import read_record, write_record
from train.data.workers import core_count
from train.extras.cache import PROGRESS, make_again
from train.extras.splitting import held_out
from train.extras.text.corpus import Corpus, Counts, Document
from train.extras.tokenizers.tokenizer import Cut, DocumentFrame, Encode, Tokenizer

BATCH = 1 << 20  # characters that are encoded in one call
# A corpus of fewer batches is encoded by one encoder, because starting others takes longer.
ALONE = 8
SHARD_BATCHES = 64  # batches between two records of the progress


class Piece(NamedTuple):
    text: Any  # a text, or token ids
    begins: bool  # whether it begins its document
    ends: bool  # whether it ends its document
    held: bool = False  # whether it is held out
    fresh: bool = True  # whether it does not continue the piece before it in its part of the data


def token_dtype(vocab: int) -> type:
    return np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32


def tokenise_corpus(
    corpus: Corpus, tokenizer: Tokenizer, kind: type, held: Fraction, work: Path
) -> None:
    """Write the tokens of a corpus to ``work/train`` and ``work/valid``, or continue writing them.

    The positions at which documents begin are written to ``work/train.begins`` and
    ``work/valid.begins``, in ascending order, as int64.

    Args:
      corpus: the documents. Without validation text, the fraction ``held`` of them is held out.
      tokenizer: how they become tokens.
      kind: the dtype of the tokens.
      held: the part of the pieces that is held out.
      work: the working folder.
    """
    parts = ("train", "valid")
    names = (*parts, *map(begins_of, parts))
    done = {"pieces": 0} | dict.fromkeys(names, 0)
    if (work / PROGRESS).exists():
        done = read_record(work / PROGRESS, make_again(work), tuple(done))
    bar = tqdm(desc="tokenise", unit=" characters", unit_scale=True, disable=None, leave=False)
    with ExitStack() as opened:
        opened.enter_context(bar)
        files = {name: opened.enter_context(open(work / name, "ab")) for name in names}
        for name, file in files.items():
            file.truncate(done[name])
            file.seek(done[name])
        left = itertools.islice(corpus_pieces(corpus, held, tokenizer.cut), done["pieces"], None)
        workers = core_count() if tokenizer.parallel else 1
        encoded = _encoded_batches(_piece_batches(left), tokenizer.encoder, kind, workers)
        for n, (batch, ids, sizes) in enumerate(encoded, 1):
            for name, held_part in zip(parts, (False, True), strict=True):
                own = np.array([piece.held for piece in batch]) == held_part
                part = ids[np.repeat(own, sizes)]
                fresh = np.array([piece.fresh for piece in batch])[own]
                begins = _document_begins(part, sizes[own], fresh, tokenizer.marks)
                begins += files[name].tell() // part.itemsize
                files[name].write(part.tobytes())
                files[begins_of(name)].write(begins.tobytes())
            done["pieces"] += len(batch)
            bar.update(sum(len(piece.text) for piece in batch))
            if n % SHARD_BATCHES == 0:
                _record_progress(work, files, done)


def _record_progress(work: Path, files: Mapping[str, BinaryIO], done: dict[str, int]) -> None:
    """Record how much of each file is complete and on the disk."""
    for name, file in files.items():
        file.flush()
        os.fsync(file.fileno())
        done[name] = file.tell()
    write_record(work / PROGRESS, done)


def begins_of(part: str) -> str:
    """The name of the file with the positions at which the documents of a part begin."""
    return f"{part}.begins"


def _document_begins(
    ids: np.ndarray, sizes: np.ndarray, fresh: np.ndarray, marks: DocumentFrame
) -> np.ndarray:
    """The positions in ``ids`` at which a document begins, ascending.

    Args:
      ids: the tokens of pieces.
      sizes: the number of tokens of each piece.
      fresh: whether a piece does not continue the piece before it.
      marks: tokens that begin or end a document within a piece.
    """
    found = [(np.cumsum(sizes) - sizes)[fresh]]
    if any(marks):
        found.append(np.flatnonzero(np.isin(ids, marks.begin)))
        found.append(np.flatnonzero(np.isin(ids, marks.end)) + 1)
    return np.unique(np.concatenate(found)).astype(np.int64)


def corpus_pieces(corpus: Corpus, held: Fraction, cut: Cut = iter) -> Iterator[Piece]:
    """Yield the pieces of the training documents, and then those of the validation documents."""
    before = None
    for n, piece in enumerate(_marked(corpus.train, corpus.counts, cut), 1):
        own = corpus.valid is None and held_out(n, held)
        # A piece of the other part may be between two pieces of a document.
        yield piece._replace(held=own, fresh=piece.begins or own != before)
        before = own
    for piece in _marked(corpus.valid or (), corpus.counts, cut):
        yield piece._replace(held=True, fresh=piece.begins)


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


def _piece_batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    taken: list[Piece] = []
    size = 0
    for piece in stream:
        taken.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield taken
            taken = []
            size = 0
    if taken:
        yield taken


def _encoded_batches(
    batches: Iterator[list[Piece]], encoder: Callable[[int], Encode], kind: type, workers: int
) -> Iterator[tuple[list[Piece], np.ndarray, np.ndarray]]:
    """Yield batches in order, with their token ids and the number of tokens of each piece."""
    few = list(itertools.islice(batches, ALONE)) if workers > 1 else []
    if len(few) < ALONE:
        encode = encoder(workers)
        for batch in itertools.chain(few, batches):
            yield batch, *_framed_ids(encode, batch, kind)
        return
    own = threading.local()

    def work(batch: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        if not hasattr(own, "encode"):
            own.encode = encoder(1)
        return _framed_ids(own.encode, batch, kind)

    # The threads wait for the processes of the encoders.
    pool = ThreadPoolExecutor(workers)
    try:
        ahead: deque[Any] = deque()
        for batch in itertools.chain(few, batches):
            ahead.append((batch, pool.submit(work, batch)))
            if len(ahead) > 2 * workers:
                batch, future = ahead.popleft()
                yield batch, *future.result()
        for batch, future in ahead:
            yield batch, *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _framed_ids(encode: Encode, batch: list[Piece], kind: type) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all pieces with the frames of their documents, and the number of each piece."""
    begins, ends = [piece.begins for piece in batch], [piece.ends for piece in batch]
    encoded, (begin, end) = encode([piece.text for piece in batch], begins)
    ids = np.concatenate(encoded).astype(kind)
    sizes = np.array([len(each) for each in encoded])
    for tokens, where, after in ((end, ends, True), (begin, begins, False)):
        places = (np.cumsum(sizes) - (0 if after else sizes))[np.array(where)]
        ids = np.insert(ids, np.repeat(places, len(tokens)), np.tile(tokens, len(places)))
        sizes = sizes + len(tokens) * np.array(where)
    return ids, sizes
