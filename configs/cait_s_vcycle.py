"""CaiT-S24 by the V-cycle of `configs/deit_b_vcycle.py`: L24-H8 with L12-H4; the class layers stay two. No paper has run it.

python -m train.compare configs/cait_s.py configs/cait_s_vcycle.py
"""

from dataclasses import replace

from configs.cait_s import DROP
from configs.cait_s import config as scratch
from configs.deit_b_vcycle import method
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="cait_s_vcycle", method=method(DROP))
