"""SBLD (Zeng et al., 2023; our reconstruction) at 12 layers, theta 0.5. Run it as `wiki12_scratch.py` says."""

from dataclasses import replace

from configs.wiki12_scratch import config as scratch
from jaxgrow.drop import LayerDrop, Sensitivity
from train.config import Experiment
from train.methods import Scratch


def config() -> Experiment:
    drop = LayerDrop(theta=0.5, sensitivity=Sensitivity())
    base = scratch()
    optim = replace(base.optim, peak_lr=1e-2)
    return replace(base, name="wiki12_sbld50", optim=optim, method=Scratch(drop))
