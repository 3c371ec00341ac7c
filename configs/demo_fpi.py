"""Function-preserving initialisation (bert2BERT, Chen et al., ACL 2022) on the demo's model: half the width first.

python -m train.compare configs/demo_scratch.py configs/demo_fpi.py
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from configs.demo_stack import SOURCE
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    base = scratch()
    small = replace(base.model, embed=24, heads=2, mlp=96)
    to = To((Stage(0.6, warmup=50, schedule="linear"),), by=("fpi",))
    return replace(base, name="demo_fpi", method=Growing(small, SOURCE, (to,)))
