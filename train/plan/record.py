"""The record of a run in a checkpoint, which is saved with the models."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from jaxgrow.typed import Json


@dataclass
class Account:
    """The cost of one phase. ``compile_seconds`` are contained in ``seconds``."""

    phase: str  # label of the phase
    kind: str
    model: str  # name of the model that the phase makes or trains
    parameters: int
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    layers: float = 0.0  # number of layers that were run, summed over the steps
    # the part of ``seconds`` that moved arrays to other devices, because the sizes have other shardings
    resharding_seconds: float = 0.0
    skipped: int = 0  # number of steps whose update was left out
    val_loss: float | None = None  # last validation loss; None before the first validation
    # What an earlier run of this process spent on compiling the same step; not part of ``seconds``.
    shared_compile_seconds: float = 0.0
    source_tokens: dict[str, int] = field(
        default_factory=dict
    )  # tokens of each source of a mixture


@dataclass
class CostRecord:
    """The cost of a run, and the sizes in bytes of the files that log it."""

    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    steps: int = 0
    source_tokens: dict[str, int] = field(
        default_factory=dict
    )  # tokens of each source of a mixture
    phases: list[Account] = field(default_factory=list)
    # seconds that are not part of ``seconds``: "validation", "checkpoints"
    uncounted: dict[str, float] = field(default_factory=dict)
    bytes: int = 0  # of the log
    events: dict[str, int] = field(default_factory=dict)  # of TensorBoard's files

    def as_json(self) -> Json:
        content = asdict(self)
        for part in (content, *content["phases"]):
            if not part["source_tokens"]:  # the run does not use a mixture
                del part["source_tokens"]
        return content

    @classmethod
    def from_json(cls, content: Json) -> "CostRecord":
        """Read the record that `as_json` wrote."""
        phases = [Account(**phase) for phase in content["phases"]]
        return cls(**dict(content, phases=phases))


def _grew(small: Account, large: Account) -> bool:
    more_layers = large.layers * small.steps > small.layers * large.steps  # in each step
    return large.parameters > small.parameters or more_layers


def growth_records(phases: Sequence[Account]) -> list[Json]:
    """Describe each growth of a run: its losses, and the time that it took.

    A growth consists of the phases between two trainings, the second of which has more parameters,
    or runs more layers in each step (a loop). An imported model counts as trained. A growth without
    a validation before and after it is left out.

    Returns:
      For each growth, the labels of its phases (``phase``), the tokens of the run so far
      (``tokens``), the last validation loss of the small model and the first one of the grown model
      (``loss_before``, ``loss_after``), the seconds of growing (``growing_seconds``), of moving
      arrays whose sizes have other shardings than before (``resharding_seconds``; 0 on one
      device), and of compiling the growth and the training that follows (``recompiling_seconds``).
    """
    trained = [i for i, account in enumerate(phases) if account.kind in ("train", "import")]
    return [
        {
            "phase": ", ".join(account.phase for account in growth),
            "tokens": sum(account.tokens for account in phases[:j]),
            "loss_before": phases[i].val_loss,
            "loss_after": growth[-1].val_loss,
            "growing_seconds": sum(
                a.seconds - a.compile_seconds - a.resharding_seconds for a in growth
            ),
            "resharding_seconds": sum(a.resharding_seconds for a in growth),
            "recompiling_seconds": sum(
                a.compile_seconds + a.shared_compile_seconds for a in [*growth, phases[j]]
            ),
        }
        for i, j in itertools.pairwise(trained)
        if (growth := phases[i + 1 : j]) and _grew(phases[i], phases[j])
        if phases[i].val_loss is not None and growth[-1].val_loss is not None
    ]


@dataclass
class RunRecord:
    """The position of a run in its plan, and the values that a resumed run needs.

    Attributes:
      phase: index of the current phase.
      step: steps of this phase that are done.
      cost: cost so far.
      validation: metrics of the last validation.
      best: best evaluation so far, if the plan keeps it (`train.extras.fine_tune`).
      corpus: identity of the data; None: the checkpoint was saved before data had one.
      groups: notes of all phases, by label, for readers of the checkpoint.
      notes: notes of the modifiers of the current phase, for readers of the checkpoint.
      skipped: number of steps in a row, up to now, whose updates were left out.
      saved: number of checkpoints of the run, with this one.
      kept: whether this checkpoint is not deleted later.
      configs: config of each complete model, for readers of the checkpoint; None for a model whose
        parameters are an adapter or growth maps.
      head: task and labels of the head, for readers of the checkpoint.
      order: order of the training samples, with the number of samples that were read
        (`train.store.seen`).
    """

    phase: int = 0
    step: int = 0
    cost: CostRecord = field(default_factory=CostRecord)
    validation: dict[str, float] = field(default_factory=dict)
    best: Json = field(default_factory=dict)
    corpus: Json | None = None
    groups: Json = field(default_factory=dict)
    notes: Json = field(default_factory=dict)
    skipped: int = 0
    saved: int = 0
    kept: bool = False
    configs: Json = field(default_factory=dict)
    head: Json = field(default_factory=dict)
    order: Json = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return the record as a checkpoint stores it."""
        content = {
            "phase": self.phase,
            "step": self.step,
            "ledger": self.cost.as_json(),
            "judged": self.validation,
            "groups": self.groups,
            "corpus": self.corpus,
            "skipped": self.skipped,
            "saved": self.saved,
            "configs": self.configs,
            "order": self.order,
        } | ({"head": self.head} if self.head else {})
        return content | self.notes | ({"best": self.best} if self.best else {})

    @classmethod
    def from_json(cls, content: Json) -> "RunRecord":
        """Read the record of a checkpoint, without the values that only readers of it need."""
        return cls(
            content["phase"],
            content["step"],
            CostRecord.from_json(content["ledger"]),
            content["judged"],
            content.get("best", {}),
            content.get("corpus"),
            skipped=content.get("skipped", 0),
            saved=content.get("saved", 0),
            order=content.get("order", {}),
        )
