"""Which data has the source model of a run seen, and where does the run go on?

A run that continues or grows a finished run on the same corpus reads the samples that follow those
of the source, in the order of the source. Otherwise it would draw the same batches again. The order
is recorded in ``config.json``, because the source may be gone when the run is resumed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxgrow.checkpoints.io.files import at_step
from train.common.errors import UserError
from train.config.experiment import Experiment
from train.data.labelled.task import Labelled
from train.data.special import document_frame
from train.data.text import tokenizer_of
from train.engine.run.workdir import Workdir
from train.plan.transforms import Import


@dataclass(frozen=True)
class Order:
    """The order of the training samples of a run.

    Attributes:
      seed: random seed of the order.
      first: number of samples of this order that a source read before the run.
      samples: number of different samples; with another number, the order is another one.
    """

    seed: int
    first: int
    samples: int

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def order_of(
    experiment: Experiment, workdir: Workdir, identity: Mapping[str, Any], samples: int
) -> tuple[Order, list[str]]:
    """Return the order of the samples of a run, and lines that say what was taken from its sources.

    Args:
      experiment: experiment of the run.
      workdir: folder of the run.
      identity: identity of the data.
      samples: number of different training samples.
    """
    usual = Order(experiment.seed, 0, samples)
    if workdir.begun:
        recorded = workdir.config.get("order")
        return (Order(**recorded) if recorded else usual), []
    if isinstance(experiment.data, Labelled):
        return usual, []
    lines = []
    for phase in experiment.plan:
        if not isinstance(phase, Import):
            continue
        name = phase.folder_of(experiment.seed)
        folder = workdir.folder.parent / Path(name).expanduser()
        run = Workdir(folder)
        result = run.result if run.finished else None
        lines += _reframed(folder, result, identity, experiment)
        order, line = _after(folder, result, identity, usual)
        lines.append(line)
        if order is not None:
            return order, [line for line in lines if line]
    return usual, [line for line in lines if line]


def _after(
    folder: Path, result: Mapping[str, Any] | None, identity: Mapping[str, Any], usual: Order
) -> tuple[Order | None, str]:
    """The order after a source, if it is known, and a line about it."""
    corpus = (result or {}).get("corpus", {})
    if result is not None and corpus and not _same(corpus, identity):
        return None, ""  # it has seen other data
    seen = (result or {}).get("order")
    if seen is None:
        return None, (
            f"{folder} does not record which data it has seen. If they are those of this run, another seed than "
            f"seed={usual.seed} avoids that they are read again in the same order"
        )
    if seen["samples"] != usual.samples:
        return None, (
            f"{folder} has read the same corpus in {seen['samples']:,} samples, but this run has {usual.samples:,} of another "
            f"length: the data start from the beginning, in the order of seed={usual.seed}"
        )
    order = Order(seen["seed"], seen["last"], usual.samples)
    return order, (
        f"the data go on at sample {order.first:,} in the order of seed {order.seed}, where {folder} stopped; it is "
        f"{order.first / order.samples:.1%} of the {order.samples:,} samples"
    )


def _same(corpus: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    return all(corpus.get(key) == identity.get(key) for key in ("train", "tokenizer"))


def _reframed(
    folder: Path,
    result: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    experiment: Experiment,
) -> list[str]:
    """A warning if the documents of a run have other tokens around them than those of its source."""
    mine = identity.get("frame")
    theirs = result["corpus"].get("frame") if result and "corpus" in result else _frame(folder)
    if not mine or not theirs or mine == theirs:
        return []
    begins = [bool(frame.partition("..")[0].strip()) for frame in (theirs, mine)]
    out = "name the tokenizer of this model in data.tokenizer"
    if begins[0] != begins[1]:
        out = f"set data.bos={str(begins[0]).lower()}"
    return [
        f"WARNING: the documents of {folder} have the form {theirs!r}, but those of this run have {mine!r}, because "
        f"data.bos={experiment.data.bos} and data.tokenizer={experiment.data.tokenizer}; {out}"  # type: ignore[union-attr]
    ]


def _frame(folder: Path) -> str:
    """The frame of the tokenizer in the folder of a model; empty without one."""
    folder, _ = at_step(folder)
    try:
        loaded = tokenizer_of(folder)
        return document_frame(loaded, folder).written(loaded)
    except UserError:
        return ""
