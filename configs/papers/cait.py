"""CaiT on ImageNet, 300 epochs, by DeiT's recipe: LiGO's pair. Not run here.

    python -m train.pretrain configs/papers/cait.py:xs --set data.path=~/tensorflow_datasets --workdir runs/cait_xs-seed0
    python -m train.compare configs/papers/cait.py:s configs/papers/cait.py:s_ligo --set data.path=~/tensorflow_datasets
    python -m train.compare configs/papers/cait.py:s configs/papers/cait.py:s_vcycle --set data.path=~/tensorflow_datasets

Touvron et al. (2021) train for 400 epochs. Deviations as of `configs/papers/deit.py`.
"""

from dataclasses import replace

from configs.papers import deit
from jaxgrow.drop import LayerDrop
from jaxgrow.models import CaiTConfig
from train.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Learned, Scratch, Stage

XS_DROP = LayerDrop(
    theta=0.95, time="constant", depth="uniform"
)  # less for a smaller model, and the same in all layers
S_DROP = LayerDrop(theta=0.9, time="constant", depth="uniform")


def xs() -> Experiment:
    """CaiT-XS24, from scratch: where S24 grows from."""
    model = CaiTConfig(layers=24, embed=288, heads=6, head_dim=48, mlp=1152, dtype="bfloat16")
    return replace(deit.s(), name="cait_xs", model=model, method=Scratch(XS_DROP))


def s() -> Experiment:
    """CaiT-S24, from scratch: the baseline of LiGO's figure."""
    small = xs()
    model = replace(small.model, embed=384, heads=8, mlp=1536)
    return replace(small, name="cait_s", model=model, method=Scratch(S_DROP))


def s_ligo() -> Experiment:
    """XS24 to S24 by LiGO: 100 steps of learning, then a fresh optimizer (Wang et al., ICLR 2023, appendix C.2).

    The paper reports 52.6 % fewer FLOPs, without the small model's cost. It says nothing of class layers and of heads that
    talk: here both have maps of their own. Reads the run `cait_xs-seed0`, or of another seed, beside its own.
    """
    to = GrowTo((Stage(1.0, warmup=0, drop=S_DROP),), by=Learned(lr=0.5))
    return replace(s(), name="cait_s_ligo", method=Growing(xs().model, "cait_xs-seed{seed}", (to,)))


def s_vcycle() -> Experiment:
    """S24 by DeiT-B's V-cycle: L24-H8 with L12-H4; the class layers stay two. No paper has run it."""
    return replace(s(), name="cait_s_vcycle", method=deit.vcycle(S_DROP))
