"""Do growing and layer dropping save FLOPs on CIFAR-10? A ViT and a Swin V2.

    python -m train.compare configs/cifar10.py:vit_scratch configs/cifar10.py:vit_vcycle \\
        configs/cifar10.py:vit_small configs/cifar10.py:vit_ligo configs/cifar10.py:vit_sbld \\
        configs/cifar10.py:vit_uniform --seeds 0,1 --frontier 0.55 --workdir runs/cifar10
    python -m train.compare configs/cifar10.py:vit_muon configs/cifar10.py:vit_muon_deepen \\
        configs/cifar10.py:vit_muon_halves --seeds 0,1 --frontier 0.55,0.75 \\
        --workdir runs/cifar10_muon
    python -m train.compare configs/cifar10.py:vit_long configs/cifar10.py:vit_long_halves \\
        configs/cifar10.py:vit_long_deepen configs/cifar10.py:vit_long_vcycle \\
        --frontier 0.55,0.75 --workdir runs/vit_long
    python -m train.compare configs/cifar10.py:swin_scratch configs/cifar10.py:swin_sbld \\
        configs/cifar10.py:swin_uniform configs/cifar10.py:swin_pld --frontier 0.55 \\
        --workdir runs/cifar10_swin

Expected result (`docs/results/encoders-muon.md`): against Muon, `vit_muon_deepen` saves 12.8 % and
`vit_muon_halves` 22.3 % of the FLOPs (two seeds). `vit_long_halves` saves 24.5 %,
`vit_long_deepen` 20.5 % and `vit_long_vcycle` 9.0 % (two seeds). Under AdamW
(`docs/results/encoders.md`), `vit_vcycle` saves 1.1 % with one seed and more than 24.7 % with the
other. Layer dropping saves nothing on either model.

The ViT has 0.7 million parameters and patches of 8 x 8. The Swin V2 has 0.8 million parameters and
patches of 4 x 4. Each run sees 2.6 epochs. `vit_long` has 1.1 million parameters and sees ten
epochs.

`cifar10/train-jpeg.tar.xz` holds the 50,000 training images as `train/<class>/<file>.jpg`. A tenth
of them is the validation set. Any other folder of images of 32 x 32 pixels in ten classes works as
well (`--set data.path=...`). In 2.6 epochs, no image is seen often enough to be memorised, so the
images are mirrored but not shifted. In ten epochs they are shifted too.
"""

from dataclasses import replace

from configs import wikipedia
from jaxgrow.extras.models.swin import SwinConfig
from jaxgrow.layerdrop import LayerDrop, Sensitivity
from jaxgrow.models import ViTConfig
from train.config.experiment import Experiment
from train.extras.images.augment import Augment
from train.extras.images.images import Images
from train.plan.methods import Growing, GrowTo, Learned, Scratch, TrainStage
from train.plan.modifiers import DropLayers
from train.plan.recipes import deepened, halves
from train.state.optim import Optim


def vit_scratch() -> Experiment:
    """Train the ViT from scratch."""
    return Experiment(
        name="cifar10_vit_scratch",
        model=ViTConfig(
            image=32,
            patch=8,
            channels=3,
            classes=10,
            layers=6,
            embed=96,
            heads=4,
            head_dim=24,
            mlp=384,
            eps=1e-6,
            remat="projections",
        ),
        steps=1800,
        batch=64,
        data=Images(source="folder", path="cifar10/train-jpeg.tar.xz", augment=Augment(flip=True)),
        optim=Optim(
            peak_lr=1e-3, schedule="wsd", decay=0.5, warmup=90, b2=0.999, weight_decay=0.05
        ),
        eval_every=90,
        eval_batches=32,
        log_every=20,
        checkpoint_every=180,
    )


def vit_vcycle() -> Experiment:
    """The V-cycle of the demo, with a last phase of half of the steps."""
    return replace(vit_scratch(), name="cifar10_vit_vcycle", method=wikipedia.VCYCLE)


def vit_small() -> Experiment:
    """The small model that `vit_ligo` grows.

    It has 3 layers and half of the width. It trains for half of the steps of the large model, until
    its learning rate has decayed.
    """
    base = vit_scratch()
    model = replace(base.model, layers=3, embed=48, heads=2, mlp=192)
    return replace(base, name="cifar10_vit_small", model=model, steps=900)


def vit_ligo() -> Experiment:
    """LiGO, with maps that are learned in 100 steps."""
    grown = GrowTo((TrainStage(0.6),), by=Learned(steps=100))
    method = Growing(vit_small().model, "cifar10_vit_small-seed{seed}", (grown,))
    return replace(vit_scratch(), name="cifar10_vit_ligo", method=method)


def vit_sbld() -> Experiment:
    """SBLD (Zeng et al., 2023; our reconstruction), with theta 0.5."""
    return _dropping(vit_scratch(), "sbld", LayerDrop(theta=0.5, sensitivity=Sensitivity()))


def vit_uniform() -> Experiment:
    """The control of `vit_sbld`: the same layer dropping without sensitivities."""
    return _dropping(
        vit_scratch(), "uniform", LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))
    )


def vit_muon() -> Experiment:
    """Train the ViT from scratch with Muon."""
    optim = replace(vit_scratch().optim, name="muon", peak_lr=1.5e-3)
    return replace(vit_scratch(), name="cifar10_vit_muon", optim=optim)


def vit_muon_deepen() -> Experiment:
    """`vit_muon` with half of the layers first."""
    return replace(
        vit_muon(),
        name="cifar10_vit_muon_deepen",
        method=deepened(vit_muon().model, 3, 0.5, wikipedia.FINAL),
    )


def vit_muon_halves() -> Experiment:
    """`vit_muon` with half of the layers and of each MLP for the first 60 % of the steps."""
    return replace(vit_muon(), name="cifar10_vit_muon_halves", method=halves(vit_muon().model))


# --- A ViT of 1.1 million parameters, ten epochs ---


def vit_long() -> Experiment:
    """Train a ViT of 10 layers and 1.1 million parameters from scratch with Muon, for ten epochs."""
    short = vit_muon()
    return replace(
        short,
        name="cifar10_vit_long",
        model=replace(short.model, layers=10, heads=3, head_dim=32),
        steps=7030,
        data=replace(short.data, augment=Augment(crop="pad", flip=True)),
        optim=replace(short.optim, warmup=350),
        eval_every=370,
        eval_batches=78,
        log_every=100,
        checkpoint_every=370,
    )


def vit_long_deepen() -> Experiment:
    """`vit_long` with 5 layers first."""
    return replace(
        vit_long(),
        name="cifar10_vit_long_deepen",
        method=deepened(vit_long().model, 5, 0.5, wikipedia.FINAL),
    )


def vit_long_halves() -> Experiment:
    """`vit_long` with 5 layers and half of each MLP for the first 60 % of the steps."""
    return replace(vit_long(), name="cifar10_vit_long_halves", method=halves(vit_long().model))


def vit_long_vcycle() -> Experiment:
    """`vit_long` with a V-cycle whose small model has 5 layers."""
    return wikipedia.cycled(vit_long())


# --- Swin V2 ---


def swin_scratch() -> Experiment:
    """Train the Swin V2 from scratch.

    The first stage has 8 x 8 patches in four windows, which every other layer shifts. The second
    stage has a single window. A run costs 1e13 FLOPs. The learning rate was swept at a quarter of
    the steps.
    """
    vit = vit_scratch()
    model = SwinConfig(
        image=32,
        patch=4,
        channels=3,
        classes=10,
        layers=(2, 6),
        embed=(48, 96),
        heads=(3, 6),
        head_dim=16,
        mlp=(192, 384),
        window=4,
        remat="projections",
    )
    return replace(
        vit, name="cifar10_swin_scratch", model=model, optim=replace(vit.optim, peak_lr=3e-3)
    )


def _dropping(base: Experiment, name: str, drop: LayerDrop) -> Experiment:
    return replace(
        base,
        name=f"{base.name.removesuffix('_scratch')}_{name}",
        method=Scratch((DropLayers(drop),)),
    )


def swin_pld() -> Experiment:
    """Progressive layer dropping. It counts the layers of both stages in one order."""
    return _dropping(swin_scratch(), "pld", LayerDrop(theta=0.5))


def swin_sbld() -> Experiment:
    """Sensitivity-based layer dropping. It counts the layers of both stages in one order."""
    return _dropping(swin_scratch(), "sbld", LayerDrop(theta=0.5, sensitivity=Sensitivity()))


def swin_uniform() -> Experiment:
    """The control of `swin_sbld`: the same layer dropping without sensitivities."""
    return _dropping(
        swin_scratch(), "uniform", LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0))
    )
