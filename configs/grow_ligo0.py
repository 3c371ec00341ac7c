"""The control of LiGO: its maps as they begin, learned in 0 steps."""

from dataclasses import replace

from configs.grow_ligo import LEARNED
from configs.grow_small import SMALL
from configs.wiki12_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (To((Stage(0.6),), by=replace(LEARNED, steps=0)),))
    return replace(scratch(), name="grow_ligo0", method=method)
