"""The small model that the others grow: 6 layers of width 24, half the steps of the large one's, fully decayed."""

from dataclasses import replace

from configs.grow_scratch import SMALL
from configs.grow_scratch import config as scratch
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="grow_small", model=SMALL, steps=1000)
