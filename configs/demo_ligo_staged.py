"""LiGO with staged training (appendix B.3: a sub-network for the first eighth of the steps, then the whole).

python -m train.compare configs/demo_scratch.py configs/demo_ligo.py configs/demo_ligo_staged.py

The sub-network is the bottom half of the layers, in the manner of bert2BERT's sub-models. The paper trains 50 of 400 thousand
steps so.
"""

from dataclasses import replace

from configs.demo_ligo import FINAL, method
from configs.demo_scratch import config as scratch
from jaxgrow.drop import LayerDrop
from train.config import Experiment
from train.methods import Stage

BOTTOM = LayerDrop(theta=0.5, time="constant", depth="prefix", scale="none", dropped="freeze")


def config() -> Experiment:
    part = Stage(0.075, warmup=50, floor=1.0, drop=BOTTOM)
    return replace(scratch(), name="demo_ligo_staged", method=method(part, replace(FINAL, steps=0.525, warmup=0)))
