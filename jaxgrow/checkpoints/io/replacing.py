"""What a folder that is written may replace: nothing, an empty folder, or a checkpoint and nothing else."""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jaxgrow.checkpoints.hf.storage import family_of
from jaxgrow.checkpoints.io import checksums
from jaxgrow.checkpoints.io.files import ADAPTER, RECORD, CheckpointError, listed, read_json
from jaxgrow.models import from_json

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SHARDS = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
# What lies beside the weights of a model and is made or fetched with them. Optimizer states, logs
# and weights of other frameworks are not among it: they may be the only ones.
_BESIDE = (
    *(
        "config.json",
        RECORD,
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
    ),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *(
        "chat_template.jinja",
        "chat_template.json",
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        "LICENSE.md",
        ".gitattributes",
    ),
)
_PARAMS = "params"
_ORBAX = (  # what a folder of parameters is made of, on every level
    *(
        checksums.NAME,
        "_CHECKPOINT_METADATA",
        "_METADATA",
        "_sharding",
        "commit_success.txt",
        "orbax.checkpoint",
        "state",
        "d",
    ),
    *("manifest.ocdbt", "ocdbt.process_*", "array_metadatas", "process_*", "[0-9a-f]" * 32),
)


def may_become(target: Path, sources: list[Path], overwrite: bool) -> None:
    """
    Raises:
      CheckpointError: a target that overlaps a source, exists and shall not be replaced, or is no
        checkpoint or more than one.
    """
    for source in sources:
        a, b = target.resolve(), source.resolve()
        if a == b or a.is_relative_to(b) or b.is_relative_to(a):
            raise CheckpointError(
                f"{target} is, holds or lies in the source {source}; name another folder"
            )
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} exists and is no folder; name another one")
    if not overwrite:
        raise CheckpointError(f"{target} exists; --overwrite replaces it")
    if os.path.ismount(target):
        raise CheckpointError(
            f"{target} is a mount point, which cannot be replaced; name a folder in it"
        )
    if not any(target.iterdir()):
        return
    record = _record(target)
    unknown = list(_unknown(target, record))
    if record is None and not _hugging_face(target) and not _adapter(target):
        what = "no checkpoint of a model that is known here"
    elif unknown:
        what = "more than a checkpoint"
    else:
        return
    more = f": {listed(unknown)}" if unknown else ""
    raise CheckpointError(
        f"{target} exists and holds {what}, so it is not replaced{more}; name another folder"
    )


def _record(folder: Path) -> dict[str, Any] | None:
    """What we said of a folder that we wrote."""
    try:
        record = read_json(folder / RECORD)
        from_json(record["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def _hugging_face(folder: Path) -> bool:
    try:
        family_of(read_json(folder / "config.json"), folder)
    except (OSError, CheckpointError):
        return False
    return any((folder / name).is_file() for name in _WEIGHTS)


def _adapter(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ADAPTER)


def _unknown(folder: Path, record: dict[str, Any] | None) -> Iterator[str]:
    """What is no part of a checkpoint; of one that we wrote, what came along is a part."""
    carried = (record or {}).get("files")
    alone = ADAPTER if record is None and not (folder / "config.json").exists() else ()
    known = {*_WEIGHTS, *_BESIDE, *alone} | {
        n for n in (carried if isinstance(carried, list) else ()) if isinstance(n, str)
    }
    for entry in sorted(folder.iterdir()):
        if (
            record is not None
            and entry.name == _PARAMS
            and entry.is_dir()
            and not entry.is_symlink()
        ):
            for file in sorted(entry.rglob("*")):
                if not any(fnmatchcase(file.name, pattern) for pattern in _ORBAX):
                    yield str(file.relative_to(folder))
        elif not entry.is_file():
            yield entry.name + ("/" if entry.is_dir() else "")
        elif entry.name not in known and not fnmatchcase(entry.name, _SHARDS):
            yield entry.name
