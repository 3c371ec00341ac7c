"""StackBERT (Gong et al., ICML 2019) on the demo's model: two layers first, then the stack twice, under one schedule.

python -m train.compare configs/demo_scratch.py configs/demo_stack.py

As in `demo_vcycle`, the small model trains at a constant rate and only the large one decays; Adam's moments are copied along.
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To

SOURCE = Stage(0.4, floor=1.0)  # of all of these: the small model's training


def config() -> Experiment:
    base = scratch()
    to = To((Stage(0.6, warmup=0, schedule="linear"),), by=("stack",), moments="copy")
    return replace(base, name="demo_stack", method=Growing(replace(base.model, layers=2), SOURCE, (to,)))
