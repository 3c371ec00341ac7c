"""RoBERTa small to base by LiGO: 47.2 % fewer FLOPs (Wang et al., ICLR 2023, Fig. 3), without the small model's cost.

The grown model warms up for 10,000 steps again, as in the published code. Not run here; reads the run `roberta_small-seed0`, or
of another seed, beside its own.
"""

from dataclasses import replace

from configs.roberta_base import config as scratch
from configs.roberta_small import config as small
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0),), by=Learned(lr=0.25))  # 2e-4, as for BERT
    return replace(
        scratch(), name="roberta_base_ligo", method=Growing(small().model, "roberta_small-seed{seed}", (to,))
    )
