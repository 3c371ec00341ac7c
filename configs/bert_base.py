"""BERT base, L12-768-12, on Wikipedia, from scratch: what BERT's V-cycle and LiGO's growth from small are compared with.

    python -m train.compare configs/bert_base.py configs/bert_base_ligo.py --set data.path=~/tensorflow_datasets

The setting of LiGO (Wang et al., ICLR 2023, section 4.1): 400,000 steps of 256 x 128 tokens, masked language modelling alone,
AdamW. The paper's GLUE average is 82.25. Not run here. English Wikipedia comes from tensorflow-datasets; the `tokenizer.json`
of bert-base-uncased must lie in `tokenizer-bert`. Samples are windows of packed text, so there are as many positions.
"""

from jaxgrow.models import BERTConfig
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="bert_base",
        model=BERTConfig(context=128, layers=12, embed=768, heads=12, head_dim=64, mlp=3072, dtype="bfloat16"),
        steps=400_000,
        batch=256,
        data=Data(source="tfds", name="wiki40b/en", tokenizer="tokenizer-bert/tokenizer.json"),
        optim=Optim(peak_lr=2e-4, schedule="linear", warmup=10_000, b2=0.999, eps=1e-6, weight_decay=0.1),
        eval_every=2_000,
        eval_batches=32,
        log_every=100,
        checkpoint_every=2_000,
    )
