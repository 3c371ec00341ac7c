"""DeiT-S to B by LiGO: 100 steps of learning, then a fresh optimizer (Wang et al., ICLR 2023, Table 2).

    python -m train.compare configs/deit_b.py configs/deit_b_ligo.py

The paper reports 55.4 % fewer FLOPs, without the small model's cost. It states neither initialisation nor learning rate of the
maps. Not run here; reads the run `deit_s-seed0`, or of another seed, beside its own.
"""

from dataclasses import replace

from configs.deit_b import config as scratch
from configs.deit_s import DROP, MODEL
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0, warmup=0, drop=DROP),), by=Learned(lr=0.5))
    return replace(scratch(), name="deit_b_ligo", method=Growing(MODEL, "deit_s-seed{seed}", (to,)))
