"""A byte-level BERT of 2.0 M parameters (8 layers, width 144) on English Wikipedia, from scratch.

    python -m train.compare configs/wiki_bert_scratch.py configs/wiki_bert_vcycle.py --seeds 0,1 --frontier 0.7 \\
        --workdir runs/wiki_bert

`wikipedia/train.txt.xz` and `valid.txt.xz` hold plain text of articles; any other text does, too (`--set data.path=...`).
Post-LN as published; 15 % of the bytes are hidden. 1.5 tokens a parameter: what two cores can do in an hour or two.
"""

from jaxgrow.models import BERTConfig
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="wiki_bert_scratch",
        model=BERTConfig(
            vocab=256, context=128, types=1, layers=8, embed=144, heads=9, head_dim=16, mlp=576, remat=True
        ),
        steps=1500,
        batch=16,
        data=Data(source="text", path="wikipedia/train.txt.xz", valid_path="wikipedia/valid.txt.xz"),
        optim=Optim(peak_lr=1e-3, schedule="wsd", decay=0.5, warmup=150, b2=0.98, weight_decay=0.01),
        eval_every=100,
        eval_batches=64,
        log_every=20,
        checkpoint_every=100,
    )
