"""The modules of the trainer import each other in one direction."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import train

ROOT = Path(train.__file__).parent


def graph(root: Path) -> dict[str, set[str]]:
    """Return the imports of each module of a package, also those for types and inside functions."""
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in files}
    found = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
            if isinstance(node, ast.ImportFrom) and node.module:
                of = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                found[name] |= of & names.keys()
    return found


def test_no_module_of_the_trainer_imports_itself_in_a_circle():
    found = graph(ROOT)
    assert len(found) > 60 and "train.plan.phase" in found["train.plan.training"]
    list(TopologicalSorter(found).static_order())
