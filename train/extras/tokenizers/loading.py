"""Tokenizers of the library `tokenizers`: how are they read, checked, and written beside a model?"""

import hashlib
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from jaxgrow.checkpoints.io.checksums import sha256
from jaxgrow.checkpoints.io.folders import atomic_file
from jaxgrow.models import Config
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.common.files import write_record
from train.extras.bounded import BoundedTokenizer, check_tokenizer
from train.extras.decoding import readable_file
from train.extras.tokenizers.cutting import TextEncoder, cut_document
from train.extras.tokenizers.special import (
    END,
    copy_special_files,
    document_frame,
    frame_as_files_say,
    largest_vocab,
    masking_vocabulary,
    read_as_text,
    set_up,
    special_tokens,
    text_encoder,
    written_frame,
)
from train.extras.tokenizers.tokenizer import BYTE_TOKENIZER, Encode, Tokenizer


def load_tokenizer(name: str) -> Any:
    """The `tokenizers.Tokenizer` of a name.

    Args:
      name: a file ``tokenizer.json``, a folder with ``vocab.json`` and ``merges.txt``, or
        ``"bytes"`` for a tokenizer that gives the same tokens as `Data.tokenizer` ``"bytes"``.

    Raises:
      UserError: the tokenizer does not exist or cannot be read.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if name == "bytes":
        return _byte_tokenizer()
    path = Path(name).expanduser()
    try:
        with readable_file(path):
            check_tokenizer(path, tokenizer_files(path))
            if path.is_dir():
                loaded = tokenizers.Tokenizer(
                    models.BPE.from_file(*map(str, tokenizer_files(path)))
                )
                loaded.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
                loaded.decoder = decoders.ByteLevel()  # type: ignore[assignment]
            else:
                loaded = tokenizers.Tokenizer.from_file(str(path))
                # The saved settings would cut documents to the context of another model.
                loaded.no_truncation()
                loaded.no_padding()
    except UserError as error:
        raise UserError(
            f"no tokenizer at {path} ({error}): give a tokenizer.json, or a folder of vocab.json and merges.txt"
        ) from error
    with readable_file(path, "download or copy the tokenizer again"):
        if path.is_dir():
            set_up(loaded, path)
        else:
            frame_as_files_say(loaded, path.parent)
        read_as_text(loaded, folder_of(name))
    return loaded


def _byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the bytes of UTF-8.

    Byte 0, which does not occur in text, ends documents.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    # A byte-level BPE writes bytes as printable characters: a printable byte as itself, the others
    # as the characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    spelt = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    vocab = {_NAMED_BYTES.get(b, character): b for character, b in spelt.items()}
    bpe = tokenizers.Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bpe.add_special_tokens([AddedToken(END, special=True)])
    return bpe


# The roles of bytes that do not occur in text (`train.data.windows.BYTES`,
# `train.extras.labelled.encoding`).
_NAMED_BYTES = {0x00: END, 0xC0: "[CLS]", 0xC1: "[PAD]", 0xFF: "[MASK]"}


def folder_of(name: str) -> Path | None:
    """The folder of a tokenizer's files; None for "bytes"."""
    path = Path(name).expanduser()
    return None if name == "bytes" else path if path.is_dir() else path.parent


def tokenizer_of(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` in the folder of a model.

    Raises:
      UserError: the folder has no tokenizer.
    """
    if (file := folder / "tokenizer.json").is_file():
        return load_tokenizer(str(file))
    if (folder / "vocab.json").is_file():
        return load_tokenizer(str(folder))
    raise UserError(
        f"there is no tokenizer.json in {folder}, nor vocab.json and merges.txt; name a tokenizer with --tokenizer, or bytes"
    )


def name_of(folder: Path) -> str:
    """The value of `Data.tokenizer` for the tokenizer in the folder of a model.

    Raises:
      UserError: the folder has no tokenizer.
    """
    if tokenizer_of(folder).get_vocab() == _byte_tokenizer().get_vocab():
        return "bytes"
    file = folder / "tokenizer.json"
    return str(file if file.is_file() else folder)


def tokenizer_files(path: Path) -> list[Path]:
    """The files of a tokenizer, which is ``tokenizer.json`` or the folder of the older two files."""
    return [path / "vocab.json", path / "merges.txt"] if path.is_dir() else [path]


# For each role of a special token, the spellings that identify it.
_ROLES = {
    "pad_token": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_OF_MASKED = ("cls_token", "sep_token", "mask_token")


def write_tokenizer(run: Path, config: Config, folder: Path) -> Json:
    """Write the tokenizer for `transformers`.

    Returns:
      The entries of ``config.json`` about the special tokens.
    """
    tokenizer = tokenizer_of(run)
    save_tokenizer(tokenizer, folder)
    special = special_tokens(tokenizer, run)
    roles = {role for role in _ROLES if config.masked or role not in _OF_MASKED}
    named = {}
    for role, names in _ROLES.items():
        existing = (name for name in names if tokenizer.token_to_id(name) is not None)
        if role in roles and (name := next(existing, None)):
            named[role] = name
    # Texts of decoders do not have these roles.
    of_bert = {named.get("cls_token"), named.get("sep_token")} & {"[CLS]", "[SEP]"}
    ends = {} if of_bert else {"bos_token_id": special.begin, "eos_token_id": special.end}
    named |= {
        role.removesuffix("_id"): tokenizer.id_to_token(i)
        for role, i in ends.items()
        if i is not None
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.length,
        **named,
        **special.names,
    }
    about |= {} if special.template is None else {"chat_template": special.template}
    write_record(folder / "tokenizer_config.json", about | {"clean_up_tokenization_spaces": False})
    if "pad_token" in named and (config.causal or config.first_position == 0):
        ends["pad_token_id"] = tokenizer.token_to_id(named["pad_token"])
    found: Json = {role: i for role, i in ends.items() if i is not None}
    if "eos_token_id" in found and len(special.ends) > 1:  # several tokens end generated texts
        found["eos_token_id"] = list(special.ends)
    return found


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    with atomic_file(folder / "tokenizer.json") as part:
        tokenizer.save(str(part))


def named_tokenizer(name: str, bos: bool | Literal["auto"] = "auto") -> Tokenizer:
    """The tokenizer of ``data.tokenizer``.

    Args:
      name: "bytes", or a file or folder, as for `load_tokenizer`.
      bos: whether a token begins each document; "auto": as the tokenizer's files say.

    Raises:
      UserError: it does not exist or cannot be read.
    """
    if name == "bytes":
        return BYTE_TOKENIZER
    loaded = load_tokenizer(name)
    files = [sha256(file) for file in tokenizer_files(Path(name).expanduser())]
    frame = document_frame(loaded, folder_of(name), bos)
    plain = text_encoder(loaded)

    def started(threads: int = 1) -> TextEncoder:
        return TextEncoder(BoundedTokenizer(plain, name, threads))

    def encoder(threads: int) -> Encode:
        texts = started(threads)
        return lambda pieces, begins: (texts(pieces, begins), frame)

    return Tokenizer(
        vocab=largest_vocab(loaded),
        files=files,
        identity=hashlib.sha256("".join(files).encode()).hexdigest(),
        rule=["plain text, cut at boundaries, with begins", frame],
        encoder=encoder,
        masking=lambda: masking_vocabulary(loaded),
        cut=partial(cut_document, encoder=cache(started)),
        frame=frame,
        written=written_frame(frame, loaded),
        parallel=True,
    )


def copy_tokenizer(name: str, folder: Path) -> None:
    """Write a tokenizer, perhaps "bytes", and the files of its special tokens to a folder."""
    save_tokenizer(load_tokenizer(name), folder)
    copy_special_files(folder_of(name), folder)


def frame_of_model(folder: Path) -> str:
    """`Tokenizer.written` of the tokenizer in the folder of a model.

    Raises:
      UserError: the folder has no tokenizer, or a damaged one.
    """
    loaded = tokenizer_of(folder)
    return written_frame(document_frame(loaded, folder), loaded)
