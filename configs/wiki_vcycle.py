"""The demo's V-cycle on Wikipedia, its last phase half of the steps.

    python -m train.compare configs/wiki_scratch.py configs/wiki_vcycle.py configs/wiki_vcycle_paper.py \\
        --seeds 0,1 --frontier 0.4,0.6,0.8 --workdir runs/wiki
"""

from dataclasses import replace

from configs.demo_vcycle import METHOD
from configs.wiki_scratch import config as scratch
from train.config import Experiment


def config() -> Experiment:
    small, final = METHOD.up
    method = replace(METHOD, up=(small, replace(final, steps=0.5)))
    return replace(scratch(), name="wiki_vcycle", method=method)
