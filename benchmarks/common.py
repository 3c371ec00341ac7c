"""Tools that the benchmarks share: alternated timing, medians with quartiles, and result files."""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from train.data.workers import core_count, end_with_parent


def parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A command line with ``--json``, and with ``--rounds`` if a default is given."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        about = "measurements of each side, at least 2"
        found.add_argument("--rounds", type=_at_least_two, default=rounds, help=about)
    found.add_argument("--json", type=new_file, help="where to write the result")
    return found


def _at_least_two(text: str) -> int:
    """A number of rounds that has quartiles."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} has no quartiles; give 2 or more")
    return int(text)


def new_file(text: str) -> str:
    """The path of a result. Its folder must exist before anything is measured."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
    return text


def refuse_unused(
    parser: argparse.ArgumentParser, a: argparse.Namespace, mode: str, *unused: str
) -> None:
    """End with a usage error if an option is given that has no effect in the chosen mode."""
    for name in unused:
        if getattr(a, name) != parser.get_default(name):
            parser.error(f"--{name} has no effect {mode}")


def add_sizes(
    parser: argparse.ArgumentParser, *, layers: int, embed: int, vocab: int, context: int
) -> None:
    """Add the sizes of a GPT-2 to a command line, with these defaults."""
    width = "width, a multiple of the head size 64"
    parser.add_argument("--layers", type=int, default=layers, help="number of layers")
    parser.add_argument("--embed", type=int, default=embed, help=width)
    parser.add_argument("--vocab", type=int, default=vocab, help="size of the vocabulary")
    parser.add_argument("--context", type=int, default=context, help="tokens of each sequence")


def sizes(a: argparse.Namespace) -> dict[str, Any]:
    """The sizes of a GPT-2 of the command line (`add_sizes`), as arguments of `GPT2Config`."""
    size = {"vocab": a.vocab, "context": a.context, "layers": a.layers, "embed": a.embed}
    return size | {"heads": a.embed // 64, "head_dim": 64, "mlp": 4 * a.embed}


def add_cores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores",
        type=int,
        default=core_count(),
        help="number of cores; with 1, processor time is reliable",
    )


def workers(starts: Mapping[str, tuple[Callable, tuple]]) -> dict[str, ProcessPoolExecutor]:
    """Start one process for each side. It first calls the function of its side with its arguments."""
    context = multiprocessing.get_context("spawn")
    return {name: ProcessPoolExecutor(1, context, *start) for name, start in starts.items()}


def over_torch(reports: Mapping[str, Sequence[Any]], tokens: int) -> dict[str, dict[str, Any]]:
    """Compare all sides with the side ``torch``.

    Args:
      reports: for each side and round, a tuple that begins with wall-clock seconds and processor
        seconds.
      tokens: number of tokens of a round.

    Returns:
      The throughput of each side, and its ratios to PyTorch.
    """
    wall = {name: [report[0] for report in rounds] for name, rounds in reports.items()}
    cpu = {name: [report[1] for report in rounds] for name, rounds in reports.items()}
    return {
        name: {
            "tokens_per_second": summary([tokens / s for s in wall[name]]),
            "speed_over_torch": ratios(wall["torch"], wall[name]),
            "speed_over_torch_in_processor_time": ratios(cpu["torch"], cpu[name]),
        }
        for name in reports
    }


def speeds(side: Mapping[str, Any], digits: int) -> tuple[str, str, str]:
    """The cells of a table for a side of `over_torch`."""
    return (
        shown(side["tokens_per_second"], digits),
        shown(side["speed_over_torch"]),
        shown(side["speed_over_torch_in_processor_time"]),
    )


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Run every side in every round, and reverse the order after each round.

    Noise of the machine then affects all sides of a round equally. The ratios within a round are
    reliable even if the absolute times are not.

    Args:
      sides: functions by name. Each returns its measurement.
      rounds: number of rounds.

    Returns:
      The measurements of each side, one per round.
    """
    out: dict[str, list[Any]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            out[name].append(sides[name]())
    return out


def between(
    reference: Callable[[], float], sides: Mapping[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time many sides, each between two runs of a reference.

    A round of many sides takes longer than the machine is steady, so each side is compared with the
    two reference runs next to it. If the reference is also one of the sides, its ratio shows the
    noise, and how much a program gains from running twice in a row.

    Args:
      reference: runs the reference and returns its time in seconds.
      sides: functions by name. Each returns its time in seconds.
      rounds: number of rounds.

    Returns:
      The times of each side, and their ratios to the mean of the two neighbouring reference times.
    """
    times, over = ({name: [] for name in sides} for _ in range(2))
    before = reference()
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            time = sides[name]()
            after = reference()
            times[name].append(time)
            over[name].append(2 * time / (before + after))
            before = after
    return times, over


def summary(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "min": min(values), "max": max(values)}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The summary of ``over / under`` within each round."""
    return summary([a / b for a, b in zip(over, under, strict=True)])


def shown(s: Mapping[str, float], digits: int = 2) -> str:
    return f"{s['median']:.{digits}f} [{s['q1']:.{digits}f}, {s['q3']:.{digits}f}]"


def environment(*packages: str) -> dict[str, Any]:
    """The date, machine, load and package versions of a measurement.

    ``load`` shows how busy the machine was. ``malloc`` holds the settings of glibc's allocator, and
    ``XLA_FLAGS`` the flags of XLA.

    Args:
      packages: names of the installed packages whose versions are recorded.
    """
    info = Path("/proc/cpuinfo")
    models = [
        line.split(":")[1].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {models[0] if models else platform.processor()}",
        "cores": core_count(),
        "load": round(os.getloadavg()[0], 1),
        "malloc": os.environ.get("GLIBC_TUNABLES"),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
    }


def alone(function: Callable, *arguments: Any, seconds: float | None = None) -> Any:
    """Call a function in a fresh process, which returns all its memory when it ends.

    Args:
      function: an importable function.
      arguments: its arguments.
      seconds: time limit; None: no limit.

    Returns:
      The value of the function.

    Raises:
      TimeoutError: the function did not finish in time.
      RuntimeError: the function raised an exception, or its process ended without an answer.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_answer, args=(there, function, *arguments))
    worker.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise TimeoutError(f"the function was not done in {seconds:.0f} s")
        value, error = here.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(
            f"the function has no result: its process died, with code {worker.exitcode}"
        ) from None
    finally:
        worker.kill()
        worker.join()
    if error:
        raise RuntimeError(error)
    return value


def _answer(there: Any, function: Callable, *arguments: Any) -> None:
    end_with_parent()
    try:
        answer = function(*arguments), ""
    except Exception as error:  # the parent process reports any error, in one line
        traceback.print_exc()
        answer = None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    there.send(answer)


class Rows:
    """Results by name, written to a JSON Lines file as soon as they are measured.

    Results that are already in the file are not measured again, except failures. The first line of
    each process holds the date and machine (`environment`).

    Args:
      path: the file; None: results are not written.
      about: date and machine of this process.
    """

    def __init__(self, path: str | None, about: Mapping[str, Any]):
        self._path = Path(path) if path else None
        lines = self._path.read_text().splitlines() if self._path and self._path.exists() else []
        rows = [row for row in map(json.loads, lines) if "name" in row]
        self._rows = {row["name"]: row for row in rows if "failed" not in row}
        self._about: Mapping[str, Any] | None = about

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._rows[name]

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        self._rows[name] = {"name": name, **row}
        new = [self._about, self._rows[name]] if self._about else [self._rows[name]]
        self._about = None
        if self._path:
            with self._path.open("a") as file:
                file.writelines(json.dumps(_rounded(line)) + "\n" for line in new)


def save(path: str | None, result: Mapping[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(_rounded(result), indent=1) + "\n")


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, Mapping):
        return {k: _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, (list, tuple)) else x
