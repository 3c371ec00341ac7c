"""The commands that make a model larger, or help with it: suggest, show, grow."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxgrow import operators
from jaxgrow.axes import axis_kind
from jaxgrow.checkpoints import CheckpointError, Source, Upcycled, open_checkpoint
from jaxgrow.checkpoints.hf.upcycled import Single
from jaxgrow.checkpoints.io.files import SHARD
from jaxgrow.checkpoints.io.replacing import may_become
from jaxgrow.cli import new_sizes
from jaxgrow.cli.errors import UsageError, reported
from jaxgrow.cli.keeps import keeps
from jaxgrow.cli.writing import (
    as_text,
    in_dtype,
    kept_as_text,
    new_as_text,
    new_record,
    print_json,
    rounding_notes,
    transform,
    write,
)
from jaxgrow.extras import plot, suggest
from jaxgrow.extras.integrations import command
from jaxgrow.extras.integrations.torch_optimizer import POLICIES
from jaxgrow.growth.maps import Growth
from jaxgrow.untrusted import print_text

# --- suggest ---


def run_suggest(a: argparse.Namespace) -> None:
    """Run ``jaxgrow suggest``."""
    source = open_checkpoint(a.src)
    wanted = _wanted(a, source)
    found = [(target, *suggest.suggest(source, target, a.keep_function)) for target in wanted]
    if a.json:
        targets: list[dict[str, Any]] = []
        for target, ways, refused in found:
            shown = [way.as_json() for way in ways]
            targets.append({"target": target, "ways": shown, "refused": refused})
        about = {"src": str(a.src), "parameters": source.parameters, "targets": targets}
        return print_json(about)
    print_text(f"{as_text(source.sizes())}\n{suggest.questions(source)}")
    for target, ways, refused in found:
        print_text(
            f"\nto {as_text(target)}: {suggest.described(source, ways, refused, str(a.src))}"
        )


def _wanted(a: argparse.Namespace, source: Source) -> list[dict[str, int]]:
    """The targets for which methods are listed: the given one, or those of a factor."""
    if a.to is None:
        return [new_sizes.possible(new_sizes.target(a, source))]
    if new_sizes.given_sizes(a):
        raise UsageError(
            "--to cannot be combined with explicit sizes: give either --to or the sizes"
        )
    wanted = suggest.targets(source.sizes(), a.to)
    if not wanted:
        raise UsageError(
            "--to is too close to 1x: no size of this model changes. Give new sizes, such as "
            "--layers 24"
        )
    return wanted


# --- show ---


def run_show(a: argparse.Namespace) -> None:
    """Run ``jaxgrow show``."""
    source = open_checkpoint(a.src)
    growth, arguments = _growth(a, source)
    names = {path: leaf.names for path, leaf in source.leaves.items()}
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in source.leaves.items()
    }
    try:
        with reported():
            figure = plot.growth(growth, shapes, names)
            figure.savefig(a.out, format=a.out.suffix[1:] or "png")
    except ImportError as error:
        raise CheckpointError(str(error)) from error
    sizes = source.config.resized(growth).sizes()
    kept = keeps(growth, source.config, a.method)
    if a.json:
        about = {"src": str(a.src), "out": str(a.out), "arguments": arguments}
        return print_json({**about, "sizes": sizes, "keeps": kept})
    print_text(f"{a.out}: growth to {as_text(sizes)}\n{kept_as_text(kept)}")


# --- grow ---


def run_grow(a: argparse.Namespace) -> None:
    """Run ``jaxgrow grow``."""
    if a.method in operators.EXPERTS:
        return _upcycle(a)
    for option in ("experts", "active"):
        if getattr(a, option) is not None:
            raise UsageError(
                f"--{option} applies to the methods {' and '.join(operators.EXPERTS)} only; "
                f"{a.method} does not create experts"
            )
    if a.format or a.names or command.is_run(a.src):
        return _grow_run(a)
    _check_state_options(a)
    source = open_checkpoint(a.src)
    growth, arguments = _growth(a, source)
    if a.noise is not None:
        if not math.isfinite(a.noise):
            raise UsageError(
                f"--noise {a.noise} is not a number of decibels: give a finite number, such as 10"
            )
        arguments |= {"noise": a.noise, "seed": a.seed or 0}
    transform(a, source, growth, arguments)


def _growth(a: argparse.Namespace, source: Source) -> tuple[Growth, dict[str, Any]]:
    """The growth that ``--method`` and the sizes define, and the arguments for its record."""
    target = new_sizes.possible(new_sizes.target(a, source))
    taken = _taken(a, source.config.traits)
    new_sizes.check_stages(source, target)
    growth = _by_method(a.method, source.sizes(), target, taken)
    return growth, {"method": a.method, "target": target, **taken}


def _by_method(
    method: str, sizes: Mapping[str, int], target: Mapping[str, int], taken: Mapping[str, Any]
) -> Growth:
    """Make the growth of a method.

    Raises:
      CheckpointError: the method does not grow an axis, or cannot reach a size.
    """
    operator = operators.OPERATORS[method]
    for axis in target:
        if axis in sizes and axis_kind(axis) not in operator.axes:
            own = ", ".join(name for name in operator.axes if name in {*map(axis_kind, sizes)})
            others = [
                m for m, other in operators.OPERATORS.items() if axis_kind(axis) in other.axes
            ]
            ways = f"; choose one of {', '.join(sorted(others))}, which grow it" if others else ""
            raise CheckpointError(f"axis {axis!r}: {method} grows {own}{ways}")
    with reported():
        return operator(sizes, target, **taken)


def _taken(a: argparse.Namespace, traits: Mapping[str, Any]) -> dict[str, Any]:
    """The optional arguments of the operator: properties of the model, and those of the command.

    Raises:
      UsageError: a seed or a blend is given, but the operator does not use it.
    """
    given = {} if a.blend is None else {"blend": a.blend}
    taken = operators.OPERATORS[a.method].accepted({**traits, **given, "seed": a.seed or 0})
    if given and "blend" not in taken:
        raise UsageError(f"--blend: {a.method} does not average layers; omit --blend")
    if "seed" not in taken and a.seed is not None and a.noise is None:
        raise UsageError(f"--seed: {a.method} does not use random numbers; omit --seed")
    return taken


def _check_run_options(a: argparse.Namespace) -> None:
    """Check that no option is given that has no effect on a checkpoint of another trainer.

    Raises:
      UsageError: there is such an option.
    """
    given = {
        "--to": a.to is not None,
        "--dtype": a.dtype is not None,
        "--shard-size": a.shard_size != SHARD,
        "--noise": a.noise is not None,
        "--lora": a.lora is not None,
        "--lora-only": a.lora_only,
        "--optimizer-state": a.optimizer_state is not None,
    }
    _refuse(given, f"not supported for {a.src}, which is a checkpoint of another trainer")


def _check_state_options(a: argparse.Namespace) -> None:
    """Check the options for the optimizer state of a Hugging Face folder.

    Raises:
      UsageError: one of them would have no effect.
    """
    dropped = a.optimizer in (None, "drop")
    _refuse(
        {"--optimizer-state": dropped and a.optimizer_state is not None},
        f"the optimizer state is dropped without --optimizer {', '.join(POLICIES)}",
    )
    _refuse({"--head-dim": a.head_dim is not None}, "only checkpoints of other trainers need it")


def _refuse(given: Mapping[str, bool], why: str) -> None:
    """Raise a `UsageError` that names the options that are given although they have no effect."""
    if found := ", ".join(option for option, is_given in given.items() if is_given):
        raise UsageError(f"{found}: {why}; omit {found}")


def _grow_run(a: argparse.Namespace) -> None:
    """Grow a checkpoint of another trainer."""
    _check_run_options(a)
    run = command.opened(a.src, a.format, a.names, a.head_dim)
    target = new_sizes.possible(new_sizes.target(a))
    policy = a.optimizer or command.policy_of(a.method)
    if policy not in command.POLICIES:
        raise UsageError(
            f"--optimizer {policy} is not supported for checkpoints of other trainers: choose from "
            f"{', '.join(command.POLICIES)}"
        )
    taken = _taken(a, run.traits)
    growth = _by_method(a.method, run.sizes(), target, taken)
    may_become(a.dst, [a.src], a.overwrite)
    arguments = {
        "format": run.format.name,
        "method": a.method,
        "target": target,
        "optimizer": policy,
    }
    about = command.grown(
        run,
        growth,
        policy,
        a.dst,
        {"arguments": arguments, **new_record(growth)},
        overwrite=a.overwrite,
        dry_run=a.dry_run,
    )
    if a.json:
        print_json(about)
    else:
        print_text(command.summary(a.dst, about, operators.OPERATORS[a.method].preserves))
        if "new_layers" in about:
            print_text(new_as_text(about["new_layers"]))


def _upcycle(a: argparse.Namespace) -> None:
    """Turn the MLPs of a model into experts."""
    if a.lora is not None:
        raise UsageError(
            f"--lora: PEFT does not support LoRA on the experts that {a.method} creates. Merge "
            "the LoRA into SRC with PEFT first"
        )
    given = {
        "--lora-only": a.lora_only,
        "--optimizer": a.optimizer not in (None, "drop"),
        "--optimizer-state": a.optimizer_state is not None,
        "--format": a.format is not None,
        "--names": a.names is not None,
        "--head-dim": a.head_dim is not None,
    }
    _refuse(given, f"not supported for {a.method}, which does not grow an optimizer state")
    _refuse({"--blend": a.blend is not None}, f"{a.method} does not average layers")
    source = open_checkpoint(a.src)
    active = _active(a)
    seed = a.seed or 0
    target = new_sizes.possible(new_sizes.given_sizes(a))
    sizes = Single(source).sizes()
    with reported():
        growth = operators.EXPERTS[a.method](sizes, target)
    grown = Upcycled(in_dtype(a, source, at_least=True), growth, active, seed)
    cast = in_dtype(a, grown)
    kept = active % (sizes["mlp"] // grown.sizes()["mlp"]) == 0
    rounded = rounding_notes(a, source, growth, grown, cast) if kept else []
    arguments = {"method": a.method, "target": target, "active": active, "seed": seed}
    write(a, cast, arguments, source, rounded=rounded, keeps=kept)


def _active(a: argparse.Namespace) -> int:
    """The number of experts that each token is routed to.

    Raises:
      UsageError: the options for a model with experts contradict each other.
    """
    active = 2 if a.active is None else a.active
    if a.experts is None:
        raise UsageError(f"{a.method} requires the number of experts, such as --experts 8")
    if a.noise is not None:
        raise UsageError(
            "--noise does not apply to methods that create experts: their routers are random, by "
            "--seed. Omit --noise"
        )
    if not 0 < active <= a.experts:
        default = " (the default)" if a.active is None else ""
        raise UsageError(
            f"--active {active}{default}: each token is routed to at least 1 and at most {a.experts} "
            "experts"
        )
    return active
