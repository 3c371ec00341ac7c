"""DeiT-Ti on ImageNet, 300 epochs, from scratch: the smallest of the DeiT paper's three.

    python -m train.pretrain configs/deit_ti.py --set data.path=~/tensorflow_datasets

Not run here; deviations as of `configs/deit_s.py`.
"""

from dataclasses import replace

from configs.deit_s import config as small
from train.config import Experiment


def config() -> Experiment:
    base = small()
    return replace(base, name="deit_ti", model=replace(base.model, embed=192, heads=3, mlp=768))
