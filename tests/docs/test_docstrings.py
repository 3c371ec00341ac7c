"""Examples in docstrings run, and every public name has a complete docstring."""

import doctest
import inspect
import pkgutil
from importlib import import_module

import pytest

import jaxgrow

MODULES = [
    module.name
    for module in pkgutil.walk_packages(jaxgrow.__path__, "jaxgrow.")
    if not module.name.startswith(
        ("jaxgrow.cli.program", "jaxgrow.checkpoints", "jaxgrow.__main__")
    )  # its examples are in the README and write files
]
FUNCTIONS = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (jaxgrow, jaxgrow.operators, jaxgrow.layerdrop)
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
} | {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (jaxgrow.operators.ligo, ("init", "growth")),
        (jaxgrow.peft.lora, ("init", "growth", "merge", "attach", "axes_of")),
        (jaxgrow.peft.adapters, ("init", "growth", "attach", "detach", "axes_of", "fused")),
    )
    for name in names
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    module, find, run = (
        import_module(name),
        doctest.DocTestFinder().find,
        doctest.DocTestRunner().run,
    )
    wrapped = [
        f
        for f in vars(module).values()
        if inspect.isfunction(f) and f.__module__ == name and f.__dict__
    ]
    examples = find(module) + [
        test for f in wrapped for test in find(inspect.unwrap(f), f.__name__, module)
    ]
    assert all(run(test).failed == 0 for test in examples)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_say_what_goes_in_what_comes_out_and_show_it(name):
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    missing = [section for section in ("Args:", "Returns:", "Example:") if section not in text]
    assert not missing
