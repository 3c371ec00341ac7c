"""A byte-level GPT of 12 layers, 0.2 M parameters, on Wikipedia, 20 tokens a parameter: what growing is compared with.

    python -m train.compare configs/grow_scratch.py configs/grow_small.py configs/grow_fpi.py configs/grow_aki.py \
        configs/grow_stack.py configs/grow_lemon.py configs/grow_ligo0.py configs/grow_ligo.py configs/grow_vcycle.py \
        --seeds 0,1 --frontier 0.75 --workdir runs/grow

Six layers of width 24 become twelve of width 36. `grow_small` trains the small model, once a seed; the others read it from its
run, beside theirs, with all that it cost.
"""

from dataclasses import replace

from configs.wiki12_scratch import config as wiki12
from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment

SMALL = GPT2Config(vocab=256, context=128, layers=6, embed=24, heads=4, head_dim=6, mlp=96, remat=True)


def config() -> Experiment:
    model = replace(SMALL, layers=12, embed=36, heads=6, mlp=144)
    return replace(wiki12(), name="grow_scratch", model=model, steps=2000, eval_every=100, eval_batches=16)
