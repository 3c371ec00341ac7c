"""SPARKLING (2026) on the demo's model: copies scaled to keep activations, asymmetric moments, new entries warm up again.

python -m train.compare configs/demo_scratch.py configs/demo_sparkling.py
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from configs.demo_stack import SOURCE
from train.config import Experiment
from train.methods import Growing, Stage, To
from train.optim import Rewarm


def config() -> Experiment:
    base = scratch()
    small = replace(base.model, embed=24, heads=2, mlp=96)
    stage = Stage(0.6, warmup=0, schedule="linear", rewarm=Rewarm(steps=50))
    to = To((stage,), by=("sparkling",), moments="asymmetric")
    return replace(base, name="demo_sparkling", method=Growing(small, SOURCE, (to,)))
