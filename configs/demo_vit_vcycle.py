"""The demo's V-cycle, for images: in depth alone, corrected, under one schedule, moments carried.

python -m train.compare configs/demo_vit_scratch.py configs/demo_vit_vcycle.py
"""

from dataclasses import replace

from configs.demo_vcycle import METHOD
from configs.demo_vit_scratch import config as scratch
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="demo_vit_vcycle", method=METHOD)
