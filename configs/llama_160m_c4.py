"""A Llama of 153 M parameters, L12-768-12 on 4 key heads, on C4, from scratch: 20 tokens a parameter. Not run here.

    python -m train.compare configs/llama_160m_c4.py configs/llama_160m_stack.py --set data.path=~/tensorflow_datasets

C4 comes from tensorflow-datasets; GPT-2's `vocab.json` and `merges.txt` must lie in `tokenizer-gpt2`.
"""

from jaxgrow.models.llama import LlamaConfig
from train.config import Experiment
from train.data import Data
from train.optim import Optim


def config() -> Experiment:
    model = LlamaConfig(
        vocab=50304, context=1024, layers=12, embed=768, heads=12, kv_heads=4, head_dim=64, mlp=2048, dtype="bfloat16"
    )
    return Experiment(
        name="llama_160m_c4",
        model=model,
        steps=12_000,
        batch=256,
        data=Data(source="tfds", name="c4/en", tokenizer="tokenizer-gpt2"),
        optim=Optim(peak_lr=6e-4, schedule="cosine", warmup=1_000, floor=0.1),
        eval_every=500,
        eval_batches=16,
        log_every=50,
        checkpoint_every=1_000,
    )
