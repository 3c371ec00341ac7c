"""A byte-level GPT of 12 layers on English Wikipedia, 20 tokens a parameter: the baseline of growth and of layer dropping.

    python -m train.compare configs/wiki12_scratch.py configs/grow_small.py configs/grow_ligo0.py configs/grow_ligo.py \\
        configs/grow_stack.py configs/grow_aki.py configs/grow_vcycle.py configs/wiki12_pld.py configs/wiki12_sbld50.py \\
        configs/wiki12_uniform50.py --seeds 0,1,2 --frontier 0.55,0.75 --workdir runs/wiki12

94 thousand parameters: so small that the rate can be swept for each row and each point of the frontier, and three seeds be run
(README, "Measured").
"""

from dataclasses import replace

from configs.wiki_scratch import config as scratch
from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment


def config() -> Experiment:
    base = scratch()
    return replace(
        base,
        name="wiki12_scratch",
        model=GPT2Config(vocab=256, context=64, layers=12, embed=24, heads=3, head_dim=8, mlp=96, remat=True),
        steps=1800,
        batch=16,
        optim=replace(base.optim, peak_lr=2e-2, warmup=100),
        eval_every=150,
        eval_batches=64,
    )
