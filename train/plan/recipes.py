"""Which growing recipes saved most in the measurements?

They apply to any model. The configs and `train.advise` use them.
"""

from dataclasses import replace

from jaxgrow.axes import axis_kind
from jaxgrow.models import Config
from jaxgrow.operators.targets import layer_axes
from train.plan.methods import Growing, GrowTo, TrainStage, VCycle
from train.plan.transforms import Grouping


def deepened(
    model: Config, layers: int, source: float, *stages: TrainStage, narrower: int = 1
) -> Growing:
    """Train a model with fewer layers first, then grow it to all layers.

    Each layer is followed by its copies. The optimizer state is copied too, so that one schedule
    continues across the growth. In a model with stages, each stage has its share of the layers, but
    at least one.

    Args:
      model: config of the large model.
      layers: number of layers of the small model.
      source: fraction of the steps of the small model, which has a constant learning rate.
      *stages: training of the grown model.
      narrower: factor by which the MLPs of the small model are narrower. MLPs whose size it does
        not divide keep their size. The growth also copies the MLP units, and adds noise that breaks
        the symmetry of the copies without changing their sum.
    """
    sizes = model.sizes()
    small = {axis: max(1, layers * sizes[axis] // model.depth) for axis in layer_axes(sizes)}
    grown = GrowTo(stages, by=("interleave",), moments="copy")
    narrow = {
        axis: size // narrower
        for axis, size in sizes.items()
        if axis_kind(axis) == "mlp" and size % narrower == 0
    }
    if narrower > 1 and narrow:
        small |= narrow
        grown = replace(grown, by=("interleave", "hypercloning"), noise=5.0)
    return Growing(model.with_sizes(small), TrainStage(source, floor=1.0), (grown,))


def halves(model: Config) -> Growing:
    """Train half of the layers, and half of the units of each MLP, for 60 % of the steps.

    The learning rate decays during the last 40 % of the steps.
    """
    return deepened(
        model,
        max(1, model.depth // 2),
        0.6,
        TrainStage(0.4, warmup=0, schedule="linear"),
        narrower=2,
    )


def deep_vcycle(small: TrainStage, last: TrainStage) -> VCycle:
    """A V-cycle in depth only, with the correction of the large model.

    The large model trains for 5 % of the steps. Then a model with half of the layers trains with the
    settings ``small``, and finally the corrected large model trains with the settings ``last``. The
    optimizer state is transferred in both directions. Only the last stage decays the learning rate;
    ``small`` may warm it up again.
    """
    return VCycle(
        down=(TrainStage(0.05, floor=1.0),),
        up=(small, last),
        groupings=(Grouping(heads=None, layers="far"),),
        alpha=1.0,
        correction=True,
        moments_down="exact",
        moments_up="exact",
    )
