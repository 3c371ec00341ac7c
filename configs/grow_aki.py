"""Advanced knowledge initialisation, its own stacking in depth (bert2BERT; Chen et al., ACL 2022)."""

from dataclasses import replace

from configs.grow_small import SMALL
from configs.wiki12_scratch import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    method = Growing(SMALL, "grow_small-seed{seed}", (To((Stage(0.6),), by=("aki",)),))
    return replace(scratch(), name="grow_aki", method=method)
