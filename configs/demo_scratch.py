"""A small byte-level GPT on the standard library's source, from scratch: the baseline of the demo.

python -m train.compare configs/demo_scratch.py configs/demo_vcycle.py
"""

from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="demo_scratch",
        model=GPT2Config(vocab=256, context=64, layers=4, embed=64, heads=4, head_dim=16, mlp=256, remat=False),
        steps=2400,
        batch=32,
        optim=Optim(peak_lr=1e-2, warmup=100, weight_decay=0.1),
        eval_every=100,
        eval_batches=32,
        log_every=20,
        checkpoint_every=400,
    )
