"""The commands of a V-cycle: coalesce, decoalesce, interpolate."""

import argparse
from collections.abc import Callable, Mapping

from jaxgrow import operators
from jaxgrow.axes.names import axis_kind, sibling_axis
from jaxgrow.checkpoints import Interpolated, open_checkpoint
from jaxgrow.checkpoints.io.files import RECORD
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.cli.errors import UsageError, errors_with_options
from jaxgrow.cli.options import AXES, axis_option
from jaxgrow.cli.writing import transform_model, write_model
from jaxgrow.growth.maps import AxisMap
from jaxgrow.operators.targets import width_axes
from jaxgrow.registry import Registry

# "fine-tunes" interpolates two checkpoints with the weight alpha, after giving both the config of
# model A or B, where they differ, and one vocabulary. It computes in the dtype of the result or a
# wider one, and also returns notes about the differences.
MERGES: Registry[
    Callable[
        [Checkpoint, Checkpoint, float, str | None, str | None], tuple[Interpolated, list[str]]
    ]
] = Registry("merge")

# Notes for the user about groups, from the given groups and the growth.
GROUP_NOTES: Registry[
    Callable[[Mapping[str, operators.Groups], Mapping[str, AxisMap]], list[str]]
] = Registry("note on groups")


def run_coalesce(a: argparse.Namespace) -> None:
    """Run ``jaxgrow coalesce``."""
    source = open_checkpoint(a.src)
    groups = _given_groups(a)
    with errors_with_options():
        growth = operators.coalesce(source.sizes(), kinds=source.config.layer_kinds, **groups)
    if groups.get("layers") == "alike":
        # Record explicit groups: decoalesce cannot derive them from the small model.
        groups["layers"] = operators.alike(source.config.layer_kinds)
    notes = [note for about in GROUP_NOTES.values() for note in about(groups, growth)]
    transform_model(a, source, growth, groups | {"tied": a.tied}, notes)


def run_decoalesce(a: argparse.Namespace) -> None:
    """Run ``jaxgrow decoalesce``."""
    source = open_checkpoint(a.src)
    groups = _given_groups(a)
    if groups.get("layers") == "alike":
        raise UsageError(
            "--layers alike: the kinds of the layers of the large model are not known. Give the "
            f"groups that {RECORD} of the coalesced model records, such as --layers 0+2,1+3"
        )
    with errors_with_options():
        growth = operators.decoalesce(_large_sizes(source.sizes(), groups), kinds=None, **groups)
    transform_model(a, source, growth, groups | {"tied": a.tied})


def _given_groups(a: argparse.Namespace) -> dict[str, operators.Groups]:
    groups = {axis: getattr(a, axis) for axis in AXES if getattr(a, axis) is not None}
    if not groups:
        raise UsageError(
            "no groups: give --heads, --layers or both, such as --heads far; or --kv-heads, "
            "--embed, --mlp"
        )
    return groups


def _large_sizes(
    small: Mapping[str, int], groups: Mapping[str, operators.Groups]
) -> dict[str, int]:
    """The sizes of the large model. Each unit of the small model is a group of its units.

    Widths without groups grow by the same factor as the heads.
    """
    large = dict(small)
    for kind, units in groups.items():
        axes = [axis for axis in small if axis_kind(axis) == kind]
        if not axes:
            raise ValueError(
                f"axis {kind!r}: the model has no such axis; its axes are {', '.join(sorted(small))}"
            )
        for axis in axes:
            if isinstance(units, str):
                large[axis] = operators.group_size(units) * small[axis]
                continue
            large[axis] = sum(map(len, units))
            if len(units) != small[axis]:
                raise ValueError(
                    f"{axis_option(kind)}: {len(units)} groups, but the source has {small[axis]} "
                    f"{axis}. Give one group for each of them"
                )
    leads = next((kind for kind in ("heads", "kv_heads") if kind in groups), None)
    following = [axis for axis in width_axes(small) if leads and axis_kind(axis) not in groups]
    for axis in following:
        heads = sibling_axis(axis, str(leads))
        large[axis], rest = divmod(small[axis] * large[heads], small[heads])
        if rest:
            raise ValueError(
                f"axis {axis!r}: {small[axis]} units cannot be divided into {small[heads]} equal "
                f"blocks, one per head. Give its groups with {axis_option(axis_kind(axis))}"
            )
    return large


def run_interpolate(a: argparse.Namespace) -> None:
    """Run ``jaxgrow interpolate``."""
    if not 0 <= a.alpha <= 1:
        raise UsageError(
            f"--alpha {a.alpha:g} is not from 0 to 1: give the weight of UP, such as --alpha 0.5"
        )
    before, up = open_checkpoint(a.before), open_checkpoint(a.up)
    with errors_with_options():
        mixed, notes = MERGES["fine-tunes"](before, up, a.alpha, a.take_config, a.dtype)
    taken = {} if a.take_config is None else {"take_config": a.take_config}
    write_model(a, mixed, {"alpha": a.alpha} | taken, notes)
