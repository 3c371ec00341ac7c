"""How are the tokens of a model read from the tokenizer files in its folder?"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from jaxgrow.checkpoints.io.files import LARGEST_EXTRA, inside, read_json, spelt
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.typed import Json


def tokenizer_notes(first: Checkpoint, second: Checkpoint) -> list[str]:
    """A note if token ids mean different tokens in two models, by the tokenizers in their folders."""
    a, b = (tokens_of(model.folder) for model in (first, second))
    other = [i for i in a.keys() & b.keys() if a[i] != b[i]]
    if not other:
        return []
    i = min(other)
    return [
        f"the tokenizers in {first.folder} and {second.folder} differ, so {len(other):,} token ids "
        f"mean different tokens: {i}, for example, means {spelt(a[i])} in the first and "
        f"{spelt(b[i])} in the second. The two models should have the same tokenizer"
    ]


def tokens_of(folder: Path) -> dict[int, str]:
    """The tokens of the tokenizer in a folder by their ids; empty without a tokenizer.

    They are the tokens of ``tokenizer.json`` or ``vocab.json``, and the added tokens of
    ``added_tokens.json`` and ``tokenizer_config.json``. A tokenizer that is not valid is an error only
    where it is used.
    """
    found: dict[int, str] = {}
    for name, tokens in _TOKENS.items():
        # The first file that has a token for an id decides, and tokenizer.json replaces vocab.json.
        if name == "vocab.json" and found:
            continue
        with suppress(OSError, AttributeError, LookupError, TypeError, ValueError):
            pairs = tokens(read_json(inside(folder, name), LARGEST_EXTRA))
            found = {int(i): token for i, token in pairs if isinstance(token, str)} | found
    return found


def _of_tokenizer(content: Json) -> list[tuple[int | str, object]]:
    """The ids and tokens of a ``tokenizer.json``."""
    vocab = content["model"]["vocab"]
    pairs = (
        vocab.items() if isinstance(vocab, dict) else ((t, i) for i, (t, *_) in enumerate(vocab))
    )
    added = [(token["id"], token["content"]) for token in content.get("added_tokens", [])]
    return [*((i, token) for token, i in pairs), *added]


# Functions that return the pairs of ids and tokens of a file.
_TOKENS: dict[str, Callable[[Json], Iterable[tuple[int | str, object]]]] = {
    "tokenizer.json": _of_tokenizer,
    "vocab.json": lambda content: [(i, token) for token, i in content.items()],
    "added_tokens.json": lambda content: [(i, token) for token, i in content.items()],
    "tokenizer_config.json": lambda content: [
        (i, token["content"]) for i, token in content["added_tokens_decoder"].items()
    ],
}
