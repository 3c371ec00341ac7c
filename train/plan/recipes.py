"""What grew best where it was measured, for any model: the configs and `train.advise` have it from here."""

from dataclasses import replace

from jaxgrow.axes import kind
from jaxgrow.models import Config
from jaxgrow.operators.targets import depth
from train.plan.methods import Growing, GrowTo, Stage, VCycle
from train.plan.transforms import Grouping


def deepened(
    model: Config, layers: int, source: float, *stages: Stage, narrower: int = 1
) -> Growing:
    """``layers`` layers first, for the part ``source`` of the steps at a constant rate; then all, under ``stages``.

    Each layer is followed by its copies, and moments are copied, so that one schedule goes on over
    the growth. Of a model with stages, each has its share of the layers, and one at least. MLPs are
    ``narrower`` times as narrow at first, if that divides them; then their units are copied, too,
    and noise tells these apart, without a change of what they add up to.
    """
    sizes = model.sizes()
    small = {axis: max(1, layers * sizes[axis] // model.depth) for axis in depth(sizes)}
    grown = GrowTo(stages, by=("interleave",), moments="copy")
    narrow = {
        axis: size // narrower
        for axis, size in sizes.items()
        if kind(axis) == "mlp" and size % narrower == 0
    }
    if narrower > 1 and narrow:
        small |= narrow
        grown = replace(grown, by=("interleave", "hypercloning"), noise=5.0)
    return Growing(model.with_sizes(small), Stage(source, floor=1.0), (grown,))


def halves(model: Config) -> Growing:
    """Half of the layers, and half of the units in each MLP, for 0.6 of the steps; the rate falls in the last 0.4."""
    return deepened(
        model, max(1, model.depth // 2), 0.6, Stage(0.4, warmup=0, schedule="linear"), narrower=2
    )


def deep_vcycle(small: Stage, last: Stage) -> VCycle:
    """A V-cycle in depth alone: 5 % of the steps, half of the layers under ``small``, then all, corrected, under ``last``.

    Moments travel both ways, so that one schedule goes on over both.
    """
    return VCycle(
        down=(Stage(0.05),),
        up=(small, last),
        groupings=(Grouping(heads=None, layers="far"),),
        alpha=1.0,
        correction=True,
        moments_down="exact",
        moments_up="exact",
    )
