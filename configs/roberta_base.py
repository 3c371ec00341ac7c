"""RoBERTa base, L12-768-12, on Wikipedia, from scratch: what LiGO's growth from small is compared with.

    python -m train.compare configs/roberta_base.py configs/roberta_base_ligo.py --set data.path=~/tensorflow_datasets

As `bert_base.py`, but batch 1024 and learning rate 8e-4 (Wang et al., ICLR 2023, section 4.1). Not run here; RoBERTa's
`vocab.json` and `merges.txt` must lie in `tokenizer-roberta`.
"""

from dataclasses import replace

from configs.bert_base import config as bert
from train.config import Experiment


def config() -> Experiment:
    base = bert()
    return replace(
        base,
        name="roberta_base",
        model=replace(base.model, vocab=50265, context=130, first_position=2, types=1, eps=1e-5),
        batch=1024,
        data=replace(base.data, tokenizer="tokenizer-roberta"),
        optim=replace(base.optim, peak_lr=8e-4),
    )
