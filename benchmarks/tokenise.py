"""Tokenising a file with a byte-level BPE: rate and peak memory, as a whole and by how much memory grows with the file.

    python benchmarks/tokenise.py FILE TOKENIZER [--megabytes 40] [--rounds 3] [--json FILE]

The first ``--megabytes`` of FILE (.txt, .xz or .gz), a quarter of them, and as many cut into small documents, each tokenised
by a process of its own into an empty cache, taking turns. Memory: the peak of that process, and of its largest worker.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alternate, environment, ratios, save, shown, summary
from train.data.corpus import read

ROOT = Path(__file__).parents[1]
CHILD = """
import json, resource, sys, tempfile, time
if __name__ == "__main__":
    from train.data.text import Data, tokens
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        tokens(Data("text", sys.argv[1], tokenizer=sys.argv[2], cache=cache))
        seconds = time.perf_counter() - start
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps([seconds, *peaks]))
"""


def measure(script: Path, corpus: Path, tokenizer: str) -> tuple[float, float, float]:
    """Seconds, and MiB of the process and of its largest worker."""
    command = [sys.executable, str(script), str(corpus), tokenizer]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True)
    return tuple(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("tokenizer", help="a tokenizer.json, or a folder of vocab.json and merges.txt")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write the result")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "child.py").write_text(CHILD)
        text = "".join(islice(read(a.file), int(a.megabytes * 1e6) // (1 << 16))).encode()
        whole = text[: int(a.megabytes * 1e6)]
        corpora = {
            "a file": folder / "whole.txt",
            "a quarter": folder / "quarter.txt",
            "small documents": folder / "small",
        }
        corpora["a file"].write_bytes(whole)
        corpora["a quarter"].write_bytes(whole[: len(whole) // 4])
        corpora["small documents"].mkdir()
        for i in range(0, len(whole), 1500):
            (corpora["small documents"] / f"{i:012}.txt").write_bytes(whole[i : i + 1500])
        sides = {
            n: (lambda c=corpus: measure(folder / "child.py", c, str(Path(a.tokenizer).resolve())))
            for n, corpus in corpora.items()
        }
        measured = alternate(sides, a.rounds)

    result: dict[str, Any] = environment("tokenizers", "numpy")
    result |= {"megabytes": len(whole) / 1e6, "rounds": a.rounds, "sides": {}}
    print(
        f"{result['machine']}, {result['cores']} cores, load {result['load']}; {len(whole) / 1e6:.0f} MB, {a.rounds} rounds"
    )
    print(f"{'':>16} {'MB/s':>20} {'peak MiB':>20} {'of a worker':>20} {'peak, of a quarters':>22}")
    for side, values in measured.items():
        size = len(whole) / (4 if side == "a quarter" else 1) / 1e6
        seconds, peak, worker = (list(column) for column in zip(*values, strict=True))
        row = {
            "megabytes_a_second": summary([size / s for s in seconds]),
            "peak_mebibytes": summary(peak),
            "worker_mebibytes": summary(worker),
            "over_quarter": ratios(peak, [v[1] for v in measured["a quarter"]]),
        }
        result["sides"][side] = row
        print(f"{side:>16} " + " ".join(f"{shown(row[key]):>20}" for key in row))
    save(a.json, result)


if __name__ == "__main__":
    main()
