"""Settings of image augmentation. `train.extras.images.pixels` carries it out."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Augment:
    """Augmentation of a training image, sampled anew each time that the image is read.

    The default leaves images unchanged. ``DEIT`` is the recipe of Touvron et al. (2021).
    Deviations: a sample is mixed with a randomly chosen training image instead of its neighbour in
    the batch, and no sample is repeated within a batch.
    """

    # "pad": shift by up to an eighth of the side; "resized": a crop of 8 to 100 % of the area
    crop: Literal["none", "pad", "resized"] = "none"
    flip: bool = False  # flip left and right with probability 0.5
    randaugment: int = 0  # number of RandAugment operations; each is applied with probability 0.5
    erasing: float = 0.0  # probability that a rectangle is replaced by noise
    # The parameter a of Beta(a, a), from which the share of the first image is sampled; 0: no mixup
    mixup: float = 0.0
    # The same for CutMix, where the share is an area. If both are set, each has probability 0.5.
    cutmix: float = 0.0
    smoothing: float = 0.0  # label smoothing: the probability that is spread over all classes

    @property
    def softens(self) -> bool:
        """Whether the target of an image is a probability of each class, not one class."""
        return bool(self.mixup or self.cutmix or self.smoothing)

    def __post_init__(self):
        for name, high in (
            ("erasing", 1),
            ("smoothing", 1),
            ("mixup", 100),
            ("cutmix", 100),
        ):
            if not 0 <= getattr(self, name) <= high:
                raise ValueError(
                    f"{name} must be between 0 and {high}, but is {getattr(self, name)}"
                )
        if self.randaugment < 0:
            raise ValueError(
                f"randaugment is {self.randaugment}, but must be a number of operations, at least 0"
            )


DEIT = Augment(
    crop="resized", flip=True, randaugment=2, erasing=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1
)  # fmt: skip
