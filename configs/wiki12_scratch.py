"""A byte-level GPT of 12 layers and 0.16 M parameters on English Wikipedia, from scratch: the baseline of layer dropping.

    python -m train.compare configs/wiki12_scratch.py configs/wiki12_pld.py configs/wiki12_sbld50.py \\
        configs/wiki12_uniform50.py configs/wiki12_sbld70.py configs/wiki12_sbld90.py --seeds 0,1,2 --frontier 0.75 \\
        --workdir runs/wiki12
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
        model=GPT2Config(vocab=256, context=128, layers=12, embed=32, heads=4, head_dim=8, mlp=128, remat=True),
        steps=1600,
        optim=replace(base.optim, peak_lr=1e-2, warmup=100),
        eval_every=200,
        eval_batches=32,
    )
