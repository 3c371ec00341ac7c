"""The demo's V-cycle on the GPT of 2 M parameters.

    python -m train.compare configs/wiki_2m_scratch.py configs/wiki_2m_vcycle.py --seeds 0,1 --workdir runs/wiki_2m
"""

from dataclasses import replace

from configs.demo_vcycle import METHOD
from configs.wiki_2m_scratch import config as scratch
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="wiki_2m_vcycle", method=METHOD)
