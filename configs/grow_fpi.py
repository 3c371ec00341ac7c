"""Function-preserving initialisation in width, stacking in depth (bert2BERT's FPI; Chen et al., ACL 2022)."""

from dataclasses import replace

from configs.grow_scratch import SMALL
from configs.grow_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (To((Stage(0.6),), by=("fpi", "stack")),))
    return replace(scratch(), name="grow_fpi", method=method)
