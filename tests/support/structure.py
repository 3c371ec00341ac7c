"""Which modules are extras?"""

from train.extras import EXTRAS


def is_extra(parts: tuple[str, ...]) -> bool:
    """Return whether the parts of a module's name are those of an extra."""
    # Extra commands are files of `train`; the other extras lie in the folders `extras`.
    return "extras" in parts or (
        parts[0] == "train" and any(p in EXTRAS["command"] for p in parts[1:2])
    )
