"""How training images are changed, as data; `train.data.pixels` does it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Augment:
    """How a training image is changed each time that it is seen; by default not at all.

    ``DEIT`` is the recipe of Touvron et al. (2021). Deviations: a sample is mixed with one of its
    own draw, not with its neighbour in the batch, and no sample is repeated within a batch.
    """

    crop: Literal["none", "pad", "resized"] = (
        "none"  # "pad": shifted by up to an eighth; "resized": 8 to 100 % of the area
    )
    flip: bool = False  # left and right, half of the time
    randaugment: int = 0  # operations, of which each is done half of the time
    magnitude: float = 9.0  # of them, of 10, with a standard deviation of one half
    erasing: float = 0.0  # probability that a rectangle becomes noise
    mixup: float = 0.0  # of Beta(a, a), how much of one image and of another; 0: never
    cutmix: float = 0.0  # the same, by area; where both are, each half of the time
    smoothing: float = 0.0  # of the targets, spread over all classes

    def __post_init__(self):
        for name, high in (
            ("erasing", 1),
            ("smoothing", 1),
            ("magnitude", 10),
            ("mixup", 100),
            ("cutmix", 100),
        ):
            if not 0 <= getattr(self, name) <= high:
                raise ValueError(f"{name} lies between 0 and {high}, but is {getattr(self, name)}")
        if self.randaugment < 0:
            raise ValueError(f"randaugment is a number of operations, not {self.randaugment}")


DEIT = Augment(
    crop="resized", flip=True, randaugment=2, erasing=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1
)  # fmt: skip
