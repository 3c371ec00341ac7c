"""LiGO (Wang et al., ICLR 2023): the maps learned in 100 steps."""

from dataclasses import replace

from configs.grow_small import SMALL
from configs.wiki12_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Learned, Stage, To

LEARNED = Learned(steps=100)


def config() -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (To((Stage(0.6),), by=LEARNED),))
    return replace(scratch(), name="grow_ligo", method=method)
