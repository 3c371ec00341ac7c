"""The best recipe found on a 0.2 M parameter GPT: a V-cycle in depth, corrected, under one schedule, moments carried.

    python -m train.compare configs/wiki_scratch.py configs/wiki_vcycle.py configs/wiki_vcycle_paper.py \\
        --seeds 0,1 --frontier 0.4,0.6,0.8 --workdir runs/wiki
"""

from dataclasses import replace

from configs.demo_vcycle import METHOD
from configs.wiki_scratch import config as scratch
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="wiki_vcycle", method=METHOD)
