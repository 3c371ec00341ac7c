"""What the fields of settings say about themselves, for `train.config`.

A class with the attribute ``step_counts`` names its fields that are numbers of steps, which do not
change with the length of a run (`train.extras.lengths`).
"""

from collections.abc import Mapping

from jaxgrow.typed import Json

# Values of conditions in the ``used_with`` of a class (`train.extras.effect`).
CHANGED = "changed"
GIVEN = "given"
SAME = "same"


def named(kinds: Mapping[str, type], *always: str) -> Json:
    """Return the metadata of a tuple field whose items have names, at most one item for each name.

    ``--set drop.theta=0.5`` then sets a field of the item with the name "drop", and adds the item
    if it is missing; ``--set drop=None`` removes it. ``config.json`` has one key for each item. An
    item with a single field is set by the value of this field: ``--set windows=4``.

    Args:
      kinds: class of the items of each name.
      always: names for which ``config.json`` always has a key.
    """
    return {"named": kinds, "always": always}
