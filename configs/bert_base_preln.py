"""BERT base with norms before the sublayers, nothing dropped: the baseline that differs from PLD in dropping alone.

    python -m train.compare configs/bert_base_preln.py configs/bert_base_pld.py --set data.path=~/tensorflow_datasets

The setting of Zhang & He (NeurIPS 2020): 200,000 steps of 4096 x 128 tokens at a learning rate of 1e-3. Theirs falls by 1 %
every 1,000 steps, to 13 %; here in a straight line to zero. Theirs is Wikipedia and books, here Wikipedia alone. Not run here;
the tokenizer is that of `bert_base.py`.
"""

from dataclasses import replace

from configs.bert_base import config as base
from train.config import Experiment
from train.optim import Optim


def config() -> Experiment:
    post = base()
    return replace(
        post,
        name="bert_base_preln",
        model=replace(post.model, norm="pre"),
        steps=200_000,
        batch=4096,
        accumulate=8,
        optim=Optim(peak_lr=1e-3, schedule="linear", warmup=4_000, b2=0.999, weight_decay=0.01),
    )
