"""What a run is trained on is part of what the run is: known by content, wherever the data lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.errors import UserError

_HOW = ("cache", "workers")  # of Data and Images: how they are read, not what
_WHERE = ("path", "valid_path", "tokenizer")
_WHAT = ("train", "valid", "tokenizer")  # of an identity: hashes; equal data may have other names


def comparable(config: Mapping[str, Any], known: bool) -> dict[str, Any]:
    """A ``config.json`` without how its data are read and, where their identity is ``known``, without where from."""
    left_out = (*_HOW, *_WHERE, "corpus") if known else (*_HOW, "corpus")
    data = {kind: {k: v for k, v in d.items() if k not in left_out} for kind, d in config["data"].items()}
    return {k: v for k, v in config.items() if k != "corpus"} | {"data": data}


def same(there: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    """Raises:
    UserError: other data ``here`` than ``there``, in the run in ``folder``.
    """
    if any(there.get(key) != here.get(key) for key in _WHAT):
        raise UserError(
            f"{folder} was begun with other data: there {told(there)}, here {told(here)}; bring those back, or give another "
            "--workdir"
        )


def told(identity: Mapping[str, Any]) -> str:
    """``wiki (train 0123456789ab, valid 0123456789ab, tokenizer bytes)``."""
    keys = ("python", *_WHAT)
    return f"{identity['name']} ({', '.join(f'{k} {identity[k][:12]}' for k in keys if k in identity)})"
