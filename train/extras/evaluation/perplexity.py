"""Perplexity of texts, in sliding windows of the model's context length.

The texts are local files, which are not preprocessed. lm-eval's task ``wikitext`` gives different
numbers, because it removes the spaces around punctuation marks and scores each article separately.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from jaxgrow.typed import Json
from jaxgrow.untrusted import file_limits
from train.common.errors import UserError
from train.extras.decoding import ENDINGS, in_folder, readable_file
from train.extras.evaluation.scoring import Scorer
from train.extras.text import formats

# Name of a text -> its published files, in the order of the search.
TEXTS: dict[str, tuple[str, ...]] = {
    "wikitext2": ("wiki.test.raw", "wiki.valid.raw"),
    "wikitext103": ("wiki.test.raw", "wiki.valid.raw"),
    "ptb": ("ptb.test.txt", "ptb.valid.txt"),
    "bits_per_byte": ("*.txt",),
}


def is_text(name: str) -> bool:
    """Whether a task is the perplexity of a text: one of `TEXTS`, or a file."""
    return name in TEXTS or Path(name).is_file()


def files_of(name: str, folder: Path) -> list[Path]:
    """The files of a text, in ``folder`` or in its subfolder ``name``; or the file ``name`` itself.

    Raises:
      UserError: the files do not exist.
    """
    if name not in TEXTS:
        return [Path(name)]
    for pattern in TEXTS[name]:
        for where in (folder / name, folder):
            if files := files_matching(where, pattern):
                return files
    raise UserError(
        f"{name} needs {' or '.join(TEXTS[name])}, perhaps compressed, in {folder / name} or {folder}; nothing is "
        "downloaded: put it there, or name another folder with --data"
    )


def files_matching(folder: Path, pattern: str) -> list[Path]:
    """The files that match, perhaps compressed.

    Raises:
      UserError: one of them is a link that leads out of the folder.
    """
    found = sorted({file for end in ENDINGS for file in folder.glob(pattern + end)})
    with readable_file(folder):
        for file in found:
            in_folder(folder, file)
    return found


def _whole_text(file: Path) -> str:
    parts: list[str] = []
    size = 0
    for part in formats.text_pieces(file):
        size += len(part)
        file_limits().check(f"{file}, or its first part,", bytes=size)
        parts.append(part)
    return "".join(parts)


def text_perplexity(scorer: Scorer, files: Iterable[Path], stride: int | None = None) -> Json:
    """Measure how well a model predicts texts.

    ================== ===================================================================================
    perplexity         ``exp(nats / tokens)``, which depends on the tokenizer
    perplexity_by_word ``exp(nats / words)``; words are separated by white space
    bits_per_byte      ``nats / (bytes ln 2)``, of UTF-8
    ================== ===================================================================================

    Args:
      scorer: the model.
      files: the files; each is a text.
      stride: tokens between two windows; None: the context length.

    Raises:
      UserError: the model is masked, the stride is longer than the context, or the files have no
        text.
    """
    files = list(files)
    if scorer.masked:
        raise UserError(
            "a masked model has no perplexity of running text; evaluate it on pairs or choices, such as blimp"
        )
    if stride is not None and not 1 <= stride <= scorer.config.length:
        raise UserError(
            f"--stride is {stride}, not between 1 and the context of {scorer.config.length} tokens"
        )
    nats = 0.0
    tokens = 0
    words = 0
    size = 0
    for file in files:
        # As in the corpora that models are trained on, a byte-order mark is not part of the text.
        text = _whole_text(file).removeprefix("\ufeff")
        requests = scorer.windows(text, stride)
        nats += sum(score.loss for score in scorer(requests))
        tokens += sum(request.end - request.begin for request in requests)
        words += len(text.split())
        size += len(text.encode())
    if not tokens or not words:
        raise UserError(f"there is no text in {', '.join(map(str, files))}; name files with text")
    return {
        "perplexity": _exp(nats / tokens),
        "perplexity_by_word": _exp(nats / words),
        "bits_per_byte": nats / (size * math.log(2)),
        "tokens": tokens,
        "words": words,
        "bytes": size,
        "files": [str(file) for file in files],
    }


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
