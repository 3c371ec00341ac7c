"""How much each method saved: the rows of ``evidence.toml``, and what they let expect at a new setting."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from train.analysis.fits import Fit, Measured, fit
from train.analysis.runs import markdown
from train.common.errors import UserError

FILE = Path(__file__).with_suffix(".toml")
FAMILIES = {"GPT2": "GPT"}  # as tables call them, if otherwise than the class
# a measurement is near a setting if parameters and tokens per parameter both agree to this factor
NEAR = 2.0


@dataclass(frozen=True)
class Setting:
    """A training from scratch: what decides whether a measurement says anything about it."""

    family: str  # class of the model's config, without "Config"
    optimizer: str  # "AdamW", "Muon"
    parameters: float
    tokens_per_parameter: float

    def distance(self, other: "Setting") -> tuple[bool, bool, float]:
        """Sorts by family, then by optimizer, then by size and tokens per parameter (a sum of two logarithms)."""
        size = abs(math.log(self.parameters / other.parameters))
        tokens = abs(math.log(self.tokens_per_parameter / other.tokens_per_parameter))
        return self.family != other.family, self.optimizer != other.optimizer, size + tokens


@dataclass(frozen=True)
class Evidence:
    """One measured saving of FLOPs, in per cent, against training from scratch with the same optimizer and final loss."""

    method: str  # key of the table ``[methods]``
    family: str
    parameters: int
    tokens_per_parameter: float
    data: str
    optimizer: str  # of the baseline
    baseline: Literal["swept", "fixed", "reported"]
    seeds: int
    page: str
    each: tuple[float, ...] = ()  # of each seed
    mean: float | None = None  # None: no saving can be read
    interval: float | None = None  # half of the 95 % interval of the mean
    bounds: int = 0  # number of seeds whose saving is a lower bound
    given: float | None = None  # the mean if the small model costs nothing
    given_interval: float | None = None
    tau: float | None = None  # part of the steps after which the model grows
    small_alone_is_cheaper: bool = (
        False  # the page says that the small model alone reaches its own loss for less
    )
    flops: float | None = None  # fraction of the FLOPs of the whole baseline
    losses: tuple[float, ...] = ()  # final loss of each seed
    summary: bool = False  # a row of the table on docs/results/index.md
    note: str = ""

    @property
    def name(self) -> str:
        return names()[self.method]

    @property
    def setting(self) -> Setting:
        return Setting(self.family, self.optimizer, self.parameters, self.tokens_per_parameter)

    @property
    def saved(self) -> str:
        """``"17.7 % ± 3.5"``; ``"> 31.4 %"`` for a lower bound; each seed in brackets if there is no interval."""
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
        """The saving with its setting and its source, for a message."""
        where = f"{self.family}, {self.optimizer}, {amount(self.parameters)} parameters"
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
        """Whether family and optimizer are the same, and size and tokens per parameter agree to the factor `NEAR`."""
        factors = (
            self.parameters / setting.parameters,
            self.tokens_per_parameter / setting.tokens_per_parameter,
        )
        comparable = (self.family, self.optimizer) == (setting.family, setting.optimizer)
        return comparable and all(1 / NEAR <= factor <= NEAR for factor in factors)


@dataclass(frozen=True)
class Frontier:
    """Runs from scratch of one setting at several budgets, each with a learning rate that is fully decayed."""

    family: str
    parameters: int
    tokens_per_parameter: float
    data: str
    optimizer: str
    flops: tuple[float, ...]  # of each budget: fraction of the FLOPs of the whole baseline, rising
    losses: tuple[tuple[float, ...], ...]  # [budget][seed], the final loss
    page: str

    @property
    def setting(self) -> Setting:
        return Setting(self.family, self.optimizer, self.parameters, self.tokens_per_parameter)

    def equal(self, loss: float, seed: int) -> float:
        """The FLOPs at which a run from scratch with the same seed ends at ``loss``, by interpolation over log FLOPs."""
        losses = [-each[seed] for each in self.losses]
        return float(np.exp(np.interp(-loss, losses, np.log(self.flops))))


def amount(count: float) -> str:
    """``"94 K"``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return (
                f"{count / size:.2g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
            )
    return f"{count:.3g}"


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def names() -> dict[str, str]:
    """The methods of the data file and what a table calls them."""
    return _read()["methods"]


@cache
def evidence() -> tuple[Evidence, ...]:
    """The rows of the data file, in its order. A mean that a row leaves out is that of its seeds."""
    rows = []
    for row in _read()["measured"]:
        each = tuple(row.get("each", ()))
        mean = row.get("mean", sum(each) / len(each) if each else None)
        rows.append(
            Evidence(**row | {"each": each, "mean": mean, "losses": tuple(row.get("losses", ()))})
        )
    return tuple(rows)


@cache
def frontiers() -> tuple[Frontier, ...]:
    """The frontiers of the data file, in its order."""
    return tuple(
        Frontier(**row | {"flops": tuple(row["flops"]), "losses": tuple(map(tuple, row["losses"]))})
        for row in _read()["frontier"]
    )


def of(method: str, tau: float | None = None) -> list[Evidence]:
    """The rows of a method; with ``tau``, those that grow after this part of the steps."""
    return [e for e in evidence() if e.method == method and (tau is None or e.tau == tau)]


def fitted(rows: Sequence[Evidence]) -> Fit:
    """The regression of the saving (a fraction) on size and tokens per parameter, over all seeds of ``rows``.

    Raises:
      UserError: the rows do not determine it.
    """
    points = [
        Measured((e.parameters, e.tokens_per_parameter), tuple(x / 100 for x in e.each), e.bounds)
        for e in rows
        if e.each
    ]
    return fit(points)


@dataclass(frozen=True)
class Estimate:
    """The saving (a fraction) that comparable measurements let expect at one setting."""

    saved: float
    half_width: float | None  # of the 95 % interval of the mean; None if there are too few seeds
    near: tuple[Evidence, ...]  # the measurements near the setting, nearest first
    rows: int  # number of comparable measurements
    regression: bool  # over all of them; otherwise it is the nearest one

    @property
    def small_alone_is_cheaper(self) -> bool:
        return any(e.small_alone_is_cheaper for e in self.near)

    @property
    def lower(self) -> float:
        """The lower end of the interval; minus infinity without one."""
        return -math.inf if self.half_width is None else self.saved - self.half_width

    @property
    def told(self) -> str:
        """``"15.5 % ± 2.8"``."""
        return f"{100 * self.saved:.1f} %" + (
            ", no interval" if self.half_width is None else f" ± {100 * self.half_width:.1f}"
        )

    @property
    def source(self) -> str:
        """Where the number comes from, for a message."""
        how = (
            f"regression over size and tokens per parameter of {self.rows} comparisons"
            if self.regression
            else "measured"
        )
        return f"{how}; nearest: {self.near[0].told}"


def estimate(rows: Sequence[Evidence], setting: Setting) -> Estimate | None:
    """What ``rows`` of one method let expect at ``setting``.

    Only rows of the same family and optimizer that were measured here count. With several sizes or
    budgets among them, the estimate is a regression over all their seeds; otherwise it is the
    nearest row. None if no row is near (`Evidence.near`).
    """
    known = [e for e in rows if e.mean is not None and e.baseline != "reported"]
    comparable = [
        e for e in known if (e.family, e.optimizer) == (setting.family, setting.optimizer)
    ]
    near = sorted((e for e in comparable if e.near(setting)), key=lambda e: _order(e, setting))
    if not near:
        return None
    try:
        saved, half = fitted(comparable).expected(
            (setting.parameters, setting.tokens_per_parameter)
        )
        return Estimate(saved, half, tuple(near), sum(bool(e.each) for e in comparable), True)
    except UserError:
        first = near[0]
        assert first.mean is not None
        half = None if first.interval is None else first.interval / 100
        return Estimate(first.mean / 100, half, tuple(near), len(comparable), False)


def nearest(rows: Sequence[Evidence], setting: Setting) -> Evidence:
    """The row that is least far from ``setting``: of the same family if there is one, then of the same optimizer."""
    return min((e for e in rows if e.mean is not None), key=lambda e: _order(e, setting))


def _order(row: Evidence, setting: Setting) -> tuple:
    """Nearest first; of several that are equally near, the one with most seeds."""
    return *row.setting.distance(setting), -row.seeds


def summary(folder: str) -> str:
    """Markdown: the table of docs/results/index.md, a row for each measurement that is marked for it.

    Args:
      folder: that of the page, to which links are relative.
    """
    heads = ["method", "model", "optimizer", "tokens per parameter", "seeds", "FLOPs saved"]
    body = [
        [
            f"[{e.name}]({Path(e.page).relative_to(folder)})",
            f"{FAMILIES.get(e.family, e.family)}, {amount(e.parameters)}",
            e.optimizer,
            f"{e.tokens_per_parameter:.0f}",
            str(e.seeds),
            e.saved,
        ]
        for e in evidence()
        if e.summary
    ]
    return markdown(heads, body)
