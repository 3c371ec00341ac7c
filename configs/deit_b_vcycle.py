"""DeiT-B by the paper's V-cycle: L12-H12 with L6-H6, alpha 0.25, the small model half of the steps (Zou et al., ICLR 2024).

    python -m train.compare configs/deit_b.py configs/deit_b_vcycle.py

The paper reports 27.1 % fewer FLOPs at equal accuracy; not run here. How long the first stage is, and whether the small model's
learning rate differs, is not published: both are as for GPT and BERT, 5 % and the same.
"""

from dataclasses import replace

from configs.deit_b import config as scratch
from configs.deit_s import DROP, EPOCH
from jaxgrow.drop import LayerDrop
from train.config import Experiment
from train.methods import Stage, VCycle
from train.transforms import Grouping


def method(drop: LayerDrop) -> VCycle:
    return VCycle(
        down=(Stage(0.05, warmup=5 * EPOCH, drop=drop),),
        up=(Stage(0.5, drop=drop), Stage(0.5, warmup=0, drop=drop)),
        groupings=(Grouping(heads="far", layers="adjacent"),),
        alpha=0.25,
    )


def config() -> Experiment:
    return replace(scratch(), name="deit_b_vcycle", method=method(DROP))
