"""The savings of each method (``jaxgrow/extras/evidence.toml``), and estimates for new settings."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np

from jaxgrow.tables import markdown_table, short_count
from jaxgrow.typed import Json, build_dataclass
from train.common.errors import UserError
from train.extras.advice.fits import Fit, Measured, fit_savings

FILE = files("jaxgrow.extras") / "evidence.toml"
FAMILIES = {"GPT2": "GPT"}  # names in tables, if they differ from the class
# A measurement is near a setting if parameters and tokens per parameter differ by at most this
# factor.
NEAR = 2.0


@dataclass(frozen=True)
class Setting:
    """A training run from scratch, described by the properties that a saving depends on."""

    family: str  # class of the model's config, without "Config"
    optimizer: str  # "AdamW", "Muon"
    parameters: float
    tokens_per_parameter: float

    def comparable(self, other: "Setting") -> bool:
        return (self.family, self.optimizer) == (other.family, other.optimizer)

    def distance(self, other: "Setting") -> tuple[bool, bool, float]:
        """A sort key: family first, then optimizer, then size and tokens per parameter.

        Size and tokens per parameter are compared by the sum of their absolute log ratios.
        """
        size = abs(math.log(self.parameters / other.parameters))
        tokens = abs(math.log(self.tokens_per_parameter / other.tokens_per_parameter))
        return self.family != other.family, self.optimizer != other.optimizer, size + tokens


@dataclass(frozen=True)
class Evidence(Setting):
    """One measured saving of FLOPs, in per cent, at equal final loss.

    The baseline is training from scratch with the same optimizer.
    """

    method: str  # a key of the table ``[methods]``
    data: str
    baseline: Literal["swept", "fixed", "reported"]
    seeds: int
    page: str
    each: tuple[float, ...] = ()  # the saving of each seed
    mean: float | None = None  # None: the saving cannot be determined
    interval: float | None = None  # half of the 95 % interval of the mean
    bounds: int = 0  # number of seeds whose saving is a lower bound
    given: float | None = None  # the mean saving if the cost of the small model is not counted
    given_interval: float | None = None
    tau: float | None = None  # fraction of the steps after which the model grows
    # Whether the page says that training the small model alone reaches its loss for less.
    small_alone_is_cheaper: bool = False
    flops: float | None = None  # cost as a fraction of the FLOPs of the full baseline
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

    def near(self, setting: Setting) -> bool:
        """Whether a measurement is comparable and near.

        Family and optimizer must be equal, and size and tokens per parameter must agree up to the
        factor `NEAR`.
        """
        factors = (
            self.parameters / setting.parameters,
            self.tokens_per_parameter / setting.tokens_per_parameter,
        )
        return self.comparable(setting) and all(1 / NEAR <= factor <= NEAR for factor in factors)


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
def all_frontiers() -> tuple[Frontier, ...]:
    """The frontiers of the data file, in its order."""
    return tuple(build_dataclass(Frontier, row) for row in _data_file()["frontier"])


def method_rows(method: str, tau: float | None = None) -> list[Evidence]:
    """The rows of a method.

    With ``tau``, only the rows that grow after this fraction of the steps.
    """
    return [e for e in all_evidence() if e.method == method and (tau is None or e.tau == tau)]


def fit_rows(rows: Sequence[Evidence]) -> Fit:
    """Fit the saving (a fraction) against size and tokens per parameter.

    All seeds of ``rows`` are used.

    Raises:
      UserError: the rows do not determine the fit.
    """
    points: list[Measured] = []
    for e in rows:
        if e.each:
            saved = tuple(percent / 100 for percent in e.each)
            points.append(Measured((e.parameters, e.tokens_per_parameter), saved, e.bounds))
    return fit_savings(points)


@dataclass(frozen=True)
class Estimate:
    """The expected saving (a fraction) at one setting, from comparable measurements."""

    saved: float
    half_width: float | None  # half of the 95 % interval of the mean; None: too few seeds
    near: tuple[Evidence, ...]  # the measurements near the setting, nearest first
    rows: int  # number of comparable measurements
    regression: bool  # True: a regression over all of them; False: the nearest one
    bounds: int  # number of seeds in the estimate that are lower bounds

    @property
    def small_alone_is_cheaper(self) -> bool:
        return any(e.small_alone_is_cheaper for e in self.near)

    @property
    def lower(self) -> float:
        """The lower end of the interval; minus infinity if there is no interval."""
        return -math.inf if self.half_width is None else self.saved - self.half_width

    @property
    def told(self) -> str:
        """The saving as text, such as ``"15.5 % ± 2.8"``."""
        # A regression that includes lower bounds is not a bound itself.
        bound = "> " * bool(self.bounds and not self.regression)
        return f"{bound}{100 * self.saved:.1f} %" + (
            ", no interval" if self.half_width is None else f" ± {100 * self.half_width:.1f}"
        )

    @property
    def source(self) -> str:
        """The source of the estimate, in words."""
        how = (
            f"regression over size and tokens per parameter of {self.rows} comparisons"
            if self.regression
            else "measured"
        )
        if self.bounds and self.regression:
            how += (
                f", with the lower bounds of {self.bounds} seed{'s' * (self.bounds > 1)} as values"
            )
        return f"{how}; nearest: {self.near[0].told}"


def estimate_saving(rows: Sequence[Evidence], setting: Setting) -> Estimate | None:
    """Estimate the saving at ``setting`` from the ``rows`` of one method.

    Only rows of the same family and optimizer that were measured in this project are used. If they
    have several sizes or budgets, the estimate is a regression over all their seeds; otherwise it
    is the nearest row.

    Args:
      rows: the measurements of one method.
      setting: the setting of the estimate.

    Returns:
      The estimate; None if no row is near (`Evidence.near`).
    """
    known = [e for e in rows if e.mean is not None and e.baseline != "reported"]
    comparable = [
        e for e in known if (e.family, e.optimizer) == (setting.family, setting.optimizer)
    ]
    near = sorted((e for e in comparable if e.near(setting)), key=lambda e: _order(e, setting))
    if not near:
        return None
    try:
        saved, half = fit_rows(comparable).expected(
            (setting.parameters, setting.tokens_per_parameter)
        )
        used = [e for e in comparable if e.each]
        bounds = sum(e.bounds for e in used)
        return Estimate(saved, half, tuple(near), len(used), True, bounds)
    except UserError:
        first = near[0]
        assert first.mean is not None
        half = None if first.interval is None else first.interval / 100
        return Estimate(first.mean / 100, half, tuple(near), len(comparable), False, first.bounds)


def nearest_row(rows: Sequence[Evidence], setting: Setting) -> Evidence:
    """The row that is nearest to ``setting``.

    A row of the same family is preferred, then a row with the same optimizer.
    """
    return min((e for e in rows if e.mean is not None), key=lambda e: _order(e, setting))


def _order(row: Evidence, setting: Setting) -> tuple:
    """A sort key: the nearest row first; of equally near rows, the row with the most seeds."""
    return *row.distance(setting), -row.seeds


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
