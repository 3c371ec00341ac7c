"""Special tokens: which tokens begin and end the texts of a model, and its chat template.

The files next to a tokenizer decide, as in `transformers`:

=================== ==========================================================================
generated texts end ``eos_token_id`` of ``generation_config.json``, or else of ``config.json``
documents end       ``eos_token`` of ``tokenizer_config.json`` or ``special_tokens_map.json``
texts begin         ``bos_token`` of these files; without one, the token that ends documents
prompts, documents  the post-processor of ``tokenizer.json`` adds tokens to each; if it adds none,
                    ``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` do
=================== ==========================================================================

The names of tokens are used only if these files are missing, as with a lone ``tokenizer.json``. In
an Orbax folder, ``jaxgrow.json`` contains the ``config.json`` of the Hugging Face model that it was
made from.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxgrow.checkpoints.io.files import RECORD
from jaxgrow.checkpoints.io.folders import atomic_file
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.files import write_record
from train.data.windows import Vocabulary
from train.extras.decoding import in_folder, json_object, read_regular, readable_file
from train.extras.tokenizers.tokenizer import ENDS, DocumentFrame

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = ENDS[0]
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
_OUT = "download or copy it again"
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


def special_tokens(tokenizer: "Tokenizer", folder: Path | None) -> Special:
    """The special tokens of a tokenizer.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      folder: the folder of its files; None: the tokenizer is the only file.

    Raises:
      UserError: one of the files is damaged.
    """
    with readable_file(folder or "the tokenizer", _OUT):
        return _special_tokens(tokenizer, folder)


def _special_tokens(tokenizer: "Tokenizer", folder: Path | None) -> Special:
    own = _existing_settings(folder, _CONFIG, _MAP)
    model = _of_model(folder)
    names = {role: name for role in _ROLES if (name := _role_token(own, role)) is not None}
    begin = _of_role(tokenizer, own, model, "bos")
    end = _of_role(tokenizer, own, model, "eos")
    ends_of_files = (_known_ids(tokenizer, file.get("eos_token_id")) for file in model)
    ends = next((ids for ids in ends_of_files if ids), ())
    if not own:
        begin = _first(tokenizer, _BEGINS) if begin is None else begin
        end = _first(tokenizer, ENDS) if end is None else end
    begin = end if begin is None else begin
    return Special(
        begin, end, ends or (() if end is None else (end,)), names, _template(folder, own)
    )


def set_up(tokenizer: "Tokenizer", folder: Path) -> None:
    """Add the special tokens of a folder to its tokenizer of ``vocab.json`` and ``merges.txt``.

    The tokenizer then adds them to texts if a setting in the files of the folder requires it.

    Raises:
      UserError: one of the files is damaged.
    """
    from tokenizers import AddedToken

    own = _existing_settings(folder, _CONFIG, _MAP)
    names = {END, *(name for role in _ROLES if (name := _role_token(own, role)) is not None)}
    for file in own:
        names |= {
            token["content"]
            for token in file.get("added_tokens_decoder", {}).values()
            if token.get("special")
        }
    there = [name for name in sorted(names) if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in there])
    frame_as_files_say(tokenizer, folder)


def frame_as_files_say(tokenizer: "Tokenizer", folder: Path) -> None:
    """Add the tokens of ``add_bos_token`` and ``add_eos_token`` to each text.

    A post-processor that adds tokens is left as it is: it already describes the frame.

    Raises:
      UserError: one of the files is damaged.
    """
    from tokenizers import processors

    own = _existing_settings(folder, _CONFIG, _MAP)
    sides = []
    for setting, role in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        name = _role_token(own, role)
        adds = any(file.get(setting) for file in own)
        known = adds and name is not None and tokenizer.token_to_id(name) is not None
        sides.append(name if known else None)
    if any(sides) and not any(added_tokens(tokenizer)):
        before, after = sides
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in {*sides} - {None}],
        )


def read_as_text(tokenizer: "Tokenizer", folder: Path | None) -> None:
    """Let a tokenizer encode the names of special tokens in a text as any other characters.

    A text from a file may contain ``<|endoftext|>``. It must not end a document. Only chat
    templates make control tokens (`train.extras.bounded.BoundedTokenizer.encode_one`).

    Raises:
      UserError: one of the files is damaged.
    """
    from tokenizers import AddedToken

    special = special_tokens(tokenizer, folder)
    ids = {special.begin, special.end, *special.ends} - {None}
    names = {*_BEGINS, *special.names.values(), *map(tokenizer.id_to_token, ids)}
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    # Some files declare their end of text as an ordinary added token, which would still be found.
    plain = [name for name in sorted(names) if name in added and not added[name].special]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in plain])
    tokenizer.encode_special_tokens = True


def text_encoder(tokenizer: "Tokenizer") -> "Tokenizer":
    """The tokenizer for texts: it gives the same ids as ``tokenizer``, but never special tokens.

    Some models, such as Unigram, find the names of special tokens among their own pieces. In their
    copy, these pieces have a name with NUL, which no text contains.
    """
    special = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    about = json.loads(tokenizer.to_str())
    model = about["model"]
    unknown = tokenizer.token_to_id(model.get("unk_token") or "")
    found = {
        name
        for i, name in special.items()
        if i not in (unknown, model.get("unk_id"))
        and i in tokenizer.encode(name, add_special_tokens=False).ids
    }
    if not found:
        return tokenizer
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {f"\0{t}" if t in found else t: i for t, i in vocab.items()}
    else:
        model["vocab"] = [[f"\0{t}" if t in found else t, score] for t, score in vocab]
    about["added_tokens"] = [t for t in about["added_tokens"] if t["content"] not in found]
    copy = type(tokenizer).from_str(json.dumps(about | {"post_processor": None}))
    copy.encode_special_tokens = True
    return copy


def largest_vocab(tokenizer: "Tokenizer") -> int:
    """One more than the largest id. Ids may have holes, so the number of tokens can be smaller."""
    before, after = added_tokens(tokenizer)
    return 1 + max((*tokenizer.get_vocab(with_added_tokens=True).values(), *before, *after))


def written_frame(frame: DocumentFrame, tokenizer: "Tokenizer") -> str:
    """A frame in words: ``<s> .. </s>``; empty if it has no tokens."""
    names = [[tokenizer.id_to_token(i) or str(i) for i in part] for part in frame]
    return " ".join((*names[0], "..", *names[1])) if any(names) else ""


def document_frame(
    tokenizer: "Tokenizer", folder: Path | None, bos: bool | Literal["auto"] = "auto"
) -> DocumentFrame:
    """The frame of each document: the tokens that the tokenizer adds to a text.

    Without such tokens, the end of text ends documents.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      folder: the folder of its files, as for `special_tokens`.
      bos: whether a token begins each document; "auto": as the tokenizer's files say.

    Raises:
      UserError: ``bos`` is True, but the tokenizer lacks a token that begins texts.
    """
    special = special_tokens(tokenizer, folder)
    before, after = added_tokens(tokenizer)
    if bos is True and not before:
        if special.begin is None:
            raise UserError(
                f"data.bos=true, but the tokenizer has no token that begins texts ({', '.join(_BEGINS)}): name it as "
                f"bos_token in {_CONFIG}, or set data.bos=auto"
            )
        before = [special.begin]
    if not after and special.end is not None:
        after = [special.end]
    return DocumentFrame(tuple(before) if bos else (), tuple(after))


def document_marks(tokenizer: "Tokenizer", folder: Path | None) -> DocumentFrame:
    """The tokens that begin or end a document within token ids, at most one of each.

    A token that has both roles ends documents. `document_frame` describes the arguments.
    """
    begin, end = document_frame(tokenizer, folder)
    first = special_tokens(tokenizer, folder).begin
    begin = begin[:1] or (() if first is None else (first,))
    return DocumentFrame(tuple(i for i in begin if i not in end), end[-1:])


def copy_special_files(source: Path | None, target: Path) -> None:
    """Copy the files that define a tokenizer's special tokens and chat template, if they exist.

    ``target`` has another ``config.json`` than ``source``, so the token ids of ``source`` are
    written to ``generation_config.json``.
    """
    if source is None:
        return
    for name in FILES:
        if os.path.lexists(file := source / name):
            with readable_file(file, _OUT):
                content = read_regular(in_folder(source, file))
            with atomic_file(target / name) as part:
                part.write_bytes(content)
    ids = {}
    for about in reversed(_of_model(source)):  # the first file that has an id decides
        ids |= {key: about[key] for key in _IDS if about.get(key) is not None}
    generation = next(iter(_existing_settings(source, _GENERATION)), {})
    if not ids.items() <= generation.items():
        write_record(target / _GENERATION, generation | ids)


def added_tokens(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer adds before and after a text."""
    encoded = tokenizer.encode("a")
    added = encoded.special_tokens_mask
    before = next((i for i, special in enumerate(added) if not special), len(added))
    after = next((i for i, special in enumerate(reversed(added)) if not special), 0)
    return encoded.ids[:before], encoded.ids[len(added) - after :]


def frame_of_pairs(tokenizer: "Tokenizer") -> tuple[list[int], list[int], list[int]]:
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


def _of_model(folder: Path | None) -> list[Json]:
    """The files of a model that may have the ids of special tokens."""
    records = (record.get("huggingface") for record in _existing_settings(folder, RECORD))
    found = _existing_settings(folder, _GENERATION, "config.json")
    return found + [record for record in records if isinstance(record, dict)]


def _existing_settings(folder: Path | None, *names: str) -> list[Json]:
    """The content of the files that exist."""
    if folder is None:
        return []
    there = [folder / name for name in names if os.path.lexists(folder / name)]
    found = []
    for file in there:
        with readable_file(file, _OUT):
            found.append(json_object(in_folder(folder, file), _OUT))
    return found


def _role_token(own: Sequence[Json], role: str) -> str | None:
    """The token of a role, as the first file that has the role names it."""
    token = next((file[role] for file in own if role in file), None)
    return token["content"] if isinstance(token, dict) else token


def _of_role(
    tokenizer: "Tokenizer", own: Sequence[Json], model: Sequence[Json], role: str
) -> int | None:
    """The token that begins or ends texts.

    The model's files decide if the tokenizer's files do not have the role.
    """
    if any(f"{role}_token" in file for file in own):
        name = _role_token(own, f"{role}_token")
        return None if name is None else tokenizer.token_to_id(name)
    found = (_known_ids(tokenizer, file.get(f"{role}_token_id")) for file in model)
    return next((ids[0] for ids in found if ids), None)


def _known_ids(tokenizer: "Tokenizer", given: object) -> tuple[int, ...]:
    """The ids of a setting, which is null, a number or a list; unknown ids are left out."""
    numbers: Iterator[object] = iter(given if isinstance(given, list) else [given])
    return tuple(
        i for i in numbers if isinstance(i, int) and i >= 0 and tokenizer.id_to_token(i) is not None
    )


def _first(tokenizer: "Tokenizer", names: Sequence[str]) -> int | None:
    return next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)


def _template(folder: Path | None, own: Sequence[Json]) -> str | None:
    if folder is not None and os.path.lexists(file := folder / _TEMPLATE):
        return read_regular(in_folder(folder, file)).decode()
    given = next((file["chat_template"] for file in own if file.get("chat_template")), None)
    if isinstance(given, list):
        given = next((each["template"] for each in given if each.get("name") == "default"), None)
    return given


# --- masked models ---

_NEVER_MASKED = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<pad>", "<unk>", "<mask>"),
    "<|endoftext|>",
)
# How byte-level tokenizers write blank, newline, tab and carriage return.
_SPACES = ("Ġ", "Ċ", "ĉ", "č")


def masking_vocabulary(tokenizer: "Tokenizer") -> Vocabulary:
    """The vocabulary of a `tokenizers.Tokenizer` that has a mask token.

    In WordPiece, ``##`` marks a token that continues a word; in byte-level BPE, ``Ġ`` marks a token
    that begins one. In other tokenizers, words are unknown.

    Raises:
      UserError: the tokenizer has no mask token.
    """
    mask = next(
        (i for t in ("[MASK]", "<mask>") if (i := tokenizer.token_to_id(t)) is not None), None
    )
    if mask is None:
        raise UserError(
            "the tokenizer has no [MASK] or <mask>: take the tokenizer of a BERT or RoBERTa, or 'bytes'"
        )
    size = largest_vocab(tokenizer)
    known = (tokenizer.token_to_id(t) for t in _NEVER_MASKED)
    special = {i for i in known if i is not None}
    special |= {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    # Ids may have holes, which no text has, so they are never a random replacement.
    special |= {i for i in range(size) if tokenizer.id_to_token(i) is None}
    pieces = [tokenizer.id_to_token(i) or "" for i in range(size)]
    if any(piece.startswith("##") for piece in pieces):
        continues = np.array([piece.startswith("##") for piece in pieces])
    elif any(piece.startswith("Ġ") for piece in pieces):
        continues = np.array([not piece.startswith(_SPACES) for piece in pieces])
    else:
        return Vocabulary(size, mask, frozenset(special))
    continues[list(special)] = False
    return Vocabulary(size, mask, frozenset(special), continues)
