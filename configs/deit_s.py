"""DeiT-S on ImageNet, 300 epochs, from scratch: where LiGO's DeiT-B grows from (Touvron et al., ICML 2021).

    python -m train.pretrain configs/deit_s.py --set data.path=~/tensorflow_datasets

The paper reports 79.8 % top-1; not run here. ImageNet comes from tensorflow-datasets, which needs its archives by hand. A batch
of 1024 at 5e-4 * batch / 512, an epoch of 1251 steps. Deviations: stochastic depth drops a layer for a whole batch, gradients
are clipped, and see `train.images.Augment`.
"""

from jaxgrow.drop import LayerDrop
from jaxgrow.models.vit import ViTConfig
from train.config import Experiment
from train.images import DEIT, Images
from train.methods import Scratch
from train.optim import Optim

EPOCH = 1251
DROP = LayerDrop(theta=0.9, time="constant")
MODEL = ViTConfig(layers=12, embed=384, heads=6, head_dim=64, mlp=1536, eps=1e-6, dtype="bfloat16")


def config() -> Experiment:
    return Experiment(
        name="deit_s",
        model=MODEL,
        steps=300 * EPOCH,
        batch=1024,
        data=Images(source="tfds", name="imagenet2012", size=224, augment=DEIT, workers=None),
        optim=Optim(peak_lr=1e-3, schedule="cosine", floor=0.01, warmup=5 * EPOCH, b2=0.999, weight_decay=0.05),
        method=Scratch(DROP),
        eval_every=EPOCH,
        eval_batches=48,
        log_every=50,
        checkpoint_every=EPOCH,
    )
