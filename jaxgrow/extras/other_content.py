"""Does a folder hold other things than a checkpoint, which no new checkpoint may replace?"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from jaxgrow.checkpoints.hf.registry import DIAGNOSES
from jaxgrow.checkpoints.hf.storage import family_of
from jaxgrow.checkpoints.io import checksums
from jaxgrow.checkpoints.io.files import (
    ADAPTER,
    PARAMS,
    RECORD,
    TEMPLATES,
    CheckpointError,
    inside,
    listed,
    read_json,
)
from jaxgrow.models import from_json
from jaxgrow.typed import Json

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SHARDS = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
# Files that are written or downloaded together with the weights of a model. Optimizer states, logs
# and weights of other frameworks are not listed, because the folder may hold their only copy.
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
# Names of files in an Orbax folder of parameters, at every level.
_ORBAX = (
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


def other_content(target: Path) -> str:
    """Describe the other content of a folder; the empty text if it holds only a checkpoint."""
    record = _record(target)
    unknown = list(_unknown(target, record))
    if record is None and not _hugging_face(target) and not _adapter(target):
        what = "no checkpoint of a supported model"
    elif unknown:
        what = "other files besides a checkpoint"
    else:
        return ""
    more = f": {listed(unknown)}" if unknown else ""
    return f"holds {what}, so it is not replaced{more}"


def _record(folder: Path) -> Json | None:
    """Return the ``jaxgrow.json`` of a folder that jaxgrow wrote, or None."""
    try:
        record = read_json(inside(folder, RECORD))
        from_json(record["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def _hugging_face(folder: Path) -> bool:
    try:
        family_of(read_json(inside(folder, "config.json")), folder)
    except (OSError, CheckpointError):
        return False
    return any((folder / name).is_file() for name in _WEIGHTS)


def _adapter(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ADAPTER)


def _unknown(folder: Path, record: Json | None) -> Iterator[str]:
    """Yield the paths in a folder that do not belong to a checkpoint.

    If jaxgrow wrote the folder, the files that it copied belong to the checkpoint.
    """
    carried = (record or {}).get("files")
    alone = ADAPTER if record is None and not (folder / "config.json").exists() else ()
    known = {*_WEIGHTS, *_BESIDE, *alone} | {
        n for n in (carried if isinstance(carried, list) else ()) if isinstance(n, str)
    }
    for entry in sorted(folder.iterdir()):
        if (
            record is not None
            and entry.name == PARAMS
            and entry.is_dir()
            and not entry.is_symlink()
        ):
            for file in sorted(entry.rglob("*")):
                if not any(fnmatchcase(file.name, pattern) for pattern in _ORBAX):
                    yield str(file.relative_to(folder))
        elif entry.name == TEMPLATES and entry.is_dir() and not entry.is_symlink():
            for file in sorted(entry.rglob("*")):
                if file.suffix != ".jinja" or not file.is_file():
                    yield str(file.relative_to(folder))
        elif not entry.is_file():
            yield entry.name + ("/" if entry.is_dir() else "")
        elif entry.name not in known and not fnmatchcase(entry.name, _SHARDS):
            yield entry.name


DIAGNOSES.add("other content", other_content)
