"""GPT-2 base to medium by LEMON in width (exact) and stacking in depth, beside LiGO. Not run here."""

from dataclasses import replace

from configs.gpt_base_c4 import config as base
from configs.gpt_medium_c4 import config as scratch
from train.config import Experiment
from train.methods import Growing, Stage, To


def config() -> Experiment:
    to = To((Stage(1.0),), by=("lemon", "stack"))
    return replace(scratch(), name="gpt_medium_stack", method=Growing(base().model, "gpt_base_c4-seed{seed}", (to,)))
