"""GPT-2 XL, 1.5 B parameters, L48-1600-25, on C4, from scratch: what LiGO's growth from medium is compared with.

    python -m train.compare configs/gpt_xl_c4.py configs/gpt_xl_ligo.py --set data.path=~/tensorflow_datasets

15 thousand steps (Wang et al., ICLR 2023, appendix C.5). Not run here.
"""

from dataclasses import replace

from configs.gpt_medium_c4 import config as medium
from train.config import Experiment


def config() -> Experiment:
    small = medium()
    model = replace(small.model, layers=48, embed=1600, heads=25, mlp=6400)
    return replace(small, name="gpt_xl_c4", model=model, steps=15_000, optim=replace(small.optim, peak_lr=2e-4))
