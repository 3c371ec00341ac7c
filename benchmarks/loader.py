"""Is the data loader fast enough? Time per sample, waiting time, and augmentation in processes.

    python benchmarks/loader.py [--rounds 5] [--json FILE]

Text: windows of 1024 tokens in batches of 64 to 1024, read as in training. Every round measures all
batch sizes. The ratio compares the time per sample with the time per sample in batches of 64 of the
same round. It is 1 if the cost of a batch is proportional to its size. In a second measurement, a
consumer takes 20 ms per step; the table shows the fraction of its time that it waits for a batch.

Images: DeiT's augmentation at 224 pixels, by a thread, by one process and by two processes. The
ratio is the throughput over the throughput of the thread.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from anywhere, installed or not

from benchmarks.common import alternate, environment, parser, ratios, save, shown, summary
from jaxgrow.tables import align_columns
from train.data.batches import Stream, training_batches
from train.data.windows import Windows
from train.extras.images.augment import DEIT
from train.extras.images.images import Images, read_images

LENGTH = 1024
SIZES = (64, 256, 512, 1024)
STEP = 0.02  # seconds
AHEAD = 8  # batches that may be prefetched before timing begins


def seconds(stream: Stream, samples: int, batch: int) -> float:
    """The time of one sample in seconds, after the prefetched batches are used up."""
    for _ in range(AHEAD):
        next(stream)
    count = max(1, samples // batch)
    start = time.perf_counter()
    for _ in range(count):
        next(stream)
    return (time.perf_counter() - start) / (count * batch)


def waiting(stream: Stream) -> float:
    """The time that a consumer waits for a batch, as a fraction of a step of `STEP` seconds."""
    next(stream)
    time.sleep(AHEAD * STEP)
    waited = 0.0
    steps = 50
    for _ in range(steps):
        time.sleep(STEP)
        start = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - start
    return waited / steps / STEP


def read_text(rounds: int) -> dict[int, dict[str, Any]]:
    """Measure the batches of text, by their size."""
    tokens = np.random.default_rng(0).integers(0, 50257, 20_000_000).astype(np.uint16)
    text = {n: training_batches(Windows(tokens, LENGTH), n, seed=0) for n in SIZES}
    sides: dict[Any, Any] = {n: (lambda n=n: seconds(text[n], 4096, n)) for n in SIZES}
    alternate(sides, 1)
    times: dict[Any, Any] = alternate(sides, rounds)
    waits: dict[Any, Any] = {n: (lambda n=n: waiting(text[n])) for n in SIZES}
    wait: dict[Any, Any] = alternate(waits, rounds)
    for stream in text.values():
        stream.close()
    return {
        n: {
            "milliseconds_a_sample": summary([1e3 * t for t in times[n]]),
            "ratio": ratios(times[n], times[SIZES[0]]),
            "waited": summary(wait[n]),
        }
        for n in SIZES
    }


def augment(rounds: int) -> dict[int, dict[str, Any]]:
    """Measure DeiT's augmentation, by the number of processes; 0: a thread."""
    streams = {
        workers: training_batches(
            read_images(Images(size=224, augment=DEIT, workers=workers)).train, 16, seed=0
        )
        for workers in (0, 1, 2)
    }
    times: dict[int, list[float]] = {workers: [] for workers in streams}
    for _ in range(rounds):
        for workers, stream in streams.items():
            times[workers].append(seconds(stream, 128, 16))
            # Otherwise its processes would prefetch during the next measurement.
            stream.close()
    return {
        workers: {
            "milliseconds_a_sample": summary([1e3 * t for t in times[workers]]),
            "rate": ratios(times[0], times[workers]),
        }
        for workers in streams
    }


def main() -> None:
    a = parser(__doc__, rounds=5).parse_args()
    result: dict[str, Any] = environment("grain", "numpy", "pillow")
    result |= {"rounds": a.rounds, "length": LENGTH, "step_milliseconds": STEP * 1e3}
    print(f"{result['machine']}, {result['cores']} cores, load {result['load']}; {a.rounds} rounds")

    result["text"] = read_text(a.rounds)
    rows = []
    for n, row in result["text"].items():
        cells = (shown(row["milliseconds_a_sample"], 4), shown(row["ratio"]), shown(row["waited"]))
        rows.append((str(n), *cells))
    head = ("batch", "ms per sample", f"over batch of {SIZES[0]}", "fraction of step waited")
    print(align_columns(head, rows, right=range(4)))

    result["deit"] = augment(a.rounds)
    names = ("a thread", "a process", "2 processes")
    rows = [(names[workers], *map(shown, row.values())) for workers, row in result["deit"].items()]
    head = ("DeiT", "ms per sample", "throughput over that of a thread")
    print(f"\n{align_columns(head, rows, right=(1, 2))}")
    save(a.json, result)


if __name__ == "__main__":
    main()
