"""The demo's V-cycle in the paper's form: half width and depth, interpolation, a fresh optimizer and warm-up each stage.

python -m train.compare configs/demo_scratch.py configs/demo_vcycle_paper.py
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from train.config import Experiment
from train.methods import Stage, VCycle

METHOD = VCycle(
    down=(Stage(0.05),),
    up=(
        Stage(0.5, lr=2.0, warmup=50, schedule="linear"),
        Stage(0.5, warmup=50, schedule="linear"),
    ),  # twice the rate is neutral for Adam at half the width
    alpha=0.5,
)


def config() -> Experiment:
    return replace(scratch(), name="demo_vcycle_paper", method=METHOD)
