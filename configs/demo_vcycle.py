"""The best recipe found for the demo: a V-cycle in depth alone, corrected, under one schedule, moments carried.

    python -m train.compare configs/demo_scratch.py configs/demo_vcycle.py

The large model trains for 5 % of the steps, its half-depth coalescence for 40 % at a constant rate, then the corrected large
model for 60 % while the rate falls to zero. Adam's moments travel both ways, so no stage warms up again.
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from train.config import Experiment
from train.methods import Stage, VCycle
from train.transforms import Grouping

METHOD = VCycle(
    down=(Stage(0.05),),
    up=(Stage(0.4, warmup=50, floor=1.0), Stage(0.6, warmup=0, schedule="linear")),
    groupings=(Grouping(heads=None, layers="far"),),
    alpha=1.0,
    correction=True,
    moments_down="exact",
    moments_up="exact",
)


def config() -> Experiment:
    return replace(scratch(), name="demo_vcycle", method=METHOD)
