"""Imports between the folders of `jaxgrow` go in one direction."""

import ast
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "jaxgrow"
# The folders and files of the library, and those that each of them may import. A part may import
# only parts above it, so there is no cycle.
ALLOWED = {
    "_version": "",
    "signals": "",
    "typed": "",
    "untrusted": "",
    "axes": "",
    "layerdrop": "",
    "sharding": "axes",
    "testing": "axes",
    "growth": "axes sharding",
    "plot": "axes growth",
    "operators": "axes growth",
    "optim": "axes growth sharding",
    "checking": "axes growth operators",
    "models": "axes growth layerdrop sharding typed",
    "peft": "axes growth models operators",
    "flops": "axes growth layerdrop models peft",
    "checkpoints": "_version axes growth models peft sharding signals typed untrusted",
}
# The parts that users start from may import all others.
ENTRIES = {"integrations", "cli", "__init__", "__main__"}


def imported(code: str) -> set[str]:
    """Return the parts of the library that the code imports, also within functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxgrow":
            found |= {"_version" if n.name == "__version__" else n.name for n in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxgrow."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names = [n.name.split(".") for n in node.names]
            found |= {[*name, "__init__"][1] for name in names if name[0] == "jaxgrow"}
    return found


def part(file: Path) -> str:
    """Return the folder of a file, or the file itself at the top level."""
    return file.relative_to(LIBRARY).parts[0].removesuffix(".py")


def test_a_part_imports_only_parts_above_it():
    wrong = [
        f"{file.relative_to(LIBRARY)} imports jaxgrow.{other}"
        for file in sorted(LIBRARY.rglob("*.py"))
        if part(file) not in ENTRIES
        for other in imported(file.read_text()) - {part(file)}
        if other not in ALLOWED[part(file)].split()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_allowed_directions_have_no_cycle():
    above: set[str] = set()
    for name, others in ALLOWED.items():
        assert set(others.split()) <= above, name
        above.add(name)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from jaxgrow.optim.muon import flops", {"optim"}),
        ("def f():\n    from jaxgrow import growth, axes", {"growth", "axes"}),
        ("import jaxgrow.cli.arguments", {"cli"}),
        ("import jaxgrow", {"__init__"}),
        ("import jax\nfrom jax import growth", set()),
    ],
)
def test_imports_are_found(code, found):
    assert imported(code) == found


def test_no_test_file_imports_another_one():
    tests = LIBRARY.parent / "tests"
    files = sorted(tests.rglob("*.py"))
    modules = {file.stem for file in files if file.stem.startswith("test_")}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not modules & set(names), f"{file}: put what tests share into tests/support"
