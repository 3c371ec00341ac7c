"""How are new sizes read from the arguments of a command, and checked against a model?"""

import argparse

from jaxgrow.axes.names import axis_kind
from jaxgrow.checkpoints import CheckpointError, Source
from jaxgrow.cli.errors import UsageError
from jaxgrow.cli.options import AXES, axis_option

# The largest size of a grown axis: larger than in any model, and small enough for a growth of it to
# fit into memory.
LARGEST = 1 << 20


def given_sizes(a: argparse.Namespace) -> dict[str, int]:
    """The new size of each axis that has one; the stages of an axis are called ``layers.0``.

    Raises:
      UsageError: a size is too large for any model.
    """
    found: dict[str, int] = {}
    for axis in (*AXES, "experts"):
        size = getattr(a, axis, None)
        if isinstance(size, int):
            found[axis] = size
        elif size is not None:
            found |= {f"{axis}.{stage}": n for stage, n in enumerate(size)}
    for axis, size in found.items():
        if size > LARGEST:
            raise UsageError(f"{axis_option(axis)} {size}: the maximum is {LARGEST:,}")
    return found


def target_sizes(a: argparse.Namespace, source: Source | None = None) -> dict[str, int]:
    """The new sizes, at least one.

    Args:
      a: the arguments.
      source: the model. Sizes that follow from others in its format need not be given.

    Raises:
      UsageError: no size is given, or one is too large for any model.
      CheckpointError: an axis of the model has stages, but a single size is given.
    """
    found = given_sizes(a)
    for axis, of in ({} if source is None else source.following).items():
        if of in found:
            found.setdefault(axis, found[of])
    # The size of some methods follows from the model, or from a list of layers.
    if not found and getattr(a, "method", None) not in ("unloop", "passthrough"):
        raise UsageError(
            f"nothing to {a.command}: give the new size of an axis, such as --layers 24"
        )
    own = [] if source is None else list(source.sizes())
    for axis, size in found.items():
        stages = [name for name in own if axis_kind(name) == axis]
        if axis not in stages and stages:
            sizes = ",".join([str(size)] * len(stages))
            raise CheckpointError(
                f"{axis_option(axis)} {size}: this model has {len(stages)} stages; give one size per "
                f"stage, such as {axis_option(axis)} {sizes}"
            )
    return found
