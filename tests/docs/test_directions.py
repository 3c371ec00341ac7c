"""Imports go in one direction: from extras to the core, and from each folder to lower ones."""

import ast
from pathlib import Path

import pytest
from structure import is_extra

ROOT = Path(__file__).parents[2]
FILES = [
    f.relative_to(ROOT) for p in ("jaxgrow", "train") for f in sorted((ROOT / p).rglob("*.py"))
]
# The folders and files of the library, and those that each of them may import. A part may import
# only parts above it, so there is no cycle.
ALLOWED = {
    "_version": "",
    "registry": "",
    "signals": "",
    "typed": "",
    "untrusted": "",
    "axes": "",
    "layerdrop": "",
    "sharding": "axes",
    "testing": "axes",
    "growth": "axes registry sharding",
    "operators": "axes growth registry",
    "optim": "axes growth registry sharding",
    "models": "axes growth layerdrop registry sharding typed",
    "flops": "axes growth layerdrop models",
    "checkpoints": "_version axes growth models registry sharding signals typed untrusted",
}
# The parts that users start from may import all other parts of the core.
ENTRIES = {"cli", "__init__", "__main__"}
# The folders of the trainer. A folder imports only folders to the left of it. What lies outside of
# the folders are commands and their arguments, which import all of them.
FLOORS = ("common", "data", "state", "plan", "step", "config", "store", "run", "analysis")


def imported(code: str) -> set[tuple[str, ...]]:
    """Return the modules and names that the code imports, also within functions."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found |= {(*str(node.module).split("."), n.name) for n in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(n.name.split(".")) for n in node.names}
    return {f for f in found if f[0] in ("jaxgrow", "train")}


def parts(file: Path) -> tuple[str, ...]:
    """Return the parts of the name of the module in a file."""
    return file.with_suffix("").parts


IMPORTS = {parts(f): imported((ROOT / f).read_text()) for f in FILES}
CORE = {module: names for module, names in IMPORTS.items() if not is_extra(module)}


def written(module: tuple[str, ...], name: tuple[str, ...]) -> str:
    return f"{'.'.join(module)} imports {'.'.join(name)}"


def test_the_core_imports_no_extra():
    wrong = [written(m, n) for m, names in CORE.items() for n in sorted(names) if is_extra(n)]
    assert not wrong, "\n".join(wrong)


def test_a_part_of_the_library_imports_only_parts_above_it():
    wrong = [
        written(module, name)
        for module, names in CORE.items()
        if module[0] == "jaxgrow" and module[1] not in ENTRIES
        for name in sorted(names)
        if name[0] == "train"
        or name[1].replace("__version__", "_version")
        not in (module[1], "extras", *ALLOWED[module[1]].split())
    ]
    assert not wrong, "\n".join(wrong)


def test_a_folder_of_the_trainer_imports_only_lower_folders():
    floor = {name: i for i, name in enumerate(FLOORS)}
    wrong = [
        written(module, name)
        for module, names in CORE.items()
        if module[0] == "train" and module[1] in floor
        for name in sorted(names)
        if name[0] == "train"
        and not is_extra(name)
        and floor.get(name[1], len(FLOORS)) > floor[module[1]]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_command_imports_another_one():
    outside = {*FLOORS, "extras", "arguments", "__init__"}
    commands = {m[1] for m in IMPORTS if m[0] == "train"} - outside
    wrong = [
        written(module, name)
        for module, names in IMPORTS.items()
        if module[0] == "train" and module[1] in commands
        for name in sorted(names)
        if name[0] == "train" and name[1] in commands - {module[1]}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_allowed_directions_have_no_cycle():
    above: set[str] = set()
    for name, others in ALLOWED.items():
        assert set(others.split()) <= above, name
        above.add(name)


@pytest.mark.parametrize(("code", "found"), [
    ("from jaxgrow.optim.muon import flops", {("jaxgrow", "optim", "muon", "flops")}),
    ("def f():\n    from jaxgrow import growth, axes", {("jaxgrow", "growth"), ("jaxgrow", "axes")}),
    ("import train.run.trainer", {("train", "run", "trainer")}),
    ("import jaxgrow", {("jaxgrow",)}),
    ("import jax\nfrom jax import growth", set()),
])  # fmt: skip
def test_imports_are_found(code, found):
    assert imported(code) == found


def test_no_test_file_imports_another_one():
    tests = ROOT / "tests"
    files = sorted(tests.rglob("*.py"))
    modules = {file.stem for file in files if file.stem.startswith("test_")}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not modules & set(names), f"{file}: put what tests share into tests/support"
