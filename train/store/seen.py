"""The order of the training samples of a run that continues or grows another run.

A run that continues or grows a finished run on the same corpus reads the samples that follow those
of the source, in the order of the source. Otherwise it would read the same batches again. The order
is recorded in ``config.json``, because the source may be gone when the run is resumed.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.config.experiment import Experiment
from train.data.batches import seed_of
from train.data.dataset import MixedSource, Source
from train.data.text import Data
from train.data.tokenizers import TOKENIZERS
from train.plan.record import RunRecord
from train.plan.transforms import LoadCheckpoint
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
    lines: list[str] = []
    # On the same corpus, the position of the checkpoint is restored with it.
    if origin and (origin[1].corpus or identity).get("train") != identity.get("train"):
        about = {"corpus": origin[1].corpus, "order": origin[1].order}
        order, lines = _after(origin[0], about, identity, usual)
        if order is not None:
            return order, lines
    for phase in experiment.plan:
        if not isinstance(phase, LoadCheckpoint):
            continue
        name = phase.folder_of(experiment.seed)
        folder = workdir.folder.parent / Path(name).expanduser()
        run = Workdir(folder)
        result = run.result if run.finished else None
        lines += _reframed(folder, result, identity, experiment)
        order, said = _after(folder, result, identity, usual)
        lines += said
        if order is not None:
            return order, lines
    return usual, lines


def _after(
    folder: Path, result: Json | None, identity: Json, usual: Order
) -> tuple[Order | None, list[str]]:
    """The order after a source, if it is known, and lines about it.

    Each text of a mixture continues separately, even if the shares or the other texts differ.
    """
    corpus = (result or {}).get("corpus", {})
    mine = usual.parts or {identity.get("train", ""): usual}
    theirs = {part.get("train") for part in corpus.get("mixture", {"": corpus}).values()}
    same = corpus.get("tokenizer") == identity.get("tokenizer") and theirs & mine.keys()
    if result is not None and corpus and not same:
        return None, []  # it has seen other data
    order = (result or {}).get("order")
    if order is None:
        return None, [
            f"{folder} does not record which data it has seen. If they are those of this run, another seed than "
            f"seed={usual.seed} avoids that they are read again in the same order"
        ]
    seen = order.get("parts", {corpus.get("train"): order})
    names = {part["train"]: f"{name}: " for name, part in identity.get("mixture", {}).items()}
    found, lines = {}, []
    for text in [text for text in mine if text in seen]:
        part, line = _part_after(folder, seen[text], mine[text])
        lines.append(names.get(text, "") + line)
        found |= {text: part} if part else {}
    if not found:
        return None, lines
    if not usual.parts:
        return next(iter(found.values())), lines
    return replace(usual, parts=mine | found), lines


def _part_after(folder: Path, seen: Json, usual: Order) -> tuple[Order | None, str]:
    """The order of one text after a source that has seen it, and a line about it."""
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


def _reframed(
    folder: Path,
    result: Json | None,
    identity: Json,
    experiment: Experiment,
) -> list[str]:
    """A warning if different tokens frame the documents of a run and of its source."""
    mine = identity.get("frame")
    theirs = result["corpus"].get("frame") if result and "corpus" in result else _frame(folder)
    data = experiment.data
    if not mine or not theirs or mine == theirs or not isinstance(data, Data):
        return []
    begins = [bool(frame.partition("..")[0].strip()) for frame in (theirs, mine)]
    out = "name the tokenizer of this model in data.tokenizer"
    if begins[0] != begins[1]:
        out = f"set data.bos={str(begins[0]).lower()}"
    return [
        f"WARNING: the documents of {folder} have the form {theirs!r}, but those of this run have {mine!r}, because "
        f"data.bos={data.bos} and data.tokenizer={data.tokenizer}; {out}"
    ]


def _frame(folder: Path) -> str:
    """The frame of the tokenizer in the folder of a model; empty without one."""
    folder, _ = at_step(folder)
    try:
        return TOKENIZERS["files"].written_frame(folder)
    except UserError:
        return ""
