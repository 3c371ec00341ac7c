"""The order of the training samples of a run that continues or grows another run.

A run that continues or grows a finished run on the same corpus reads the samples that follow those
of the source, in the order of the source. Otherwise it would read the same batches again. The order
is recorded in ``config.json``, because the source may be gone when the run is resumed.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxgrow.registry import Registry
from jaxgrow.typed import Json
from train.config.experiment import Experiment
from train.data.batches import seed_of
from train.data.dataset import MixedSource, Source
from train.plan.record import RunRecord
from train.store.workdir import Workdir


@dataclass(frozen=True)
class Order:
    """The order of the training samples of a run.

    Attributes:
      seed: random seed of the order.
      first: number of samples of this order that a source read before the run.
      samples: number of different samples; the order depends on it.
      parts: of a mixture, the order of each source, by the hash of its tokens.
    """

    seed: int
    first: int
    samples: int
    parts: dict[str, "Order"] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether another run has read the samples before."""
        return self.first > 0 or any(part.goes_on for part in self.parts.values())

    def as_json(self) -> Json:
        content = asdict(self)
        for part in (content, *content["parts"].values()):
            if not part["parts"]:
                del part["parts"]
        return content

    def until(self, last: int, training: Source | MixedSource) -> Json:
        """The order, with the number of samples that were read up to the end of the run.

        Args:
          last: number of samples that were read or skipped.
          training: training samples.
        """
        content: Json = self.as_json() | {"last": last}
        if isinstance(training, MixedSource):
            counts = training.counts(last)
            for part, count in zip(content["parts"].values(), counts, strict=True):
                part["last"] = part["first"] + count
        return content


def _order_from_json(content: Json) -> Order:
    """Read the order in ``config.json``."""
    parts = {text: _order_from_json(part) for text, part in content.get("parts", {}).items()}
    return Order(content["seed"], content["first"], content["samples"], parts)


def _usual(seed: int, identity: Json, training: Source | MixedSource) -> Order:
    """The order of a run that does not continue another run."""
    parts = {}
    if isinstance(training, MixedSource):
        for i, (name, part) in enumerate(training.parts.items()):
            parts[identity["mixture"][name]["train"]] = Order(seed_of(seed, i), 0, len(part))
    return Order(seed, 0, len(training), parts)


# "sources" returns the order after the sources of a run, and log lines about them. It takes what
# `order_of` takes, with the order of a run without sources in place of the samples.
ORDERS: Registry[
    Callable[
        [Experiment, Workdir, Json, Order, tuple[Path, RunRecord] | None], tuple[Order, list[str]]
    ]
] = Registry("sample order", "train.extras")


def order_of(
    experiment: Experiment,
    workdir: Workdir,
    identity: Json,
    training: Source | MixedSource,
    origin: tuple[Path, RunRecord] | None = None,
) -> tuple[Order, list[str]]:
    """Return the order of the samples of a run, and log lines about the sources of this order.

    Args:
      experiment: experiment of the run.
      workdir: folder of the run.
      identity: identity of the data.
      training: training samples.
      origin: another run, and its checkpoint that this run starts from.
    """
    usual = _usual(experiment.seed, identity, training)
    if workdir.begun:
        recorded = workdir.config.get("order")
        return (_order_from_json(recorded) if recorded else usual), []
    if not experiment.data.goes_on:
        return usual, []
    return ORDERS["sources"](experiment, workdir, identity, usual, origin)
