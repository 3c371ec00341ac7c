"""Knowledge inheritance (Qin et al., NAACL 2022) on the demo's model: LiGO's small model teaches the large one at first.

python -m train.compare configs/demo_scratch.py configs/demo_inherit.py
"""

from dataclasses import replace

from configs.demo_ligo import method
from configs.demo_scratch import config as scratch
from configs.demo_stack import SOURCE
from train.config import Experiment
from train.methods import Inherit, Stage


def config() -> Experiment:
    return replace(scratch(), name="demo_inherit", method=Inherit(method().small, SOURCE, Stage(1.0)))
