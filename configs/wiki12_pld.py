"""PLD (Zhang & He, 2020) at 12 layers: theta 0.5, gamma 100 / T, the paper's scaling. Run it as `wiki12_scratch.py` says."""

from dataclasses import replace

from configs.wiki12_scratch import config as scratch
from jaxgrow.drop import LayerDrop
from train.config import Experiment
from train.methods import Scratch


def config() -> Experiment:
    base = scratch()
    optim = replace(base.optim, peak_lr=1e-2)
    return replace(base, name="wiki12_pld", optim=optim, method=Scratch(LayerDrop(theta=0.5)))
