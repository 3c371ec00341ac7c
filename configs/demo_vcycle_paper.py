"""The demo's V-cycle in the paper's form: two levels, interpolation, half of the steps small, half of them large.

python -m train.compare configs/demo_scratch.py configs/demo_vcycle_paper.py
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from train.config import Experiment
from train.plan import Stage, VCycle


def config() -> Experiment:
    method = VCycle(down=(Stage(0.05),), up=(Stage(0.5, lr=2.0), Stage(0.5)), alpha=0.5)
    return replace(scratch(), name="demo_vcycle_paper", method=method)
