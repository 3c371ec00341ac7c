"""The V-cycle that was best on Wikipedia (`wiki_vcycle.py`), for the same large model; no small model is needed before."""

from dataclasses import replace

from configs.wiki12_scratch import config as scratch
from configs.wiki_vcycle import config as wiki
from train.config import Experiment


def config() -> Experiment:
    base = scratch()
    return replace(base, name="grow_vcycle", method=wiki().method, optim=replace(base.optim, peak_lr=4e-2))
