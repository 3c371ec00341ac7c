"""LiGO with token dropping (appendix B.3: 15 % of the tokens go around the layers in the middle).

python -m train.compare configs/demo_scratch.py configs/demo_ligo.py configs/demo_ligo_tokens.py
"""

from dataclasses import replace

from configs.demo_ligo import FINAL, method
from configs.demo_scratch import config as scratch
from jaxgrow.drop import TokenDrop
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="demo_ligo_tokens", method=method(replace(FINAL, tokens=TokenDrop(0.15))))
