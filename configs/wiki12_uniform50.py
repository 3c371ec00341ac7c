"""The control of `wiki12_sbld50.py`: the same without sensitivities (beta 0), so every layer that may be dropped alike.

Pre-analysis, block list, schedule and mean are SBLD's: what differs is who is dropped. Run it as `wiki12_scratch.py` says.
"""

from dataclasses import replace

from configs.wiki12_scratch import config as scratch
from jaxgrow.drop import LayerDrop, Sensitivity
from train.config import Experiment
from train.methods import Scratch


def config() -> Experiment:
    drop = LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))
    base = scratch()
    optim = replace(base.optim, peak_lr=1e-2)
    return replace(base, name="wiki12_uniform50", optim=optim, method=Scratch(drop))
