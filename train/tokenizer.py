"""Train a tokenizer on the training text of a config: ``python -m train.tokenizer CONFIG --vocab 8192 --out tokenizer.json``

The tokenizer is a byte-level BPE, so that every text can be encoded and decoded. It is trained on
the training documents of the config, without the validation documents. For an encoder, it has the
special tokens [PAD], [UNK], [CLS], [SEP] and [MASK], and puts each text between [CLS] and [SEP].
For a decoder, <|endoftext|> ends a document.

To train a model with this tokenizer, give its file and the same vocabulary size::

    python -m train.pretrain CONFIG --set data.tokenizer=tokenizer.json model.vocab=8192
"""

from typing import Any

from jaxgrow.checkpoints.io.folders import atomic_file
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say
from train.config.experiment import Experiment, load_as
from train.data.text import Data
from train.extras.text.mixing import training_text
from train.extras.tokenizers.special import END

MASKED = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(data: Data, vocab: int, masked: bool) -> Any:
    """Train a `tokenizers.Tokenizer` with ``vocab`` tokens on the training text of ``data``.

    Args:
      data: the corpus; its own tokenizer is not used.
      vocab: vocabulary size, including the special tokens.
      masked: whether the model is an encoder, whose special tokens differ from those of a decoder.

    Raises:
      UserError: the corpus is missing, unreadable, or too small for so many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = MASKED if masked else [END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(special) + len(alphabet):
        raise UserError(
            f"--vocab is {vocab}, but the bytes and the special tokens alone need {len(special) + len(alphabet)}"
        )
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training_text(data), trainer)
    if tokenizer.get_vocab_size() < vocab:
        raise UserError(
            f"the corpus is too small for --vocab {vocab}: it gives only {tokenizer.get_vocab_size()} tokens; "
            "lower --vocab to this number"
        )
    if masked:
        ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    return tokenizer


def main() -> None:
    arguments = command_parser("tokenizer").parse_args()
    experiment = load_as(Experiment, arguments.config, arguments.set)[1]
    if not isinstance(experiment.data, Data):
        raise UserError(
            f"{experiment.name} trains on {type(experiment.data).__name__}; "
            "a tokenizer needs a config that trains on text (Data)"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)  # an error here comes before the work
    tokenizer = train_tokenizer(experiment.data, arguments.vocab, experiment.model.masked > 0)
    with atomic_file(arguments.out) as part:
        tokenizer.save(str(part))
    say(
        f"{arguments.out}: {tokenizer.get_vocab_size():,} tokens; "
        f"--set data.tokenizer={arguments.out} model.vocab={arguments.vocab}"
    )


if __name__ == "__main__":
    exits_cleanly(main)
