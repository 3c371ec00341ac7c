"""GPT-2 medium, L24-1024-16, on C4, from scratch: what LiGO's growth from base is compared with.

    python -m train.compare configs/gpt_medium_c4.py configs/gpt_medium_ligo.py configs/gpt_medium_stack.py \
        --set data.path=~/tensorflow_datasets

Batch 384 of 1024 tokens (Wang et al., ICLR 2023, section 4.1); steps and learning rate are not stated there. Not run here.
"""

from dataclasses import replace

from configs.gpt_base_c4 import config as base
from train.config import Experiment


def config() -> Experiment:
    small = base()
    model = replace(small.model, layers=24, embed=1024, heads=16, mlp=4096, remat=True)
    return replace(small, name="gpt_medium_c4", model=model, optim=replace(small.optim, peak_lr=3e-4))
