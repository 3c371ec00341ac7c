"""Special tokens: which tokens begin and end the texts of a model, and its chat template.

The files next to a tokenizer decide, as in `transformers`:

=================== ==========================================================================
generated texts end ``eos_token_id`` of ``generation_config.json``, or else of ``config.json``
documents end       ``eos_token`` of ``tokenizer_config.json`` or ``special_tokens_map.json``
texts begin         ``bos_token`` of these files; without one, the token that ends documents
prompts             the post-processor of ``tokenizer.json`` adds tokens to each; a tokenizer
                    without this file has ``add_bos_token`` and ``add_eos_token``
=================== ==========================================================================

The names of tokens are used only if these files are missing, as with a lone ``tokenizer.json``. In
an Orbax folder, ``jaxgrow.json`` contains the ``config.json`` of the Hugging Face model that it was
made from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxgrow.checkpoints.io.files import RECORD
from train.common.errors import UserError
from train.common.files import appears_whole, checked_json, write_json

END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "[SEP]")
_BEGINS = ("<|begin_of_text|>", "<s>", END, "[CLS]", *ENDS)
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_GENERATION = "generation_config.json"
FILES = (_CONFIG, _MAP, _TEMPLATE, _GENERATION)  # the files that belong to a tokenizer
_IDS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Special:
    """The special tokens of a tokenizer."""

    begin: int | None  # precedes a text without context
    end: int | None  # follows each document
    ends: tuple[int, ...]  # each of them ends a generated text
    names: dict[str, str] = field(default_factory=dict)  # role, such as bos_token -> token
    template: str | None = None  # the chat template, for Jinja


def special_tokens(tokenizer: Any, folder: Path | None) -> Special:
    """The special tokens of a tokenizer.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      folder: the folder of its files; None: the tokenizer is the only file.

    Raises:
      UserError: one of the files is damaged.
    """
    own = _settings(folder, _CONFIG, _MAP)
    model = _of_model(folder)
    names = {role: name for role in _ROLES if (name := _named(own, role)) is not None}
    begin = _of_role(tokenizer, own, model, "bos")
    end = _of_role(tokenizer, own, model, "eos")
    ends_of_files = (_ids(tokenizer, file.get("eos_token_id")) for file in model)
    ends = next((ids for ids in ends_of_files if ids), ())
    if not own:
        begin = _first(tokenizer, _BEGINS) if begin is None else begin
        end = _first(tokenizer, ENDS) if end is None else end
    begin = end if begin is None else begin
    return Special(
        begin, end, ends or (() if end is None else (end,)), names, _template(folder, own)
    )


def set_up(tokenizer: Any, folder: Path) -> None:
    """Add the special tokens of a folder to its tokenizer of ``vocab.json`` and ``merges.txt``.

    The tokenizer then adds them to texts if the files in the folder say so.

    Raises:
      UserError: one of the files is damaged.
    """
    from tokenizers import AddedToken, processors

    own = _settings(folder, _CONFIG, _MAP)
    names = {END, *(name for role in _ROLES if (name := _named(own, role)) is not None)}
    for file in own:
        names |= {
            token["content"]
            for token in file.get("added_tokens_decoder", {}).values()
            if token.get("special")
        }
    there = [name for name in sorted(names) if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in there])
    sides = []
    for setting, role in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        adds = any(file.get(setting) for file in own) and _named(own, role) in there
        sides.append(_named(own, role) if adds else None)
    if any(sides):
        before, after = sides
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in {*sides} - {None}],
        )


def copied(source: Path | None, target: Path) -> None:
    """Copy the files that define a tokenizer's special tokens and chat template, if they exist.

    ``target`` has a ``config.json`` of its own, so the token ids of the other one are written to
    ``generation_config.json``.
    """
    if source is None:
        return
    for name in FILES:
        if (file := source / name).is_file():
            with appears_whole(target / name) as part:
                part.write_bytes(file.read_bytes())
    ids = {}
    for about in reversed(_of_model(source)):  # the first file that has an id decides
        ids |= {key: about[key] for key in _IDS if about.get(key) is not None}
    generation = next(iter(_settings(source, _GENERATION)), {})
    if not ids.items() <= generation.items():
        write_json(target / _GENERATION, generation | ids)


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer adds before and after a text."""
    encoded = tokenizer.encode("a")
    added = encoded.special_tokens_mask
    before = next((i for i, special in enumerate(added) if not special), len(added))
    after = next((i for i, special in enumerate(reversed(added)) if not special), 0)
    return encoded.ids[:before], encoded.ids[len(added) - after :]


def frame_of_pairs(tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """The tokens that the tokenizer adds before, between and after two texts."""
    encoded = tokenizer.encode("a", "b")
    first = [i for i, text in enumerate(encoded.sequence_ids) if text == 0]
    second = [i for i, text in enumerate(encoded.sequence_ids) if text == 1]
    if not first or not second:
        return [], [], []
    return (
        encoded.ids[: first[0]],
        encoded.ids[first[-1] + 1 : second[0]],
        encoded.ids[second[-1] + 1 :],
    )


def _of_model(folder: Path | None) -> list[dict[str, Any]]:
    """The files of a model that may have the ids of special tokens."""
    records = (record.get("huggingface") for record in _settings(folder, RECORD))
    found = _settings(folder, _GENERATION, "config.json")
    return found + [record for record in records if isinstance(record, dict)]


def _settings(folder: Path | None, *names: str) -> list[dict[str, Any]]:
    """The content of the files that exist."""
    found = []
    for name in names:
        if folder is None or not (file := folder / name).is_file():
            continue
        try:
            found.append(checked_json(file.read_bytes(), ()))
        except ValueError as error:
            raise UserError(f"{file} is damaged: {error}; download or copy it again") from error
    return found


def _named(own: Sequence[dict[str, Any]], role: str) -> str | None:
    """The token of a role, as the first file that has the role names it."""
    token = next((file[role] for file in own if role in file), None)
    return token["content"] if isinstance(token, dict) else token


def _of_role(
    tokenizer: Any, own: Sequence[dict[str, Any]], model: Sequence[dict[str, Any]], role: str
) -> int | None:
    """The token that begins or ends texts.

    The model's files decide if the tokenizer's files do not have the role.
    """
    if any(f"{role}_token" in file for file in own):
        name = _named(own, f"{role}_token")
        return None if name is None else tokenizer.token_to_id(name)
    found = (_ids(tokenizer, file.get(f"{role}_token_id")) for file in model)
    return next((ids[0] for ids in found if ids), None)


def _ids(tokenizer: Any, given: Any) -> tuple[int, ...]:
    """The ids of a setting, which is null, a number or a list; unknown ids are left out."""
    numbers: Iterator[Any] = iter(given if isinstance(given, list) else [given])
    return tuple(
        i for i in numbers if isinstance(i, int) and i >= 0 and tokenizer.id_to_token(i) is not None
    )


def _first(tokenizer: Any, names: Sequence[str]) -> int | None:
    return next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)


def _template(folder: Path | None, own: Sequence[dict[str, Any]]) -> str | None:
    if folder is not None and (file := folder / _TEMPLATE).is_file():
        return file.read_text("utf-8")
    given = next((file["chat_template"] for file in own if file.get("chat_template")), None)
    if isinstance(given, list):
        given = next((each["template"] for each in given if each.get("name") == "default"), None)
    return given
