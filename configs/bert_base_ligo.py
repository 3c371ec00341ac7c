"""BERT small to base by LiGO: 100 steps of learning, then a fresh optimizer (Wang et al., ICLR 2023, Table 1).

The paper reports 44.7 % fewer FLOPs and 40.7 % less wall-clock time, without the small model's cost; with it, 26.0 %. The
maps' learning rate is the published code's peak; its warm-up of 10,000 for 100 steps is not followed. Not run here; reads the
run `bert_small-seed0`, or of another seed, beside its own.
"""

from dataclasses import replace

from configs.bert_base import config as scratch
from configs.bert_small import config as small
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0, warmup=0),), by=Learned())
    return replace(scratch(), name="bert_base_ligo", method=Growing(small().model, "bert_small-seed{seed}", (to,)))
