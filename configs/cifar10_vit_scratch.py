"""A ViT of 1.9 M parameters on CIFAR-10, patches of 4 x 4, 20 epochs, from scratch.

    python -m train.compare configs/cifar10_vit_scratch.py configs/cifar10_vit_vcycle.py --seeds 0,1 --frontier 0.4,0.6,0.8 \\
        --workdir runs/cifar10

`cifar10/train-jpeg.tar.xz` holds the 50,000 training images as `train/<class>/<file>.jpg`, of which a tenth is held out; any
other folder of images of 32 x 32 pixels in ten classes does, too (`--set data.path=...`).
"""

from jaxgrow.models.vit import ViTConfig
from train.config import Experiment
from train.images import SHIFT_FLIP, Images
from train.optim import Optim

MODEL = ViTConfig(
    image=32, patch=4, channels=3, classes=10, layers=6, embed=160, heads=4, head_dim=40, mlp=640, eps=1e-6, remat=True
)


def config() -> Experiment:
    return Experiment(
        name="cifar10_vit_scratch",
        model=MODEL,
        steps=7000,
        batch=128,
        data=Images(source="folder", path="cifar10/train-jpeg.tar.xz", augment=SHIFT_FLIP),
        optim=Optim(peak_lr=1e-3, schedule="wsd", decay=0.5, warmup=350, b2=0.999, weight_decay=0.05),
        eval_every=200,
        eval_batches=16,
        log_every=50,
        checkpoint_every=1000,
    )
