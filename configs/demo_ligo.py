"""LiGO (Wang et al., ICLR 2023) on the demo's model: half the layers and three quarters of the width first.

python -m train.compare configs/demo_scratch.py configs/demo_ligo.py

The maps are learned for 100 steps at the experiment's own rate, with 10 steps of warm-up: at rates a hundred times smaller, as
the published recipe has them, they hardly move.
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from configs.demo_stack import SOURCE
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To

FINAL = Stage(0.6, warmup=50, schedule="linear")


def method(*stages: Stage) -> Growing:
    small = replace(scratch().model, layers=2, embed=36, heads=3, mlp=144)
    return Growing(small, SOURCE, (To(stages, by=Learned()),))


def config() -> Experiment:
    return replace(scratch(), name="demo_ligo", method=method(FINAL))
