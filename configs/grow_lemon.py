"""LEMON (Wang et al., ICLR 2024): exact in width and depth, so that training begins at the small model's loss."""

from dataclasses import replace

from configs.grow_small import SMALL
from configs.wiki12_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (To((Stage(0.6),), by=("lemon", "llama_pro")),))
    return replace(scratch(), name="grow_lemon", method=method)
