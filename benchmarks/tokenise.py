"""How fast is tokenising, and does its memory grow with the corpus? Several formats and sizes.

    python benchmarks/tokenise.py FILE TOKENIZER [--megabytes 160] [--rounds 3] [--json FILE]
    python benchmarks/tokenise.py FILE TOKENIZER --gigabytes 0.5,2,8 [--json FILE.jsonl]

The first command uses the first ``--megabytes`` of FILE (.txt, .gz, .xz or .zst; a shorter file is
repeated). It writes them as one text file, a folder of small files, compressed JSON Lines, and
Parquet in one row group, each also at a sixteenth and a quarter of the size. A separate process
tokenises each of them into an empty cache; the corpora alternate. Memory is the peak of this
process and of its largest worker (bytes need no worker). Most of it comes from imports.

``--gigabytes`` writes corpora of these sizes as JSON Lines. They repeat the documents of FILE, each
time in a new order. It tokenises each corpus, and trains a small GPT on it with batches of windows
from the complete corpus. A process needs its anonymous memory. The peak also includes recently read
pages of mapped files, which the system reclaims when it needs memory. Each size needs twice its
size on the disk, in TMPDIR.
"""

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import (
    Rows,
    alternate,
    environment,
    parser,
    ratios,
    refuse_unused,
    save,
    shown,
    summary,
)
from jaxgrow.tables import align_columns
from train.common.errors import exits_cleanly
from train.extras.text.corpus import PIECE
from train.extras.text.formats import text_pieces

SIZES = (1, 4, 16)
DOCUMENT = 3000  # characters
ROOT = Path(__file__).parents[1]
CHILD = """
import json, resource, sys, tempfile, time
if __name__ == "__main__":
    from train.data.text import Data
    from train.extras.text.reading import read_tokens
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        read_tokens(Data("text", sys.argv[1], tokenizer=sys.argv[2], cache=cache))
        seconds = time.perf_counter() - start
    # ru_maxrss would start at the memory of the parent process. A worker's value is therefore at
    # least the value of this process.
    (own,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps([seconds, own / 1024, largest / 1024]))
"""


GROWING = """
import json, sys, threading, time

def memory(what):
    (kibibytes,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))
    return kibibytes / 1024

def tokenise(data, folder):
    from train.extras.text.reading import read_tokens
    read_tokens(data)

def train(data, folder):
    from jaxgrow.models import GPT2Config
    from train.extras.text.reading import read_tokens
    from train.config.experiment import Experiment
    from train.run.trainer import run_experiment
    model = GPT2Config(vocab=read_tokens(data).vocab, context=128, layers=1, embed=16, heads=1, head_dim=16, mlp=16)
    run_experiment(Experiment(name="small", model=model, data=data, steps=200, batch=16, eval_batches=2), folder)

if __name__ == "__main__":
    from train.data.text import Data
    what, corpus, tokenizer, folder = sys.argv[1:]
    most, done = [0.0], threading.Event()
    def watch():
        while not done.wait(0.02):
            most[0] = max(most[0], memory("RssAnon"))
    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    globals()[what](Data("text", corpus, tokenizer=tokenizer, cache=folder + "/cache"), folder + "/run")
    seconds = time.perf_counter() - start
    done.set()
    print(json.dumps([seconds, most[0], memory("VmHWM")]))
"""


def measure(script: Path, corpus: Path, tokenizer: str) -> tuple[float, float, float]:
    """Tokenise a corpus in a separate process.

    Returns:
      Seconds, the peak memory of the process in MiB, and the peak memory of its largest worker in
      MiB.
    """
    command = [sys.executable, str(script), str(corpus), tokenizer]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
    )
    return tuple(json.loads(done.stdout))


def documents(whole: str) -> list[str]:
    return [whole[i : i + DOCUMENT] for i in range(0, len(whole), DOCUMENT)]


def as_text(whole: str, path: Path) -> None:
    path.with_suffix(".txt").write_text(whole)


def as_small_files(whole: str, path: Path) -> None:
    path.mkdir()
    for i, document in enumerate(documents(whole)):
        (path / f"{i:012}.txt").write_text(document)


def as_json_lines(whole: str, path: Path) -> None:
    with pa.output_stream(str(path.with_suffix(".jsonl.zst")), compression="zstd") as file:
        for document in documents(whole):
            file.write((json.dumps({"text": document}) + "\n").encode())


def as_parquet(whole: str, path: Path) -> None:
    table = pa.table({"text": documents(whole)})
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=len(table))


FORMATS: dict[str, Callable[[str, Path], None]] = {
    "a file of text": as_text,
    "small files": as_small_files,
    ".jsonl.zst": as_json_lines,
    "one row group": as_parquet,
}


def shuffled(lines: list[bytes]) -> Iterator[bytes]:
    """Yield the lines forever, in a new order each time."""
    order = random.Random(0)
    while True:
        order.shuffle(lines)
        yield from lines


def grow(file: Path, tokenizer: str, gigabytes: list[float], found: Rows) -> None:
    """Measure the memory of tokenising and of training as a function of the size of the corpus.

    Args:
      file: text whose documents are repeated.
      tokenizer: as on the command line.
      gigabytes: sizes of the corpora.
      found: where results are added.
    """
    lines = [
        (json.dumps({"text": d}) + "\n").encode() for d in documents("".join(text_pieces(file)))
    ]
    rows = []
    for size in gigabytes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            count = 0
            (folder / "child.py").write_text(GROWING)
            with (folder / "corpus.jsonl").open("wb") as out:
                for line in shuffled(lines):
                    if out.tell() >= size * 1e9:
                        break
                    out.write(line)
                    count += 1
            for what in ("tokenise", "train"):
                command = [
                    sys.executable,
                    folder / "child.py",
                    what,
                    folder / "corpus.jsonl",
                    tokenizer,
                    folder,
                ]
                done = subprocess.run(
                    command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
                )
                seconds, anonymous, peak = json.loads(done.stdout.splitlines()[-1])
                row = {
                    "gigabytes": size,
                    "documents": count,
                    "seconds": seconds,
                    "anonymous_mebibytes": anonymous,
                }
                found.add(f"{what} {size:g} GB", row | {"peak_mebibytes": peak})
                cells = (f"{count:,}", f"{seconds:.0f}", f"{anonymous:.0f}", f"{peak:.0f}")
                rows.append((f"{what} {size:g} GB", *cells))
    head = ("", "documents", "seconds", "anonymous MiB", "peak MiB")
    print(align_columns(head, rows, right=range(1, 5)))


def formats(file: Path, tokenizer: str, megabytes: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the tokenising of corpora of each format and size, made of the text of a file.

    Returns:
      The summary of each corpus.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "child.py").write_text(CHILD)
        pieces = (piece for file in itertools.cycle([file]) for piece in text_pieces(file))
        whole = "".join(itertools.islice(pieces, int(megabytes * 1e6) // PIECE))
        sides: dict[str, Callable[[], Any]] = {}
        # For each side, its size in megabytes and the name of the smallest corpus of its format.
        about: dict[str, tuple[float, str]] = {}
        for i, (format, write) in enumerate(FORMATS.items()):
            for size in SIZES:
                part = whole[: len(whole) * size // SIZES[-1]]
                write(part, folder / f"{i}-{size}")
                (corpus,) = folder.glob(f"{i}-{size}*")
                sides[f"{format} {size}x"] = lambda corpus=corpus: measure(
                    folder / "child.py", corpus, tokenizer
                )
                about[f"{format} {size}x"] = len(part.encode()) / 1e6, f"{format} {SIZES[0]}x"
        return _summaries(alternate(sides, rounds), about)


def _summaries(
    measured: dict[str, list[Any]], about: dict[str, tuple[float, str]]
) -> dict[str, dict[str, Any]]:
    found = {}
    for side, values in measured.items():
        seconds, peak, worker = (list(column) for column in zip(*values, strict=True))
        megabytes, first = about[side]
        found[side] = {
            "megabytes": megabytes,
            "megabytes_a_second": summary([megabytes / s for s in seconds]),
            "peak_mebibytes": summary(peak),
            "worker_mebibytes": summary(worker),
            "peak_over_1x": ratios(peak, [v[1] for v in measured[first]]),
        }
    return found


def main() -> None:
    p = parser(__doc__, rounds=3)
    p.add_argument("file", type=Path, help="text: .txt, .gz, .xz or .zst")
    names = "a tokenizer.json, a folder of vocab.json and merges.txt, or bytes"
    largest = "size of the largest corpus of each format"
    p.add_argument("tokenizer", help=names)
    p.add_argument("--megabytes", type=float, default=160, help=largest)
    p.add_argument("--gigabytes", help="sizes of corpora to tokenise and to train on")
    a = p.parse_args()
    if a.gigabytes:
        refuse_unused(p, a, "with --gigabytes", "megabytes", "rounds")
    tokenizer = a.tokenizer if a.tokenizer == "bytes" else str(Path(a.tokenizer).resolve())
    if a.gigabytes:
        found = Rows(a.json, environment("jax", "grain", "tokenizers", "numpy"))
        return grow(a.file, tokenizer, [float(size) for size in a.gigabytes.split(",")], found)

    sides = formats(a.file, tokenizer, a.megabytes, a.rounds)
    result: dict[str, Any] = environment("tokenizers", "numpy", "pyarrow")
    result |= {"tokenizer": Path(a.tokenizer).name, "rounds": a.rounds, "sides": sides}
    print(f"{result['machine']}, {result['cores']} cores, load {result['load']}; {a.rounds} rounds")
    rows = []
    for side, row in sides.items():
        megabytes, *others = row.values()
        rows.append((side, f"{megabytes:.0f}", *map(shown, others)))
    head = ("", "MB", "MB/s", "peak MiB", "worker peak MiB", "peak over 1x")
    print(align_columns(head, rows, right=range(1, 6)))
    save(a.json, result)


if __name__ == "__main__":
    exits_cleanly(main)
