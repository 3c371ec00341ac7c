"""Templates and tokenizers of others run in child processes, with limits of time and memory."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxgrow.typed import Json
from jaxgrow.untrusted import UntrustedError, file_limits, open_regular
from train.common.errors import UserError
from train.extras.decoding import in_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SCRIPT = Path(__file__).with_name("bounded_child.py")
_START = 60.0  # seconds until the child has started
# The limit is CPU time. A child on a busy machine may wait this many times longer.
_PATIENCE = 10
_TIMED = 1 << 20  # bytes of text that may be encoded in `Limits.seconds`


class BoundedChild:
    """A child process that answers requests, and is killed when one takes too long.

    Args:
      threads: the number of threads of its libraries.
      **setup: a first request, which each new process gets.
    """

    def __init__(self, threads: int = 1, **setup: object):
        self._threads = threads
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._end = lambda: None

    def ask(self, what: str, size: int = 0, **request: object) -> Any:
        """The answer of a job of ``bounded_child.py``.

        Args:
          what: the file, for messages.
          size: bytes of a text. A long text may take longer.
          **request: the name of the job, and its arguments.

        Raises:
          UntrustedError: the job failed, or needs more than the limits.
        """
        if self._process is None:
            self._start()
            if self._setup:
                self.ask(what, size=sum(map(len, map(str, self._setup.values()))), **self._setup)
        seconds = file_limits().seconds * max(1.0, size / _TIMED)
        budget = {"bytes": file_limits().bytes, "record": file_limits().record}
        budget["seconds"] = math.ceil(seconds * self._threads)
        line, content = self._answer(budget | request, _PATIENCE * seconds)
        answer = json.loads(line or b'{"memory": true}')
        if "memory" in answer:
            raise UntrustedError(f"{what}: it {self._excess(seconds)}")
        if "error" in answer:
            raise UntrustedError(f"{what}: {answer['error']}")
        return answer["result"], content

    def close(self) -> None:
        """End the child."""
        self._end()
        self._process = None

    def _start(self) -> None:
        many = {
            "TOKENIZERS_PARALLELISM": "true" if self._threads > 1 else "false",
            "RAYON_NUM_THREADS": str(self._threads),
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # other pools reserve more than they need
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            # Isolated: modules in the working directory are not imported.
            [sys.executable, "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | many,
            # Signals to the group of this process, which then ends in order, do not reach the child.
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _ended, self._process)
        with _killing(self._process, _START):
            _piped(self._process)[1].readline()

    def _answer(self, request: Json, seconds: float) -> tuple[bytes, bytes]:
        """The line of an answer, empty if the child ended, and the bytes after it."""
        process = self._process
        assert process is not None
        sent, received = _piped(process)
        with _killing(process, seconds):
            try:
                text = json.dumps(request, ensure_ascii=False)
                sent.write(text.encode("utf-8", "surrogatepass") + b"\n")
                sent.flush()
                line = received.readline()
                count = json.loads(line).get("bytes", 0)
                content = received.read(count)
                return (line, content) if len(content) == count else (b"", b"")
            except (BrokenPipeError, ValueError):  # it has ended
                return b"", b""

    def _excess(self, seconds: float) -> str:
        """Why the child has ended, for a message."""
        assert self._process is not None
        process = self._process
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        self.close()
        if process.returncode in _OUT_OF_TIME:
            return (
                f"needs more than {seconds:g} s; if you trust the file, raise the limit, such as with --limits "
                f"seconds={10 * file_limits().seconds:g}"
            )
        return (
            "needs too much memory or is damaged: the process that ran it has ended; if you trust the file, raise the "
            f"limit, such as with --limits bytes={4 * file_limits().bytes}"
        )


_LATE = getattr(signal, "SIGXCPU", signal.SIGTERM)
_OUT_OF_TIME = {-_LATE}


def _piped(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


@contextmanager
def _killing(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill the process if the block takes longer, as the system does after too much CPU time."""
    timer = threading.Timer(seconds, process.send_signal, [_LATE])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


class Encoded(NamedTuple):
    """The ids of a text and their places in it, as `tokenizers` returns them."""

    ids: np.ndarray
    offsets: np.ndarray | None = None  # [n, 2], the characters of each id


class BoundedTokenizer:
    """A tokenizer of others in a child process, with limits of time and memory for each call.

    Args:
      tokenizer: a `tokenizers.Tokenizer` that reads the names of special tokens as text.
      name: its name, for messages.
      threads: the number of threads.
    """

    def __init__(self, tokenizer: "Tokenizer", name: str, threads: int = 1):
        self._name = name
        self._child = BoundedChild(threads, job="load", tokenizer=tokenizer.to_str())

    def encode_batch_fast(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> list[Encoded]:
        """The ids of each text, without special tokens.

        Raises:
          UserError: the tokenizer needs too much time or memory, or makes too many tokens.
        """
        assert not add_special_tokens
        return self._encoded(texts, spans=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """As `encode_batch_fast`, with the places of the ids."""
        return self._encoded(texts, spans=True)

    def encode_one(self, text: str, framed: bool = False, control: bool = False) -> list[int]:
        """The ids of a text.

        Args:
          text: the text.
          framed: whether to add the tokens that the tokenizer adds to a text.
          control: whether names of special tokens in the text are special tokens, as in a chat.

        Raises:
          UserError: as for `encode_batch_fast`.
        """
        [encoded] = self._encoded([text], spans=False, framed=framed, control=control)
        return encoded.ids.tolist()

    def _encoded(
        self, texts: Sequence[str], spans: bool, framed: bool = False, control: bool = False
    ) -> list[Encoded]:
        if not texts:
            return []
        size = sum(map(len, texts))
        what = f"encoding {size:,} characters with the tokenizer {self._name}"
        try:
            sizes, content = self._child.ask(
                what, size, job="encode", texts=texts, spans=spans, framed=framed, control=control
            )
        except UntrustedError as error:
            raise UserError(str(error)) from error
        edges = np.cumsum(sizes)
        numbers = np.frombuffer(content, np.uint32)
        ids = np.split(numbers[: edges[-1]], edges[:-1])
        if not spans:
            return [*map(Encoded, ids)]
        offsets = np.split(numbers[edges[-1] :].reshape(-1, 2).astype(np.int32), edges[:-1])
        return [*map(Encoded, ids, offsets)]

    def close(self) -> None:
        """End the child process."""
        self._child.close()


child = BoundedChild()
# Characters that the replacements of a tokenizer may make of one.
_GROWTH = 64
_tried: set[tuple[tuple[str, int, int], ...]] = set()


def check_tokenizer(path: Path, files: Sequence[Path]) -> None:
    """Load a tokenizer in a process with limits, and encode a few texts with it.

    A worker process loads only what the main process has tried.

    Args:
      path: ``tokenizer.json``, or the folder of ``vocab.json`` and ``merges.txt``.
      files: its files.

    Raises:
      UntrustedError: it is damaged, or needs too much time or memory.
    """
    if multiprocessing.parent_process() is not None:
        return
    real = [in_folder(path, file) if path.is_dir() else file.resolve() for file in files]
    for file in real:
        open_regular(file).close()
        file_limits().check(str(file), bytes=file.stat().st_size)
    key = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in real)
    if key in _tried:
        return
    if path.is_dir():
        child.ask(str(path), job="tokenizer", folder=list(map(str, real)))
    else:
        _check_growth(json.loads(real[0].read_bytes()), path)
        child.ask(str(path), job="tokenizer", file=str(real[0]))
    _tried.add(key)


def _check_growth(about: object, path: Path) -> None:
    """Refuse replacements that together multiply the length of a text."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(about.get(part)) if isinstance(about, dict) else 1
        if growth > _GROWTH:
            raise UntrustedError(
                f"the {part} of {path} makes up to {growth:,.0f} characters of one, more than {_GROWTH}"
            )
    # Generated tokens are decoded in this process.
    if isinstance(about, dict) and _has_expression(about.get("decoder")):
        raise UntrustedError(
            f"the decoder of {path} has a regular expression, which is not supported: replace it by a string"
        )


def _has_expression(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    pattern, inner = decoder.get("pattern"), decoder.get("decoders")
    if isinstance(pattern, dict) and "Regex" in pattern:
        return True
    return isinstance(inner, list) and any(map(_has_expression, inner))


def _growth(part: Any) -> float:
    if not isinstance(part, dict):
        return 1.0
    growth = 1.0
    for each in [
        *part.get("normalizers", []),
        *part.get("pretokenizers", []),
        *part.get("decoders", []),
    ]:
        growth *= _growth(each)
    if part.get("type") == "Replace":
        pattern = part.get("pattern") or {}
        # A regular expression may match the places between characters.
        least = len(pattern["String"]) if pattern.get("String") else 1
        between = 0 if pattern.get("String") else 1
        growth *= max(1.0, len(part.get("content") or "") / least + between)
    return growth
