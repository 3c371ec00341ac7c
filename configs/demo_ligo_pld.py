"""LiGO with layer dropping (appendix B.3: at most a tenth of the layers) while the grown model trains.

python -m train.compare configs/demo_scratch.py configs/demo_ligo.py configs/demo_ligo_pld.py
"""

from dataclasses import replace

from configs.demo_ligo import FINAL, method
from configs.demo_scratch import config as scratch
from jaxgrow.drop import LayerDrop
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="demo_ligo_pld", method=method(replace(FINAL, drop=LayerDrop(theta=0.9))))
