"""The V-cycle that was best on Wikipedia (`wiki_vcycle.py`), for the same large model; no small model is needed before."""

from dataclasses import replace

from configs.demo_vcycle import METHOD
from configs.grow_scratch import config as scratch
from train.config import Experiment


def config() -> Experiment:
    small, final = METHOD.up
    return replace(scratch(), name="grow_vcycle", method=replace(METHOD, up=(small, replace(final, steps=0.5))))
