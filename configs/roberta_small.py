"""RoBERTa small, L6-512-8: the small model of LiGO's RoBERTa pair (Wang et al., ICLR 2023, Table 4). Not run here.

python -m train.pretrain configs/roberta_small.py --set data.path=~/tensorflow_datasets --workdir runs/roberta_small-seed0
"""

from dataclasses import replace

from configs.roberta_base import config as base
from train.config import Experiment


def config() -> Experiment:
    large = base()
    model = replace(large.model, layers=6, embed=512, heads=8, mlp=2048)
    return replace(large, name="roberta_small", model=model, steps=220_000)
