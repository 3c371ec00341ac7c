"""DeiT-B on ImageNet, L12-768-12, 300 epochs, from scratch: the baseline of the multi-level paper's and LiGO's DeiT tables.

    python -m train.pretrain configs/deit_b.py --set data.path=~/tensorflow_datasets

81.8 % top-1 in the DeiT paper, 81.1 % in the other two; not run here.
"""

from dataclasses import replace

from configs.deit_s import config as small
from train.config import Experiment


def config() -> Experiment:
    base = small()
    return replace(base, name="deit_b", model=replace(base.model, embed=768, heads=12, mlp=3072))
