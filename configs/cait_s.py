"""CaiT-S24 on ImageNet, 300 epochs, from scratch: the baseline of LiGO's CaiT figure.

    python -m train.pretrain configs/cait_s.py --set data.path=~/tensorflow_datasets

Not run here; deviations as of `configs/cait_xs.py`.
"""

from dataclasses import replace

from configs.cait_xs import config as small
from jaxgrow.drop import LayerDrop
from train.config import Experiment
from train.methods import Scratch

DROP = LayerDrop(theta=0.9, time="constant", depth="uniform")


def config() -> Experiment:
    base = small()
    model = replace(base.model, embed=384, heads=8, mlp=1536)
    return replace(base, name="cait_s", model=model, method=Scratch(DROP))
