"""The command grow: make a model larger."""

import argparse
import math
from collections.abc import Callable, Mapping

from jaxgrow import operators
from jaxgrow.axes import axis_kind
from jaxgrow.checkpoints import CheckpointError, Source, open_checkpoint
from jaxgrow.cli.errors import UsageError, errors_with_options, refuse_options
from jaxgrow.cli.methods import OPTIMIZER_POLICIES
from jaxgrow.cli.new_sizes import target_sizes
from jaxgrow.cli.other_formats import format_of
from jaxgrow.cli.writing import transform_model
from jaxgrow.growth.maps import Growth
from jaxgrow.registry import Registry
from jaxgrow.typed import Json

# Methods that need more than a growth: functions that run the command.
GROWING: Registry[Callable[[argparse.Namespace], None]] = Registry("growing method")
# Methods that do not take new sizes: functions that return the growth, as `growth_of`.
GROWTHS: Registry[Callable[[argparse.Namespace, Source], tuple[Growth, Json]]] = Registry(
    "growth without sizes"
)


def run_grow(a: argparse.Namespace) -> None:
    """Run ``jaxgrow grow``."""
    if a.vocab is not None or a.like_tokens is not None:
        return GROWING["vocab"](a)
    if any(folder for folder, _ in a.layers_from or ()):
        return GROWING["several models"](a)
    if a.method in GROWING:
        return GROWING[a.method](a)
    experts = " and ".join(operators.EXPERTS)
    why = f"only the methods {experts} create experts, and {a.method} does not"
    refuse_options(a, why, "experts", "active")
    if (other := format_of(a.src, a)) is not None:
        return other.grow(a)
    refuse_lost_state(a)
    source = open_checkpoint(a.src)
    growth, arguments = growth_of(a, source)
    if a.noise is not None:
        if not math.isfinite(a.noise):
            raise UsageError(
                f"--noise {a.noise} is not a number of decibels: give a finite number, such as 10"
            )
        arguments |= {"noise": a.noise, "seed": a.seed or 0}
    transform_model(a, source, growth, arguments)


def refuse_lost_state(a: argparse.Namespace) -> None:
    """Check that a given optimizer state is not dropped."""
    if a.optimizer in (None, "drop"):
        dropped = f"the optimizer state is dropped without --optimizer {', '.join(OPTIMIZER_POLICIES[:2])}"
        refuse_options(a, dropped, "optimizer_state")


def growth_of(a: argparse.Namespace, source: Source) -> tuple[Growth, Json]:
    """The growth that ``--method`` and the sizes define, and the arguments for its record."""
    if a.method in GROWTHS:
        return GROWTHS[a.method](a, source)
    refuse_options(a, f"{a.method} makes no loop", "loop")
    target = target_sizes(a, source)
    growth, taken = growth_by_method(a, source.sizes(), target, source.config.traits)
    return growth, {"method": a.method, "target": target, **taken}


def growth_by_method(
    a: argparse.Namespace,
    sizes: Mapping[str, int],
    target: Mapping[str, int],
    traits: Mapping[str, object],
) -> tuple[Growth, Json]:
    """Make the growth of ``--method``.

    Args:
      a: the parsed arguments.
      sizes: the sizes of the model.
      target: the new sizes.
      traits: properties of the model that operators take.

    Returns:
      The growth, and the optional arguments of the operator, from the properties of the model and
      from the command.

    Raises:
      UsageError: a seed or a blend is given, but the operator does not use it.
      CheckpointError: the method does not grow an axis, or cannot reach a size.
    """
    operator = operators.OPERATORS[a.method]
    given = {"blend": a.blend, "sources": a.layers_from and [i for _, i in a.layers_from]}
    given = {name: x for name, x in given.items() if x is not None}
    taken = operator.accepted({**traits, **given, "seed": a.seed or 0})
    if "blend" not in taken:
        refuse_options(a, f"{a.method} does not average layers", "blend")
    if "seed" not in taken and a.noise is None:
        refuse_options(a, f"{a.method} does not use random numbers", "seed")
    for axis in target:
        if axis in sizes and axis_kind(axis) not in operator.axes:
            own = ", ".join(name for name in operator.axes if name in {*map(axis_kind, sizes)})
            others = [
                m for m, other in operators.OPERATORS.items() if axis_kind(axis) in other.axes
            ]
            ways = f"; choose one of {', '.join(sorted(others))}, which grow it" if others else ""
            raise CheckpointError(f"axis {axis!r}: {a.method} grows {own}{ways}")
    with errors_with_options():
        return operator(sizes, target, **taken), taken
