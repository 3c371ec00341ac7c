"""Sensitivity-based layer dropping (Zeng et al., AAAI 2023; the formulas are our reconstruction) on the demo's model.

    python -m train.compare configs/demo_scratch.py configs/demo_pld.py configs/demo_sbld.py configs/demo_uniform.py \\
        --seeds 0,1,2 --workdir runs/drop

All layers for 5 % of the steps, one measurement, then PLD's schedule and mean keep probability, divided among the layers in
the order of their sensitivities.
"""

from dataclasses import replace

from configs.demo_scratch import config as scratch
from jaxgrow.drop import LayerDrop, Sensitivity
from train.config import Experiment
from train.methods import Scratch


def config() -> Experiment:
    return replace(scratch(), name="demo_sbld", method=Scratch(LayerDrop(theta=0.5, sensitivity=Sensitivity())))
