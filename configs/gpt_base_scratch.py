"""GPT-2 base, L12-768-12, from scratch: the baseline of the multi-level paper's GPT table.

    python -m train.pretrain configs/gpt_base_scratch.py --set data.path=~/tensorflow_datasets

Expects about 2.72 validation loss after 100,000 steps of 512 x 512 tokens (the published code's own baseline on
Wikipedia, 8 accelerators); not run here. English Wikipedia comes from tensorflow-datasets; GPT-2's `vocab.json` and
`merges.txt` must lie in `tokenizer-gpt2`.
"""

from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="gpt_base_scratch",
        model=GPT2Config(context=512, layers=12, embed=768, heads=12, head_dim=64, mlp=3072, dtype="bfloat16"),
        steps=100_000,
        batch=512,
        data=Data(source="tfds", name="wiki40b/en", tokenizer="tokenizer-gpt2"),
        optim=Optim(peak_lr=1e-4, schedule="linear", warmup=5_000, b2=0.999, weight_decay=0.01),
        eval_every=1_000,
        eval_batches=16,
        log_every=50,
        checkpoint_every=1_000,
    )
