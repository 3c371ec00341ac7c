"""CaiT-XS24 to S24 by LiGO: 100 steps of learning, then a fresh optimizer (Wang et al., ICLR 2023, appendix C.2).

    python -m train.compare configs/cait_s.py configs/cait_s_ligo.py

The paper reports 52.6 % fewer FLOPs, without the small model's cost. It says nothing of class layers and of heads that talk:
here both have maps of their own. Not run here; reads the run `cait_xs-seed0`, or of another seed, beside its own.
"""

from dataclasses import replace

from configs.cait_s import DROP
from configs.cait_s import config as scratch
from configs.cait_xs import MODEL
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0, warmup=0, drop=DROP),), by=Learned(lr=0.5))
    return replace(scratch(), name="cait_s_ligo", method=Growing(MODEL, "cait_xs-seed{seed}", (to,)))
