"""The demo's V-cycle on CIFAR-10, its last phase half of the steps.

    python -m train.compare configs/cifar10_vit_scratch.py configs/cifar10_vit_vcycle.py --seeds 0,1 --frontier 0.7 \\
        --workdir runs/cifar10
"""

from dataclasses import replace

from configs.cifar10_vit_scratch import config as scratch
from configs.wiki_vcycle import config as wiki
from train.config import Experiment


def config() -> Experiment:
    return replace(scratch(), name="cifar10_vit_vcycle", method=wiki().method)
