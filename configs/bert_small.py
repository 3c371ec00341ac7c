"""BERT small, L6-512-8, on Wikipedia: the small model of LiGO's BERT pair (Wang et al., ICLR 2023, Table 4).

    python -m train.pretrain configs/bert_small.py --set data.path=~/tensorflow_datasets --workdir runs/bert_small-seed0

The paper grows it after 220,000 steps (appendix C.1). Not run here. English Wikipedia comes from tensorflow-datasets; the
`tokenizer.json` of bert-base-uncased must lie in `tokenizer-bert`.
"""

from dataclasses import replace

from configs.bert_base import config as base
from train.config import Experiment


def config() -> Experiment:
    large = base()
    model = replace(large.model, layers=6, embed=512, heads=8, mlp=2048)
    return replace(large, name="bert_small", model=model, steps=220_000)
