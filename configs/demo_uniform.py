"""The control of `demo_sbld.py`: the same without sensitivities (beta 0), so every layer that may be dropped alike.

    python -m train.compare configs/demo_scratch.py configs/demo_pld.py configs/demo_sbld.py configs/demo_uniform.py \\
        --seeds 0,1,2 --workdir runs/drop

Pre-analysis, block list, schedule and mean are SBLD's: what differs is who is dropped.
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from jaxgrow.drop import LayerDrop, Sensitivity
from train.config import Experiment
from train.methods import Scratch


def config() -> Experiment:
    drop = LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))
    return replace(scratch(), name="demo_uniform", method=Scratch(drop))
