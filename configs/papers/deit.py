"""Do the savings on DeiT hold? V-cycle and LiGO on ImageNet, 300 epochs. Not run here.

    python -m train.pretrain configs/papers/deit.py:s --set data.path=~/tensorflow_datasets \\
        --workdir runs/deit_s-seed0
    python -m train.compare configs/papers/deit.py:b configs/papers/deit.py:b_vcycle \\
        --set data.path=~/tensorflow_datasets
    python -m train.compare configs/papers/deit.py:b configs/papers/deit.py:b_ligo \\
        --set data.path=~/tensorflow_datasets

Results of the papers: the V-cycle saves 27.1 % of the FLOPs at equal accuracy. LiGO saves 55.4 %,
without the cost of the small model.

The setting is DeiT's (Touvron et al., ICML 2021): a batch of 1024, a learning rate of
`5e-4 * batch / 512`, and warm-ups of 5 epochs of 1251 steps. ImageNet comes from tensorflow-datasets, for which
its archives must be downloaded by hand. Deviations: stochastic depth drops a layer for a complete
batch, gradients are clipped, and `train.extras.images.augment.Augment` lists more of them.
"""

from dataclasses import replace

from jaxgrow.layerdrop import LayerDrop
from jaxgrow.models import ViTConfig
from train.config.experiment import Experiment
from train.extras.images.augment import DEIT
from train.extras.images.images import Images
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage, VCycle
from train.plan.modifiers import DropLayers
from train.plan.transforms import Grouping
from train.state.optim import Optim

EPOCH = 1251
DROP = LayerDrop(theta=0.9, time="constant")


def s() -> Experiment:
    """DeiT-S, from scratch: the source model for LiGO's DeiT-B. The paper reports 79.8 % top-1."""
    return Experiment(
        name="deit_s",
        model=ViTConfig(
            layers=12, embed=384, heads=6, head_dim=64, mlp=1536, eps=1e-6, dtype="bfloat16"
        ),
        epochs=300,
        batch=1024,
        data=Images(source="tfds", name="imagenet2012", size=224, augment=DEIT, workers=None),
        optim=Optim(
            peak_lr=1e-3,
            schedule="cosine",
            floor=0.01,
            warmup=5 * EPOCH,
            b2=0.999,
            weight_decay=0.05,
        ),
        method=Scratch((DropLayers(DROP),)),
        eval_every=EPOCH,
        eval_batches=48,
        log_every=50,
        checkpoint_every=EPOCH,
    )


def ti() -> Experiment:
    """DeiT-Ti, from scratch: the smallest of the three models."""
    small = s()
    return replace(small, name="deit_ti", model=replace(small.model, embed=192, heads=3, mlp=768))


def b() -> Experiment:
    """DeiT-B, L12-768-12, from scratch: the baseline of the multi-level paper and of LiGO.

    The DeiT paper reports 81.8 % top-1, the other two papers 81.1 %.
    """
    small = s()
    return replace(small, name="deit_b", model=replace(small.model, embed=768, heads=12, mlp=3072))


def vcycle(drop: LayerDrop) -> VCycle:
    """The V-cycle of the multi-level paper (Zou et al., ICLR 2024).

    The small model has half of the layers and heads, and it trains for half of the steps. Alpha is
    0.25.

    Args:
      drop: layer dropping (stochastic depth) in every stage.
    """
    return VCycle(
        down=(TrainStage(0.05, warmup=5 * EPOCH, modifiers=(DropLayers(drop),)),),
        up=(
            TrainStage(0.5, modifiers=(DropLayers(drop),)),
            TrainStage(0.5, warmup=0, modifiers=(DropLayers(drop),)),
        ),
        groupings=(Grouping(heads="far", layers="adjacent"),),
        alpha=0.25,
    )


def b_vcycle() -> Experiment:
    """DeiT-B with the V-cycle: L12-H12 with L6-H6.

    The paper reports 27.1 % fewer FLOPs at equal accuracy. It does not state the length of the
    first stage, or whether the small model has another learning rate. Both are as for GPT and BERT:
    5 %, and the same learning rate.
    """
    return replace(b(), name="deit_b_vcycle", method=vcycle(DROP))


def b_ligo() -> Experiment:
    """LiGO from DeiT-S to DeiT-B: 100 steps of learning, then a fresh optimizer.

    The paper (Wang et al., ICLR 2023, Table 2) reports 55.4 % fewer FLOPs, without the cost of the
    small model. It states neither the initialisation nor the learning rate of the maps. The
    experiment reads the run `deit_s-seed0`, or the run of another seed, from the same workdir.
    """
    to = GrowTo((TrainStage(1.0, warmup=0, modifiers=(DropLayers(DROP),)),), by=Learned(lr=0.5))
    return replace(b(), name="deit_b_ligo", method=Growing(s().model, "deit_s-seed{seed}", (to,)))
