"""A byte-level GPT of 0.2 M parameters on English Wikipedia, 20 tokens a parameter, from scratch.

    python -m train.compare configs/wiki_scratch.py configs/wiki_vcycle.py configs/wiki_vcycle_paper.py \\
        --seeds 0,1 --frontier 0.4,0.6,0.8 --workdir runs/wiki

`wikipedia/train.txt.xz` and `valid.txt.xz` hold plain text of articles; any other text does, too (`--set data.path=...`).
"""

from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="wiki_scratch",
        model=GPT2Config(vocab=256, context=128, layers=4, embed=64, heads=4, head_dim=16, mlp=256, remat=True),
        steps=2200,
        batch=16,
        data=Data(source="text", path="wikipedia/train.txt.xz", valid_path="wikipedia/valid.txt.xz"),
        optim=Optim(peak_lr=1e-2, schedule="wsd", decay=0.5, warmup=100),
        eval_every=100,
        eval_batches=64,
        log_every=20,
        checkpoint_every=1000,
    )
