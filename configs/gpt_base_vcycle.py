"""GPT-2 base by the paper's V-cycle: L12-768 with L6-384, alpha 0.25, the small model half of the steps at 4e-4.

    python -m train.compare configs/gpt_base_scratch.py configs/gpt_base_vcycle.py

The paper reports 24.1 % fewer FLOPs and 16.5 % less wall-clock time at equal loss; not run here. Stages, learning rates and
missing warm-ups are those of the published example; its depth pairs are (i, i + 6), the paper's are neighbours.
"""

from dataclasses import replace

from configs.gpt_base_scratch import config as scratch
from train.config import Experiment
from train.methods import Stage, VCycle
from train.transforms import Grouping


def config() -> Experiment:
    method = VCycle(
        down=(Stage(0.05, warmup=5_000),),  # the published first stage is all warm-up
        up=(Stage(0.5, lr=4.0, warmup=0), Stage(0.5, warmup=0)),
        groupings=(Grouping(heads="far", layers="adjacent"),),
        alpha=0.25,
    )
    return replace(scratch(), name="gpt_base_vcycle", method=method)
