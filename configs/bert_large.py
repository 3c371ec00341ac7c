"""BERT large, L24-1024-16, on Wikipedia, from scratch: the baseline of its V-cycles and of LiGO's growth from base.

    python -m train.compare configs/bert_large.py configs/bert_large_vcycle2.py configs/bert_large_vcycle3.py \\
        --set data.path=~/tensorflow_datasets

Steps, batch and learning rate are those of BERT base: neither paper states others. Not run here.
"""

from dataclasses import replace

from configs.bert_base import config as base
from train.config import Experiment


def config() -> Experiment:
    small = base()
    model = replace(small.model, layers=24, embed=1024, heads=16, mlp=4096, remat=True)
    return replace(small, name="bert_large", model=model)
