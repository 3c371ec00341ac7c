"""The modules of the trainer import each other in one direction."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import train

ROOT = Path(train.__file__).parent


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, including imports for types and inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def graph(root: Path) -> dict[str, set[str]]:
    """Return the imports of each module of a package, without imports of other packages."""
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in files}
    return {name: imports(path) & names.keys() for name, path in names.items()}


def test_no_module_of_the_trainer_imports_itself_in_a_circle():
    found = graph(ROOT)
    assert len(found) > 60 and "train.plan.phase" in found["train.plan.training"]
    list(TopologicalSorter(found).static_order())


def test_a_circle_is_found(tmp_path):
    (tmp_path / "one.py").write_text(f"def f():\n    from {tmp_path.name} import two")
    (tmp_path / "two.py").write_text(f"import {tmp_path.name}.one")
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph(tmp_path)).static_order())
