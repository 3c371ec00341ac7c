"""Notes on the groups of heads: unusual ones, and those that decoalesce needs again."""

from collections.abc import Mapping

import numpy as np

from jaxgrow import operators
from jaxgrow.axes.names import axis_kind
from jaxgrow.cli.v_cycle_commands import GROUP_NOTES
from jaxgrow.growth.maps import AxisMap
from jaxgrow.growth.matrices import dense


def odd_groups(groups: Mapping[str, operators.Groups], growth: Mapping[str, AxisMap]) -> list[str]:
    """A note for each axis with an odd number of heads, which a named grouping cannot pair."""
    name = groups.get("heads", groups.get("kv_heads"))
    notes = []
    for axis, m in growth.items():
        size = m.old // m.new
        if axis_kind(axis) in ("heads", "kv_heads") and name in ("far", "adjacent") and size > 2:
            notes.append(
                f"{m.old} {axis} cannot be grouped in pairs, so {name!r} merged groups of {size}, "
                f"like {name}:{size}"
            )
    return notes


def own_key_groups(
    groups: Mapping[str, operators.Groups], growth: Mapping[str, AxisMap]
) -> list[str]:
    """A note if decoalesce cannot derive the number of key/value heads from the groups of heads."""
    heads, keys = growth.get("heads"), growth.get("kv_heads")
    if heads is None or keys is None or "kv_heads" in groups:
        return []
    if keys.old * heads.new == keys.new * heads.old:
        return []
    merged = [np.flatnonzero(row) for row in dense(keys.write)]
    own = ",".join("+".join(map(str, group)) for group in merged)
    return [
        f"{keys.old} kv_heads become {keys.new}, unlike {heads.old} heads, which become "
        f"{heads.new}: give decoalesce the groups --kv-heads {own} as well"
    ]


GROUP_NOTES.add("odd", odd_groups)
GROUP_NOTES.add("key heads", own_key_groups)
