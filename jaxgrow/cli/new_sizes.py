"""Which new sizes do the arguments of a command give, and does the model have such axes?"""

import argparse
from collections.abc import Mapping

from jaxgrow.axes.names import axis_kind
from jaxgrow.checkpoints import CheckpointError, Source
from jaxgrow.cli.errors import UsageError
from jaxgrow.cli.options import AXES, axis_option

# The largest size of a grown axis: larger than in any model, and small enough for a growth of it to
# fit into memory.
LARGEST = 1 << 20


def given_sizes(a: argparse.Namespace) -> dict[str, int]:
    """The new size of each axis that has one; the stages of an axis are called ``layers.0``."""
    found: dict[str, int] = {}
    for axis in AXES:
        size = getattr(a, axis)
        if isinstance(size, int):
            found[axis] = size
        elif size is not None:
            found |= {f"{axis}.{stage}": n for stage, n in enumerate(size)}
    if (experts := getattr(a, "experts", None)) is not None:
        found["experts"] = experts
    return found


def target(a: argparse.Namespace, source: Source | None = None) -> dict[str, int]:
    """The new sizes, at least one.

    Args:
      a: the arguments.
      source: the model. Sizes that follow from others in its format need not be given.

    Raises:
      UsageError: no size is given.
    """
    found = given_sizes(a)
    for axis, of in ({} if source is None else source.following).items():
        if of in found:
            found.setdefault(axis, found[of])
    if not found:
        raise UsageError(
            f"nothing to {a.command}: give the new size of an axis, such as --layers 24"
        )
    return found


def possible(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes after checking that none of them is too large.

    Raises:
      UsageError: a size is too large for any model.
    """
    for name, size in sizes.items():
        if size > LARGEST:
            raise UsageError(f"{axis_option(name)} {size}: the maximum is {LARGEST:,}")
    return sizes


def check_stages(source: Source, target: Mapping[str, int]) -> None:
    """Check that the target has one size per stage for each axis that has stages.

    Raises:
      CheckpointError: a single size is given for such an axis.
    """
    for axis in target:
        stages = [name for name in source.sizes() if axis_kind(name) == axis]
        if axis not in stages and stages:
            sizes = ",".join(str(target[axis]) for _ in stages)
            raise CheckpointError(
                f"{axis_option(axis)} {target[axis]}: this model has {len(stages)} stages; give one "
                f"size per stage, such as {axis_option(axis)} {sizes}"
            )
