"""GPT-2 base to medium by LiGO: 100 steps of learning, then a fresh optimizer (Wang et al., ICLR 2023, Fig. 3c).

The paper reports 22.5 % fewer FLOPs, without the small model's cost. It states neither initialisation nor learning rate of the
maps. Not run here; reads the run `gpt_base_c4-seed0`, or of another seed, beside its own.
"""

from dataclasses import replace

from configs.gpt_base_c4 import config as base
from configs.gpt_medium_c4 import config as scratch
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0, warmup=0),), by=Learned(lr=0.5))
    return replace(scratch(), name="gpt_medium_ligo", method=Growing(base().model, "gpt_base_c4-seed{seed}", (to,)))
