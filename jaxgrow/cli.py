"""The command ``jaxgrow``: checkpoints on disk, grown, coalesced, de-coalesced, interpolated, compared and converted."""

import argparse
import inspect
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrow import operators
from jaxgrow.interop import CheckpointError, Grown, Interpolated, Source, open_checkpoint, write
from jaxgrow.interop.files import RECORD
from jaxgrow.interop.source import Checkpoint
from jaxgrow.signals import interrupting

try:
    import resource
except ImportError:  # as on Windows
    resource = None

METHODS = operators.DEPTH | operators.WIDTH
ROWS, LENGTH = 8, 128  # what `report` runs: samples, and tokens of each, at most
LARGEST = (
    1 << 20
)  # units of an axis that is grown: more than any model has, and what memory a growth of it takes is no matter


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    a = _parser().parse_args(argv)
    try:
        with interrupting():
            if a.run is not _report:
                jax.config.update(
                    "jax_platforms", "cpu"
                )  # what works on files need not wait for an accelerator, nor hold it
            a.run(a)
    except (CheckpointError, OSError, MemoryError) as error:
        said = "there is not enough memory" if isinstance(error, MemoryError) else str(error)
        return _ended(f"error: {said}", error, 2)
    except KeyboardInterrupt as error:
        return _ended("interrupted", error, 128 + (error.args[0] if error.args else signal.SIGINT))
    return 0


def _ended(said: str, error: BaseException, status: int) -> int:
    """Says it, and what became of DST: no line without end, and nothing that a terminal would obey."""
    for line in "; ".join([said, *getattr(error, "__notes__", [])]).split("\n"):
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:1000])
        print(text + ("..." if len(line) > 1000 else ""), file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxgrow", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, help: str, *folders: str, writes: bool = True) -> argparse.ArgumentParser:
        p = commands.add_parser(run.__name__[1:], help=help, description=help)
        for folder in folders:
            p.add_argument(folder.lower(), metavar=folder, type=Path)
        if writes:
            p.add_argument("dst", metavar="DST", type=Path, help="a folder to be made")
            p.add_argument("--to", choices=["hf", "orbax"], help="the kind of DST (default: that of the source)")
            p.add_argument("--overwrite", action="store_true", help="replace a checkpoint in DST, at the end")
        p.set_defaults(run=run)
        return p

    command(
        _inspect, "show a model: its config, and every leaf with shape, axes, dtype and place", "PATH", writes=False
    )
    for run, help in (
        (_coalesce, "make a model smaller: groups of heads and layers become one"),
        (_decoalesce, "make a coalesced model large again; groups are those of the large model"),
    ):
        p = command(run, help, "SRC")
        form = "'far', 'adjacent', or groups of old units: 0+2,1+3"
        p.add_argument("--heads", type=_groups, help=f"{form}; the residual stream and MLP units follow")
        p.add_argument("--layers", type=_groups, help=form)
        p.add_argument(
            "--tied", choices=["norm", "paper"], default="norm", help="what takes the factor of a tied head (README)"
        )
    p = command(_interpolate, "(1 - alpha) BEFORE + alpha UP", "BEFORE", "UP")
    p.add_argument("--alpha", type=float, required=True, help="the weight of UP")
    p = command(_grow, "make a model larger by a published method", "SRC")
    p.add_argument("--method", choices=sorted(METHODS), required=True)
    for axis in ("layers", "embed", "heads", "kv-heads", "mlp"):
        p.add_argument(f"--{axis}", type=int, metavar="N", help="the new size")
    p.add_argument("--seed", type=int, metavar="N", help="of methods that draw units")
    p = command(_report, "what B keeps of A's function, and by how much not", "A", "B", writes=False)
    p.add_argument("--tokens", type=Path, metavar="FILE", help="token ids, as .npy or text (default: random ones)")
    command(_convert, "write a model as another kind of folder", "SRC")
    return parser


def _groups(text: str) -> operators.Groups:
    if text in ("far", "adjacent"):
        return text  # type: ignore[return-value]
    try:
        return tuple(tuple(int(unit) for unit in group.split("+")) for group in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 'far', 'adjacent' or groups like 0+2,1+3: a comma between new units, a plus between old ones"
        ) from None


# --- what the commands do ---


def _inspect(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.path)
    architecture = source.foreign["architectures"][0] if source.foreign else type(source.config).__name__
    print(f"{architecture} in {a.path}\n{source.config}")
    print(" ".join(f"{axis}={size}" for axis, size in sorted(source.sizes().items())))
    rows = [(p, str(x.shape), " ".join(x.names), str(x.dtype), source.place(p)) for p, x in source.leaves.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(_size(source))


def _coalesce(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    growth = _built(operators.coalesce, source.sizes(), **_grouped(a))
    _write(a, _grown(source, growth, a.tied), _grouped(a, tied=a.tied), source)


def _decoalesce(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    large = _large(source.sizes(), **_grouped(a))
    growth = _built(operators.decoalesce, large, **_grouped(a))
    _write(a, _grown(source, growth, a.tied), _grouped(a, tied=a.tied), source)


def _interpolate(a: argparse.Namespace) -> None:
    if not math.isfinite(a.alpha):
        raise CheckpointError(f"--alpha {a.alpha} is no weight; give a number, 0 for BEFORE to 1 for UP")
    before, up = open_checkpoint(a.before), open_checkpoint(a.up)
    _write(a, Interpolated(before, up, a.alpha), {"alpha": a.alpha}, before, up)


def _grow(a: argparse.Namespace) -> None:
    source, method = open_checkpoint(a.src), METHODS[a.method]
    target = {n: getattr(a, n) for n in ("layers", "embed", "heads", "kv_heads", "mlp") if getattr(a, n) is not None}
    if not target:
        raise CheckpointError("nothing to grow: give the new size of an axis, as --layers 24")
    for name, size in target.items():
        if size > LARGEST:
            raise CheckpointError(f"--{name.replace('_', '-')} {size}: no model has more than {LARGEST:,}")
    options: dict[str, Any] = {}
    takes = inspect.signature(method).parameters
    if "norm" in takes:
        options["norm"] = source.config.normalisation
    if "seed" in takes:
        options["seed"] = a.seed or 0
    elif a.seed is not None:
        raise CheckpointError(f"--seed: {a.method} draws nothing; leave it out")
    growth = _built(method, source.sizes(), target, **options)
    _write(a, Grown(source, growth), {"method": a.method, "target": target, **options}, source)


def _convert(a: argparse.Namespace) -> None:
    if a.to is None:
        raise CheckpointError("convert needs --to: hf or orbax")
    source = open_checkpoint(a.src)
    _write(a, source, {}, source)


def _report(a: argparse.Namespace) -> None:
    from jaxgrow.report import preservation

    first, second = open_checkpoint(a.a), open_checkpoint(a.b)
    inputs, what = _inputs(first, second, a.tokens)

    def run(source: Source) -> Any:
        apply = jax.jit(lambda params, x: source.config.module.apply({"params": params}, x, rms=True))
        params = source.params()
        return lambda x: apply(params, x)

    print(f"a: {a.a}, b: {a.b}, on {what}")
    print(preservation(run(first), run(second), inputs))


# --- what they share ---


def _grouped(a: argparse.Namespace, **more: Any) -> dict[str, Any]:
    groups = {name: getattr(a, name) for name in ("heads", "layers") if getattr(a, name) is not None}
    if not groups:
        raise CheckpointError("no groups: give --heads, --layers or both")
    return groups | more


def _large(small: dict[str, int], **groups: operators.Groups) -> dict[str, int]:
    """The sizes of the model whose groups are the units of the small one."""
    large = dict(small)
    for name, units in groups.items():
        if not isinstance(units, str) and len(units) != small[name]:
            raise CheckpointError(
                f"--{name}: {len(units)} groups, but the source has {small[name]} {name}: one group for each of them"
            )
        large[name] = 2 * small[name] if isinstance(units, str) else sum(map(len, units))
    for name in ("embed", "mlp", "kv_heads") if "heads" in groups else ():
        if name in small:
            large[name], rest = divmod(small[name] * large["heads"], small["heads"])
            if rest:
                raise CheckpointError(
                    f"axis {name!r}: {small[name]} units are no {small['heads']} equal blocks, one a head"
                )
    return large


def _built(operator: Any, *arguments: Any, **options: Any) -> Any:
    """The growth of an operator, which refuses what it cannot do."""
    try:
        return operator(*arguments, **options)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _grown(source: Checkpoint, growth: Any, tied: str) -> Grown:
    return Grown(source, growth, source.config.paper_axes() if tied == "paper" else None)


def _write(a: argparse.Namespace, source: Source, arguments: dict[str, Any], *roots: Checkpoint) -> None:
    began = time.perf_counter()
    record = {"operator": a.run.__name__[1:], "arguments": arguments}
    write(source, a.dst, record, roots, to=a.to, overwrite=a.overwrite, progress=True)
    seconds = time.perf_counter() - began
    print(f"{a.dst}: {_size(source)}, in {seconds:.1f} s{_peak()}; how it was made: {RECORD}")


def _peak() -> str:
    if resource is None:
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"; peak memory {peak / 1e6:,.0f} MB"


def _size(source: Source) -> str:
    count = sum(math.prod(leaf.shape) for leaf in source.leaves.values())
    return f"{count:,} parameters, {sum(leaf.size for leaf in source.leaves.values()) / 1e6:,.1f} MB"


def _inputs(first: Source, second: Source, file: Path | None) -> tuple[Any, str]:
    """Inputs that both models take, and what they are."""
    rng = np.random.default_rng(0)
    example, other = (jax.tree.map(lambda x: (x.dtype, x.shape[1:]), m.config.example) for m in (first, second))
    if example != other:
        raise CheckpointError("the two models take different inputs, so there is nothing to compare")
    vocab, other = first.sizes().get("vocab"), second.sizes().get("vocab")
    if vocab != other:
        raise CheckpointError(f"the vocabularies differ, {vocab} and {other} tokens: the logits have no common meaning")
    if vocab is None:
        if file is not None:
            raise CheckpointError("--tokens: these models take images; leave it out")
        return rng.standard_normal((ROWS, *example[1]), np.float32), f"{ROWS} random images"

    def inputs(tokens: np.ndarray) -> Any:
        return {"tokens": tokens} if isinstance(example, dict) else tokens

    length = min(first.config.length, second.config.length, LENGTH)
    if file is None:
        return inputs(rng.integers(0, vocab, (ROWS, length))), f"{ROWS} x {length} random tokens"
    tokens = _tokens(file, vocab, ROWS * length)
    length = min(length, len(tokens))
    rows = min(ROWS, len(tokens) // length)
    return inputs(tokens[: rows * length].reshape(rows, length)), f"the first {rows} x {length} tokens of {file}"


def _tokens(file: Path, vocab: int, most: int) -> np.ndarray:
    """The first ids of a file; no more of it is read than they may take."""
    try:
        if file.suffix == ".npy":
            ids = np.array(np.lib.format.open_memmap(file, mode="r").reshape(-1)[:most])
        else:
            with file.open() as text:
                ids = np.array(text.read(LARGEST).split()[:most], np.int64)
    except OSError:
        raise
    except Exception as error:  # NumPy raises whatever it comes across
        raise CheckpointError(f"{file} holds no token ids: {error}") from error
    if ids.size == 0 or ids.dtype.kind not in "iu":
        raise CheckpointError(f"{file} holds no token ids, but {ids.size} numbers of dtype {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(f"{file} has ids from {ids.min()} to {ids.max()}; the models know 0 .. {vocab - 1}")
    return ids.astype(np.int32)


if __name__ == "__main__":
    sys.exit(main())
