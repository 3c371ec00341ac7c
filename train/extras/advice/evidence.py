"""The savings of each method (``jaxgrow/extras/evidence.toml``)."""

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np

from jaxgrow.tables import markdown_table, short_count
from jaxgrow.typed import Json, build_dataclass

FILE = files("jaxgrow.extras") / "evidence.toml"
FAMILIES = {"GPT2": "GPT"}  # names in tables, if they differ from the class
LAW = ("deepen", "halves")  # methods whose lag follows the square root of docs/results/lag.md
# Steps of the full model in the V-cycle of `train.advise`, relative to a run from scratch.
VCYCLE_STEPS = 0.55
OTHER = 0.3  # distance between two methods, families or optimizers


@dataclass(frozen=True)
class Setting:
    """A training run from scratch, described by the properties that a saving depends on."""

    family: str  # class of the model's config, without "Config"
    optimizer: str  # "AdamW", "Muon"
    parameters: float
    tokens_per_parameter: float

    @property
    def place(self) -> tuple[float, float]:
        """Size and budget, in units of similar importance: a factor of 16, and a factor of 2."""
        return math.log2(self.parameters / 1e6) / 4, math.log2(self.tokens_per_parameter / 20)

    @property
    def key(self) -> tuple[str, str, float, float]:
        """What equal settings agree in."""
        return self.family, self.optimizer, self.parameters, self.tokens_per_parameter


@dataclass(frozen=True, kw_only=True)
class Case(Setting):
    """A method, as it is used in a setting."""

    method: str  # a key of the table ``[methods]``
    tau: float | None = None  # fraction of the steps after which the model grows
    # Cost of the run that grows, as a fraction of the FLOPs of the full baseline; NaN: not recorded.
    flops: float = math.nan

    @property
    def reach(self) -> float:
        """The factor of the lag in the forecast: the square root that docs/results/lag.md shows."""
        if self.method not in LAW or self.tau is None:
            return 0.5
        return self.tau * math.sqrt(self.tau / (1 - self.tau))

    @property
    def small(self) -> float:
        """The part of ``flops`` that the small model has."""
        return self.flops - (VCYCLE_STEPS if self.tau is None else 1 - self.tau)

    def pace(self, slowdown: float) -> float:
        """The seconds per FLOP of the run that grows, relative to the full model.

        Args:
          slowdown: the same of the small model.
        """
        return 1 + (slowdown - 1) * self.small / self.flops

    def distance(self, other: "Case") -> float:
        """How different two cases are: in `place`, and in method, family and optimizer."""
        far = sum(abs(a - b) for a, b in zip(self.place, other.place, strict=True))
        kinds = (self.method, self.family, self.optimizer)
        others = (other.method, other.family, other.optimizer)
        return far + OTHER * sum(a != b for a, b in zip(kinds, others, strict=True))


@dataclass(frozen=True, kw_only=True)
class Evidence(Case):
    """One measured saving of FLOPs, in per cent, at equal final loss.

    The baseline is training from scratch with the same optimizer.
    """

    data: str
    baseline: Literal["swept", "fixed", "untuned", "reported"]
    seeds: int
    page: str
    each: tuple[float, ...] = ()  # the saving of each seed
    mean: float | None = None  # None: the saving cannot be determined
    interval: float | None = None  # half of the 95 % interval of the mean
    bounds: int = 0  # number of seeds whose saving is a lower bound
    given: float | None = None  # the mean saving if the cost of the small model is not counted
    given_interval: float | None = None
    # The saving if no run of the frontier is near the loss; only forecasts use it.
    rough: float | None = None
    # Seconds per FLOP of the small model, relative to the large one; None: not in the logs.
    slowdown: float | None = None
    # Whether the page says that training the small model alone reaches its loss for less.
    small_alone_is_cheaper: bool = False
    losses: tuple[float, ...] = ()  # final loss of each seed
    summary: bool = False  # a row of the table on docs/results/index.md
    suggest: bool = False  # a row that `jaxgrow suggest` prints
    note: str = ""

    @property
    def name(self) -> str:
        return method_names()[self.method]

    @property
    def saved(self) -> str:
        """The saving as text, such as ``"17.7 % ± 3.5"``.

        A lower bound is ``"> 31.4 %"``. Without an interval, the seeds follow in brackets.
        """
        if self.mean is None:
            return "none"
        text = "> " * bool(self.bounds) + f"{self.mean:.1f} %"
        if self.interval is not None:
            return f"{text} ± {self.interval:.1f}"
        return (
            text if len(self.each) < 2 else f"{text} [{', '.join(f'{x:.1f}' for x in self.each)}]"
        )

    @property
    def told(self) -> str:
        """The saving, its setting and its source, in words."""
        where = f"{self.family}, {self.optimizer}, {short_count(self.parameters)} parameters"
        seeds = (
            "reported"
            if self.baseline == "reported"
            else "1 seed"
            if self.seeds == 1
            else f"{self.seeds} seeds"
        )
        note = f". {self.note.removesuffix('.')}" * bool(self.note)
        return f"{self.saved} ({where}, {self.tokens_per_parameter:.3g} tokens per parameter, {seeds}; {self.page}{note})"

    @property
    def comparison(self) -> tuple[tuple[str, str, float, float], str]:
        """Measurements with the same value may share runs."""
        return self.key, self.data

    @property
    def outcome(self) -> float | None:
        """The saving that a forecast is judged by; None for the results of others."""
        if self.baseline == "reported" or math.isnan(self.flops):
            return None
        return self.rough if self.mean is None else self.mean

    @property
    def outcome_seconds(self) -> float | None:
        """The saving of seconds; None if the logs do not have the times of steps.

        Both models are timed in one run, because runs on different machines cannot be compared.
        """
        if self.outcome is None or self.slowdown is None:
            return None
        return 100 - (100 - self.outcome) * self.pace(self.slowdown)

    @property
    def lag(self) -> float:
        """The lag at which the forecast is the measured saving (`forecast`)."""
        assert self.outcome is not None
        return math.log((1 - self.outcome / 100) / self.flops) / self.reach


@dataclass(frozen=True, kw_only=True)
class PilotRow(Case):
    """The lag that a pilot of a measured model found (`train.advise`)."""

    steps: int  # of the small model
    lag: float
    page: str


@dataclass(frozen=True)
class Frontier(Setting):
    """Runs from scratch of one setting with several budgets.

    Each run has a complete learning rate schedule.
    """

    data: str
    flops: tuple[float, ...]  # each budget as a fraction of the full baseline's FLOPs, ascending
    losses: tuple[tuple[float, ...], ...]  # final losses, [budget][seed]
    page: str

    def equal(self, loss: float, seed: int) -> float:
        """The FLOPs at which a run from scratch with the same seed ends at ``loss``.

        Interpolates over log FLOPs.
        """
        losses = [-each[seed] for each in self.losses]
        return float(np.exp(np.interp(-loss, losses, np.log(self.flops))))


@cache
def _data_file() -> Json:
    return tomllib.loads(FILE.read_text())


def method_names() -> dict[str, str]:
    """The name of each method in tables, by its key in the data file."""
    return _data_file()["methods"]


@cache
def all_evidence() -> tuple[Evidence, ...]:
    """The rows of the data file, in its order. A missing mean is computed from the seeds."""
    rows = [build_dataclass(Evidence, row) for row in _data_file()["measured"]]
    means = [sum(row.each) / len(row.each) if row.each else None for row in rows]
    return tuple(
        replace(row, mean=mean) if row.mean is None else row
        for row, mean in zip(rows, means, strict=True)
    )


@cache
def all_pilots() -> tuple[PilotRow, ...]:
    """The pilots of the data file, in its order."""
    return tuple(build_dataclass(PilotRow, row) for row in _data_file()["pilot"])


@cache
def all_frontiers() -> tuple[Frontier, ...]:
    """The frontiers of the data file, in its order."""
    return tuple(build_dataclass(Frontier, row) for row in _data_file()["frontier"])


def method_rows(method: str, tau: float | None = None) -> list[Evidence]:
    """The rows of a method whose baselines are tuned.

    With ``tau``, only the rows that grow after this fraction of the steps.
    """
    rows = [e for e in all_evidence() if e.method == method and e.baseline != "untuned"]
    return [e for e in rows if tau is None or e.tau == tau]


def summary_table(folder: str) -> str:
    """The table of docs/results/index.md as Markdown.

    It has a row for each measurement that is marked for it.

    Args:
      folder: the folder of the page; links are relative to it.
    """
    heads = ["method", "model", "optimizer", "tokens per parameter", "seeds", "FLOPs saved"]
    body = [
        [
            f"[{e.name}]({Path(e.page).relative_to(folder)})",
            f"{FAMILIES.get(e.family, e.family)}, {short_count(e.parameters)}",
            e.optimizer,
            f"{e.tokens_per_parameter:.0f}",
            str(e.seeds),
            e.saved,
        ]
        for e in all_evidence()
        if e.summary
    ]
    return markdown_table(heads, body)
