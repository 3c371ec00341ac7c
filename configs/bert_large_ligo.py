"""BERT base to large by LiGO: 45.2 % fewer FLOPs (Wang et al., ICLR 2023, Fig. 2c), without the small model's cost.

Not run here; reads the run `bert_base-seed0`, or of another seed, beside its own.
"""

from dataclasses import replace

from configs.bert_base import config as base
from configs.bert_large import config as scratch
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0, warmup=0),), by=Learned())
    return replace(scratch(), name="bert_large_ligo", method=Growing(base().model, "bert_base-seed{seed}", (to,)))
