"""Do the settings of an experiment agree with what its paper states?

``configs/papers/settings.toml`` has the statements of the papers, and explains its fields.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxgrow.tables import markdown_table
from train.config.experiment import Experiment, load_as
from train.config.overrides import all_settings
from train.extras.labelled.downstream import FineTuning

ROOT = Path(__file__).parents[2]
FILE = ROOT / "configs" / "papers" / "settings.toml"


@dataclass(frozen=True)
class Statement:
    """One setting that a paper states for an experiment, with our value.

    Attributes:
      setting: the name of the setting, as for ``--set``.
      paper: the paper, as in ``# Deviation(PAPER)``.
      page: the page of the paper.
      by: the part of the paper, or the published code, that states the value.
      value: the value in the paper.
      ours: the value of the experiment; None if it has no such setting.
    """

    setting: str
    paper: str
    page: str
    by: str
    value: Any
    ours: Any

    @property
    def differs(self) -> bool:
        if self.setting == "seeds":
            return len(self.ours) != self.value
        return self.ours != (tuple(self.value) if isinstance(self.value, list) else self.value)


@cache
def paper_statements() -> dict[str, Any]:
    """Return the content of ``configs/papers/settings.toml``."""
    return tomllib.loads(FILE.read_text())


def stated_settings(config: str, experiment: Any) -> list[Statement]:
    """Return the settings that papers state for an experiment.

    Args:
      config: the experiment as on the command line, ``FILE.py:NAME``, perhaps with overrides.
      experiment: the `train.config.experiment.Experiment` or
        `train.extras.labelled.downstream.FineTuning`.
    """
    file, _, rest = config.partition(":")
    path = Path(file).resolve()
    if not path.is_relative_to(ROOT):
        return []
    name = f"{path.relative_to(ROOT).as_posix()}:{rest.partition(':')[0]}"
    ours = {s.name: s.value for s in all_settings(experiment)}
    return [
        Statement(setting, entry["paper"], entry["page"], entry["by"], value, ours.get(setting))
        for entry in paper_statements()["stated"]
        if name in entry["experiments"]
        for setting, value in _expanded(entry.get("settings", {}))
    ]


def _expanded(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings, with those of its source in place of a corpus."""
    for setting, value in values.items():
        if setting == "corpus":
            yield from paper_statements()["corpora"][value].items()
        else:
            yield setting, value


def stated_report(name: str, found: list[Statement]) -> str:
    """Describe the settings that differ from those of the papers."""
    if not found:
        return f"{name}: no paper states its settings"
    papers = ", ".join(dict.fromkeys(s.paper for s in found))
    differ = [s for s in found if s.differs]
    head = f"{name}: {len(found) - len(differ)} of {len(found)} settings are as stated ({papers})"
    if not differ:
        return head
    rows = [[s.setting, f"{_shown(s.value)} ({s.paper}, {s.by})", _shown(s.ours)] for s in differ]
    return f"{head}; these differ:\n\n{markdown_table(['setting', 'paper', 'ours'], rows)}\n"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def paper_report(config: str, experiment: object) -> str:
    """Compare the settings of a config, which is named as on the command line, with the papers."""
    if not isinstance(experiment, FineTuning):
        experiment = load_as(Experiment, config)[1]  # another object is an error
    return stated_report(experiment.name, stated_settings(config, experiment))
