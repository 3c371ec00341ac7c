"""Does LiGO's saving on CaiT hold? LiGO's pair on ImageNet, 300 epochs. Not run here.

    python -m train.pretrain configs/papers/cait.py:xs --set data.path=~/tensorflow_datasets \\
        --workdir runs/cait_xs-seed0
    python -m train.compare configs/papers/cait.py:s configs/papers/cait.py:s_ligo \\
        --set data.path=~/tensorflow_datasets
    python -m train.compare configs/papers/cait.py:s configs/papers/cait.py:s_vcycle \\
        --set data.path=~/tensorflow_datasets

Result of the paper: LiGO saves 52.6 % of the FLOPs, without the cost of the small model.

The training follows DeiT's recipe. Touvron et al. (2021) train CaiT for 400 epochs.
`configs/papers/deit.py` lists the deviations.
"""

from dataclasses import replace

from configs.papers import deit
from jaxgrow.extras.models.cait import CaiTConfig
from jaxgrow.layerdrop import LayerDrop
from train.config.experiment import Experiment
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers

# The keep probability is the same in all layers, and higher in the smaller model.
XS_DROP = LayerDrop(theta=0.95, time="constant", depth="uniform")
S_DROP = LayerDrop(theta=0.9, time="constant", depth="uniform")


def xs() -> Experiment:
    """CaiT-XS24, from scratch: the source model for S24."""
    model = CaiTConfig(layers=24, embed=288, heads=6, head_dim=48, mlp=1152, dtype="bfloat16")
    return replace(deit.s(), name="cait_xs", model=model, method=Scratch((DropLayers(XS_DROP),)))


def s() -> Experiment:
    """CaiT-S24, from scratch: the baseline of LiGO's figure."""
    small = xs()
    model = replace(small.model, embed=384, heads=8, mlp=1536)
    return replace(small, name="cait_s", model=model, method=Scratch((DropLayers(S_DROP),)))


def s_ligo() -> Experiment:
    """LiGO from XS24 to S24: 100 steps of learning, then a fresh optimizer.

    The paper (Wang et al., ICLR 2023, appendix C.2) reports 52.6 % fewer FLOPs, without the cost of
    the small model. It does not describe class layers and talking heads. Here each of them has its
    own maps. The experiment reads the run `cait_xs-seed0`, or the run of another seed, from the
    same workdir.
    """
    to = GrowTo((TrainStage(1.0, warmup=0, modifiers=(DropLayers(S_DROP),)),), by=Learned(lr=0.5))
    return replace(s(), name="cait_s_ligo", method=Growing(xs().model, "cait_xs-seed{seed}", (to,)))


def s_vcycle() -> Experiment:
    """S24 with DeiT-B's V-cycle: L24-H8 with L12-H4.

    The number of class layers stays two. No paper has run this experiment.
    """
    return replace(s(), name="cait_s_vcycle", method=deit.vcycle(S_DROP))
