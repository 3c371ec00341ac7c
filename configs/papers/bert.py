"""Do the papers' savings on BERT hold? LiGO, V-cycles and PLD at the papers' sizes. Not run here.

    python -m train.pretrain configs/papers/bert.py:small --set data.path=~/tensorflow_datasets \\
        --workdir runs/bert_small-seed0
    python -m train.compare configs/papers/bert.py:base configs/papers/bert.py:base_ligo \\
        --set data.path=~/tensorflow_datasets
    c=configs/papers/bert.py
    python -m train.compare $c:base_multilevel $c:base_vcycle
    python -m train.compare $c:large_multilevel $c:large_vcycle2 $c:large_vcycle3
    python -m train.compare $c:base_preln $c:base_pld

Results of the papers: LiGO saves 44.7 % of the FLOPs of base, without the cost of the small model.
The V-cycle saves 19.0 % on base, and 37.4 and 51.6 % on large. PLD takes 24 % less time per sample.

All models are trained with masked language modelling alone, and with AdamW. For LiGO, English
Wikipedia comes from tensorflow-datasets. For the V-cycles and PLD, the text is Wikipedia and
BooksCorpus: the folder `wikipedia-and-bookscorpus` with the text of both, for example in two
subfolders that Hugging Face `datasets` saved. The publishers of BooksCorpus no longer offer it.
Without it, `--set data.source=tfds data.name=wiki40b/en data.path=~/tensorflow_datasets` trains on
Wikipedia alone, which differs from the papers.

The `tokenizer.json` of bert-base-uncased must be in `tokenizer-bert`. Samples are windows of packed
text, so the model needs no more positions than a window has. An experiment that grows a small model
reads its run, such as `bert_small-seed0` or the run of another seed, from the same workdir.

`configs/papers/settings.toml` has the settings that the papers state, and `python -m train.show`
compares an experiment with them. Other settings are not stated in the papers.
"""

from dataclasses import replace

from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import BERTConfig
from train.config.experiment import Experiment
from train.data.text import Data
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.transforms import Grouping
from train.state.optim import Optim


def base() -> Experiment:
    """Base, L12-768-12, from scratch: the baseline of LiGO's growth from small.

    This is the setting of LiGO (Wang et al., ICLR 2023, section 4.1): 400,000 steps of 256 x 128
    tokens. The paper reports a GLUE average of 82.25.
    """
    return Experiment(
        name="bert_base",
        model=BERTConfig(
            context=128, layers=12, embed=768, heads=12, head_dim=64, mlp=3072, dtype="bfloat16"
        ),
        steps=400_000,
        batch=256,
        data=Data(source="tfds", name="wiki40b/en", tokenizer="tokenizer-bert/tokenizer.json"),
        optim=Optim(
            peak_lr=2e-4, schedule="linear", warmup=10_000, b2=0.999, eps=1e-6, weight_decay=0.1
        ),
        eval_every=2_000,
        eval_batches=32,
        log_every=100,
        checkpoint_every=2_000,
    )


def small() -> Experiment:
    """Small, L6-512-8: the small model of LiGO's pair (Wang et al., ICLR 2023, Table 4).

    It is grown after 220,000 steps (appendix C.1).
    """
    large = base()
    model = replace(large.model, layers=6, embed=512, heads=8, mlp=2048)
    return replace(large, name="bert_small", model=model, steps=220_000)


def large() -> Experiment:
    """Large, L24-1024-16, from scratch: the baseline of LiGO from base.

    The number of steps, the batch and the learning rate are stated for BERT, whatever its size.
    """
    small = base()
    model = replace(small.model, layers=24, embed=1024, heads=16, mlp=4096, remat="auto")
    return replace(small, name="bert_large", model=model)


# --- LiGO (Wang et al., ICLR 2023) ---


def base_ligo() -> Experiment:
    """LiGO from small to base: 100 steps of learning, then a fresh optimizer (Table 1).

    The paper reports 44.7 % fewer FLOPs and 40.7 % less wall-clock time without the cost of the
    small model. With this cost, it is 26.0 %. The learning rate of the maps is the peak of the
    published code.
    """
    # Deviation(LiGO): method.to.0.by.warmup: the published warm-up of 10,000 steps would leave the
    # learning rate of the 100 steps near 0, so it has 10 steps.
    to = GrowTo((TrainStage(1.0, warmup=0),), by=Learned())
    return replace(
        base(), name="bert_base_ligo", method=Growing(small().model, "bert_small-seed{seed}", (to,))
    )


def large_ligo() -> Experiment:
    """LiGO from base to large: 45.2 % fewer FLOPs (Fig. 2c), small model excluded."""
    to = GrowTo((TrainStage(1.0, warmup=0),), by=Learned())
    return replace(
        large(), name="bert_large_ligo", method=Growing(base().model, "bert_base-seed{seed}", (to,))
    )


# --- V-cycles (Zou et al., ICLR 2024) ---


def base_multilevel() -> Experiment:
    """Base, L12-768-12, from scratch: the baseline of its V-cycle.

    40 epochs of batches of 512 windows of 128 tokens, at a peak learning rate of 1e-4. Reviews of
    the paper give 300,000 steps for them: `--set steps=300_000` trains so long on any corpus.
    """
    ligo = base()
    return replace(
        ligo,
        name="bert_base_multilevel",
        steps=0,
        epochs=40,
        batch=512,
        data=Data(
            source="text",
            path="wikipedia-and-bookscorpus",
            tokenizer="tokenizer-bert/tokenizer.json",
        ),
        optim=replace(ligo.optim, peak_lr=1e-4),
    )


def large_multilevel() -> Experiment:
    """Large, L24-1024-16, from scratch, with the settings of base: the baseline of its V-cycles."""
    return replace(base_multilevel(), name="bert_large_multilevel", model=large().model)


def base_vcycle() -> Experiment:
    """The V-cycle of base: L12-768 with L6-384, alpha 0.5.

    The small model trains for half of the steps. The paper reports 19.0 % fewer FLOPs and 10.8 %
    less wall-clock time at equal loss. It does not state the first stage, and the learning rate and
    the warm-ups of the other stages. Here they are taken from the published example for GPT-2, with
    a learning rate of 4e-4 for the small model. Embeddings grow by the published rules.
    """
    method = VCycle(
        down=(TrainStage(0.05),),
        up=(TrainStage(0.5, lr=4.0, warmup=0), TrainStage(0.5, warmup=0)),
        groupings=(Grouping(heads="far", layers="adjacent", tied="paper"),),
        alpha=0.5,
    )
    return replace(base_multilevel(), name="bert_base_vcycle", method=method)


def large_vcycle2() -> Experiment:
    """The V-cycle of large in two levels: L24-1024 with L12-512, alpha 0.5.

    The paper reports 37.4 % fewer FLOPs and 32.9 % less wall-clock time (Table 4).
    """
    return replace(large_multilevel(), name="bert_large_vcycle2", method=base_vcycle().method)


def large_vcycle3() -> Experiment:
    """The V-cycle of large in three levels: L24-1024, L12-512 and L6-256, alpha 0.5.

    The paper reports 51.6 % fewer FLOPs and 41.9 % less wall-clock time (Table 4). Each coarse
    model trains for half of the steps.
    """
    method = VCycle(
        down=(TrainStage(0.05), TrainStage(0.05)),
        up=(
            TrainStage(0.5, lr=4.0, warmup=0),
            TrainStage(0.5, lr=4.0, warmup=0),
            TrainStage(0.5, warmup=0),
        ),
        groupings=(Grouping(heads="far", layers="adjacent", tied="paper"),),
        alpha=0.5,
    )
    return replace(large_multilevel(), name="bert_large_vcycle3", method=method)


# --- PLD (Zhang & He, NeurIPS 2020) ---


def base_preln() -> Experiment:
    """Base with pre-LN and without layer dropping: it differs from `base_pld` only in the dropping.

    It trains for 200,000 steps of 4096 x 128 tokens at a learning rate of 1e-3.
    """
    # Deviation(PLD): optim.schedule: in the published config the learning rate falls by 1 % every
    # 1,000 steps, to 13 %. Here it falls linearly to zero, as in all our comparisons.
    post = base_multilevel()
    return replace(
        post,
        name="bert_base_preln",
        model=replace(post.model, norm="pre"),
        steps=200_000,
        epochs=None,
        batch=4096,
        accumulate=8,
        optim=Optim(peak_lr=1e-3, schedule="linear", warmup=4_000, b2=0.999, weight_decay=0.01),
    )


def base_pld() -> Experiment:
    """Progressive layer dropping: theta 0.5, and gamma 0.001 per step in 200,000 steps.

    The paper reports 24 % less time per sample. It also reports pre-training 2.5 times as fast as
    for a post-LN baseline with a lower learning rate. `base_preln` is not this baseline. Gamma is
    that of the published config; the paper proposes 100 / T, half of it.
    """
    # Deviation(PLD): method.drop.keep: the published code divides by another probability than the
    # one with which it keeps a layer. `base_pld_published` repeats this.
    drop = LayerDrop(theta=0.5, gamma=200.0)
    return replace(base_preln(), name="bert_base_pld", method=Scratch((DropLayers(drop),)))


def base_pld_published() -> Experiment:
    """`base_pld` with the sampling and the rescaling of the published code.

    They scale up every layer on average, by 1.04 to 1.08 (`LayerDrop.keep`).
    """
    drop = LayerDrop(theta=0.5, gamma=200.0, keep="published")
    return replace(
        base_preln(), name="bert_base_pld_published", method=Scratch((DropLayers(drop),))
    )
