"""The small model that the others grow: 6 layers of width 16, half the steps of the large one's, fully decayed.

Each seed's is trained once; the others read it from its run, beside theirs, with all that it cost. Run it as
`wiki12_scratch.py` says.
"""

from dataclasses import replace

from configs.wiki12_scratch import config as scratch
from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment

SMALL = GPT2Config(vocab=256, context=64, layers=6, embed=16, heads=2, head_dim=8, mlp=64, remat=True)


def config() -> Experiment:
    return replace(scratch(), name="grow_small", model=SMALL, steps=900)
