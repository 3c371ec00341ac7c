"""Progressive layer dropping (Zhang & He, 2020) on the demo's model: theta 0.5, gamma 100 / T, the paper's scaling.

    python -m train.compare configs/demo_scratch.py configs/demo_pld.py configs/demo_sbld.py configs/demo_uniform.py \\
        --seeds 0,1,2 --workdir runs/drop
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from jaxgrow.drop import LayerDrop
from train.config import Experiment
from train.methods import Scratch


def config() -> Experiment:
    return replace(scratch(), name="demo_pld", method=Scratch(LayerDrop(theta=0.5)))
