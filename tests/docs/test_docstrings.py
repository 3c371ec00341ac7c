"""Examples in docstrings run, and every public name has a complete docstring."""

import doctest
import inspect
import pkgutil
import re
from importlib import import_module

import pytest

import jaxgrow
from jaxgrow.extras.peft import adapters, lora

MODULES = [
    module.name
    for module in pkgutil.walk_packages(jaxgrow.__path__, "jaxgrow.")
    # its examples are in the README and write files
    if not module.name.startswith(
        ("jaxgrow.cli.program", "jaxgrow.checkpoints", "jaxgrow.__main__")
    )
]
PUBLIC = {
    package: package.__all__ for package in (jaxgrow, jaxgrow.operators, jaxgrow.layerdrop)
} | {
    jaxgrow.operators.ligo: ["init_coefficients", "learned_growth"],
    lora: ["init_lora", "lora_growth", "merge_lora", "attach_lora", "lora_axes"],
    adapters: [f"{x}_adapters" for x in ("init", "attach", "detach")]
    + ["adapter_growth", "adapter_axes"],
}
FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in PUBLIC.items()
    for name in names
    if inspect.isfunction(getattr(module, name))
}


@pytest.mark.extra
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    module, find = import_module(name), doctest.DocTestFinder().find
    examples = find(module)
    for f in vars(module).values():
        if inspect.isfunction(f) and f.__module__ == name and f.__dict__:  # it is wrapped
            examples += find(inspect.unwrap(f), f.__name__, module)
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in examples)


def undocumented(function) -> list[str]:
    """Return the arguments that a docstring does not describe, and its empty sections."""
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(\w+):$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    described = re.findall(r"^  \*{0,2}([\w, *]+):", sections.get("Args", ""), re.MULTILINE)
    named = {name.strip(" *") for names in described for name in names.split(",")}
    missing = [name for name in inspect.signature(function).parameters if name not in named]
    missing += [] if sections.get("Returns", "").strip() else ["Returns"]
    return missing + ([] if ">>> " in sections.get("Example", "") else ["Example"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_say_what_goes_in_what_comes_out_and_show_it(name):
    assert undocumented(FUNCTIONS[name]) == []


def test_a_docstring_with_headings_alone_is_incomplete():
    def double(x, times): ...

    double.__doc__ = "Multiply.\n\nArgs:\n  x: a number.\n\nReturns:\n\nExample:\n  None yet.\n"
    assert undocumented(double) == ["times", "Returns", "Example"]
