"""The command ``jaxgrow``: grow, coalesce, prune, compare and convert checkpoints on disk."""

import argparse
import json
import math
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jaxgrow import operators, plot
from jaxgrow.axes.names import LAYERS, beside, is_layers, kind
from jaxgrow.checkpoints import (
    FAMILIES,
    Cast,
    CheckpointError,
    Grown,
    Interpolated,
    Noisy,
    Source,
    Upcycled,
    open_checkpoint,
    write,
)
from jaxgrow.checkpoints.hf import peft
from jaxgrow.checkpoints.hf.upcycled import Single
from jaxgrow.checkpoints.io.files import RECORD
from jaxgrow.checkpoints.io.folders import appearing
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.checkpoints.io.safetensors import SHARD
from jaxgrow.cli import model_inputs, suggest
from jaxgrow.cli.arguments import AXES, parser
from jaxgrow.cli.completion import script
from jaxgrow.cli.keeps import METHODS as METHODS_ABOUT
from jaxgrow.cli.keeps import keeps, rounding
from jaxgrow.growth.maps import AxisMap, Growth, Rules
from jaxgrow.growth.report import preservation, rms
from jaxgrow.integrations import command, torch_optimizer
from jaxgrow.models import Config, importance
from jaxgrow.operators.targets import depth, width
from jaxgrow.signals import interrupting

try:
    import resource
except ImportError:  # as on Windows
    resource: Any = None

METHODS = operators.DEPTH | operators.WIDTH
# The largest size of a grown axis: larger than in any model, and small enough for a growth of it to
# fit into memory.
LARGEST = 1 << 20


class UsageError(CheckpointError):
    """Arguments that are invalid independently of the checkpoint files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      The exit status: 0 on success; 2 if the arguments are invalid independently of the checkpoint
      files; 1 for any other failure; 128 plus the number of the signal after an interruption.
    """
    a = parser(COMMANDS).parse_args(argv)
    try:
        if (getattr(a, "seed", None) or 0) < 0:
            raise UsageError(f"--seed {a.seed}: a seed must be a non-negative integer")
        with interrupting():
            if a.run not in (_report, _prune):
                # The other commands only transform files: they neither wait for an accelerator nor
                # occupy it.
                jax.config.update("jax_platforms", "cpu")
            a.run(a)
    except (CheckpointError, OSError, MemoryError) as error:
        said = "out of memory" if isinstance(error, MemoryError) else str(error)
        return _ended(f"error: {said}", error, 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as error:
        return _ended("interrupted", error, 128 + (error.args[0] if error.args else signal.SIGINT))
    return 0


def _ended(said: str, error: BaseException, status: int) -> int:
    """Print a message and the notes about DST to stderr, and return the exit status.

    Long lines are truncated and unprintable characters are escaped, because file contents may occur
    in the message.
    """
    for line in "; ".join([said, *getattr(error, "__notes__", [])]).split("\n"):
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:1000])
        print(text + ("..." if len(line) > 1000 else ""), file=sys.stderr)
    return status


# --- the commands ---


def _inspect(a: argparse.Namespace) -> None:
    if command.is_run(a.path):
        about = command.inspected(command.opened(a.path, a.format, a.names))
        return _say(about) if a.json else print(command.described(a.path, about))
    source = open_checkpoint(a.path)
    architecture = (
        source.foreign["architectures"][0] if source.foreign else type(source.config).__name__
    )
    leaves = [
        {
            "path": p,
            "shape": x.shape,
            "axes": x.names,
            "dtype": x.dtype.name,
            "place": source.place(p),
        }
        for p, x in source.leaves.items()
    ]
    if a.json:
        about = {
            "path": str(a.path),
            "architecture": architecture,
            "config": source.config.as_json(),
        }
        return _say({**about, **_size(source, source.bytes), "leaves": leaves})
    print(f"{architecture} in {a.path}\n{source.config}")
    print(_spelt(source.sizes()))
    rows = [[" ".join(x) if k == "axes" else str(x) for k, x in leaf.items()] for leaf in leaves]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
    print(_amount(source, source.bytes))


def _coalesce(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    groups = _grouped(a)
    with _as_typed():
        growth = operators.coalesce(source.sizes(), kinds=source.config.layer_kinds, **groups)
    if groups.get("layers") == "alike":
        # Record explicit groups: decoalesce cannot derive them from the small model.
        groups["layers"] = operators.alike(source.config.layer_kinds)
    _transform(a, source, growth, groups | {"tied": a.tied}, groups=_named_groups(groups, growth))


def _named_groups(
    groups: Mapping[str, operators.Groups], growth: Mapping[str, AxisMap]
) -> list[str]:
    """A note for each axis of heads that a named grouping cannot split into pairs (odd sizes)."""
    notes = []
    for axis, m in growth.items():
        name, size = groups.get("heads", groups.get("kv_heads")), m.old // m.new
        if kind(axis) in ("heads", "kv_heads") and name in ("far", "adjacent") and size > 2:
            notes.append(
                f"{m.old} {axis} cannot be grouped in pairs, so {name!r} merged groups of {size}, "
                f"like {name}:{size}"
            )
    return notes


def _decoalesce(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    groups = _grouped(a)
    if groups.get("layers") == "alike":
        raise UsageError(
            "--layers alike: the kinds of the layers of the large model are not known. Give the "
            "groups that "
            f"{RECORD} of the coalesced model records, such as --layers 0+2,1+3"
        )
    with _as_typed():
        growth = operators.decoalesce(_large(source.sizes(), groups), kinds=None, **groups)
    _transform(a, source, growth, groups | {"tied": a.tied})


def _interpolate(a: argparse.Namespace) -> None:
    if not math.isfinite(a.alpha):
        raise UsageError(
            f"--alpha {a.alpha} is not a finite number: give a weight from 0 (BEFORE) to 1 (UP)"
        )
    before, up = open_checkpoint(a.before), open_checkpoint(a.up)
    mixed = Interpolated(_wide(a, before), _wide(a, up), a.alpha)
    _write(a, _typed(a, mixed), {"alpha": a.alpha}, before, up)


def _grow(a: argparse.Namespace) -> None:
    if a.method in operators.EXPERTS:
        return _upcycle(a)
    for option in ("experts", "active"):
        if getattr(a, option) is not None:
            raise UsageError(
                f"--{option} applies to the methods {' and '.join(operators.EXPERTS)} only; "
                f"{a.method} does not "
                "create experts"
            )
    if a.format or a.names or command.is_run(a.src):
        return _grow_run(a)
    source = open_checkpoint(a.src)
    growth, arguments = _growth(a, source)
    if a.noise is not None and not math.isfinite(a.noise):
        raise UsageError(
            f"--noise {a.noise} is not a number of decibels: give a finite number, such as 10"
        )
    noise = {} if a.noise is None else {"noise": a.noise, "seed": a.seed or 0}
    _transform(a, source, growth, arguments | noise)


def _grow_run(a: argparse.Namespace) -> None:
    """Grow a checkpoint of another trainer."""
    run, target, method = (
        command.opened(a.src, a.format, a.names),
        _possible(_target(a)),
        METHODS[a.method],
    )
    policy = a.optimizer or command.policy_of(a.method)
    if policy not in command.POLICIES:
        raise UsageError(
            f"--optimizer {policy} is not supported for Orbax checkpoints: choose from "
            f"{', '.join(command.POLICIES)}"
        )
    with _as_typed():
        growth = method(
            run.sizes(), target, **suggest.taken(method, run.format.traits, a.seed or 0)
        )
    may_become(a.dst, [a.src], a.overwrite)
    arguments = {
        "format": run.format.name,
        "method": a.method,
        "target": target,
        "optimizer": policy,
    }
    about = command.grown(
        run, growth, policy, a.dst, arguments, overwrite=a.overwrite, dry_run=a.dry_run
    )
    _say(about) if a.json else print(command.summary(a.dst, about, METHODS_ABOUT[a.method][1]))


def _show(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    growth, arguments = _growth(a, source)
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in source.leaves.items()
    }
    try:
        with _as_typed():
            figure = plot.growth(
                growth, shapes, {path: leaf.names for path, leaf in source.leaves.items()}
            )
            figure.savefig(a.out, format=a.out.suffix[1:] or "png")
    except ImportError as error:
        raise CheckpointError(str(error)) from error
    sizes, kept = source.config.resized(growth).sizes(), keeps(growth, source.config, a.method)
    if a.json:
        return _say(
            {
                "src": str(a.src),
                "out": str(a.out),
                "arguments": arguments,
                "sizes": sizes,
                "keeps": kept,
            }
        )
    print(f"{a.out}: growth to {_spelt(sizes)}\n{_kept(kept)}")


def _suggest(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    if a.to is not None and _given(a):
        raise UsageError(
            "--to cannot be combined with explicit sizes: give either --to or the sizes"
        )
    wanted = [_possible(_target(a))] if a.to is None else suggest.targets(source.sizes(), a.to)
    if not wanted:
        raise UsageError(
            "--to is too close to 1x: no size of this model changes. Give new sizes, such as "
            "--layers 24"
        )
    found = [(target, *suggest.suggest(source, target, a.keep_function)) for target in wanted]
    if a.json:
        said = [
            {"target": t, "ways": [way.as_json() for way in ways], "refused": why}
            for t, ways, why in found
        ]
        return _say({"src": str(a.src), "parameters": source.parameters, "targets": said})
    print(f"{_spelt(source.sizes())}\n{suggest.questions(source)}")
    for target, ways, refused in found:
        print(f"\nto {_spelt(target)}: {suggest.described(source, ways, refused, str(a.src))}")


def _growth(a: argparse.Namespace, source: Source) -> tuple[Growth, dict[str, Any]]:
    """The growth that ``--method`` and the sizes define, and the arguments for its record."""
    method, target = METHODS[a.method], _possible(_target(a))
    options = suggest.taken(method, source.config.traits, a.seed or 0)
    if "seed" not in options and a.seed is not None and a.noise is None:
        raise UsageError(f"--seed: {a.method} does not use random numbers; omit --seed")
    _check_stages(source, target)
    with _as_typed():
        growth = method(source.sizes(), target, **options)
    return growth, {"method": a.method, "target": target, **options}


def _upcycle(a: argparse.Namespace) -> None:
    if a.lora is not None:
        raise UsageError(
            f"--lora: PEFT does not support LoRA on the experts that {a.method} creates. Merge "
            "the LoRA into "
            "SRC with PEFT first"
        )
    source, active, seed = open_checkpoint(a.src), 2 if a.active is None else a.active, a.seed or 0
    if a.experts is None:
        raise UsageError(f"{a.method} requires the number of experts, such as --experts 8")
    if a.noise is not None:
        raise UsageError(
            "--noise does not apply to methods that create experts: their routers are random, by "
            "--seed. Omit "
            "--noise"
        )
    if not 0 < active <= a.experts:
        raise UsageError(
            f"--active {active}: each token is routed to at least 1 and at most {a.experts} experts"
        )
    target = _possible({"experts": a.experts, **_given(a)})
    sizes = Single(source).sizes()
    with _as_typed():
        growth = operators.EXPERTS[a.method](sizes, target)
    grown = Upcycled(_wide(a, source), growth, active, seed)
    made, kept = _typed(a, grown), active % (sizes["mlp"] // grown.sizes()["mlp"]) == 0
    notes = rounding(growth, grown.leaves, made.leaves) if kept else []
    arguments = {"method": a.method, "target": target, "active": active, "seed": seed}
    _write(a, made, arguments, source, keeps=kept, notes=notes)


def _prune(a: argparse.Namespace) -> None:
    source = open_checkpoint(a.src)
    sizes, target, alternating = source.sizes(), _target(a), source.config.traits["alternating"]
    if a.by and a.layers is None:
        raise UsageError(
            f"--by {a.by} selects the layers to remove: give their new number with --layers"
        )
    _check_stages(source, target)
    if source.config.predicts == "states" and "embed" in target:
        raise CheckpointError(
            "prune compares outputs before and after, but the outputs of a model without a head "
            "are its features "
            "on axis 'embed', which would change size. Omit --embed"
        )
    inputs, what = model_inputs.of_data(source, a.data)
    rng = np.random.default_rng(0)
    drawn = {
        axis: rng.random(
            (sizes[beside(axis, LAYERS)], sizes[axis])
            if kind(axis) in ("heads", "mlp")
            else sizes[axis]
        )
        for axis in (*depth(sizes), *width(sizes))
    }
    with _as_typed():
        control = operators.prune(sizes, target, drawn, alternating)
    # Detect a result that cannot be written before the expensive measurements.
    files = None if a.lora is None else lambda part: []
    _put(a, Grown(_wide(a, source), control), {}, source, dry_run=True, files=files)

    by = a.by or "influence"
    scores = _scores(source, inputs, by, target)
    growth = operators.prune(sizes, target, scores, alternating)
    whole = _run(source)(inputs)
    report: dict[str, Any] = {"inputs": what, "whole": {"loss": _loss(source, whole[0], inputs)}}
    for name, pruning in (("pruned", growth), ("random", control)):
        said = _run(Grown(source, pruning))(inputs)
        found = preservation(lambda _: whole, lambda _, said=said: said, inputs)
        report[name] = {"loss": _loss(source, said[0], inputs), **asdict(found)}
    arguments: dict[str, Any] = {"target": target, "data": str(a.data)}
    if a.layers is not None:
        report["scores"] = {axis: scores[axis].tolist() for axis in target if is_layers(axis)}
        stay = {
            axis: operators.best(x, target[axis], axis in alternating)
            for axis, x in report["scores"].items()
        }
        removed = {
            axis: sorted(set(range(sizes[axis])) - set(units.tolist()))
            for axis, units in stay.items()
        }
        arguments |= {"by": by, "removed": removed}
    _transform(a, source, growth, arguments, report=report)
    if not a.json:
        print(_compared(report, arguments))


def _scores(source: Source, inputs: Any, by: str, target: dict[str, int]) -> dict[str, np.ndarray]:
    """The importance of each unit, by axis; larger is more important."""
    config, params = source.config, _wide_params(source)
    found: dict[str, Any] = {}
    if layers := list(filter(is_layers, target)):
        streams = jax.jit(partial(importance.streams, config))(params, inputs)
        for axis in layers:
            removed = len(streams[axis]) - 1 - target[axis]
            by_angle = by == "angular" and removed
            found[axis] = (
                importance.angular(streams[axis], removed)
                if by_angle
                else importance.influence(streams[axis])
            )
    if target.keys() - layers:
        found |= jax.jit(partial(importance.activations, config))(params, inputs)
    return {axis: np.asarray(x) for axis, x in found.items()}


def _loss(source: Source, logits: Any, inputs: Any) -> float | None:
    """Mean cross-entropy per predicted token, in nats; None for other than causal models."""
    if not source.config.causal or source.config.predicts != "tokens":
        return None
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -float(np.take_along_axis(np.asarray(log_p), inputs[:, 1:, None], -1).mean())


def _compared(report: dict[str, Any], arguments: dict[str, Any]) -> str:
    lines = []
    for axis, gone in arguments.get("removed", {}).items():
        lines += [f"removed {axis}: {', '.join(map(str, gone)) or 'none'}"]
        lines += [
            f"{arguments['by']} per layer: {' '.join(f'{s:.3g}' for s in report['scores'][axis])}"
        ]
    lines += [
        f"on {report['inputs']}:",
        f"{'':8}{'loss':>10}{'KL from original':>18}{'mean |difference|':>20}",
    ]
    for name in ("whole", "pruned", "random"):
        row = report[name]
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        label = "original" if name == "whole" else name
        lines += [
            f"{label:9}{loss:>9}"
            + (f"{row['kl']:18.3g}{row['mean_abs']:20.3g}" if "kl" in row else "")
        ]
    return "\n".join(
        [*lines, "random: a control of the same sizes whose units were chosen at random"]
    )


def _convert(a: argparse.Namespace) -> None:
    if a.to is None and a.dtype is None and a.shard_size == SHARD:
        raise UsageError("convert needs at least one of --to, --dtype and --shard-size")
    source = open_checkpoint(a.src)
    _write(a, _typed(a, source), {}, source)


def _completion(a: argparse.Namespace) -> None:
    print(script(a.commands, a.shell), end="")


def _architectures(a: argparse.Namespace) -> None:
    found = {name: family.model_type for name, family in FAMILIES.items()}
    if a.json:
        return _say(found)
    for name, model_type in sorted(found.items()):
        print(f"{name}  (model_type {model_type})")


def _report(a: argparse.Namespace) -> None:
    first, second = open_checkpoint(a.a), open_checkpoint(a.b)
    inputs, what = model_inputs.of_both(first, second, a.data)
    found = preservation(_run(first), _run(second), inputs)
    if a.json:
        return _say({"a": str(a.a), "b": str(a.b), "inputs": what, **asdict(found)})
    print(f"a: {a.a}, b: {a.b}, on {what}")
    print(found)


COMMANDS = {
    "inspect": _inspect,
    "coalesce": _coalesce,
    "decoalesce": _decoalesce,
    "interpolate": _interpolate,
    "show": _show,
    "grow": _grow,
    "suggest": _suggest,
    "prune": _prune,
    "report": _report,
    "convert": _convert,
    "architectures": _architectures,
    "completion": _completion,
}


# --- shared by the commands ---


def _given(a: argparse.Namespace) -> dict[str, int]:
    given = {axis: getattr(a, axis) for axis in AXES if getattr(a, axis) is not None}
    target = {axis: size for axis, size in given.items() if isinstance(size, int)}
    return target | {
        f"{axis}.{i}": n
        for axis, sizes in given.items()
        if axis not in target
        for i, n in enumerate(sizes)
    }


def _target(a: argparse.Namespace) -> dict[str, int]:
    target = _given(a)
    if not target:
        raise UsageError(
            f"nothing to {a.command}: give the new size of an axis, such as --layers 24"
        )
    return target


def _possible(target: dict[str, int]) -> dict[str, int]:
    for name, size in target.items():
        if size > LARGEST:
            raise UsageError(f"--{name.replace('_', '-')} {size}: the maximum is {LARGEST:,}")
    return target


def _check_stages(source: Source, target: Mapping[str, int]) -> None:
    """
    Raises:
      CheckpointError: a single size is given for an axis that has one size per stage.
    """
    for axis in target:
        stages = [name for name in source.sizes() if kind(name) == axis]
        if axis not in stages and stages:
            sizes = ",".join(str(target[axis]) for _ in stages)
            option = f"--{axis.replace('_', '-')}"
            raise CheckpointError(
                f"{option} {target[axis]}: this model has {len(stages)} stages; give one size per "
                "stage, such as "
                f"{option} {sizes}"
            )


def _run(source: Source) -> Any:
    """The function ``inputs -> (logits, RMS of the output of each layer)`` of a model."""
    return partial(_program(source.config), _wide_params(source))


# Models with the same config share the compiled program. Programs are large, so few are cached.
@lru_cache(maxsize=4)
def _program(config: Config) -> Any:
    return jax.jit(
        lambda params, inputs: config.module.apply({"params": params}, inputs, observe=rms)
    )


def _wide_params(source: Source) -> Any:
    """The parameters in float32 or wider, so that intermediate results are not rounded."""
    return Cast(source, "float32", at_least=True).params()


def _grouped(a: argparse.Namespace) -> dict[str, operators.Groups]:
    groups = {axis: getattr(a, axis) for axis in AXES if getattr(a, axis) is not None}
    if not groups:
        raise UsageError(
            "no groups: give --heads, --layers or both, such as --heads far; or --kv-heads, "
            "--embed, --mlp"
        )
    return groups


def _large(small: dict[str, int], groups: dict[str, operators.Groups]) -> dict[str, int]:
    """The sizes of the large model, whose groups of units are the units of the small model."""
    large = dict(small)
    for of, units in groups.items():
        axes = [axis for axis in small if kind(axis) == of]
        if not axes:
            raise ValueError(
                f"axis {of!r}: the model has no such axis; its axes are {', '.join(sorted(small))}"
            )
        for axis in axes:
            if not isinstance(units, str) and len(units) != small[axis]:
                raise ValueError(
                    f"--{of}: {len(units)} groups, but the source has {small[axis]} {axis}. Give "
                    "one group for each of "
                    "them"
                )
            large[axis] = (
                operators.group_size(units) * small[axis]
                if isinstance(units, str)
                else sum(map(len, units))
            )
    leads = next((of for of in ("heads", "kv_heads") if of in groups), None)
    for axis in width(small):
        if leads is not None and kind(axis) not in groups:
            leading = beside(axis, leads)
            large[axis], rest = divmod(small[axis] * large[leading], small[leading])
            if rest:
                raise ValueError(
                    f"axis {axis!r}: {small[axis]} units cannot be divided into {small[leading]} "
                    "equal blocks, one per "
                    f"head. Give its groups with --{kind(axis).replace('_', '-')}"
                )
    return large


@contextmanager
def _as_typed() -> Iterator[None]:
    """Translate errors of the library to command-line notation: ``axis=8`` to ``--axis 8``."""
    try:
        yield
    except ValueError as error:
        axes = "|".join((*AXES, "experts"))
        text = re.sub(
            rf"\b({axes})=(\d+)", lambda m: f"--{m[1].replace('_', '-')} {m[2]}", str(error)
        )
        text = text.replace('layers="alike"', "--layers alike")
        said = CheckpointError(text)
        for note in getattr(error, "__notes__", []):  # the state of DST
            said.add_note(note)
        raise said from error


def _typed(a: argparse.Namespace, source: Source, **options: Any) -> Source:
    """The source in ``--dtype``, if it is given."""
    return source if a.dtype is None else Cast(source, a.dtype, **options)


def _wide(a: argparse.Namespace, source: Source) -> Source:
    """The source in at least the width of ``--dtype``, so that it is rounded only at the end."""
    return _typed(a, source, at_least=True)


def _transform(
    a: argparse.Namespace, root: Any, growth: Growth, arguments: dict[str, Any], **said: Any
) -> None:
    """Write the grown model and its LoRA, and report whether the function is preserved."""
    lora = _lora(a, root, growth)
    if lora is not None:
        arguments = arguments | {"lora": str(a.lora)}
        said["lora"] = {"rank": lora.lora.rank, "modules": len(lora.lora.targets)}
    if a.lora_only:
        assert lora is not None
        return _write_lora(a, lora, root, growth, said["lora"])
    paper = arguments.get("tied") == "paper"
    with _as_typed():
        grown: Source = Grown(_wide(a, root), growth, root.config.paper_axes() if paper else None)
    kept = keeps(growth, root.config, arguments.get("method", "")) and not paper
    if (noise := arguments.get("noise")) is not None:
        if isinstance(growth, Rules) or not kept:
            raise CheckpointError(
                "--noise requires a growth that preserves the function by exact copies, but "
                f"{a.method} does not do "
                "that for this model. Omit --noise"
            )
        grown = Noisy(grown, growth, arguments["seed"], noise)
    made = _typed(a, grown)
    notes = rounding(growth, grown.leaves, made.leaves, noise is not None) if kept else []
    if (state := getattr(a, "optimizer", None)) is not None:
        arguments = arguments | {"optimizer": state}
    _write(
        a,
        made,
        arguments,
        root,
        files=_beside(a, root, made, growth, lora),
        keeps=kept,
        notes=notes,
        **said,
    )


def _beside(
    a: argparse.Namespace, root: Any, made: Source, growth: Growth, lora: peft.PeftAdapter | None
) -> Any:
    """The function that writes the grown LoRA and optimizer state; None without either."""
    policy = getattr(a, "optimizer", None)
    if policy in (None, "drop"):
        return None if lora is None else lambda part: peft.write_into(part, lora, made, str(a.dst))

    def write(part: Any) -> list[str]:
        names = [] if lora is None else peft.write_into(part, lora, made, str(a.dst))
        return names + torch_optimizer.write_beside(root, part, growth, policy, a.optimizer_state)

    return write


def _lora(a: argparse.Namespace, root: Any, growth: Growth) -> peft.PeftAdapter | None:
    """The LoRA of the grown model, if ``--lora`` is given."""
    if a.lora is None:
        if a.lora_only:
            raise UsageError("--lora-only requires a LoRA: give its directory with --lora DIR")
        return None
    own = peft.load_beside(a.lora, root)
    with _as_typed():
        return own.grown(growth)


def _write_lora(
    a: argparse.Namespace, lora: peft.PeftAdapter, root: Any, growth: Growth, about: dict[str, Any]
) -> None:
    """Write a LoRA without its model."""
    sources = [root.folder, a.lora]
    if a.dry_run:
        may_become(a.dst, sources, a.overwrite)
    else:
        with appearing(a.dst, sources, a.overwrite) as part:
            peft.write_into(part, lora, Grown(root, growth))
    if a.json:
        return _say(
            {
                "dst": str(a.dst),
                "written": not a.dry_run,
                "lora": about,
                "sizes": lora.config.sizes(),
            }
        )
    nothing = "; nothing was written (--dry-run)" if a.dry_run else ""
    print(f"{a.dst}: only the LoRA, {about['modules']} modules of rank {about['rank']}{nothing}")
    print(_spelt(lora.config.sizes()))


def _write(
    a: argparse.Namespace,
    source: Source,
    arguments: dict[str, Any],
    *roots: Any,
    files: Any = None,
    **said: Any,
) -> None:
    began = time.perf_counter()
    record = {
        "operator": a.command,
        "arguments": arguments | ({} if a.dtype is None else {"dtype": a.dtype}),
    }
    size = _put(a, source, record, *roots, dry_run=a.dry_run, files=files)
    seconds = time.perf_counter() - began
    about = {
        "dst": str(a.dst),
        "written": not a.dry_run,
        **record,
        **_size(source, size),
        **said,
        "seconds": seconds,
    }
    about["notes"] = [
        *said.get("notes", []),
        *(note for root in roots for note in getattr(root, "notes", ())),
    ]
    peak = ""
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        about["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        peak = f"; peak memory {about['peak_memory'] / 1e6:,.0f} MB"
    if a.json:
        return _say(about)
    if a.dry_run:
        print(
            f"{a.dst}: {_amount(source, size)}; nothing was written "
            f"(--dry-run)\n{_spelt(source.sizes())}"
        )
    else:
        print(
            f"{a.dst}: {_amount(source, size)}, in {seconds:.1f} s{peak}; the arguments are "
            f"recorded in {RECORD}"
        )
    if lora := said.get("lora"):
        print(f"with LoRA: {lora['modules']} modules of rank {lora['rank']}")
    notes = said.get("notes", [])
    if said:
        print(_kept(said["keeps"], notes))
    for note in (*about["notes"], *said.get("groups", [])):
        print(f"note: {note}")


def _put(
    a: argparse.Namespace,
    source: Source,
    record: dict[str, Any],
    *roots: Any,
    dry_run: bool,
    files: Any = None,
) -> int:
    """Write the model, or only check that this is possible; return the bytes of its tensors."""
    options: dict[str, Any] = {"beside": files}
    options |= {"to": a.to, "overwrite": a.overwrite, "shard": a.shard_size, "dry_run": dry_run}
    with _as_typed():
        return write(source, a.dst, record, roots, progress=True, **options)


def _kept(kept: bool, rounded: Sequence[str] = ()) -> str:
    """Describe whether the function is preserved; ``rounded``: notes about rounding."""
    if not kept:
        return "the function is changed by the transformation"
    return "the function is preserved up to rounding" if rounded else "the function is preserved"


def _say(about: dict[str, Any]) -> None:
    print(json.dumps(about, indent=2))


def _size(source: Source, size: int) -> dict[str, Any]:
    return {"sizes": source.sizes(), "parameters": source.parameters, "bytes": size}


def _amount(source: Source, size: int) -> str:
    return f"{source.parameters:,} parameters, {size / 1e6:,.1f} MB"


def _spelt(sizes: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
