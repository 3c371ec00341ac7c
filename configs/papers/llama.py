"""Llamas on C4 with 20 tokens per parameter, up to 70B parameters. Not run here.

    python -m train.compare configs/papers/llama.py:llama_160m_c4 \\
        configs/papers/llama.py:llama_160m_stack --set data.path=~/tensorflow_datasets
    python -m train.preflight configs/papers/llama.py:llama_7b_c4 \\
        configs/papers/llama.py:llama_13b_grown --on h100:8

Expected result: unknown for the first command, because no paper has this setting. The compiled
steps of 7B and 70B are in `docs/results/scale.md`.

The models are L12-768-12 with 4 key/value heads (153 M parameters), a 7B that grows to a 13B, and a
70B. C4 comes from tensorflow-datasets. The `vocab.json` and `merges.txt` of GPT-2 must be in
`tokenizer-gpt2`, and the `tokenizer.json` of a Llama in `tokenizer-llama`.
"""

from dataclasses import replace

from jaxgrow.models import LlamaConfig
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import Growing, GrowTo, TrainStage
from train.state.mesh import Mesh
from train.state.optim import Optim


def llama_160m_c4() -> Experiment:
    """Train the 160M model from scratch."""
    model = LlamaConfig(
        vocab=50304,
        context=1024,
        layers=12,
        embed=768,
        heads=12,
        kv_heads=4,
        head_dim=64,
        mlp=2048,
        dtype="bfloat16",
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


def llama_160m_stack() -> Experiment:
    """G_stack (Du et al., NeurIPS 2024): three layers first, then stacked four times.

    Its formula (`g_stack_tokens`) was fitted to larger models. At this size it would give more than
    a quarter of the tokens to the small model, so a quarter is used. As published, the grown model
    starts with a fresh optimizer and has its own schedule.
    """
    base = llama_160m_c4()
    small = replace(base.model, layers=base.model.layers // 4)
    growing = Growing(small, TrainStage(0.25), (GrowTo((TrainStage(0.75),), by=("g_stack",)),))
    return replace(base, name="llama_160m_stack", method=growing)


def llama_8x160m_c4() -> Experiment:
    """Eight experts in place of each MLP, over eight devices: 0.55 G parameters.

    Each token uses two experts. No paper has this setting.
    """
    base = llama_160m_c4()
    return replace(
        base, name="llama_8x160m_c4", model=replace(base.model, experts=8), mesh=Mesh(fsdp=8)
    )


def llama_7b_c4() -> Experiment:
    """Llama 7B, L32-4096-32 (Touvron et al., 2023), over eight devices.

    The learning rate, warm-up, clipping and batch are as published.
    """
    model = LlamaConfig(
        context=2048,
        layers=32,
        embed=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        mlp=11008,
        dtype="bfloat16",
        remat="auto",
    )
    return Experiment(
        name="llama_7b_c4",
        model=model,
        steps=32_000,
        batch=2048,
        accumulate=128,
        mesh=Mesh(fsdp=8),
        data=Data(source="tfds", name="c4/en", tokenizer="tokenizer-llama"),
        optim=Optim(peak_lr=3e-4, schedule="cosine", warmup=2_000, floor=0.1),
        eval_every=1_000,
        eval_batches=4,
        log_every=10,
        checkpoint_every=500,
    )


def llama_13b_grown() -> Experiment:
    """Llama 13B, L40-5120-40, grown from a 7B.

    It is widened by AKI (bert2BERT) and deepened by stacking. No paper has this setting.
    """
    base = llama_7b_c4()
    model = replace(base.model, layers=40, embed=5120, heads=40, kv_heads=40, mlp=13824)
    growing = Growing(
        base.model, "llama_7b_c4-seed{seed}", (GrowTo((TrainStage(1.0),), by=("aki", "stack")),)
    )
    return replace(base, name="llama_13b_grown", model=model, method=growing)


def llama_70b_c4() -> Experiment:
    """Llama 70B, L80-8192-64 with 8 key/value heads (Touvron et al., 2023), over 64 devices.

    The learning rate and the batch are as published.
    """
    base = llama_7b_c4()
    model = replace(
        base.model, context=4096, layers=80, embed=8192, heads=64, kv_heads=8, mlp=28672
    )
    return replace(
        base,
        name="llama_70b_c4",
        model=model,
        steps=329_000,
        batch=1024,
        accumulate=16,
        mesh=Mesh(fsdp=64),
        optim=replace(base.optim, peak_lr=1.5e-4),
    )
