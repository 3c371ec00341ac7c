"""What do masked models need to know of a tokenizer?"""

from typing import TYPE_CHECKING

import numpy as np

from train.common.errors import UserError
from train.data.windows import Vocabulary
from train.extras.tokenizers.special import largest_vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = (
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
    known = (tokenizer.token_to_id(t) for t in _SPECIAL)
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
