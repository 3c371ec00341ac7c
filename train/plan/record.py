"""The record of a run in a checkpoint, which is saved with the models."""

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
    skipped: int = 0  # number of steps whose update was left out
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
