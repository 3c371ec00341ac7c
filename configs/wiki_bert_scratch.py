"""A byte-level BERT of 2.2 M parameters (4 layers, width 208) on English Wikipedia, from scratch.

    python -m train.compare configs/wiki_bert_scratch.py configs/wiki_bert_vcycle.py --seeds 0,1 --frontier 0.7 \\
        --workdir runs/wiki_bert

`wikipedia/train.txt.xz` and `valid.txt.xz` hold plain text of articles; any other text does, too (`--set data.path=...`).
2.3 tokens a parameter. So short a run has to leave the plateau early where a BERT knows how frequent a byte is, nothing else:
pre-LN, windows of 32 bytes and a quarter of them hidden did within 400 steps; post-LN, windows of 64 and 15 % not within 700.
"""

from jaxgrow.models import BERTConfig
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="wiki_bert_scratch",
        model=BERTConfig(
            vocab=256,
            context=32,
            types=1,
            layers=4,
            embed=208,
            heads=13,
            head_dim=16,
            mlp=832,
            norm="pre",
            masked=0.25,
            remat=True,
        ),
        steps=2500,
        batch=64,
        data=Data(source="text", path="wikipedia/train.txt.xz", valid_path="wikipedia/valid.txt.xz"),
        optim=Optim(peak_lr=1e-3, schedule="wsd", decay=0.5, warmup=150, b2=0.98, weight_decay=0.01),
        eval_every=125,
        eval_batches=32,
        log_every=25,
        checkpoint_every=250,
    )
