"""The demo's V-cycle, its last phase with progressive layer dropping: a stage of any method takes a `LayerDrop`.

python -m train.compare configs/demo_scratch.py configs/demo_vcycle.py configs/demo_vcycle_pld.py
"""

from dataclasses import replace

from configs.demo_vcycle import METHOD
from configs.demo_vcycle import config as vcycle
from jaxgrow.drop import LayerDrop
from train.config import Experiment


def config() -> Experiment:
    small, final = METHOD.up
    drop = LayerDrop(theta=0.7, time="constant", reverse=True, recovery=0.3)
    return replace(vcycle(), name="demo_vcycle_pld", method=replace(METHOD, up=(small, replace(final, drop=drop))))
