"""Fine-tuning on tasks, with the settings of the papers and with settings for small models.

    python -m train.finetune configs/finetune.py:sst2 --model runs/vcycle --set data.path=DIR

Expected result (`docs/results/finetuned.md`): small text models score only a little above
their untrained controls, for example 0.745 instead of 0.726 on SST-2 (`pieces_sst2`, an encoder of
0.27 million parameters). A ViT of 1.1 million scores 0.958 instead of 0.731 on MNIST (`mnist`).
There are no results for the settings of the papers.

The data folder holds the published files of the task. It may also hold the files of several tasks,
each in its own subfolder.
"""

from dataclasses import replace

from jaxgrow.layerdrop import LayerDrop, Sensitivity
from train.extras.images.augment import Augment
from train.extras.images.images import Images
from train.extras.labelled.downstream import FineTuning
from train.extras.labelled.task import Labelled
from train.state.optim import Optim


def _glue(task: str) -> FineTuning:
    """The setting of multi-level training (Zou et al., 2024) for a GLUE task.

    It reports the best of five learning rates. Texts are padded to 128 tokens.
    """
    return FineTuning(
        name=task,
        data=Labelled(task, "glue", length=128),
        epochs=5,
        batch=32,
        learning_rates=(5e-6, 1e-5, 2e-5, 3e-5, 5e-5),
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
    """The setting of LiGO (Wang et al., 2023).

    Windows have 384 tokens and start 128 tokens apart, as is usual.
    """
    return FineTuning(
        name="squad1",
        data=Labelled("squad1", "squad", length=384, stride=128),
        epochs=2,
        batch=12,
        learning_rates=(5e-5,),
        seeds=(0, 1, 2),
    )


def squad2() -> FineTuning:
    return replace(squad1(), name="squad2", data=replace(squad1().data, task="squad2"))


def table() -> FineTuning:
    """Labelled text of your own: ``--set data.path=FILE data.text=COLUMN data.label=COLUMN``."""
    return FineTuning(
        name="table",
        data=Labelled("table", "table.csv", length=128),
        epochs=3,
        batch=32,
        learning_rates=(1e-5, 2e-5, 5e-5),
    )


def cifar10() -> FineTuning:
    """CIFAR-10 for a ViT, DeiT or CaiT, with images of 32 x 32 pixels.

    Use ``--set data.size=224`` for a model that was trained at this size.
    """
    return FineTuning(
        name="cifar10",
        data=Images("folder", "cifar10/train-jpeg.tar.xz", augment=Augment(flip=True)),
        epochs=10,
        batch=128,
        learning_rates=(1e-4, 3e-4, 1e-3),
        optim=Optim(schedule="cosine", b2=0.999, weight_decay=0.05),
    )


def _transfer(name: str, path: str) -> FineTuning:
    """DeiT's transfer to small datasets (Touvron et al., 2021), which LiGO uses as well.

    SGD runs for 1000 epochs with batches of 768 and a learning rate of 0.01. Images have the size
    of the model. Deviations: there is no label smoothing or mixing except in ``data.augment``;
    the weight decay is 1e-4.

    Args:
      name: name of the fine-tuning.
      path: folder or archive of ``<class>/<file>.jpg``.
    """
    return FineTuning(
        name=name,
        data=Images("folder", path, size=224, augment=Augment(crop="resized", flip=True)),
        epochs=1000,
        batch=768,
        learning_rates=(0.01,),
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
    """Drop layers during fine-tuning.

    The number of epochs is unchanged, so each epoch costs less. Compare the scores by epoch.
    """
    return replace(base, name=f"{base.name}_{name}", drop=drop)


def sst2_pld() -> FineTuning:
    """Progressive layer dropping (Zhang & He, 2020), with theta 0.5 as in the paper's pre-training.

    It is for decoders: encoders drop no layers of padded texts.
    """
    return _dropping(sst2(), LayerDrop(theta=0.5), "pld")


def sst2_sbld() -> FineTuning:
    """Sensitivity-based layer dropping (Zeng et al., 2023; our reconstruction), as on Swin.

    The sensitivities are measured on the fine-tuned model.
    """
    return _dropping(sst2(), LayerDrop(theta=0.5, sensitivity=Sensitivity()), "sbld")


def sst2_uniform() -> FineTuning:
    """The control of `sst2_sbld`: the same mean keep probability without sensitivities."""
    return _dropping(sst2(), LayerDrop(theta=0.5, sensitivity=Sensitivity(beta=0.0)), "uniform")


def digits() -> FineTuning:
    """The digits of scikit-learn, 8 x 8 pixels, which need no download."""
    return FineTuning(
        name="digits",
        data=Images("digits"),
        epochs=20,
        batch=64,
        learning_rates=(1e-3, 3e-3),
        seeds=(0, 1, 2),
    )


def _small(
    task: str, kind: str, length: int, stride: int = 128, examples: int = 8192
) -> FineTuning:
    """A task for the small models of `configs.wikipedia`.

    The learning rates of these models are a hundred times as high as for a BERT.
    """
    return FineTuning(
        name=task,
        data=Labelled(task, kind, length=length, stride=stride, examples=examples),
        epochs=2,
        batch=32,
        learning_rates=(3e-4, 1e-3, 3e-3),
        seeds=(0,),
        optim=Optim(schedule="linear", b2=0.99, weight_decay=0.01),
    )


def bytes_sst2() -> FineTuning:
    return _small("sst2", "sst2", length=96)


def bytes_cola() -> FineTuning:
    return _small("cola", "cola", length=64)


def pieces_sst2() -> FineTuning:
    """SST-2 for the word-piece model of `configs.wikipedia_encoder`."""
    return _small("sst2", "sst2", length=64)


def pieces_cola() -> FineTuning:
    return _small("cola", "cola", length=32)


def pieces_squad1() -> FineTuning:
    return replace(_small("squad1", "squad", length=128, stride=64, examples=4096), epochs=1)


def mnist() -> FineTuning:
    """MNIST for the ViT of `configs.cifar10`: a folder with one subfolder for each digit."""
    return FineTuning(
        name="mnist",
        data=Images("folder", "mnist-png", size=32),
        epochs=2,
        batch=64,
        learning_rates=(1e-3, 3e-3, 1e-2),
        optim=Optim(schedule="cosine", b2=0.999, weight_decay=0.05),
    )


def fashion_mnist() -> FineTuning:
    """Fashion-MNIST, or MNIST: the four published files in one folder.

    The images of 28 x 28 pixels are enlarged to 32 x 32, a size that most patch sizes divide.
    """
    return replace(mnist(), name="fashion_mnist", data=Images("idx", "fashion-mnist", size=32))
