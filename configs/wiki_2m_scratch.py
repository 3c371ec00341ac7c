"""A byte-level GPT of 2 M parameters on English Wikipedia, from scratch, far below 20 tokens a parameter.

    python -m train.compare configs/wiki_2m_scratch.py configs/wiki_2m_vcycle.py --seeds 0,1 --workdir runs/wiki_2m
"""

from dataclasses import replace

from configs.wiki_scratch import config as small
from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment


def config() -> Experiment:
    return replace(
        small(),
        name="wiki_2m_scratch",
        model=GPT2Config(vocab=256, context=128, layers=8, embed=144, heads=9, head_dim=16, mlp=576, remat=True),
        steps=400,
        optim=replace(small().optim, peak_lr=4e-3, warmup=50),
        eval_every=50,
        eval_batches=32,
    )
