"""Registries find what extras add, and import an extra only when its name is looked up."""

import re
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import jaxgrow.extras
import train.extras
from jaxgrow.models import Config
from jaxgrow.registry import Registry

TABLES = (jaxgrow.extras.EXTRAS, train.extras.EXTRAS)
ROOT = Path(__file__).parents[2]


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


def registries():
    """Yield the registries that the modules of both packages define."""
    for file in [*ROOT.glob("jaxgrow/**/*.py"), *ROOT.glob("train/**/*.py")]:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r'^(\w+): "?Registry\[', file.read_text(), re.MULTILINE):
            yield resolve_name(f"{module}:{name}")
    yield Config.families


@pytest.mark.extra
def test_every_name_in_the_tables_has_a_value():
    found = [*registries()]
    assert {kind for table in TABLES for kind in table} <= {registry.kind for registry in found}
    for registry in found:
        assert len(registry) and all(registry[n] is not None for n in registry), registry.kind
