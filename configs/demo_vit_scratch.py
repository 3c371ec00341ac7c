"""A ViT of 0.1 M parameters on scikit-learn's handwritten digits, which need no download: the demo's baseline for images.

python -m train.compare configs/demo_vit_scratch.py configs/demo_vit_vcycle.py
"""

from jaxgrow.models.vit import ViTConfig
from train.config import Experiment
from train.images import Images
from train.optim import Optim

MODEL = ViTConfig(
    image=8, patch=2, channels=1, classes=10, layers=4, embed=48, heads=4, head_dim=12, mlp=192, eps=1e-6, remat=True
)


def config() -> Experiment:
    return Experiment(
        name="demo_vit_scratch",
        model=MODEL,
        steps=1500,
        batch=32,
        data=Images(),  # no shifts: the digits fill their pixels, and lose strokes
        optim=Optim(peak_lr=3e-3, schedule="wsd", decay=0.5, warmup=100, b2=0.999, weight_decay=0.05),
        eval_every=50,
        eval_batches=5,
        log_every=20,
        checkpoint_every=500,
    )
