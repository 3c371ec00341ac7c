"""Fine-tuning on tasks, as papers have it.

    python -m train.finetune configs/finetune.py:sst2 --model runs/vcycle --set data.path=DIR

The folder of the data holds the published files of the task, or of all tasks, each in a folder of its own.
"""

from dataclasses import replace

from jaxgrow.drop import LayerDrop, Sensitivity
from train.data.augment import Augment
from train.data.images import Images
from train.data.labelled.task import Labelled
from train.finetuning import FineTuning
from train.state.optim import Optim


def _glue(task: str) -> FineTuning:
    """Multi-level training (Zou et al., 2024): five rates, the best of them, for every task; padded to 128 tokens."""
    return FineTuning(
        name=task,
        data=Labelled(task, "glue", length=128),
        epochs=5,
        batch=32,
        rates=(1e-5, 2e-5, 3e-5, 4e-5, 5e-5),
        seeds=(0, 1, 2),
    )


def cola() -> FineTuning:
    return _glue("cola")


def sst2() -> FineTuning:
    return _glue("sst2")


def mrpc() -> FineTuning:
    return _glue("mrpc")


def stsb() -> FineTuning:
    return _glue("stsb")


def qqp() -> FineTuning:
    return _glue("qqp")


def mnli() -> FineTuning:
    return _glue("mnli")


def qnli() -> FineTuning:
    return _glue("qnli")


def rte() -> FineTuning:
    return _glue("rte")


def wnli() -> FineTuning:
    return _glue("wnli")


def squad1() -> FineTuning:
    """LiGO's (Wang et al., 2023); windows of 384 tokens, 128 apart, as is usual."""
    return FineTuning(
        name="squad1",
        data=Labelled("squad1", "squad", length=384, stride=128),
        epochs=2,
        batch=12,
        rates=(5e-5,),
        seeds=(0, 1, 2),
    )


def squad2() -> FineTuning:
    return replace(squad1(), name="squad2", data=replace(squad1().data, task="squad2"))


def table() -> FineTuning:
    """Labelled text of your own: ``--set data.path=FILE data.text=COLUMN data.label=COLUMN``."""
    return FineTuning(
        name="table", data=Labelled("table", "table.csv", length=128), epochs=3, batch=32, rates=(1e-5, 2e-5, 5e-5)
    )


def cifar10() -> FineTuning:
    """A ViT, DeiT or CaiT, at 32 pixels a side; ``--set data.size=224`` for one that was trained so."""
    return FineTuning(
        name="cifar10",
        data=Images("folder", "cifar10/train-jpeg.tar.xz", augment=Augment(flip=True)),
        epochs=10,
        batch=128,
        rates=(1e-4, 3e-4, 1e-3),
        optim=Optim(schedule="cosine", b2=0.999, weight_decay=0.05),
    )


def _transfer(name: str, path: str) -> FineTuning:
    """DeiT's transfer to small sets (Touvron et al., 2021), LiGO's, too: SGD, 1000 epochs of batches of 768, at 0.01, at the
    model's own size. Deviations: no label smoothing or mixing but ``data.augment``'s; weights decay by 1e-4.

    ``path``: a folder or archive of ``<class>/<file>.jpg``.
    """
    return FineTuning(
        name=name,
        data=Images("folder", path, size=224, augment=Augment(crop="resized", flip=True)),
        epochs=1000,
        batch=768,
        rates=(0.01,),
        warmup=0.005,
        optim=Optim(name="sgd", schedule="cosine", b1=0.9, weight_decay=1e-4),
    )


def flowers() -> FineTuning:
    """Oxford Flowers-102."""
    return _transfer("flowers", "flowers102")


def cars() -> FineTuning:
    """Stanford Cars."""
    return _transfer("cars", "cars196")


def cifar100() -> FineTuning:
    return _transfer("cifar100", "cifar100")


def _dropping(base: FineTuning, drop: LayerDrop, name: str) -> FineTuning:
    """Layers are dropped while it fine-tunes. Read it by epoch: the same number of epochs costs less, at which score?"""
    return replace(base, name=f"{base.name}_{name}", drop=drop)


def sst2_pld() -> FineTuning:
    """Progressive layer dropping (Zhang & He, 2020) for a pre-LN BERT, as the paper pre-trains: theta 0.5."""
    return _dropping(sst2(), LayerDrop(theta=0.5), "pld")


def sst2_sbld() -> FineTuning:
    """Sensitivity-based layer dropping (Zeng et al., 2023; our reconstruction), as on Swin: of what is fine-tuned."""
    return _dropping(sst2(), LayerDrop(theta=0.5, sensitivity=Sensitivity()), "sbld")


def sst2_uniform() -> FineTuning:
    """The control of `sst2_sbld`: the same mean, no sensitivities."""
    return _dropping(sst2(), LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0)), "uniform")


def digits() -> FineTuning:
    """scikit-learn's, 8 pixels a side, which are always there."""
    return FineTuning(name="digits", data=Images("digits"), epochs=20, batch=64, rates=(1e-3, 3e-3), seeds=(0, 1, 2))


def _small(task: str, kind: str, length: int, stride: int = 128, examples: int = 8192) -> FineTuning:
    """For the small models of `configs.wikipedia`, whose rates are a hundred times those of a BERT."""
    return FineTuning(
        name=task,
        data=Labelled(task, kind, length=length, stride=stride, examples=examples),
        epochs=2,
        batch=32,
        rates=(3e-4, 1e-3, 3e-3),
        seeds=(0,),
        optim=Optim(schedule="linear", b2=0.99, weight_decay=0.01),
    )


def bytes_sst2() -> FineTuning:
    return _small("sst2", "sst2", length=96)


def bytes_cola() -> FineTuning:
    return _small("cola", "cola", length=64)


def pieces_sst2() -> FineTuning:
    """Of `configs.wikipedia_encoder`."""
    return _small("sst2", "sst2", length=64)


def pieces_cola() -> FineTuning:
    return _small("cola", "cola", length=32)


def pieces_squad1() -> FineTuning:
    return replace(_small("squad1", "squad", length=128, stride=64, examples=4096), epochs=1)


def mnist() -> FineTuning:
    """Digits, for the ViT of `configs.cifar10`: a folder of images for each."""
    return FineTuning(
        name="mnist",
        data=Images("folder", "mnist-png", size=32),
        epochs=2,
        batch=64,
        rates=(1e-3, 3e-3, 1e-2),
        optim=Optim(schedule="cosine", b2=0.999, weight_decay=0.05),
    )
