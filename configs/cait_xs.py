"""CaiT-XS24 on ImageNet, 300 epochs, by DeiT's recipe: where LiGO's CaiT-S24 grows from.

    python -m train.pretrain configs/cait_xs.py --set data.path=~/tensorflow_datasets

Touvron et al. (2021) train for 400; not run here. Deviations as of `configs/deit_s.py`.
"""

from dataclasses import replace

from configs.deit_s import config as deit
from jaxgrow.drop import LayerDrop
from jaxgrow.models.cait import CaiTConfig
from train.config import Experiment
from train.methods import Scratch

MODEL = CaiTConfig(layers=24, embed=288, heads=6, head_dim=48, mlp=1152, dtype="bfloat16")
DROP = LayerDrop(theta=0.95, time="constant", depth="uniform")  # less for a smaller model, and the same in all layers


def config() -> Experiment:
    return replace(deit(), name="cait_xs", model=MODEL, method=Scratch(DROP))
