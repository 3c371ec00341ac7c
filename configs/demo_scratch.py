"""A byte-level GPT of 0.13 M parameters on the standard library's source, 21 tokens a parameter: the demo's baseline.

    python -m train.compare configs/demo_scratch.py configs/demo_vcycle.py

Peak rate, warm-up and schedule are the best of a sweep (README, "Measured").
"""

from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="demo_scratch",
        model=GPT2Config(vocab=256, context=64, layers=4, embed=48, heads=4, head_dim=12, mlp=192, remat=True),
        steps=1300,
        batch=32,
        optim=Optim(peak_lr=1e-2, schedule="wsd", decay=0.5, warmup=100),
        eval_every=50,
        eval_batches=32,
        log_every=20,
        checkpoint_every=500,
    )
