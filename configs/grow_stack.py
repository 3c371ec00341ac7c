"""LEMON's exact map in width, stacking in depth (StackBERT; Gong et al., ICML 2019)."""

from dataclasses import replace

from configs.grow_small import SMALL
from configs.wiki12_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (To((Stage(0.6),), by=("lemon", "stack")),))
    return replace(scratch(), name="grow_stack", method=method)
