"""Registries find what extras add, and import an extra only when its name is looked up."""

import sys
from pkgutil import resolve_name

import pytest

import jaxgrow.extras
import train.extras
from jaxgrow.registry import Registry

# The registry of each kind in the tables ``EXTRAS``.
REGISTRIES = {
    "adapter": "jaxgrow.cli.writing:ADAPTERS",
    "adapter module": "jaxgrow.models.bottleneck:ADAPTER_MODULES",
    "announcer": "train.analysis.comparing:ANNOUNCERS",
    "architecture": "jaxgrow.checkpoints.hf.registry:FAMILIES",
    "arguments": "train.arguments:MORE",
    "attention kernel": "jaxgrow.models.attention:KERNELS",
    "automatic settings": "train.config.experiment:AUTOMATIC",
    "batch ramp": "train.config.experiment:RAMPS",
    "board": "train.store.trackers:BOARDS",
    "card of a changed model": "jaxgrow.checkpoints.writing:MODEL_CARDS",
    "checkpoint format": "jaxgrow.cli.other_formats:CHECKPOINT_FORMATS",
    "command": "train.arguments:COMMANDS",
    "companion": "jaxgrow.checkpoints.writing:COMPANIONS",
    "comparison report": "train.analysis.comparing:REPORTS",
    "comparison score": "train.analysis.comparing:SCORERS",
    "conversion": "jaxgrow.checkpoints.writing:CONVERSIONS",
    "noise": "jaxgrow.checkpoints.writing:NOISES",
    "corpus": "train.extras.text.reading:CORPORA",
    "dataset": "train.data.dataset:DATASETS",
    "diagnosis": "jaxgrow.checkpoints.hf.registry:DIAGNOSES",
    "fused operation": "jaxgrow.models.attention:FUSED_OPERATIONS",
    "generation": "jaxgrow.models.attention:CONTINUING",
    "growth without sizes": "jaxgrow.cli.grow_commands:GROWTHS",
    "growing method": "jaxgrow.cli.grow_commands:GROWING",
    "holding": "train.plan.modifiers:HOLDING",
    "image size": "jaxgrow.models.patches:RESIZING",
    "joining": "train.common.hosts:JOINING",
    "lengths": "train.analysis.comparing:LENGTHS",
    "listing": "train.arguments:LISTINGS",
    "measure": "train.plan.training:MEASURES",
    "memory check": "train.run.trainer:MEMORY_CHECKS",
    "location of a model": "jaxgrow.checkpoints.opening:LOCATIONS",
    "merge": "jaxgrow.cli.v_cycle_commands:MERGES",
    "method": "train.plan.methods:METHODS",
    "mixture of experts": "jaxgrow.models.llama:MIXTURES",
    "model card": "train.store.workdir:CARDS",
    "model family": "jaxgrow.models.config:Config.families",
    "modifier": "train.plan.training:MODIFIERS",
    "note on groups": "jaxgrow.cli.v_cycle_commands:GROUP_NOTES",
    "multipliers": "jaxgrow.optim.scaling:MULTIPLIERS",
    "naming": "jaxgrow.checkpoints.hf.registry:NAMING",
    "new units": "jaxgrow.growth.symmetry:INITIALISING",
    "operator function": "jaxgrow.operators:LATER",
    "origin": "train.store.origin:ORIGINS",
    "phase": "train.plan.methods:PHASES",
    "pooler": "jaxgrow.models.vit:POOLERS",
    "rotary scaling": "jaxgrow.models.llama:SCALINGS",
    "repeated keys": "jaxgrow.checkpoints.hf.base:REPEATED_KEYS",
    "rounding": "jaxgrow.cli.writing:ROUNDING",
    "run checkpoint": "jaxgrow.checkpoints.opening:UNFINISHED",
    "sample order": "train.store.seen:ORDERS",
    "scaling of segments": "jaxgrow.models.llama:SEGMENTS",
    "sharing": "train.analysis.comparing:SHARING",
    "stored experts": "jaxgrow.checkpoints.hf.registry:STORED_EXPERTS",
    "stored rotary scaling": "jaxgrow.checkpoints.hf.rope:STORED_SCALINGS",
    "text": "train.data.text:TEXTS",
    "timing": "train.config.experiment:TIMINGS",
    "trace": "train.run.trainer:TRACES",
    "trackers": "train.store.trackers:TRACKERS",
    "unused": "train.config.experiment:UNUSED",
}
TABLES = (jaxgrow.extras.EXTRAS, train.extras.EXTRAS)


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Return a registry with a package of extras that adds ``late`` and forgets ``lost``."""
    (tmp_path / "own_extras").mkdir()
    (tmp_path / "own_extras/__init__.py").write_text(
        "EXTRAS = {'number': {'late': 'own_extras.numbers: a number', 'lost': 'own_extras.numbers'}}\n"
        "from jaxgrow.registry import Registry\n"
        "NUMBERS = Registry('number', 'own_extras')\n"
    )
    (tmp_path / "own_extras/numbers.py").write_text(
        "from own_extras import NUMBERS\nNUMBERS.add('late', 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield resolve_name("own_extras:NUMBERS")
    for name in ("own_extras", "own_extras.numbers"):
        sys.modules.pop(name, None)


def test_a_module_is_imported_when_its_name_is_looked_up(registry):
    registry.add("early", 1)
    assert [*registry] == ["early", "late", "lost"] and len(registry) == 3 and "late" in registry
    assert registry["early"] == 1 and registry.describe("late") == "a number"
    assert "own_extras.numbers" not in sys.modules
    assert registry["late"] == 3
    assert "own_extras.numbers" in sys.modules
    assert registry.get("absent") is None
    with pytest.raises(KeyError, match="lost"):
        registry["lost"]


def test_a_name_has_one_value(registry):
    registry.add("early", 1)
    with pytest.raises(ValueError, match="the number early is registered already"):
        registry.add("early", 1)
    assert registry["early"] == 1


def test_a_class_that_is_defined_again_replaces_itself():
    classes = Registry("class")
    for size in (1, 2):
        classes.add("Own", type("Own", (), {"size": size}))
    assert classes["Own"].size == 2
    with pytest.raises(ValueError, match="the class Own is registered already"):
        classes.add("Own", type("Other", (), {}))
    with pytest.raises(ValueError, match="the class Own is registered already"):
        classes.add("Own", type("Own", (), {"__module__": "another_file"}))


@pytest.mark.extra
def test_every_name_in_the_tables_has_a_value():
    assert {kind for table in TABLES for kind in table} <= REGISTRIES.keys()
    for kind, place in REGISTRIES.items():
        places = [place] if kind != "command" else [place, "jaxgrow.cli.arguments:COMMANDS"]
        for found in map(resolve_name, places):
            assert len(found) and all(found[name] is not None for name in found), kind
