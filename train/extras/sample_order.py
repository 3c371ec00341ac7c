"""In which order does a run read the samples that follow those of the runs that it continues?"""

from dataclasses import replace
from pathlib import Path

from jaxgrow.checkpoints.io.files import at_step
from jaxgrow.typed import Json
from train.common.errors import UserError
from train.config.experiment import Experiment
from train.data.text import Data
from train.extras.tokenizers.loading import frame_of_model
from train.plan.record import RunRecord
from train.plan.transforms import LoadCheckpoint
from train.store.seen import ORDERS, Order
from train.store.workdir import Workdir


def order_after_sources(
    experiment: Experiment,
    workdir: Workdir,
    identity: Json,
    usual: Order,
    origin: tuple[Path, RunRecord] | None,
) -> tuple[Order, list[str]]:
    """Return the order after the first source whose order is known, and log lines about sources.

    Args:
      experiment: experiment of the run.
      workdir: folder of the run.
      identity: identity of the data.
      usual: the order of a run without sources.
      origin: another run, and its checkpoint that this run starts from.
    """
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
        return frame_of_model(folder)
    except UserError:
        return ""


ORDERS.add("sources", order_after_sources)
