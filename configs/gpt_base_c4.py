"""GPT-2 base, L12-768-12, on C4: the small model of LiGO's GPT pair (Wang et al., ICLR 2023, Table 4).

    python -m train.pretrain configs/gpt_base_c4.py --set data.path=~/tensorflow_datasets --workdir runs/gpt_base_c4-seed0

Batch 384 of 1024 tokens, as the paper's; it states neither steps nor learning rates, so these are the usual ones for the size.
Not run here. C4 comes from tensorflow-datasets; GPT-2's `vocab.json` and `merges.txt` must lie in `tokenizer-gpt2`.
"""

from jaxgrow.models.gpt2 import GPT2Config
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    return Experiment(
        name="gpt_base_c4",
        model=GPT2Config(context=1024, layers=12, embed=768, heads=12, head_dim=64, mlp=3072, dtype="bfloat16"),
        steps=100_000,
        batch=384,
        data=Data(source="tfds", name="c4/en", tokenizer="tokenizer-gpt2"),
        optim=Optim(peak_lr=6e-4, schedule="cosine", warmup=2_000, floor=0.1),
        eval_every=1_000,
        eval_batches=16,
        log_every=50,
        checkpoint_every=1_000,
    )
