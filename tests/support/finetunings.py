"""Tasks that a tiny model learns in seconds, and models to fine-tune on them."""

import json
from pathlib import Path

import numpy as np
import runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxgrow.checkpoints import orbax
from jaxgrow.extras.models.deberta import DeBERTaConfig
from jaxgrow.extras.models.modernbert import ModernBERTConfig
from jaxgrow.models import BERTConfig, GPT2Config, LlamaConfig, TextConfig
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.task import Labelled
from train.extras.tokenizers.loading import load_tokenizer
from train.state.optim import Optim

SIZES = dict(vocab=256, context=16, layers=2, embed=16, heads=2, head_dim=8, mlp=32)
FAMILIES = {
    "gpt2": GPT2Config(**SIZES),
    "bert": BERTConfig(**SIZES),
    "llama": LlamaConfig(**SIZES, kv_heads=1),
    "modernbert": ModernBERTConfig(**SIZES, kv_heads=2, window=4),
}
# The models that classify texts.
CLASSIFIERS = FAMILIES | {"deberta": DeBERTaConfig(**SIZES, distances=8, farthest=6)}
OPTIM = Optim(schedule="linear", b2=0.99, weight_decay=0.0)


def cola(folder: Path, shuffled: bool = False) -> Path:
    """Write sentences of a's or b's as CoLA files; ``shuffled`` makes the labels meaningless."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate((("train", 512), ("dev", 128))):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 2, count)
        texts = ["".join(rng.choice([*("ab"[label] * 3), *" cd"], 10)) for label in labels]
        said = rng.permutation(labels) if shuffled else labels
        rows = (f"x\t{label}\t\t{text}\n" for label, text in zip(said, texts, strict=True))
        (folder / f"in_domain_{name}.tsv").write_text("".join(rows))
    return folder


def squad(folder: Path) -> Path:
    """Write questions whose answer is the word of b's."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate((("train-v1.1.json", 256), ("dev-v1.1.json", 32))):
        rng, paragraphs = np.random.default_rng(seed), []
        for i in range(count):
            before = int(rng.integers(1, 6))
            answer = {"text": "bbb", "answer_start": before + 1}
            question = {"question": "b", "id": str(i), "answers": [answer]}
            paragraphs.append({"context": f"{'a' * before} bbb aa", "qas": [question]})
        (folder / name).write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    return folder


# The special tokens of the published tokenizers.
SPECIAL = {
    "gpt2": ["<|endoftext|>", "<|pad|>"],
    "llama": ["<s>", "</s>", "<pad>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "modernbert": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
}


def pieces(folder: Path, family: str) -> str:
    """Train a byte-level tokenizer of 300 tokens on a corpus, and return its file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options = {"special_tokens": SPECIAL[family], "show_progress": False, "vocab_size": 300}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    made.train([str(runs.corpus(folder) / "0.txt")], trainer)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def checkpoint(folder: Path, config: TextConfig) -> Path:
    """Save a model with a tokenizer of bytes, like a finished run."""
    orbax.export_model(folder, config, runs.fresh(config))
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    return folder


def tuning(path: Path, **changes) -> FineTuning:
    values = dict(name="cola", data=Labelled("cola", str(path), length=14), epochs=1, batch=16)
    return FineTuning(**values | dict(learning_rates=(1e-2,), optim=OPTIM) | changes)


def spans(home: Path) -> FineTuning:
    """Return the fine-tuning experiment on `squad`."""
    data = Labelled("squad1", str(squad(home / "squad")), length=16, stride=8)
    return FineTuning("squad1", data, epochs=2, batch=8, learning_rates=(1e-2,), optim=OPTIM)
